"""Groups of a plan's fields that belong to one technique: `plan.powersgd`, `plan.offload`, `plan.fp8`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from strategies.models.parts import LAYERS
from topologies.documents.units import Elements
from topologies.reading import Config

FP8_WIDTH = 1  # bytes of an fp8 number
NVFP4_WIDTH = 0.5 + 1 / 16  # bytes of a 4-bit number and its part of a scale, of which 16 have one of 8 bits
WIDTHS = {"fp8": FP8_WIDTH, "fp4": NVFP4_WIDTH}  # by type of products


def _is_zero(value: object) -> bool:
    return value == 0


def _is_all(value: object) -> bool:
    return value == "all"


class PowerSGD(Config):
    """Gradient compression of PyTorch's `powerSGD_hook`, for data_parallel=ddp_powersgd. Names are the fields of its state."""

    matrix_approximation_rank: PositiveInt = Field(1, le=2**20, description="columns of the two thin matrices P and Q")
    min_compression_rate: float = Field(
        2.0, gt=0, le=1e9, description="an n × m matrix is compressed only where (n + m) · rank · this < n · m"
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
    tile: Elements = Field(
        128 * 2**20, description="parameters that the CPUs update in one go while those before are copied (DeepSpeed: 128 Mi)"
    )
    buffers: PositiveInt = Field(
        5,
        le=10**6,
        description="parts of a model that a rank holds in the CPUs' memory on their way from NVMe (DeepSpeed: buffer_count 5)",
    )

    def __str__(self) -> str:
        return f"{{{', '.join(f'{name}: {value}' for name, value in self.model_dump(exclude_unset=True).items())}}}"

    @model_validator(mode="after")
    def _consistent(self) -> Offload:
        if self.optimizer is None and self.parameters is None:
            raise ValueError("offload={}: name what is kept where, such as offload={optimizer: cpu}")
        return self


class Fp8(Config):
    """Linear layers in fp8 or, with scaling nvfp4, in 4 bits: with `kernels: megatron` Transformer Engine's, `compiled` torchao's
    (`strategies.layers.fp8`).
    """

    scaling: Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"] = Field(
        "tensorwise",
        description="what shares a scale: a tensor, by its maxima in past steps (delayed) or its own now (tensorwise); a row "
        "(rowwise); 128 numbers of it (blockwise); 32 (mxfp8, of Blackwell). Megatron-LM's --fp8-recipe. "
        "nvfp4: numbers of 4 bits, 16 of which share one, and all of a tensor one more (Blackwell; --fp4-recipe)",
    )
    gather: bool = Field(
        False,
        description="zero1, zero2, zero3: parameters of linear layers are gathered in fp8 or NVFP4 (Megatron-LM's "
        "--fp8-param-gather and --fp4-param-gather, torchtitan's enable_fsdp_float8_all_gather)",
    )
    dispatch: bool = Field(
        False,
        description="experts: tokens are cast before they are sent to their experts, and gradients of results before they are "
        "(DeepSeek-V3; DeepEP's use_fp8); what comes back has 16 bits",
    )
    activation_func_input_store: bool = Field(
        False,
        description="inputs of activations of MLPs and experts are kept in fp8 (Megatron-LM's activation_func_fp8_input_store)",
    )
    attention: bool = Field(
        False,
        exclude_if=_is_zero,
        description="the attention core multiplies in fp8, too, and keeps its operands and its result so (Transformer Engine's "
        "fp8_dpa; Megatron-LM's --fp8-dot-product-attention); what is around it has 16 bits",
    )
    attention_output: Literal["bf16", "e5m6"] = Field(
        "bf16",
        description="how the attention core's result is kept for its own backward pass, beside its fp8 copy for the product "
        "after it (bf16, Transformer Engine); or both as 12 bits (e5m6, DeepSeek-V3)",
    )
    amax_reduction: Literal["all", "tp", "none"] = Field(
        "all",
        exclude_if=_is_all,
        description="scaling delayed: which ranks agree on maxima after every pass: all that have the same layers (all), the tp "
        "and cp ranks among them (tp; Megatron-LM's --tp-only-amax-red) or none (Transformer Engine's reduce_amax=False)",
    )
    layers_at_start_in_bf16: int = Field(
        0,
        ge=0,
        le=LAYERS,
        exclude_if=_is_zero,
        description="first layers of the model that stay in 16 bits (Megatron-LM's --first-last-layers-bf16 "
        "--num-layers-at-start-in-bf16)",
    )
    layers_at_end_in_bf16: int = Field(
        0, ge=0, le=LAYERS, exclude_if=_is_zero, description="last layers that do (--num-layers-at-end-in-bf16)"
    )

    def stays_in_bf16(self, layer: int, layers: int) -> bool:
        """Whether layer 0 … layers − 1 is multiplied in 16 bits."""
        return layer < self.layers_at_start_in_bf16 or layer >= layers - self.layers_at_end_in_bf16

    @property
    def of_tensors(self) -> bool:
        """Whether all of a tensor shares one scale and no other."""
        return self.scaling in ("delayed", "tensorwise")

    @property
    def dtype(self) -> str:
        """Type of the operands of products."""
        return "fp4" if self.scaling == "nvfp4" else "fp8"

    @property
    def width(self) -> float:
        """Bytes of such a number."""
        return WIDTHS[self.dtype]
