"""When DeepSpeed's ZeRO-3 gathers and releases parts of a model, or tiles of parts: a pure function of sizes and four limits.

github.com/deepspeedai/DeepSpeed deepspeed/runtime/zero/partitioned_param_coordinator.py, fetch_sub_module and
__params_to_release, with the trace of a forward and a backward pass. The host decides, in the order in which it launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strategies.frameworks.deepspeed.options import DeepSpeed


class Step(NamedTuple):
    """Before a part's pass: the part to gather because it is not there (or None), those to gather ahead; whether to release it
    afterwards.
    """

    part: int
    needed: bool
    ahead: tuple[int, ...]
    release: bool


def steps(sizes: Sequence[int], limits: DeepSpeed, lowest: int = 0) -> list[Step]:
    """Steps of a forward pass over parts of `sizes` elements and of the backward pass, down to the part `lowest`, which releases
    everything.
    """
    count = len(sizes)
    return steps_of([*range(count), *reversed(range(lowest, count))], sizes, limits)


def steps_of(trace: Sequence[int], sizes: Sequence[int], limits: DeepSpeed) -> list[Step]:
    """The same where a forward and a backward pass use parts, or tiles, in the order of `trace`."""
    live: set[int] = set()
    until: dict[int, int] = {}  # part -> the last step for which it has been looked at
    queue, result = 0, []
    for now, part in enumerate(trace):
        needed = part not in live
        live.add(part)
        queue = max(queue, now + 1)
        room = min(limits.stage3_max_live_parameters - sum(sizes[part] for part in live), limits.stage3_prefetch_bucket_size)
        ahead: list[int] = []
        while queue < len(trace) and sum(sizes[part] for part in ahead) < room:
            if trace[queue] not in live:
                ahead.append(trace[queue])
                live.add(trace[queue])
            until[trace[queue]] = queue
            queue += 1
        release = until.get(part, now) <= now and not _soon(part, trace[now + 1 :], sizes, limits.stage3_max_reuse_distance)
        if release:
            live.remove(part)
        result.append(Step(part, needed, tuple(ahead), release))
    return result


def _soon(part: int, coming: Sequence[int], sizes: Sequence[int], distance: int) -> bool:
    """Whether the part is used again before `distance` elements of others."""
    passed = 0
    for other in coming:
        if passed >= distance:
            return False
        if other == part:
            return True
        passed += sizes[other]
    return False
