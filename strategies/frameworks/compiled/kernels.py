"""torch.compile: priced as Megatron-LM's kernels but for what autograd adds up between kernels, which it fuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from strategies.frameworks import kernel_sets
from strategies.frameworks.passes import Ways, persistent_norm, stream
from strategies.frameworks.pytorch.kernels import InPyTorch


@kernel_sets("compiled")
class Compiled(InPyTorch):
    """`kernels: compiled` in a plan: PyTorch's operators as Inductor fuses them; fp8 by torchao."""

    compiled = torchao = sorts_copies = True
    refused_overlaps: ClassVar[Mapping[str, str]] = {
        "weight_gradient": "PyTorch's tensor parallelism waits for each collective, or takes pieces"
    }
    fp8_scalings = ("tensorwise", "rowwise", "mxfp8")
    fp8_gathers = "parameter"

    def waits_for_counts(self, exchanged: bool) -> bool:
        """torchtitan's all-to-all is given lists; grouped products take their offsets on the GPU (torchtitan/distributed/
        expert_parallel.py, _token_dispatch).
        """
        return exchanged

    def norm(self, rms: bool, width: float) -> Ways:
        """One kernel each way."""
        return persistent_norm(width, "compiled norm")

    def real_rotary(self, width: float) -> Ways:
        """One kernel each way."""
        return Ways(stream(2 * width, operator="compiled rotary"), stream(2 * width, operator="compiled rotary backward"))
