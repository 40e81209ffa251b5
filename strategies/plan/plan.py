"""The plan: how a model is trained. One frozen class of fields: degrees in `strategies.plan.degrees`, how a rank computes in
`strategies.plan.computing`, what is trained in `strategies.plan.fine_tuning`, what ranks schedule, share and overlap here;
`Resolved` fills in what depends on model and cluster.

The same `Plan` drives the simulation and a real execution. Every field is honoured or refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from sim.collectives import algorithms
from sim.grid import ORDER
from sim.pricing.transfers.protocols import split
from strategies.data_parallel import Declaration, hooks
from strategies.frameworks.deepspeed.options import DeepSpeed
from strategies.frameworks.deepspeed.runtime import deepspeed_runtime
from strategies.frameworks.runtime import Runtime, SendInParts
from strategies.models.model import Model
from strategies.models.parts import LAYERS, WIDTH, Layers, Tokens, unsaid
from strategies.plan.computing import Computing
from strategies.plan.degrees import Degrees, Ranks
from strategies.plan.fine_tuning import FineTuning
from strategies.plan.options import Offload, PowerSGD
from strategies.plan.repetitions import spelt_out
from strategies.plan.synonyms import FIELDS, HOOKS, SCHEDULES, UNLIKE
from strategies.schedules import schedules
from topologies.cluster import MAX_GPUS
from topologies.documents.units import Bytes
from topologies.reading import folded, nearest

OPEN = frozenset({"sequence", "global_batch", "uneven_batch"})
"""Fields that say how large a step is, and nothing of how it is carried out: a plan that says no others is still to be found."""
LOCAL = 10_000  # local steps, all of which are played; DiLoCo takes 500
SEQUENCE = 8192  # tokens of a sequence at most, when a plan says nothing of it

TensorOverlap = Literal["none", "weight_gradient", "pieces"]
GradientSync = Literal["every", "last"]
UnevenBatch = Literal["refuse", "drop_last", "join", "partial"]


def _is_refused(value: object) -> bool:
    return value == "refuse"


class Plan(Degrees, Computing, FineTuning):
    """How a model is trained. Degrees multiply: world size W = tp·cp·pp·dp; the ep ranks are among the cp·dp ranks."""

    other_names: ClassVar[Mapping[str, str]] = FIELDS

    schedule: str = Field(
        "1f1b", description="pipeline schedule, by name (`shardyard list schedules`) or from a CSV file of PyTorch's form"
    )
    chunks: Layers | None = Field(None, description="virtual stages of each pipeline rank, for schedules that interleave")
    data_parallel: str = Field("ddp", description="data parallel hook, by name (`shardyard list data_parallel`); fsdp is zero3")
    shard: Ranks | None = Field(
        None,
        description="dp ranks that share one sharded copy of the model states, which is replicated over the others (HSDP); by"
        " default all",
    )
    powersgd: PowerSGD | None = Field(None, description="options of ddp_powersgd; by default as PyTorch's hook")
    deepspeed: DeepSpeed | None = Field(
        None, description="zero1, zero2, zero3 by DeepSpeed, with its options (buckets, prefetch, ZeRO++); {} takes its defaults"
    )
    offload: Offload | None = Field(
        None,
        description="zero1, zero2, zero3: states kept in the CPUs' memory or on NVMe disks: {optimizer: cpu}, {optimizer: "
        "nvme, …}",
    )
    local_steps: PositiveInt | None = Field(
        None, le=LOCAL, description="local_sgd and diloco: steps of each dp rank between two synchronisations"
    )
    reshard: bool = Field(
        True, description="zero3: release parameters after the forward pass and gather them again for the backward"
    )
    gradient_sync: GradientSync | None = Field(
        None,
        description="zero2 and zero3: microbatches that reduce gradients: every one, or only the last, until which unsharded "
        "gradients stay, and with zero3 unsharded parameters after a backward pass (FSDP2's set_requires_gradient_sync and "
        "set_reshard_after_backward); by default last in a pipeline with kernels=torch or compiled, otherwise every",
    )
    reshard_after_backward: bool | None = Field(
        None,
        exclude_if=unsaid,
        description="zero3 with gradient_sync=last: release parameters after every backward pass, also one that reduces nothing "
        "(accelerate's no_sync); by default they stay until the last one, as in PyTorch's pipelines",
    )
    microbatch: PositiveInt = Field(1, le=WIDTH, description="sequences in one microbatch of one dp rank")
    global_batch: PositiveInt | None = Field(
        None, le=10**15, description="sequences in one step of the whole job; by default 4 for each GPU, in whole microbatches"
    )
    accumulation: PositiveInt | None = Field(
        None, le=10**15, description="microbatches per step and dp rank, instead of global_batch"
    )
    microbatches_per_replica: tuple[Annotated[int, Field(ge=1, le=10**9)], ...] | None = Field(
        None,
        min_length=1,
        max_length=MAX_GPUS,
        exclude_if=unsaid,
        description="microbatches of each dp rank in a step, in order, instead of global_batch: those on faster GPUs take more; "
        "32x9 is 32 ranks of 9",
    )
    uneven_batch: UnevenBatch = Field(
        "refuse",
        exclude_if=_is_refused,
        description="a global_batch that dp·microbatch does not divide: refuse it; drop_last, the sequences that are left over"
        " are not trained on (PyTorch's DistributedSampler); join, the first dp ranks have a microbatch more than the others,"
        " which only take part in the collectives then (DDP's Join); partial, dp ranks have equally many sequences or one more, "
        "and the last microbatch of each has what is left (DataLoader's drop_last=False)",
    )
    sequence: Tokens | None = Field(
        None,
        description="tokens per sequence; by default the model's context, but no more than 8,192 (assumed: what models of "
        "longer contexts see in most of their pretraining)",
    )
    bucket: Bytes | None = Field(
        None,
        description="bytes of gradients that close a bucket of DDP and ZeRO, which holds whole parameters; by default as the "
        "framework: PyTorch's DDP 25 MiB, at first 1 MiB; Megatron-LM max(40e6, 1e6·dp) parameters in the first chunk of the "
        "first pipeline rank, and all gradients at once elsewhere and without overlap",
        gt=0,
    )
    overlap: bool = Field(True, description="overlap dp collectives with compute")
    overlap_tp: TensorOverlap | None = Field(
        None,
        description="tp collectives that run beside products: weight_gradient, reductions of gradients (the default with "
        "kernels=megatron; needs CUDA_DEVICE_MAX_CONNECTIONS=1 there); pieces, also gathers before products and "
        "reduce-scatters after them, a rank's tokens at a time (Megatron-LM's --tp-comm-overlap, PyTorch's async TP); none is"
        " the default with kernels=compiled and torch",
    )
    overlap_p2p: bool = Field(
        True,
        description="pipeline sends do not hold up the sender's compute; otherwise its host too waits for every exchange "
        "(torch.cuda.synchronize in Megatron-LM's p2p_communication.py)",
    )
    scatter_gather: SendInParts | None = Field(
        None,
        description="pipeline sends of tp ranks that have the same tensor: each sends 1/tp of it and the receivers gather it,"
        " as Megatron-LM of 2021 and 2022 without sequence parallelism (megatron), as DeepSpeed's pipeline engine (deepspeed,"
        " the default with `deepspeed`), as DeepSpeed up to 0.5.0, which sends gradients whole (deepspeed_forward), or not at"
        " all (none)",
    )
    layers_per_stage: tuple[Annotated[int, Field(ge=0, le=LAYERS)], ...] | None = Field(
        None,
        max_length=LAYERS,
        description="layers of each virtual stage, 0 for an embedding or a head alone; by default as equal as possible; 62x8 is "
        "62 stages of 8 layers",
    )
    first_stage_layers: Layers | None = Field(
        None, description="layers of the first stage, the others alike (Megatron-LM's --decoder-first-pipeline-num-layers)"
    )
    last_stage_layers: Layers | None = Field(None, description="layers of the last stage (--decoder-last-pipeline-num-layers)")
    embedding_as_layer: bool = Field(
        False, description="the embedding counts as a layer (Megatron-LM's --account-for-embedding-in-pipeline-split)"
    )
    loss_as_layer: bool = Field(
        False, description="head and loss count as a layer (Megatron-LM's --account-for-loss-in-pipeline-split)"
    )
    algorithm: str = Field(
        "auto",
        description="algorithm of collectives: auto takes the cheapest of NCCL's; a name; or all_reduce/tree, …; also with a "
        "protocol: ring/ll128, all_reduce/tree/simple, auto/ll",
    )
    order: str = Field("-".join(ORDER), description="rank order of the axes, innermost first (Megatron-LM: tp-cp-ep-dp-pp)")

    @field_validator("layers_per_stage", "microbatches_per_replica", mode="before")
    @classmethod
    def _runs(cls, value: object) -> object:
        """Runs of equal numbers may be written as one."""
        return spelt_out(value, MAX_GPUS)

    @field_validator("sequence", "global_batch", mode="before")
    @classmethod
    def _no_prefix(cls, value: object) -> object:
        """8k tokens are 8,000 to some and 8,192 to others."""
        if isinstance(value, str) and re.fullmatch(r"[\d.]+ *[kKMG]i?", value.strip()):
            raise ValueError("may be powers of 1000 or of 1024: write the whole number, such as 8192")
        return value

    @field_validator("schedule")
    @classmethod
    def _schedule(cls, name: str) -> str:
        return SCHEDULES.get(folded(name)) or schedules.named(name)

    @field_validator("data_parallel")
    @classmethod
    def _hook(cls, name: str) -> str:
        if folded(name) in UNLIKE:
            raise ValueError(UNLIKE[folded(name)])
        return HOOKS.get(folded(name)) or hooks.named(name)

    @field_validator("algorithm")
    @classmethod
    def _algorithm(cls, choice: str) -> str:
        known = {"auto", *algorithms, *(full.split("/")[1] for full in algorithms)}
        for name in split(choice)[0].split(", "):
            if name not in known:
                raise ValueError(f"'{name}' is not an algorithm of any collective{nearest(name, known)}")
        return choice

    @field_validator("order")
    @classmethod
    def _order(cls, text: str) -> str:
        if sorted(text.split("-")) != sorted(ORDER):
            raise ValueError(f"must name each of {', '.join(ORDER)} once, joined by '-'")
        return text

    def sequence_of(self, model: Model) -> int:
        """Tokens of a sequence of `model`."""
        return self.sequence or min(model.context, SEQUENCE)

    @property
    def hook(self) -> type[Declaration]:
        """What `data_parallel` declares."""
        return hooks[self.data_parallel]

    @property
    def runtime(self) -> Runtime:
        """What keeps gradients and model states: DeepSpeed where the plan has its options, otherwise what goes with `kernels`."""
        return self.kernel_set.runtime if self.deepspeed is None else deepspeed_runtime(self.deepspeed)

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are gathered before they are used (ZeRO-3, FSDP)."""
        return "parameter" in self.hook.shards

    @property
    def beside_products(self) -> TensorOverlap:
        """`overlap_tp`, or its default."""
        return self.overlap_tp or self.kernel_set.beside_products

    @property
    def scatters(self) -> SendInParts:
        """`scatter_gather`, or its default."""
        alike = self.tp > 1 and self.pp > 1 and not self.sequence_parallel
        return self.scatter_gather or (self.runtime.send_in_parts if alike else "none")

    @property
    def syncs_gradients(self) -> GradientSync:
        """`gradient_sync`, or its default.

        Stages of torch.distributed.pipelining switch FSDP2's reductions off until the last microbatch (torch 2.13, stage.py,
        backward_maybe_with_nosync). Megatron-LM's FSDP reduces in every backward pass where gradients are sharded
        (megatron_fsdp.py, grad_reduce_every_bprop), and so does DeepSpeed, which has no pipelines with them.
        """
        pipelined = self.pp > 1 and self.of_pytorch and not self.runtime.reduces_as_made and self.offload is None
        return self.gradient_sync or ("last" if pipelined and "gradient" in self.hook.shards else "every")

    @property
    def keeps_parameters(self) -> bool:
        """Whether sharded parameters stay after a backward pass that reduces no gradients."""
        return self.shards_parameters and self.syncs_gradients == "last" and not self.reshard_after_backward

    @property
    def own_gradients(self) -> bool:
        """Whether each parameter has a gradient by itself on the GPU (PyTorch's .grad), in no buffer of a framework."""
        return self.of_pytorch and not self.runtime.own_buffers and self.offload is None and not self.hook.flat

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients are freed after the update, and made anew by the next backward pass."""
        return self.own_gradients and self.kernel_set.frees_gradients

    @property
    def copies_gradients(self) -> bool:
        """Whether DDP's buckets are beside the gradients."""
        return self.own_gradients and self.hook.of_ddp and not self.kernel_set.bucket_views

    @property
    def pipeline_engine(self) -> bool:
        """Whether DeepSpeed's pipeline engine runs the passes; Megatron-DeepSpeed's with one stage, too."""
        piped = self.pp > 1 or self.kernel_set.pipeline_modules
        return self.deepspeed is not None and piped and not self.hook.shards_all("gradient")

    @property
    def partitioned(self) -> bool:
        """Whether a stage keeps but a part of its result, as DeepSpeed's pipeline engine does."""
        return self.scatters in ("deepspeed", "deepspeed_forward")

    def splits(self, way: str) -> bool:
        """Whether tp ranks send a part each of what all of them have, forward (F) or backward (B)."""
        return way in {"none": "", "deepspeed_forward": "F", "deepspeed": "FB", "megatron": "FB"}[self.scatters]

    @property
    def pytorch_fsdp(self) -> bool:
        """Whether zero3 is PyTorch's, not Megatron-LM's and not DeepSpeed's."""
        return self.shards_parameters and self.of_pytorch and self.runtime.fsdp

    @property
    def masters_only(self) -> bool:
        """Whether what is sharded is the fp32 master, cast when it is gathered, and reduced gradients become fp32 (torch 2.13,
        FSDPParam, foreach_reduce; FSDP1's _cast_grad_to_param_dtype). Of offloaded states two copies are counted nevertheless.
        """
        return self.pytorch_fsdp and self.has_masters and self.offload is None

    @property
    def casts_gradients(self) -> bool:
        """Whether 16-bit gradients are added to fp32 ones by DeepSpeed's BF16_Optimizer, which is its ZeRO-1 then."""
        wider = self.bytes_per_gradient > self.bytes_per_element
        return self.runtime.casts_gradients and not self.hook.shards_all("gradient") and wider

    @property
    def bytes_of_states(self) -> dict[str, float]:
        """Bytes per parameter of each model state, before sharding."""
        if self.masters_only:
            return {"parameter": 4, "gradient": 4, "optimizer": self.bytes_per_optimizer_state - 4}
        return {
            "parameter": self.bytes_per_element,
            "gradient": self.bytes_per_gradient,
            "optimizer": self.bytes_per_optimizer_state,
        }

    @property
    def bytes_that_stay(self) -> dict[str, float]:
        """Bytes per parameter of each model state between steps, before sharding."""
        return self.bytes_of_states | ({"gradient": 0} if self.frees_gradients else {})
