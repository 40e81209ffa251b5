"""Ranks: started here as local processes, or found in the environment that torchrun and Slurm scripts set.

`launch(work, ranks, *arguments)` runs `work(place, *arguments)` on every rank of a process group and returns what each returns.
Local ranks meet through a file (no port), are pinned to cores of their own while there are enough, and start with an allocator
that keeps its memory. Under torchrun this process is one of the ranks: the standard variables RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT are read and nothing else, and only rank 0 gets the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from calibration.devices import Kind
from calibration.launch.launcher import under_launcher
from calibration.launch.local import run_locally
from calibration.launch.place import Hear, need_torch, run_as_rank


def launch(
    work: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    device: Kind = "cpu",
    hear: Hear | None = None,
    nodes: Sequence[str] = (),
    speeds: Mapping[int, float] = MappingProxyType({}),
) -> list[Any]:
    """What `work(place, *arguments)` returned on each rank; empty on ranks other than 0 under torchrun.

    `work` is a function of a module; arguments and results can be pickled. hear: called with what ranks tell.
    nodes: network namespaces that local ranks are spread over in equal parts, see `calibration.launch.emulation`. speeds: parts
    of their usual speed that ranks of this machine's cores are throttled to, see `calibration.launch.throttle`. Raises
    RankError with the first dead rank and its error line; on Ctrl-C ends all ranks and passes it on.
    """
    need_torch()
    if under_launcher():
        return run_as_rank(work, ranks, arguments, device, hear or (lambda _: None))
    return run_locally(work, ranks, arguments, device, hear or (lambda _: None), nodes, speeds)
