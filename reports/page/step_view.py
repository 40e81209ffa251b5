"""A played step as data that a page draws, zooms and reads out: rows of bars, and what a GPU holds over the step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import floor, log10
from pathlib import Path
from typing import Any

from markupsafe import Markup

from reports.figures import COLOURS, LANES, MEMORY
from reports.figures.memory_over_time import thinned
from reports.figures.timeline_bars import chosen, lane_names, strips
from sim.analysis.memory import ledger, tensor_capacity
from sim.program import MEMORY_KINDS
from sim.timeline import Timeline

STATIC = Path(__file__).parents[1] / "explorer" / "static"
SCRIPTS = ("dom.js", "timeline.js", "plots.js")  # modules, in the order in which they need each other
NOTICE = "uPlot 1.6.32, copyright (c) 2022 Leon Sorokin, MIT License"
SCREEN = 1500  # pixels
BARS = 12_000  # of a page that cannot ask for more


def step_view(
    played: Timeline,
    window: tuple[float, float] | None = None,
    lane: int | None = None,
    pixels: int = SCREEN,
    limit: int = SCREEN,
) -> dict[str, Any]:
    """Passes and transfers of each row between two moments, and what a GPU holds over the step. Seconds and bytes.

    lane: whose GPU; by default the one that holds most. pixels: of the window, finer bars are joined; limit: bars of a row.
    """
    if window is not None:
        first, last = max(0.0, window[0]), min(played.step, window[1])
        window = (first, last) if last - first > 1e-9 * played.step else None
    lanes, names, keys = chosen(played, LANES), lane_names(played), list[str]()
    places = 7 - floor(log10(played.step))  # of a time, in a billionth of the step

    def at(seconds: float) -> float:
        return round(seconds, places)

    def indexed(shares: Mapping[str, float]) -> list[list[float]]:
        keys.extend(key for key in shares if key not in keys)
        return [[keys.index(key), at(value)] for key, value in shares.items()]

    rows, axes = [], dict[str, str]()
    for number in lanes:
        row = strips(played, number, limit, window, pixels)
        bars = [
            [at(bar.start), at(bar.end), bar.microbatch, at(bar.whole), indexed(bar.shares), int(bar.pale)] for bar in row.passes
        ]
        transfers = {axis: [[at(bar.start), at(bar.end)] for bar in several] for axis, several in row.transfers.items()}
        axes |= {axis: COLOURS[axis] for axis in transfers}
        rows.append({"lane": number, "name": names[number], "passes": bars, "transfers": transfers})
    return {
        "step": played.step,
        "window": list(window or (0.0, played.step)),
        "rows": rows,
        "keys": [[key, COLOURS[key]] for key in keys],
        "axes": axes,
        "lanes": len(played.lanes),
        "memory": memory_view(played, lane if lane in lanes else None),
    }


def whole_step(played: Timeline) -> dict[str, Any]:
    """The step with as many bars as a page of one file has room for."""
    rows = len(chosen(played, LANES))
    return step_view(played, pixels=6 * SCREEN, limit=max(400, BARS // rows))


def memory_view(played: Timeline, lane: int | None = None) -> dict[str, Any]:
    """What a lane's GPU holds over the step by kind; by default the lane that holds most."""
    books = {number: ledger(played, number) for number in ([lane] if lane is not None else range(len(played.lanes)))}
    lane = max(books, key=lambda number: books[number].peak)
    times, sizes = thinned(books[lane], played.step)
    used = [place for place in range(len(MEMORY_KINDS)) if sizes[:, place].any()]
    return {
        "name": lane_names(played)[lane],
        "times": times.tolist(),
        "kinds": [[MEMORY_KINDS[place], MEMORY[MEMORY_KINDS[place]], sizes[:, place].round().tolist()] for place in used],
        "room": tensor_capacity(played),
    }


def script() -> Markup:
    """The explorer's modules as one script for a page without a server."""
    texts = [(STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS]
    joined = "\n".join(re.sub(r"(?m)^import .*?;$\n?|^export ", "", text) for text in texts)
    library = (STATIC / "uplot.js").read_text(encoding="utf-8").partition("*/")[2]  # without the address in its head
    return Markup(f"/*! {NOTICE} */{library}\n{joined}")


def style() -> Markup:
    """Styles of its curves."""
    return Markup((STATIC / "uplot.css").read_text(encoding="utf-8"))
