"""Groups of a plan's fields that belong to one technique: `plan.powersgd`, `plan.offload`, `plan.deepspeed`, `plan.fp8`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from topologies.reading import Config


def _whole(value: Any) -> Any:
    """5e8, which is a text to YAML, as a number."""
    try:
        return int(float(value)) if isinstance(value, str) and len(value) < 64 and float(value).is_integer() else value
    except ValueError:
        return value


FP8_WIDTH = 1  # bytes of an fp8 number
MOST = 10**15  # elements: a hundred times the largest models
Elements = Annotated[int, Field(gt=0, le=MOST), BeforeValidator(_whole)]
ElementsOrNone = Annotated[int, Field(ge=0, le=MOST), BeforeValidator(_whole)]


class PowerSGD(Config):
    """Gradient compression of PyTorch's `powerSGD_hook`, for data_parallel=ddp_powersgd. The names are those of its state."""

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


class DeepSpeed(Config):
    """DeepSpeed's way with zero1, zero2, zero3: fields of `zero_optimization` in its configuration, its defaults, elements; two
    of `activation_checkpointing`; and its version.

    Without this group buckets are PyTorch's (`bucket`, in bytes), and zero3 is FSDP2: a part of the model (a layer) is gathered
    while the one before computes, and released after use. DeepSpeed's overlap_comm is the plan's `overlap`. Its unit is a
    tensor; here it is a part: limits that end inside a part act at its end.
    """

    reduce_bucket_size: Elements = Field(500_000_000, description="gradients reduced at once; a buffer of so many is held")
    allgather_bucket_size: Elements = Field(500_000_000, description="zero1, zero2: parameters gathered at once")
    stage3_prefetch_bucket_size: ElementsOrNone = Field(
        50_000_000,
        description="zero3: parts ahead are gathered until they have so many parameters; 0 gathers each when it is needed",
    )
    stage3_param_persistence_threshold: ElementsOrNone = Field(
        100_000, description="zero3: parameters of at most this size are never released, and gathered after each update"
    )
    stage3_max_live_parameters: Elements = Field(
        1_000_000_000, description="zero3: nothing is gathered ahead beyond so many gathered parameters"
    )
    stage3_max_reuse_distance: ElementsOrNone = Field(
        1_000_000_000, description="zero3: parameters are not released when they are used again before so many others"
    )
    version: Literal["0.3.13", "0.5", "0.6"] = Field(
        "0.6",
        description="zero3: of 0.6 (2022) and later, where tensors are gathered and reduced together; before that one by one, in "
        "lists with a piece per rank, and the host waits for the GPU: 0.3.13 (March 2021), or 0.3.14 to 0.5 (2021), in which "
        "nothing is gathered ahead or kept",
    )
    partition_activations: bool = Field(
        False, description="recompute=full: each tp rank keeps 1/tp of a layer's input, and gathers it to recompute the layer"
    )
    cpu_checkpointing: bool = Field(
        False,
        description="recompute=full with zero3: inputs of layers are copied to the CPUs' memory, and back before they are "
        "needed; the GPU waits for both",
    )
    zero_quantized_weights: bool = Field(False, description="ZeRO++ qwZ: parameters are gathered as 8-bit integers")
    zero_hpz_partition_size: PositiveInt = Field(
        1,
        le=2**20,
        description="ZeRO++ hpZ: neighbouring ranks that hold a second copy, from which backward passes gather; 1 is none",
    )
    zero_quantized_gradients: bool = Field(
        False, description="ZeRO++ qgZ: gradients are reduced by all-to-alls of 4-bit integers, inside nodes and then across"
    )

    @property
    def coalesced(self) -> bool:
        """Whether zero3 gathers and reduces several tensors by one collective."""
        return self.version == "0.6"

    @property
    def traced(self) -> bool:
        """Whether zero3 knows what comes next (`strategies.frameworks.deepspeed_2021.zero3`)."""
        return self.version != "0.5"

    @property
    def hierarchical(self) -> bool:
        """Whether the ranks of a node do something by themselves."""
        return self.zero_hpz_partition_size > 1 or self.zero_quantized_gradients


class Fp8(Config):
    """Linear layers in fp8, with `kernels: megatron` as Transformer Engine's, with `compiled` as torchao's
    (`strategies.layers.fp8`).
    """

    scaling: Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"] = Field(
        "tensorwise",
        description="what shares a scale: a tensor, by its maxima in past steps (delayed) or its own now (tensorwise); a row "
        "(rowwise); 128 numbers of it (blockwise); 32 (mxfp8, of Blackwell). Megatron-LM's --fp8-recipe",
    )
    gather: bool = Field(
        False,
        description="zero1, zero2, zero3: parameters of linear layers are gathered in fp8 (Megatron-LM's --fp8-param-gather, "
        "torchtitan's enable_fsdp_float8_all_gather)",
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
    attention_output: Literal["bf16", "e5m6"] = Field(
        "bf16",
        description="how the attention core's result is kept for its own backward pass, beside its fp8 copy for the product "
        "after it (bf16, Transformer Engine); or both as 12 bits (e5m6, DeepSeek-V3)",
    )
