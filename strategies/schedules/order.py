"""What a pipeline schedule is: the actions of each rank in order, and where virtual stages are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
KEPT = 2**20  # microbatches of the longest order whose passes are kept: an execution of asynchronous stages has no last one


class Action(NamedTuple):
    """One pass of a microbatch through a chunk.

    "F": forward; "B": whole backward; or in two parts, "I": gradient of the input, which the stage before waits for, and "W":
    gradient of the weights, which nobody waits for. beside: this pass and the next, a forward and a backward pass, overlap:
    their kernels take turns, so that the collectives of each run beside the kernels of the other.
    """

    kind: str
    microbatch: int
    chunk: int = 0
    beside: bool = False


KINDS = {"F": 0, "B": 1, "I": 2, "W": 3}  # of passes


class OrderColumns(NamedTuple):
    """The passes of an order: their numbers in KINDS, microbatches and chunks, and which are `beside` the next."""

    kind: Integers
    microbatch: Integers
    chunk: Integers
    beside: NDArray[np.bool_]

    @classmethod
    def of(cls, order: Sequence[Action]) -> OrderColumns | None:
        """Those of an order; None where it has others than KINDS."""
        kinds, *others = zip(*order, strict=True) if order else ((), (), (), ())
        kind = np.array([KINDS.get(each, -1) for each in kinds], np.int64)
        if (kind < 0).any():
            return None
        types = (np.int64, np.int64, np.bool_)
        return cls(kind, *(np.array(column, each) for column, each in zip(others, types, strict=True)))

    def is_plain(self, microbatches: int, chunks: int) -> bool:
        """Whether no pass is beside another, repeated, unknown, or earlier than what it needs of the same chunk."""
        inside = (self.microbatch >= 0) & (self.microbatch < microbatches) & (self.chunk >= 0) & (self.chunk < chunks)
        if self.beside.any() or not inside.all():
            return False
        place = np.full((len(KINDS), microbatches, chunks), -1)
        place[self.kind, self.microbatch, self.chunk] = np.arange(len(self.kind))
        forward, whole, first, second = place
        if (place >= 0).sum() < len(self.kind) or ((whole >= 0) & (first >= 0)).any():
            return False
        return all(
            ((later < 0) | ((earlier >= 0) & (earlier < later))).all()
            for earlier, later in ((forward, whole), (forward, first), (first, second))
        )


def passes(kind: str, microbatches: int, chunk: int = 0, first: int = 0) -> Iterable[Action]:
    """A pass of every microbatch from the first on, in order: the same objects for all ranks, but of an endless run."""
    if microbatches > KEPT:
        return (Action(kind, microbatch, chunk) for microbatch in range(first, microbatches))
    return _every(kind, microbatches, chunk)[first:]


@lru_cache(maxsize=64)
def _every(kind: str, microbatches: int, chunk: int) -> tuple[Action, ...]:
    return tuple(Action(kind, microbatch, chunk) for microbatch in range(microbatches))


Order = Callable[[int, int, int, int], Iterator[Action]]


@dataclass(frozen=True)
class Schedule:
    """An order, how many chunks it takes (None: any number from 2), and where virtual stage s is.

    "loop": chunk s // ranks of rank s % ranks. "v": the second chunk of a rank comes back: rank 0 has the first and the last.
    "mirror": two copies of the model, the second (stages from `ranks` on) on the ranks in reverse order; the first half of the
    microbatches passes the first copy, the other half the second. Otherwise the stages of each rank, by chunk: such a schedule is
    for that many ranks and `microbatches` only.

    A schedule with `versions` is asynchronous: steps follow each other without a flush, so that passes of several versions of the
    parameters are under way; the function says how many a rank of so many keeps. Such an order may be asked for many steps.
    """

    order: Order
    chunks: int | None = 1
    placement: Literal["loop", "v", "mirror"] | tuple[tuple[int, ...], ...] = "loop"
    microbatches: int | None = None
    versions: Callable[[int, int], int] | None = None  # rank, ranks
    settled: int = 1  # microbatches per rank from which on each more makes the step longer by the same time
    every_microbatch: bool = False  # asynchronous: parameters are updated after each microbatch, not once in a step
    text: str = ""  # of the file it was read from
    notes: tuple[str, ...] = ()  # what was ignored in it

    @property
    def ranks(self) -> int | None:
        """The only number of ranks that it is for; None: any."""
        return len(self.placement) if isinstance(self.placement, tuple) else None

    @property
    def copies(self) -> int:
        """Copies of the model that the ranks of one pipeline hold."""
        return 2 if self.placement == "mirror" else 1

    def stage(self, rank: int, ranks: int, chunk: int) -> int:
        """The virtual stage of a rank's chunk."""
        if isinstance(self.placement, tuple):
            return self.placement[rank][chunk]
        if self.placement == "mirror" and chunk:
            return 2 * ranks - 1 - rank
        if self.placement == "v" and chunk % 2:
            return (chunk + 1) * ranks - 1 - rank
        return chunk * ranks + rank


def first_mistake(order: Sequence[Action], microbatches: int, chunks: int) -> int | None:
    """The position of the first action that is repeated, comes before what it needs of the same chunk, or cannot be."""
    before, instead = {"F": "", "B": "F", "I": "F", "W": "I"}, {"B": "I", "I": "B"}
    done: set[tuple[str, int, int]] = set()
    for position, (kind, microbatch, chunk, beside) in enumerate(order):
        if beside and not _pair(Action(kind, microbatch, chunk), *order[position + 1 : position + 2]):
            return position
        earlier, same = before.get(kind, "unknown"), (kind, microbatch, chunk)
        ready = not earlier or (earlier, microbatch, chunk) in done
        again = same in done or (instead.get(kind, ""), microbatch, chunk) in done
        if not ready or again or not (0 <= microbatch < microbatches and 0 <= chunk < chunks):
            return position
        done.add(same)
    return None


def _pair(action: Action, *following: Action) -> bool:
    """Whether a pass can overlap with the next: a forward and a backward pass, the second independent of the first."""
    if not following:
        return False
    other = following[0]
    kinds = {action.kind, other.kind}
    return kinds in ({"F", "B"}, {"F", "I"}) and not other.beside and action[1:3] != other[1:3]


def without_missing(order: Iterator[Action], microbatches: int) -> Iterator[Action]:
    """An order for more microbatches, without those that there are not."""
    every = list(order)
    for action, following in zip(every, [*every[1:], None], strict=True):
        if action.microbatch < microbatches:
            alone = following is None or following.microbatch >= microbatches
            yield action._replace(beside=False) if alone else action
