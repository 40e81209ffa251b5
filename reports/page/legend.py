"""The legend of a page: what a colour means in all of its figures, once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from reports.figures import COLOURS, HATCHES, MEMORY, PALE, pale
from reports.formatting import KINDS, components, held
from sim.analysis.summary import Summary

SEEN = 0.0005  # of a step: less cannot be seen
_LINE = "#00000088 0 1px, transparent 1px 4px"
_STROKES = {
    "/": f"repeating-linear-gradient(135deg, {_LINE})",
    "\\": f"repeating-linear-gradient(45deg, {_LINE})",
    "-": f"repeating-linear-gradient(0deg, {_LINE})",
    "|": f"repeating-linear-gradient(90deg, {_LINE})",
}
_CROSSED = {"x": "/\\", "+": "-|"}
_DOTS = "radial-gradient(#00000088 1px, transparent 1.5px) 0 0 / 5px 5px"


class Entry(NamedTuple):
    """A colour: what it means, and how it looks as a CSS background."""

    name: str
    background: str


def legend(summaries: Iterable[Summary], view: Mapping[str, Any]) -> dict[str, list[Entry]]:
    """Entries of what takes time and of what takes memory in the runs of a page and in the step that it shows in full."""
    runs = list(summaries)
    seen = [{name: part for name, part in run.breakdown.items() if part >= SEEN * run.step_seconds} for run in runs]
    names = [name.removesuffix(" exposed") for name in components(seen)]
    names += [name for name, _ in view["keys"]] + list(view["axes"])
    kinds = [kind for kind in KINDS if any(held(stage)[kind] for run in runs for stage in run.memory)]
    times = [Entry(_told(name), background(COLOURS[name], HATCHES.get(name, ""))) for name in dict.fromkeys(names)]
    if any(is_pale for row in view["rows"] for *_, is_pale in row["passes"]):
        times.append(Entry(PALE, pale(COLOURS["forward"])))
    return {
        "time": times,
        "memory": [Entry(kind, MEMORY[kind]) for kind in kinds],
    }


def _told(name: str) -> str:
    return f"{name} communication" if name in HATCHES and name != "gpu variability" else name


def background(colour: str, hatch: str) -> str:
    """A colour with its hatch."""
    if not hatch:
        return colour
    strokes = [_STROKES[each] for each in _CROSSED.get(hatch[0], hatch[0]) if each in _STROKES]
    return ", ".join([*(strokes or [_DOTS]), colour])
