"""DualPipeV: DualPipe folded into a V, so that no parameters are held twice. Forward and backward passes go in pairs.

DeepSeek-AI 2024, arXiv:2412.19437, section 3.2 (DualPipe), and github.com/deepseek-ai/DualPipe (its V, due to Sea AI Lab); the
order is that of PyTorch's ScheduleDualPipeV. The two passes of a pair, whose kernels DualPipe interleaves to hide the all-to-all
of experts, are played one after the other, forward first: that overlap is not modelled, and the forward pass's result leaves
before the pair ends, so that the bubble is at most the published (p − 1)(F&B + B − 3W).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from strategies.schedules import Action, schedule


@schedule("dualpipe-v", chunks=2, placement="v")
def dualpipe_v(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Warm up as ZB-V, pair the forward pass of one chunk with the backward pass of the other, drain with split passes.

    With fewer than 2·ranks microbatches, those that are missing are left out of the order for that many.
    """
    for action in _full(rank, ranks, max(microbatches, 2 * ranks)):
        if action.microbatch < microbatches:
            yield action


def _full(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """The order for at least 2·ranks microbatches, in the eight steps of the original."""
    after = ranks - rank - 1  # ranks that come after this one
    count = {(way, chunk): 0 for way in "FB" for chunk in (0, 1)}
    put_off: deque[Action] = deque()  # weight gradients

    def run(steps: str) -> Iterator[Action]:
        """ "F0", "B1", …: the next such pass of a chunk; "W": the oldest weight gradient that was put off, if any."""
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
            yield Action(kind, microbatch, chunk)

    yield from run("F0 " * (2 * after))
    yield from run("F0 F1 " * (rank + 1))
    yield from run("I1 W F1 " * after)
    yield from run("F0 B1 F1 B0 " * (microbatches - 2 * ranks + rank + 1))
    yield from run("B1 F1 B0 " * after)
    last = ["B1", "B0"] * (rank + 1)  # of which the second half is split
    yield from run(" ".join(last[: rank + 1]))
    yield from run(" ".join(last[rank + 1 :]).replace("B", "I"))
    yield from run("W I0 " * after)
    yield from run("W " * (rank + 1))
