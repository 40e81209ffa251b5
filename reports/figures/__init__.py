"""The figures: a file of this folder each, one function that draws and is registered by its decorator.

Colours are safe for colour-blind eyes. The same data give the same bytes: no dates, no random ids, the font that comes with
matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from reports.formatting import KINDS
from topologies.documents.writing import whole_file
from topologies.reading import UserError
from topologies.registry import Registry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from reports.figures.film import Frame

# Okabe & Ito 2008, "Color Universal Design", jfly.uni-koeln.de/color
BLUE, ORANGE, GREEN, SKY, YELLOW, PURPLE, RED = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#F0E442", "#CC79A7", "#D55E00"
BROWN = "#8C5A00"  # a dark orange: a part of the backward pass
BLACK, GREY, DARK, WHITE, LIGHT = "#000000", "#BBBBBB", "#555555", "#FFFFFF", "#E8E8E8"


class _Colours(dict[str, str]):
    """Colours by name; effects, which anybody may add, are red."""

    def __missing__(self, name: str) -> str:
        return RED


COLOURS = _Colours(
    {
        "forward": BLUE,
        "backward": ORANGE,
        "weight gradient": BROWN,
        "recompute": YELLOW,
        "optimizer": GREEN,
        "launch": GREY,
        "slowdown": DARK,
        "bubble": WHITE,
        "wait": LIGHT,
        "gpu variability": LIGHT,
        "tp": PURPLE,
        "cp": YELLOW,
        "ep": BLACK,
        "dp": RED,
        "replica": YELLOW,
        "pp": SKY,
        "host": GREY,
        "nvme": DARK,
        "cpu": ORANGE,
    }
)
HATCHES = {
    "tp": "////",
    "cp": "xxxx",
    "ep": "....",
    "dp": "\\\\\\\\",
    "replica": "++++",
    "pp": "----",
    "host": "oo",
    "nvme": "OO",
    "cpu": "**",
    "gpu variability": "||||",
}
MEMORY = dict(zip(KINDS, (BLUE, ORANGE, GREEN, SKY, YELLOW, PURPLE, GREY), strict=True))

DOTS, WIDE = 130, 1800  # per inch, and of the whole width at most
LANES = 32  # rows of a Gantt chart
DIGIT = 0.0066  # of the width of a figure, for each digit of a number: narrower passes have none
STRENGTH = 0.55  # of the colour of every other chunk
PALE = "pale: every other chunk of the rank"

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "hatch.color": "#00000066",
    "svg.hashsalt": "shardyard",
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Drawing:
    """A registered figure: `draw` makes it from its data; calling it saves it, as PNG or SVG by the name of the file, or as GIF
    where it has a `film` (its frames, from its data).
    """

    draw: Callable[[Any], Figure]
    film: Callable[[Any], Iterable[Frame]] | None = None

    def figure(self, data: Any) -> Figure:
        """Drawn in the style of all figures, and not saved."""
        with _styled():
            return self.draw(data)

    def __call__(self, data: Any, path: Path, legend: bool = True) -> Path:
        """Raises UserError for a GIF of a figure that does not move."""
        if path.suffix == ".gif":
            return self._moving(data, path)
        with _styled():
            metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
            drawn = self.draw(data)
            if not legend:
                _without_legend(drawn)
            picture = io.BytesIO()
            dots = min(DOTS, WIDE / drawn.get_figwidth())
            drawn.savefig(picture, format=path.suffix[1:], dpi=dots, metadata=metadata)
            with whole_file(path) as file:
                file.write(_small(picture) if path.suffix == ".png" else picture.getvalue())
        return path

    def _moving(self, data: Any, path: Path) -> Path:
        if self.film is None:
            raise UserError(f"{path}: this figure does not move: must end in .png or .svg")
        from reports.figures.film import gif

        with _styled(), whole_file(path) as file:
            file.write(gif(self.film(data)))
        return path


@contextmanager
def _styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)  # type: ignore[arg-type]
        yield


def _without_legend(drawn: Figure) -> None:
    """Take its legends off, and the room that they had: strips below the figure, columns beside it."""
    boxes = [each.get_window_extent() for each in drawn.legends]
    for each in list(drawn.legends):
        each.remove()
    below = max((box.height for box in boxes if box.width >= box.height), default=0.0)
    beside = max((box.width for box in boxes if box.width < box.height), default=0.0)
    width, height = drawn.get_size_inches()
    drawn.set_size_inches(width - beside / drawn.dpi, height - below / drawn.dpi)


def _small(picture: BinaryIO) -> bytes:
    """The same picture in 256 colours: a third of the bytes, which is what lets a page hold all of them. Colours of a few dots
    stay as well: MEDIANCUT makes one of those that are near each other.
    """
    from PIL import Image

    with Image.open(picture) as image:
        dots = image.info.get("dpi", (DOTS, DOTS))
        small = image.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    reduced = io.BytesIO()
    small.save(reduced, format="PNG", optimize=True, dpi=dots)
    return reduced.getvalue()


figures: Registry[Drawing] = Registry("figure", package="reports.figures")


def figure(
    name: str, *, sweeps: bool = False, film: Callable[[Any], Iterable[Frame]] | None = None
) -> Callable[[Callable[[Any], Figure]], Drawing]:
    """Decorator: registers a function from data to a Figure. sweeps: its panels share an axis of time, which may pass; film:
    frames of another kind.
    """

    def register(draw: Callable[[Any], Figure]) -> Drawing:
        def swept_frames(data: Any) -> Iterable[Frame]:
            from reports.figures.film import swept

            return swept(draw(data))

        return figures(name)(Drawing(draw, swept_frames if sweeps else film))

    return register


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of `width` × `height` inches. Not by pyplot, whose state is global."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    return drawn, drawn.add_subplot()


def ink(colour: str) -> str:
    """Black or white: what can be read on `colour`, by its brightness (Rec. 601)."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return WHITE if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else BLACK


