"""Documents of unequal lengths packed into sequences (`plan.packing`): attention stays within each, so that a sequence costs
by the squares of its documents' lengths, and dp ranks that have longer ones keep the others waiting.

As flash attention of variable lengths runs it (cu_seqlens; Transformer Engine's thd layout, Hugging Face's padding-free
collator): Σ lᵢ² pairs of tokens in place of the sequence's square. All other work goes by tokens, of which every sequence has
as many.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from topologies.reading import Config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STEPS, MOST = 200, 200_000  # drawn steps, over which the busiest rank is a mean; drawn sequences of all steps
SEED = 1


class Packing(Config):
    """What is packed."""

    lengths: tuple[Annotated[int, Field(gt=0, le=2**30)], ...] = Field(
        min_length=1,
        max_length=100_000,
        description="tokens of the documents of a data set, or of a sample of them; a longer one than a sequence has as many "
        "tokens as that",
    )


def mean_length(lengths: tuple[int, ...], sequence: int) -> float:
    """Tokens that a token attends to without a mask, in the mean: Σ l² / Σ l of the pieces in sequences."""
    return float(_squares(lengths, sequence, 2_000).mean()) / sequence


@lru_cache(maxsize=1024)
def busiest(lengths: tuple[int, ...], sequence: int, ranks: int, sequences: int) -> float:
    """Work of attention of the busiest of `ranks` ranks relative to the mean, where each has so many sequences between two
    moments at which all wait for each other.
    """
    if ranks == 1 or len(set(lengths)) == 1:
        return 1.0
    steps = max(1, min(STEPS, MOST // (ranks * sequences)))
    squares = _squares(lengths, sequence, ranks * sequences * steps)
    work = squares.reshape(steps, ranks, sequences).mean(axis=2)
    return float((work.max(axis=1) / squares.mean()).mean())


@lru_cache(maxsize=64)
def _squares(lengths: tuple[int, ...], sequence: int, count: int) -> NDArray[np.float64]:
    """Σ l² of `count` sequences."""
    import numpy as np

    drawn, places = _drawn(lengths, sequence, count)
    return np.bincount(places, weights=drawn.astype(float) ** 2, minlength=count).astype(np.float64)


def pieces(lengths: tuple[int, ...], sequence: int, count: int) -> list[list[int]]:
    """Tokens of the documents in each of `count` sequences, in order."""
    drawn, places = _drawn(lengths, sequence, count)
    result: list[list[int]] = [[] for _ in range(count)]
    for length, place in zip(drawn.tolist(), places.tolist(), strict=True):
        result[place].append(length)
    return result


def _drawn(lengths: tuple[int, ...], sequence: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of documents, or of their parts, and in which sequence each lies. Documents follow each other in any order; what
    does not fit into a sequence goes on in the next, where it attends to nothing before.
    """
    import numpy as np

    cut = np.minimum(np.array(lengths), sequence)
    drawn = np.random.default_rng(SEED).choice(cut, size=int(count * sequence / cut.mean() * 1.1) + 100)
    borders = np.arange(1, count + 1) * sequence
    ends = np.cumsum(drawn)
    edges = np.union1d(ends[ends < borders[-1]], borders)
    return np.diff(edges, prepend=0), np.searchsorted(borders, edges)
