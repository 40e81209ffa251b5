"""A job: model + plan + cluster (+ profile, effects), everything that determines a prediction."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.engine.effects import Effect
from strategies.data_parallel.hook import hook_of
from strategies.layers.fine_tuning.adapted_matrices import adapter_parameters
from strategies.layers.fine_tuning.parts import trained_parameters
from strategies.models.model import Model
from strategies.plan.allotment import dropped, said_of_uneven
from strategies.plan.packing import mean_length
from strategies.plan.plan import Plan
from strategies.plan.resolved import STEPS, Resolved, Step, Target
from strategies.plan.rules import refuse
from strategies.plan.rules.data_parallel import hosted
from strategies.schedules import schedules
from topologies.cluster import Cluster, UnequalCluster
from topologies.documents.cards import card
from topologies.hardware import Gpu
from topologies.reading import UserError, plain

if TYPE_CHECKING:
    from strategies.resilience.settings import RunSettings

FIELDS = ("name", "model", "cluster", "nodes", "plan", "profile", "effects", "run", "variability")  # of a job as it is written
FOUND = "plan: auto: "  # how the remark on a plan that was found begins


@dataclass(frozen=True)
class Auto:
    """Of a plan that is found (`plan: auto`): what was said of it, with the default of every other field, which fields those are,
    and whether auto was asked for, or no field was said that is not `strategies.plan.plan.OPEN`.
    """

    plan: Plan
    said: frozenset[str]
    asked: bool


class _Gpus(NamedTuple):
    """The different GPUs of a cluster, and GPUs of a node; None where nodes have different numbers."""

    kinds: tuple[Gpu, ...]
    per_node: int | None


def _gpus(cluster: Cluster) -> _Gpus:
    """Of the latest cluster they are kept: a search resolves 10⁵ plans on one."""
    global _latest
    known, gpus = _latest
    if known is not cluster:
        sizes = {len(group.gpus) for group in cluster.groups}
        gpus = _Gpus(cluster.gpu_kinds, sizes.pop() if len(sizes) == 1 else None)
        _latest = cluster, gpus
    return gpus


_latest: tuple[Cluster | None, _Gpus] = None, _Gpus((), None)


@dataclass(frozen=True, repr=False)
class Job:
    """What is asked. `ignored` lists keys of the model's file that mean nothing here."""

    name: str
    model: Model
    plan: Plan
    cluster: Cluster
    profile: str | None = None
    ignored: tuple[str, ...] = ()
    where: str = "plan"
    remarks: tuple[str, ...] = ()  # what of a framework's settings was not used
    effects: tuple[Effect, ...] = ()  # what makes some GPUs, hosts or links differ from their price
    run: RunSettings | None = None  # what happens over days; None: nothing is said
    variability: float | None = (
        None  # of GPUs of one kind: see `Profile.variability`; 0: they are alike; None: as the profile says
    )
    auto: Auto | None = None  # how the plan was found; None: it was said
    # reads the job again with changes, as {"nodes": 4}; None: it was made by hand, or has come to another process
    source: Callable[[Mapping[str, Any]], Job] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<Job {self.name}: {self.model.name} on {self.cluster.described}, {self._plan_in_words()}>"

    def _repr_html_(self) -> str:
        return card(f"{self.model.name} on {self.cluster.described}", {"plan": self._plan_in_words(), "hash": self.hash})

    def _plan_in_words(self) -> str:
        """Fields of the plan that are not at their defaults."""
        given = {
            name: value for name, value in self.plan if value != Plan.model_fields[name].get_default(call_default_factory=True)
        }
        return ", ".join(f"{name}={plain(value)}" for name, value in given.items()) or "defaults"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"source": None}  # what it was read from may not be for other processes

    @property
    def said(self) -> frozenset[str]:
        """Fields that were said of a plan that is found, or was; none of one that was said whole."""
        return self.auto.said if self.auto else frozenset()

    @property
    def own_remarks(self) -> tuple[str, ...]:
        """The remarks but for the one on a plan that was found."""
        return tuple(remark for remark in self.remarks if not remark.startswith(FOUND))

    def resolve(self) -> Resolved:
        """The plan with its defaults filled in; UserError when it does not fit the model or the cluster."""
        return Resolved.by(self.steps, self.plan, self.target)

    @property
    def target(self) -> Target:
        """What plans of the job are resolved for."""
        columns = all(gpu.fp8_columns for gpu in _gpus(self.cluster).kinds)
        return Target(self.model, self.cluster.gpus, _gpus(self.cluster).per_node or self.cluster.gpus, self.where, columns)

    @property
    def steps(self) -> tuple[Step, ...]:
        """By which plans of the job are resolved: rules of its cluster first."""
        return (Step("", self._computes), Step("", self._has_places), Step("", self._carries_out), *STEPS)

    def _computes(self, plan: Plan, *_: Any) -> None:
        """In types that the GPUs have."""
        low = plan.fp8.dtype if plan.fp8 else None
        said = "fp8.scaling=nvfp4" if low == "fp4" else "fp8"
        for asked, dtype in (("precision={!r}", plan.precision), (said, low)):
            for gpu in _gpus(self.cluster).kinds if dtype is not None else ():
                if dtype not in gpu.peak:
                    known = f"{gpu.name} computes in {', '.join(gpu.peak)}"
                    raise UserError(f"{self.where}: {asked.format(dtype)} is not possible: {known}")

    def _has_places(self, plan: Plan, *_: Any) -> None:
        """For what is not kept on GPUs."""
        unequal = isinstance(self.cluster, UnequalCluster)
        refuse(self.where, self._for_equal_nodes(plan) if unequal else hosted(plan, self.cluster.node.cpu))

    def _carries_out(self, plan: Plan, *_: Any) -> None:
        """What the plan's hook can do."""
        hook = hook_of(plan.data_parallel)
        hook.check(plan, self.cluster.nodes, self.where)
        if hook.needs_gpus and not all(gpu.sms for gpu in _gpus(self.cluster).kinds):
            raise UserError(f"{self.where}: data_parallel={plan.data_parallel} needs GPUs: {hook.needs_gpus}")

    def _for_equal_nodes(self, plan: Plan) -> Iterator[str]:
        """What is not simulated on nodes that are not alike."""
        deepspeed = plan.deepspeed
        asked = {
            "offload": plan.offload is not None,
            "offload_activations": plan.offload_activations is not None,
            "deepspeed.cpu_checkpointing": deepspeed is not None and deepspeed.cpu_checkpointing,
            "deepspeed (ZeRO++)": deepspeed is not None
            and (deepspeed.zero_hpz_partition_size > 1 or deepspeed.zero_quantized_gradients),
        }
        for name in (name for name, given in asked.items() if given):
            yield f"{name} is for nodes that are alike, and the cluster is {self.cluster.described}"

    @property
    def global_batch(self) -> int:
        """Sequences of a step, which other plans of the same job keep. Raises UserError where the plan does not say them and
        does not fit the model or the cluster.
        """
        return self.plan.global_batch or self.resolve().global_batch

    @property
    def notes(self) -> tuple[str, ...]:
        """What was ignored or assumed in the plan and in descriptions of the cluster, the schedule and a framework's settings."""
        return (*self._assumed(), *self.cluster.notes, *self.cluster.remarks, *schedules[self.plan.schedule].notes, *self.remarks)

    def _assumed_of_fp8(self) -> Iterator[str]:
        """What a scaling costs on a GPU that does not have its products."""
        without = [gpu.name for gpu in _gpus(self.cluster).kinds if not gpu.mxfp8]
        if self.plan.fp8 and self.plan.fp8.scaling == "mxfp8" and without:
            having = "NVIDIA's GPUs have its products from Blackwell on, AMD's from CDNA 4 on"
            yield f"fp8.scaling=mxfp8 on {', '.join(without)} is priced as if it were fp8 with a scale per tensor: {having}"

    def _assumed(self) -> Iterator[str]:
        """What the plan does not say, or says without effect."""
        plan, model, sequence = self.plan, self.model, self.plan.sequence_of(self.model)
        if plan.sequence is None and sequence < model.context:
            yield f"sequence: {sequence:,} tokens by default, of the model's {model.context:,}; plan.sequence says otherwise"
        if self._kernels_unsaid:
            others = "plan.kernels=torch is PyTorch's own modules, slower and larger, compiled those of torch.compile"
            yield f"kernels: Megatron-LM's with Transformer Engine by default; {others}"
        if sequence > model.context:
            beyond = f"{model.positions} positions go on beyond, which frameworks compute, but {model.name} has not learned them"
            yield f"sequence={sequence:,} exceeds the context of {model.context:,} tokens: {beyond}"
        unsaid = plan.gradient_sync is None and plan.syncs_gradients == "every"
        if plan.pp > 1 and unsaid and "gradient" in plan.hook.shards:
            said = f"data_parallel={plan.data_parallel} with pp={plan.pp}: gradients are reduced in every microbatch"
            yield f"{said}; plan.gradient_sync=last reduces them once, and keeps whole ones until then"
        yield from self._assumed_of_fp8()
        if model.state_space is not None:
            made = "by the bytes that they move" if model.state_space.step_rank else "as the products that they are made of"
            yield f"state-space scans are priced {made}: no profile has measured their kernels"
        if model.delta_net is not None:
            yield "gated delta rules are priced as the products that they are made of: no profile has measured their kernels"
        if local := sorted({own.counted_keys(sequence) for own, _ in model.distinct_layers} - {sequence}):
            sizes = " and ".join(f"{size:,}" for size in local)
            yield f"MFU counts attention within windows or chunks of {sizes} tokens with as many keys, other attention in full"
        if plan.packing is not None:
            seen = mean_length(plan.packing.lengths, sequence)
            yield f"packing: documents that a token attends to have {seen:,.0f} tokens in the mean, weighted by tokens"
        if not plan.trains_all:
            whole, trained = model.parameters + adapter_parameters(plan, model), trained_parameters(model, plan)
            said = f"{trained:,} of {whole:,} parameters are trained ({100 * trained / whole:.3g} %)"
            yield f"{said}; MFU counts no gradients of frozen weights"
        dp = self.cluster.gpus // (plan.tp * plan.cp * plan.pp)
        if dp and (left := dropped(plan, dp)):
            yield f"uneven_batch=drop_last: {left:,} of {plan.global_batch:,} sequences of a step are not trained on"
        if dp and (uneven := said_of_uneven(plan, dp)):
            yield uneven
        if plan.pp == 1 and plan.schedule != Plan.model_fields["schedule"].default:
            yield f"schedule={plan.schedule} with pp=1: there is no pipeline; each rank runs its own passes in that order"

    @property
    def _kernels_unsaid(self) -> bool:
        """Whether nobody said whose kernels run a plan without model parallelism, which PyTorch carries out by itself."""
        plan = self.plan
        alone = plan.tp == plan.pp == plan.cp == plan.ep == 1
        return alone and "kernels" not in plan.model_fields_set

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits that change with any input."""
        parts = [part.model_dump(mode="json") for part in (self.model, self.plan, self.cluster)]
        written = [text] if (text := schedules[self.plan.schedule].text) else []
        written += [str(effect) for effect in self.effects]
        written += [self.run.model_dump_json()] if self.run is not None else []
        written += [f"variability {self.variability!r}"] if self.variability is not None else []
        return hashlib.sha256(json.dumps([*parts, self.profile, *written], sort_keys=True).encode()).hexdigest()[:12]
