"""Groups of a plan's fields that belong to one technique: `plan.powersgd`, `plan.offload`, `plan.deepspeed`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from topologies.reading import Config


class PowerSGD(Config):
    """Gradient compression of PyTorch's `powerSGD_hook`, for data_parallel=ddp_powersgd. The names are those of its state."""

    matrix_approximation_rank: PositiveInt = Field(1, description="columns of the two thin matrices P and Q")
    min_compression_rate: float = Field(
        2.0, gt=0, description="an n × m matrix is compressed only where (n + m) · rank · this < n · m"
    )
    use_error_feedback: bool = Field(
        True, description="keep what compression lost, a copy of all gradients, and add it next time"
    )
    warm_start: bool = Field(True, description="start from the last step's Q, and keep P and Q; otherwise from random numbers")


class Offload(Config):
    """What zero1, zero2 and zero3 keep outside of the GPUs: ZeRO-Offload (arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857),
    FSDP2's CPUOffloadPolicy (zero3 with both on the CPU).
    """

    optimizer: Literal["cpu", "nvme"] | None = Field(
        None, description="optimizer states: then the CPUs update, and gradients come to them as the backward pass makes them"
    )
    parameters: Literal["cpu", "nvme"] | None = Field(
        None, description="zero3: each rank's part of the parameters, copied to the GPU before each gather"
    )
    tile: PositiveInt = Field(
        128 * 2**20, description="parameters that the CPUs update in one go while those before are copied (DeepSpeed: 128 Mi)"
    )
    buffers: PositiveInt = Field(
        5, description="parts of a model that a rank holds in the CPUs' memory on their way from NVMe (DeepSpeed: buffer_count 5)"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Offload:
        if self.optimizer is None and self.parameters is None:
            raise ValueError("offload={}: name what is kept where, such as offload={optimizer: cpu}")
        return self
