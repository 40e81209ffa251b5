"""DualPipe: microbatches enter a pipeline at both ends; forward and backward passes in pairs hide each other's collectives.

DeepSeek-AI 2024, arXiv:2412.19437, section 3.2, and github.com/deepseek-ai/DualPipe. DualPipe holds two copies of the model, the
second on the ranks in reverse order, whose gradients are summed over the two ranks that have a stage. DualPipeV (Sea AI Lab) is
one half of it, folded into a V, so that no parameters are held twice; its order is that of PyTorch's ScheduleDualPipeV. The two
passes of a pair take turns at the collectives of their layers; its results leave when the whole pair has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from strategies.schedules import schedule
from strategies.schedules.order import Action, without_missing
from topologies.reading import UserError

NOTE = (
    "the two passes of a pair overlap, except while gradients are reduced bucket by bucket, and with parameters gathered in parts"
)


@schedule("dualpipe", chunks=2, placement="mirror", settled=2, notes=(f"dualpipe: {NOTE}",))
def dualpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Two halves of a V that meet in the middle: each rank is in one of them, and passes on to the other."""
    if ranks % 2 or microbatches % 2:
        raise UserError(
            f"plan: schedule=dualpipe needs even pp and microbatches, and has pp={ranks}, microbatches={microbatches}"
        )
    half, mirrored = microbatches // 2, rank >= ranks // 2
    for kind, microbatch, chunk, beside in _some(min(rank, ranks - 1 - rank), ranks // 2, half):
        copy = chunk ^ mirrored
        yield Action(kind, microbatch + copy * half, copy, beside)


@schedule("dualpipe-v", chunks=2, placement="v", settled=2, notes=(f"dualpipe-v: {NOTE}",))
def dualpipe_v(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Warm up as ZB-V, pair the forward pass of one chunk with the backward pass of the other, drain with split passes.

    With fewer than 2·ranks microbatches, those that are missing are left out of the order for that many.
    """
    return _some(rank, ranks, microbatches)


def _some(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    return without_missing(_full(rank, ranks, max(microbatches, 2 * ranks)), microbatches)


def _full(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """The order for at least 2·ranks microbatches, in the eight steps of the original."""
    after = ranks - rank - 1  # ranks that come after this one
    count = {(way, chunk): 0 for way in "FB" for chunk in (0, 1)}
    put_off: deque[Action] = deque()  # weight gradients

    def run(steps: str) -> Iterator[Action]:
        """ "F0", "B1", …: the next such pass of a chunk; with "&" it is one with that which follows; "W": the oldest weight
        gradient that was put off, if any.
        """
        for step in steps.split():
            if step == "W":
                if put_off:
                    yield put_off.popleft()
                continue
            kind, chunk = step[0], int(step[1])
            way = "F" if kind == "F" else "B"
            microbatch = count[way, chunk]
            count[way, chunk] += 1
            if kind == "I":
                put_off.append(Action("W", microbatch, chunk))
            yield Action(kind, microbatch, chunk, step.endswith("&"))

    yield from run("F0 " * (2 * after))
    yield from run("F0 F1 " * (rank + 1))
    yield from run("I1 W F1 " * after)
    main = "F0& B1 F1& B0 " * (microbatches - 2 * ranks + rank + 1)
    yield from run(main if after else main.replace("&", "", 1))  # the last rank passes on its first result at once
    yield from run("B1 F1& B0 " * after)
    last = ["B1", "B0"] * (rank + 1)  # of which the second half is split
    yield from run(" ".join(last[: rank + 1]))
    yield from run(" ".join(last[rank + 1 :]).replace("B", "I"))
    yield from run("W I0 " * after)
    yield from run("W " * (rank + 1))
