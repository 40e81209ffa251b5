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

from pydantic import Field, PositiveInt

from calibration.devices import Kind
from calibration.measure.interference import LIMIT
from topologies.documents.writing import write_whole
from topologies.reading import Config, UserError, build, lines_of, parse_line, shown

FORMAT = 1
MOST = 128 * 2**20  # bytes of a journal; a full calibration writes less than one MiB
SIZES = {  # numbers and texts that tell the cases of a part from others
    "gemm": ("batch", "m", "n", "k"),
    "attention": ("batch", "heads", "sequence", "head_dim"),
    "memory": ("bytes",),
    "optimizer": ("bytes",),
    "launch": (),
    "copy": ("bytes",),
    "collective": ("ranks", "nodes", "bytes"),
    "overlap": (),
    "company": (),
    "variability": (),
    "wrapping": ("width",),
    "footprint": (),
    "anchor": (),
    "layer": ("hidden", "layers"),
    "sustained": ("side",),
}
SHORTEST, LONGEST = 1e-12, 1e6  # seconds of one case
NOTHING = ("launch", "overlap", "wrapping", "variability")  # may take no time at all
NAMES = {
    "gemm": ("dtype",),
    "attention": ("dtype", "way"),
    "memory": ("kind",),
    "optimizer": ("kind",),
    "launch": ("kind",),
    "copy": ("from", "to"),
    "collective": ("operation",),
    "overlap": ("kind",),
    "company": ("kind",),
    "wrapping": ("wrapper",),
    "footprint": ("kind",),
    "anchor": ("kind",),
    "sustained": ("kind", "dtype"),
}

Case = dict[str, str | float]
Key = tuple[str, str, tuple[tuple[str, str | float], ...]]


class Sample(Config):
    """One measurement of one case on all ranks at once."""

    part: str  # as in SIZES
    case: Case  # sizes and names that tell it from others of its part
    context: Literal["alone", "step"] = "alone"  # back to back, or between pieces of compute as in a training step
    value: float = Field(ge=0, le=1e15)  # seconds; bytes of a footprint
    least: float = Field(default=0.0, ge=0, le=1e15)  # of a collective: the rank that waited least
    spread: float = Field(default=0.0, ge=0, le=1e9)  # interquartile range over the median
    count: int = Field(default=1, ge=1, le=10**12)  # repetitions
    foreign: float = Field(default=0.0, ge=0, le=1e6)  # share of the machine's CPU time that went to others meanwhile
    round: int = Field(default=0, ge=0, le=10**6)

    @property
    def key(self) -> Key:
        """What tells this case from others."""
        return self.part, self.context, tuple(sorted(self.case.items()))


class Head(Config):
    """The first line of a journal, as `calibration.machine.describe` and `calibrate` say it."""

    format: Literal[1]
    device: Kind
    ranks: PositiveInt = Field(le=2**20)
    machine: str
    versions: str
    memory: float = Field(0.0, ge=0, le=1e18)  # bytes per rank
    quick: bool = False
    cores: int = Field(0, ge=0, le=2**20)
    facts: dict[str, str | float] = {}  # noqa: RUF012  # of a GPU: memory in bytes, multiprocessors, compute capability


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
    by_case: dict[Key, list[Sample]] = {}
    for sample in samples:
        by_case.setdefault(sample.key, []).append(sample)
    result = []
    for samples_of_case in by_case.values():
        calm = [sample for sample in samples_of_case if sample.foreign <= LIMIT]
        used = calm or [min(samples_of_case, key=lambda sample: sample.foreign)]
        value, least = (median(getattr(sample, name) for sample in used) for name in ("value", "least"))
        between = (max(s.value for s in used) - min(s.value for s in used)) / value if value else 0.0
        spread = max(between, median(sample.spread for sample in used))
        first = samples_of_case[0]
        result.append(
            Merged(
                first.part,
                first.case,
                first.context,
                value,
                least,
                spread,
                len(samples_of_case),
                len(samples_of_case) - len(calm),
            )
        )
    return result


def between_rounds(samples: Iterable[Sample], part: str) -> float:
    """By which part cases of `part` took longer in their slowest round (in the median) than in their fastest; 0 of one round."""
    by_case: dict[Key, list[Sample]] = {}
    for sample in samples:
        if sample.part == part:
            by_case.setdefault(sample.key, []).append(sample)
    ratios: dict[int, list[float]] = {}
    for every in by_case.values():
        usual = median(sample.value for sample in every)
        for sample in every if usual and len(every) > 1 else ():
            ratios.setdefault(sample.round, []).append(sample.value / usual)
    rounds: list[float] = [median(of_round) for of_round in ratios.values()]
    return max(rounds) / min(rounds) - 1 if rounds else 0.0


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
    head: dict[str, Any] | None = None
    samples: list[Sample] = []
    whole = 0
    for number, line in lines_of(path, MOST):
        if not line.endswith("\n"):
            break  # written half
        where = f"{path}: line {number}"
        data = parse_line(line, where)
        if head is None:
            head = data
            if head.get("format") != FORMAT:
                shape = shown(head.get("format"))
                raise UserError(f"{where}: format={shape}: must be {FORMAT}, as `shardyard calibrate` writes it")
        else:
            samples.append(_measured(build(Sample, data, where), where))
        whole += len(line.encode())
    if head is None:
        raise UserError(f"{path}: line 1: not JSON: a journal begins with a line about its machine")
    return head, samples, whole


def _measured(sample: Sample, where: str) -> Sample:
    """The sample, when it has what its part's fit needs. Raises UserError."""
    part, case = sample.part, sample.case
    if part not in SIZES:
        raise UserError(f"{where}: part={shown(part)}: must be one of {', '.join(SIZES)}")
    for name in SIZES[part]:
        value = case.get(name)
        if not isinstance(value, float) or not 0 <= value <= 1e15:
            raise UserError(f"{where}: case.{name}={shown(value)}: must be a number from 0 to 1e15 for part={part}")
    for name in NAMES.get(part, ()):
        if not isinstance(case.get(name), str):
            raise UserError(f"{where}: case.{name}={shown(case.get(name))}: must be a text for part={part}")
    least = 0.0 if part in NOTHING else SHORTEST
    if part != "footprint" and not least <= sample.value <= LONGEST:
        raise UserError(f"{where}: value={sample.value:g}: must be from {least:g} to {LONGEST:g} seconds for part={part}")
    return sample
