"""Options of Megatron-LM of 2020 to 2022 (`kernels: apex`)."""

from __future__ import annotations

from operator import not_

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
    timed_parts: bool = Field(
        False,
        exclude_if=not_,
        description="the host waits for the GPU before every layer, embedding and head, too, their collectives follow their "
        "kernels, and gradients are neither added up nor joined, as where times of all of them are taken one by one",
    )
    fp16_lm_cross_entropy: bool = Field(
        False,
        exclude_if=not_,
        description="the loss is computed from logits in fp16, which are not cast to fp32 (--fp16-lm-cross-entropy)",
    )
