"""Pipeline schedules as files: the CSV of PyTorch's pipelining, which reads and writes any order of passes.

One row per rank, one cell per pass, in the order in which the rank runs them: `[stage][F, B, I or W][microbatch]`, as in
`0F0,1F0,1B0`. An empty cell does nothing. `(0F3;3B1)OVERLAP_F_B` interleaves the kernels of two passes. What the lowered form
adds (SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD) follows here from the placement and the data parallel
strategy: such cells are counted and ignored.

Source: torch.distributed.pipelining.schedules, `_PipelineScheduleRuntime._load_csv`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from strategies.schedules.order import Action, Schedule, first_mistake
from topologies.reading import UserError, load_text

_PASS = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


class Pass(NamedTuple):
    """One pass as the file has it, and its column."""

    stage: int
    kind: str
    microbatch: int
    column: int
    beside: bool = False  # one with the next


@dataclass(frozen=True, eq=False)
class Written:
    """An order that was written down, rank by rank."""

    rows: tuple[tuple[Action, ...], ...]

    def __call__(self, rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
        """What is written for the rank."""
        return iter(self.rows[rank])


def read_schedule(path: str) -> Schedule:
    """The schedule in a file; stages are placed where their passes are. Raises UserError with file, row and column."""
    return _parse(path, load_text(Path(path)))


@lru_cache(maxsize=64)
def _parse(path: str, text: str) -> Schedule:
    rows: list[list[Pass]] = []
    ignored = 0
    for number, row in enumerate(_table(path, text), 1):
        rows.append([])
        for column, cell in enumerate(map(str.strip, row), 1):
            if _COMMUNICATION.fullmatch(cell):
                ignored += 1
            else:
                rows[-1] += _passes(cell, column, f"{path}: row {number}, column {column}")
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise UserError(f"{path}: no passes; expected a row per rank with cells such as 0F0")
    placement = _placement(path, rows)
    microbatches = 1 + max(entry.microbatch for row in rows for entry in row)
    order = tuple(_order(path, rank, row, placement[rank], microbatches) for rank, row in enumerate(rows))
    _flows(path, rows)
    notes = (f"{path}: {ignored} cells of communication ignored; it follows from the plan",) if ignored else ()
    return Schedule(Written(order), len(placement[0]), placement, microbatches, text=text, notes=notes)


def _table(path: str, text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise UserError(f"{path}: not valid CSV: {error}") from None


def _passes(cell: str, column: int, where: str) -> Iterator[Pass]:
    """The passes in a cell: none, one, or an overlapped pair."""
    pair = _PAIR.fullmatch(cell)
    parts = pair[1].split(";") if pair else [cell] if cell else []
    for part in parts:
        match = _PASS.fullmatch(part.strip())
        if not match:
            raise UserError(f"{where}: '{cell[:40]}' is no pass; expected [stage][F, B, I or W][microbatch], such as 0F0")
        yield Pass(int(match[1]), match[2], int(match[3]), column, pair is not None and part is parts[0])


def _placement(path: str, rows: Sequence[Sequence[Pass]]) -> tuple[tuple[int, ...], ...]:
    """The stages of each row, in order. Every stage is in one row, and every row has as many."""
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for entry in row:
            if owner.setdefault(entry.stage, rank) != rank:
                where = f"{path}: row {rank + 1}, column {entry.column}"
                raise UserError(
                    f"{where}: stage {entry.stage} is in row {owner[entry.stage] + 1} already; a stage is on one rank"
                )
    result = tuple(tuple(sorted({entry.stage for entry in row})) for row in rows)
    missing = next(stage for stage in range(len(owner) + 1) if stage not in owner)
    if missing < len(owner):
        raise UserError(f"{path}: stage {missing} has no passes, and stage {max(owner)} has")
    for rank, stages in enumerate(result):
        if len(stages) != len(result[0]):
            raise UserError(f"{path}: row {rank + 1} has {len(stages)} stages, and row 1 has {len(result[0])}; must be equal")
    return result


def _order(path: str, rank: int, row: Sequence[Pass], stages: tuple[int, ...], microbatches: int) -> tuple[Action, ...]:
    """The row's passes by chunk. Every microbatch passes every stage once, forward and back."""
    order = tuple(Action(entry.kind, entry.microbatch, stages.index(entry.stage), entry.beside) for entry in row)
    wrong = first_mistake(order, microbatches, len(stages))
    if wrong is not None:
        stage, kind, microbatch, column, beside = row[wrong]
        rule = "is paired with what is no other microbatch's pass the other way" if beside else "is repeated or too early"
        raise UserError(f"{path}: row {rank + 1}, column {column}: {stage}{kind}{microbatch} {rule}")
    done = {(action.chunk, action.microbatch) for action in order if action.kind in "BW"}
    for chunk, stage in enumerate(stages):
        for microbatch in range(microbatches):
            if (chunk, microbatch) not in done:
                raise UserError(f"{path}: row {rank + 1}: no B, nor I and W, of stage {stage} and microbatch {microbatch}")
    return order


def _flows(path: str, rows: Sequence[Sequence[Pass]]) -> None:
    """Every pass gets the result that it needs of another stage before its row comes to it, or ranks wait for each other."""
    last = max(entry.stage for row in rows for entry in row)
    done: set[tuple[str, int, int]] = set()
    position, moved = [0] * len(rows), True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            for stage, kind, microbatch, _, _ in row[position[rank] :]:
                way, source = ("F", stage - 1) if kind == "F" else ("B", stage + 1)
                if kind != "W" and 0 <= source <= last and (way, source, microbatch) not in done:
                    break
                if kind != "W":
                    done.add((way, stage, microbatch))
                position[rank] += 1
                moved = True
    for rank, row in enumerate(rows):
        if position[rank] < len(row):
            stage, kind, microbatch, column, _ = row[position[rank]]
            where = f"{path}: row {rank + 1}, column {column}"
            raise UserError(f"{where}: {stage}{kind}{microbatch} waits for ever: rows wait for each other's passes")
