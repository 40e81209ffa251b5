"""Embedding tables of a recommender on parameter servers, beside a dense model: what a worker looks up, and what of it is
sent.

Tables are far larger than what a step touches (Naumov et al. 2019, DLRM, arXiv:1906.00091), so that servers hold their rows, a
k-th of each table on each of k servers, and workers pull the rows of their samples and push the rows' gradients (Lian et al.
2021, Persia, arXiv:2111.05897). Of n lookups in a table of R rows, each row as likely as any other, R · (1 − (1 − 1/R)^n) rows
are distinct, and each of these is sent once:

* with a worker's gradients: the gradients of its rows with their numbers, and the numbers of the next step's rows, 8 bytes each;
* with the dense parameters: the rows of the next step.

A worker adds up the rows of a sample in a table (FBGEMM's table-batched embedding: one kernel each way for all tables). Servers
update the rows of one worker's gradient at a time, or of all workers' at once in a synchronous step. Rows of real tables are
looked up unequally often, so that fewer are distinct.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from sim.engine.parameter_servers import Setting
from sim.pricing.prices import Prices
from sim.program import Kernel
from topologies.reading import UserError, shown

NUMBER = 8  # bytes of a row's number
FLOAT = 4
LARGEST = 10**12  # rows, or numbers of a table's row
MOST = 10_000  # lookups of a sample in a table, and tables
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a number
SparseOptimizer = Literal["rowwise_adagrad", "adagrad", "sgd"]
# bytes of state of a row of so many numbers: FBGEMM's EXACT_ROWWISE_ADAGRAD keeps one number, Adagrad one for each, both in fp32
STATES: dict[str, Callable[[int], int]] = {
    "rowwise_adagrad": lambda width: FLOAT,
    "adagrad": lambda width: FLOAT * width,
    "sgd": lambda width: 0,
}


class Table(NamedTuple):
    """An embedding table, and how often a sample looks something up in it."""

    rows: int
    width: int
    lookups: int

    def distinct(self, samples: int) -> float:
        """Rows that so many samples look up, each once, as expected of lookups at random."""
        return -self.rows * math.expm1(samples * self.lookups * math.log1p(-1 / self.rows)) if self.rows > 1 else 1.0


@dataclass(frozen=True)
class Embeddings:
    """Tables, the type of their numbers, and what updates them."""

    tables: tuple[Table, ...]
    precision: str = "fp32"
    optimizer: str = "rowwise_adagrad"

    def __post_init__(self) -> None:
        if self.precision not in WIDTHS:
            raise UserError(f"--embedding-type {shown(self.precision)}: must be one of {', '.join(WIDTHS)}")
        if self.optimizer not in get_args(SparseOptimizer):
            raise UserError(f"--embedding-optimizer {shown(self.optimizer)}: must be one of {', '.join(STATES)}")

    @property
    def number(self) -> int:
        """Bytes of a number of a table."""
        return WIDTHS[self.precision]

    @property
    def held(self) -> float:
        """Bytes of all tables with their optimizer's states."""
        return float(sum(t.rows * (t.width * self.number + STATES[self.optimizer](t.width)) for t in self.tables))

    def traffic(self, samples: int) -> Traffic:
        """What one worker sends for a step of so many samples."""
        distinct = [table.distinct(samples) for table in self.tables]
        rows = sum(count * table.width * self.number for count, table in zip(distinct, self.tables, strict=True))
        return Traffic(sum(distinct), rows + 2 * NUMBER * sum(distinct), rows)

    def pooling(self, samples: int) -> tuple[Kernel, ...]:
        """The kernels by which a worker adds up its rows, forward and backward: forward reads every row that is looked up and
        writes a sum for each sample and table; backward sets the gradients of distinct rows to zero, and adds to one for each
        lookup.
        """
        forward = backward = 0.0
        for table in self.tables:
            row = table.width * self.number
            forward += samples * (table.lookups + 1) * row
            backward += table.distinct(samples) * row + 3 * samples * table.lookups * row
        moved = {"forward": forward, "backward": backward}
        return tuple(Kernel("memory", "embeddings", phase, 0.0, size) for phase, size in moved.items())

    def update(self, samples: int) -> Kernel:
        """The update of all rows that so many samples look up: gradient, row and state are read, row and state written."""
        moved = sum(
            table.distinct(samples) * (3 * table.width * self.number + 2 * STATES[self.optimizer](table.width))
            for table in self.tables
        )
        return Kernel("optimizer", "embeddings", "optimizer", 0.0, moved)

    def buffers(self, samples: int) -> float:
        """Bytes on a worker: its rows and their sums, and the gradients of both."""
        sums = samples * sum(table.width for table in self.tables) * self.number
        return 2 * (self.traffic(samples).pulled + sums)


class Traffic(NamedTuple):
    """Of one worker in one step: rows, and bytes."""

    rows: float
    pushed: float
    pulled: float


def tables_of(texts: tuple[str, ...]) -> tuple[Table, ...]:
    """Tables as the command line has them: rows, width and lookups of a sample, `100000000x128:20`; without lookups there is one.

    Raises UserError.
    """
    if len(texts) > MOST:
        raise UserError(f"--embedding: {len(texts):,} tables are too many (at most {MOST:,})")
    return tuple(map(_table, texts))


def _table(text: str) -> Table:
    match = re.fullmatch(r"(\d{1,13})x(\d{1,7})(?::(\d{1,5}))?", text)
    numbers = Table(int(match[1]), int(match[2]), int(match[3] or 1)) if match else Table(0, 0, 0)
    if not (0 < numbers.rows <= LARGEST and 0 < numbers.width <= 2**22 and 0 < numbers.lookups <= MOST):
        rule = "must be rows × width, and lookups of a sample, as 100000000x128:20"
        raise UserError(f"--embedding {shown(text)}: {rule}")
    return numbers


def with_embeddings(setting: Setting, embeddings: Embeddings, samples: int, prices: Prices, bound: int | None) -> Setting:
    """A worker's step and the servers' update with the tables, before servers share the update; samples: of a worker's step."""
    traffic, at_once = embeddings.traffic(samples), samples * (setting.workers if bound == 0 else 1)
    return replace(
        setting,
        compute=setting.compute + sum(map(prices.seconds, embeddings.pooling(samples))),
        gradient=setting.gradient + traffic.pushed,
        parameters=setting.parameters + traffic.pulled,
        update=setting.update + prices.seconds(embeddings.update(at_once)),
    )
