"""Options of DeepSpeed: `plan.deepspeed`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from topologies.documents.units import Elements, ElementsOrZero
from topologies.reading import Config


class DeepSpeed(Config):
    """DeepSpeed's way with zero1, zero2, zero3: fields of `zero_optimization` in its configuration, its defaults, elements; two
    of `activation_checkpointing`; and its version.

    Without this group buckets are PyTorch's (`bucket`, in bytes), and zero3 is FSDP2: a part of the model (a layer) is gathered
    while the one before computes, and released after use. DeepSpeed's overlap_comm is the plan's `overlap`. Its unit is a
    tensor; here it is a part: limits that end inside a part act at its end.
    """

    reduce_bucket_size: Elements = Field(500_000_000, description="gradients reduced at once; a buffer of so many is held")
    allgather_bucket_size: Elements = Field(500_000_000, description="zero1, zero2: parameters gathered at once")
    use_multi_rank_bucket_allreduce: bool = Field(
        True,
        description="zero1, zero2: ranks all-reduce buckets of gradients, of which each keeps its part; false, as before "
        "December 2023 (DeepSpeed #4695): each part is reduced to the rank that keeps it",
    )
    stage3_prefetch_bucket_size: ElementsOrZero = Field(
        50_000_000,
        description="zero3: parts ahead are gathered until they have so many parameters; 0 gathers each when it is needed",
    )
    stage3_param_persistence_threshold: ElementsOrZero = Field(
        100_000, description="zero3: parameters of at most this size are never released, and gathered after each update"
    )
    stage3_max_live_parameters: Elements = Field(
        1_000_000_000, description="zero3: nothing is gathered ahead beyond so many gathered parameters"
    )
    stage3_max_reuse_distance: ElementsOrZero = Field(
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

    tiles: PositiveInt = Field(
        1,
        le=1024,
        description="zero3: memory-centric tiling: matrices of layers are cut by their outputs into so many tiles, which are "
        "gathered, multiplied and released one after the other (deepspeed.zero.TiledLinear, out_splits, in the model's code)",
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
