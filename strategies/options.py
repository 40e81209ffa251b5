"""Groups of a plan's fields that belong to one technique: `plan.powersgd`, `plan.offload`, `plan.deepspeed`."""

from __future__ import annotations

from pydantic import Field, PositiveInt

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
