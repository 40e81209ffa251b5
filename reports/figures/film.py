"""Figures that move, as GIFs that loop: one file that any browser and any slides show."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

WIDTH = 900  # dots
FRAMES = 60  # of a sweep
TICK, HOLD = 100, 2500  # milliseconds of a frame, and of the last one
VEIL = 0.85  # of what is still to come
COLOURS = 128


class Frame(NamedTuple):
    """A picture and the milliseconds for which it is seen."""

    picture: Image
    milliseconds: int


def swept(drawn: Figure) -> Iterator[Frame]:
    """A figure whose panels share an axis of time, which passes: what is to come is veiled."""
    from PIL import Image, ImageDraw

    whole = rendered(drawn)
    veiled = Image.blend(whole, Image.new("RGB", whole.size, "white"), VEIL)
    boxes = [ax.get_window_extent() for ax in drawn.axes]
    for number in range(FRAMES + 1):
        picture = whole.copy()
        for box in boxes:
            x = round(box.x0 + number / FRAMES * box.width)
            top, bottom = round(whole.height - box.y1), round(whole.height - box.y0)
            rest = (x, top, round(box.x1) + 2, bottom)
            picture.paste(veiled.crop(rest), rest[:2])
            ImageDraw.Draw(picture).line((x, top, x, bottom), fill="black")
        yield Frame(picture, TICK if number < FRAMES else HOLD)


def rendered(drawn: Figure) -> Image:
    """The figure as a picture of `WIDTH` dots; positions of its axes are dots from then on."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    drawn.set_dpi(WIDTH / drawn.get_figwidth())
    canvas: Any = FigureCanvasAgg(drawn)
    canvas.draw()
    return Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")


def gif(frames: Iterable[Frame]) -> bytes:
    """All frames in the colours of the first and the last one."""
    from PIL import Image

    every = list(frames)
    first, last = every[0].picture, every[-1].picture
    both = Image.new("RGB", (first.width, first.height + last.height))
    both.paste(first, (0, 0))
    both.paste(last, (0, first.height))
    palette = both.quantize(COLOURS, dither=Image.Dither.NONE)
    pictures = [each.picture.quantize(palette=palette, dither=Image.Dither.NONE) for each in every]
    out = io.BytesIO()
    times = [each.milliseconds for each in every]
    pictures[0].save(out, format="GIF", save_all=True, append_images=pictures[1:], duration=times, loop=0)
    return out.getvalue()
