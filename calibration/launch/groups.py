"""Process groups of some ranks, which wait for each other as long as all ranks do.

A group that is made without a timeout has the backend's own, not that of the ranks (torch 2.13, `_get_default_timeout`): NCCL's
watchdog would end a rank after 10 minutes, while it waits for others that compute, whatever the command was told.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from calibration.launch.place import PATIENCE


def new_group(ranks: Sequence[int], alone: bool = False) -> Any:
    """A process group. All ranks make it, or with `alone` its own only; then every rank must be making one, its own or another:
    NCCL splits the communicator of all ranks, which each of them must take part in (ncclCommSplit).
    """
    return dist.new_group(list(ranks), timeout=_patience(), use_local_synchronization=alone)


def patient(mesh: DeviceMesh) -> DeviceMesh:
    """The groups of a mesh, which has no timeout to give."""
    for name in mesh.mesh_dim_names or ():
        _set_pg_timeout(_patience(), mesh.get_group(name))
    return mesh


def _patience() -> timedelta:
    return timedelta(seconds=PATIENCE.get())
