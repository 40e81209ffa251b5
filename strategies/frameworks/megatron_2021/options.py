"""Options of Megatron-LM of 2020 to 2022 (`kernels: apex`)."""

from __future__ import annotations

from pydantic import Field

from strategies.frameworks.options import Options


class Megatron2021Options(Options):
    """What differed between its versions and its users."""

    persistent_norm: bool = Field(False, description="layer norms by Apex's FastLayerNorm (Megatron-LM since the end of 2021)")
    timers: bool = Field(
        False,
        description="the host waits for the GPU before every pass, to take the time (Megatron-LM until 2022: "
        "torch.cuda.synchronize in megatron/global_vars.py)",
    )