def pale(colour: str) -> str:
    """A colour mixed with white: of every other chunk of a pipeline rank."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(STRENGTH * part + (1 - STRENGTH) * 255):02X}" for part in parts)


def columns(entries: int) -> int:
    """Columns of a legend below a figure of 12 inches: one row of up to seven, else two that are as long."""
    return entries if entries <= 7 else -(-entries // 2)


def chunk_patch() -> Any:
    """The legend entry of pale colours."""
    from matplotlib.patches import Patch

    return Patch(facecolor=pale(BLUE), label=PALE)


def patch(name: str, label: str) -> Any:
    """A legend entry."""
    from matplotlib.patches import Patch

    return Patch(facecolor=COLOURS[name], hatch=HATCHES.get(name), edgecolor=DARK, linewidth=0.5, label=label)


def at_the_right(axes: Axes, y: float, text: str, reach: float, **style: Any) -> None:
    """A line's number beside the axes, whose last digit lies so many points to the right of them."""
    place: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "ha": "right", "va": "center"}
    axes.annotate(text, (1.0, y), xytext=(reach, 0), fontsize=9, **place, **style)


def log_ticks(axis: Axis, low: float, high: float, text: Callable[[float], str]) -> None:
    """Labels with units for a logarithmic axis, more of them where the axis is short, at most 12: left to itself matplotlib puts
    one where what is drawn lies within a decade.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    short, some = (1, 1.5, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 5, 7)
    parts = short if high < 4 * low else some if high < 20 * low else (1, 2, 5) if high < 1e4 * low else (1,)
    axis.set_major_locator(LogLocator(subs=parts, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())


def time_unit(step: float) -> tuple[float, str]:
    """(factor from seconds, name of the unit)."""
    if step >= 1:
        return 1.0, "s"
    return (1e3, "ms") if step >= 1e-3 else (1e6, "µs")
