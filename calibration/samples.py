"""Samples: what was measured, one line of JSON each, appended as soon as it is there, so that nothing is lost.

The first line of a journal says on which machine and with which settings; a journal of another machine is refused. A sample is
one visit: the fit takes the median over visits during which nobody else used the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from pydantic import Field

from calibration.interference import LIMIT
from topologies.reading import Config, UserError, build, load_text
from topologies.writing import write_whole

FORMAT = 1

Case = dict[str, str | float]
Key = tuple[str, str, tuple[tuple[str, str | float], ...]]


class Sample(Config):
    """One measurement of one case on all ranks at once."""

    part: str  # gemm, attention, memory, optimizer, launch, copy, collective, overlap, wrapping, footprint, layer
    case: Case  # sizes and names that tell it from others of its part
    context: Literal["alone", "step"] = "alone"  # back to back, or between pieces of compute as in a training step
    value: float = Field(ge=0)  # seconds; bytes of a footprint
    least: float = Field(default=0.0, ge=0)  # of a collective: the rank that waited least
    spread: float = Field(default=0.0, ge=0)  # interquartile range over the median
    count: int = Field(default=1, ge=1)  # repetitions
    foreign: float = Field(default=0.0, ge=0)  # share of the machine's CPU time that went to others meanwhile
    round: int = 0

    @property
    def key(self) -> Key:
        """What tells this case from others."""
        return self.part, self.context, tuple(sorted(self.case.items()))


class Merged(NamedTuple):
    """A case over its visits: medians, and how many visits were disturbed."""

    part: str
    case: Case
    context: str
    value: float
    least: float
    spread: float
    visits: int
    disturbed: int


def merge(samples: Iterable[Sample]) -> list[Merged]:
    """Cases in the order of their first visit; where all visits were disturbed, the one that was disturbed least counts."""
    found: dict[Key, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.key, []).append(sample)
    result = []
    for those in found.values():
        calm = [sample for sample in those if sample.foreign <= LIMIT]
        used = calm or [min(those, key=lambda sample: sample.foreign)]
        value, least = (median(getattr(sample, name) for sample in used) for name in ("value", "least"))
        between = (max(s.value for s in used) - min(s.value for s in used)) / value if value else 0.0
        spread = max(between, median(sample.spread for sample in used))
        first = those[0]
        result.append(Merged(first.part, first.case, first.context, value, least, spread, len(those), len(those) - len(calm)))
    return result


class Journal:
    """Samples in a file, the ones of an interrupted run among them."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        """Open or begin `path`. head: machine and settings that its samples must share. Raises UserError."""
        self.path, self.head = path, {"format": FORMAT, **head}
        self.samples: list[Sample] = []
        if path.exists() and path.stat().st_size:
            self._go_on()
        if not self.samples:  # nothing to be lost
            write_whole(path, json.dumps(self.head) + "\n")

    def _go_on(self) -> None:
        head, self.samples, whole = read_journal(self.path)
        if not self.samples:
            return
        for name, value in self.head.items():
            if head.get(name) != value:
                raise UserError(
                    f"{self.path}: {name}={head.get(name)!r} of its samples, but {value!r} now: give another --samples file, "
                    "or delete this one to measure anew"
                )
        self.head = head
        if len(self.path.read_bytes()) > whole:  # a line that was cut while it was written
            with self.path.open("r+b") as file:
                file.truncate(whole)

    def add(self, sample: Sample) -> None:
        """Append it to the file at once. Raises UserError when that fails."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(sample.model_dump_json(exclude_defaults=True) + "\n")
        except OSError as error:
            kept = f"{len(self.samples)} samples are kept"
            raise UserError(f"{self.path}: cannot be written: {error.strerror or error}; {kept}") from None
        self.samples.append(sample)

    def done(self) -> set[tuple[int, Key]]:
        """Visits that are there already."""
        return {(sample.round, sample.key) for sample in self.samples}


def read_journal(path: Path) -> tuple[dict[str, Any], list[Sample], int]:
    """(first line, samples, bytes of whole lines) of a journal. Raises UserError for a line that is no sample."""
    lines = load_text(path).splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # written half
    head = _line(path, 1, lines[0] if lines else "")
    if head.get("format") != FORMAT:
        raise UserError(f"{path}: line 1: format={head.get('format')!r}: must be {FORMAT}, as `shardyard calibrate` writes it")
    samples = []
    for number, line in enumerate(lines[1:], 2):
        samples.append(build(Sample, _line(path, number, line), f"{path}: line {number}"))
    return head, samples, sum(len(line.encode()) for line in lines)


def _line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {number}: not JSON: {error.msg}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: line {number}: must be an object")
    return data
