"""ZeRO-3: parameters are sharded too, and gathered part by part just before they are used; what FSDP's and DeepSpeed's share.

Rajbhandari et al. 2020, arXiv:1910.02054, section 7.2: an all-gather for the forward pass, one for the backward pass, a
reduce-scatter of gradients: 3Ψ·(n−1)/n per microbatch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from sim.program import Memory, Ref
from strategies.data_parallel.hook import Hook
from strategies.data_parallel.parameter_gather import ParameterGather
from strategies.lowering.blocks import BACKWARD, FORWARD, INPUT, WEIGHT
from strategies.lowering.stage import Stage
from topologies.registry import Registry


class Turn(NamedTuple):
    """A pass of a microbatch through the parts of a stage. keeps: it reduces no gradients; stays: it releases no parameters."""

    way: str  # FORWARD, BACKWARD, INPUT or WEIGHT
    microbatch: int
    keeps: bool = False
    stays: bool = False

    @property
    def backward(self) -> bool:
        """Whether it passes the parts in reverse."""
        return self.way != FORWARD


class ShardedParameters(Hook):
    """Sharded parameters, gradients and optimizer states."""

    shards = frozenset({"optimizer", "gradient", "parameter"})
    scatters = zero_stage = True

    def __init__(self) -> None:
        self._gathers: dict[int, ParameterGather] = {}

    def gather_of(self, stage: Stage) -> ParameterGather:
        """How the parameters of a stage are gathered."""
        if stage.number not in self._gathers:
            self._gathers[stage.number] = ParameterGather(stage)
        return self._gathers[stage.number]

    def forward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...]) -> Ref:
        """Gather, compute and release each part."""
        if stage.alone:
            return stage.forward(microbatch, after)
        return self.play(stage, Turn(FORWARD, microbatch), after)

    def input_gradient(self, stage: Stage, microbatch: int, after: tuple[Ref, ...]) -> Ref:
        """Gathers like a backward pass, reduces nothing."""
        if stage.alone:
            return stage.input_gradient(microbatch, after)
        return self.play(stage, Turn(INPUT, microbatch, stage.plan.syncs_gradients == "last", stage.plan.keeps_parameters), after)

    def backward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], last: bool, weights_only: bool = False) -> Ref:
        """Gather, compute and release each part in reverse, and reduce-scatter its gradients. Weight gradients alone need no
        parameters.
        """
        if stage.alone:
            return stage.whole_backward(microbatch, after, weights_only)
        stage.last_microbatch = last
        keeps = stage.plan.syncs_gradients == "last" and (not last or weights_only or stage.plan.pp > 1)
        turn = Turn(WEIGHT if weights_only else BACKWARD, microbatch, keeps, keeps and stage.plan.keeps_parameters)
        ref = (self._weights if weights_only else self.play)(stage, turn, after)
        self.finish(stage, turn, ref, last)
        stage.has_gradients |= last or not keeps
        return ref

    def _weights(self, stage: Stage, turn: Turn, after: tuple[Ref, ...]) -> Ref:
        """The weight gradients of all parts, by the second half of a split backward pass."""
        for part in self.order(stage, turn):
            gradient = self.new_gradient(stage, part)
            ref = stage.weight_gradient(turn.microbatch, (*after, *stage.crowded), part, part + 1, allocate=gradient)
            self.reduce(stage, turn, part, ref)
            after = () if stage.plan.overlap else tuple(stage.reduced[-1:])
        return ref

    def in_order(self, stage: Stage, turn: Turn, after: tuple[Ref, ...]) -> Ref:
        """A pass of a stage whose parameters are there, or come tensor by tensor."""
        for part in self.order(stage, turn):
            ref = self.part(stage, turn, part, after)
            after = () if stage.plan.overlap else tuple(stage.reduced[-1:])
        return ref

    @staticmethod
    def order(stage: Stage, turn: Turn) -> range:
        """The parts as the pass comes to them; backward, none below the lowest that is trained."""
        count = len(stage.parts)
        return range(count - 1, stage.lowest - 1, -1) if turn.backward else range(count)

    @staticmethod
    def begin(stage: Stage, after: tuple[Ref, ...]) -> tuple[Ref, ...]:
        """What the first gather of a pass waits for: the last compute of the pass before."""
        before = stage.last_compute()
        return after if before is None else (*after, before)

    def gradient(self, stage: Stage, part: int) -> Memory:
        """The unsharded gradient of a part, until it is reduced."""
        if stage.plan.copies == 1 and not stage.host.updates:  # there is but one rank, and it accumulates its gradients
            return ()
        return (("temporary", sum(self.gather_of(stage).elements(part)) * stage.plan.bytes_per_gradient),)

    def new_gradient(self, stage: Stage, part: int) -> Memory:
        """What a backward pass allocates for the part's gradient, unless it adds to one that is there."""
        return self.gradient(stage, part)

    def send(self, stage: Stage, elements: tuple[int, int], after: Ref, free: Memory, count: int = 1) -> None:
        """Reduce gradients, of experts too, in `count` collectives."""
        dense, experts = (each * stage.plan.bytes_per_gradient for each in elements)
        shard = stage.new_gradients(elements[0] / stage.plan.shards + elements[1] / stage.expert_shards)
        stage.reduce("reduce_scatter", dense / count, count, (after,), free, experts, allocate=shard)

    def update(self, stage: Stage) -> None:
        """Update the own shard; parameters are gathered when next used."""
        shards = stage.plan.shards
        updated = stage.update(shards, tuple(stage.reduced[-len(stage.parts) :]), shards)
        self.gather_of(stage).again(updated)

    @abstractmethod
    def play(self, stage: Stage, turn: Turn, after: tuple[Ref, ...]) -> Ref:
        """Add a pass of all parts, with their gathers."""

    @abstractmethod
    def part(self, stage: Stage, turn: Turn, part: int, after: tuple[Ref, ...]) -> Ref:
        """Add a pass of one part, which releases its parameters and reduces its gradients."""

    @abstractmethod
    def reduce(self, stage: Stage, turn: Turn, part: int, after: Ref) -> None:
        """Reduce the part's gradients, now or with others."""

    @abstractmethod
    def finish(self, stage: Stage, turn: Turn, ref: Ref, last: bool) -> None:
        """Add what ends a backward pass."""


# by the name that a framework's `Runtime.zero3` says; a framework's own is in its file zero3.py
zero3_implementations: Registry[type[ShardedParameters]] = Registry(
    "ZeRO-3 implementation", package="strategies.frameworks", module="zero3"
)
