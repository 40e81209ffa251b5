"""torch.nn.DataParallel: one process whose threads drive all GPUs of a node."""

from __future__ import annotations

from typing import Any

from torch import nn

from calibration.execute.chunks import Chunk
from calibration.execute.data_parallel import Hook, executed


@executed("dataparallel")
class DataParallel(Hook):
    """The modules of PyTorch, on as many GPUs as there are dp ranks."""

    one_process = True

    def wrap(self, chunk: Chunk) -> nn.Module:
        """Every forward pass scatters the batch and broadcasts the parameters."""
        devices: list[Any] = list(range(self.setup.resolved.dp))
        return nn.DataParallel(chunk.net, device_ids=devices)
