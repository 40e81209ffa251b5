"""What a data parallel hook does: around a stage's forward and backward passes, at the update, and for lower bounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from sim.program import Memory, Program, Ref
from strategies.data_parallel import Declaration, hooks
from strategies.layers.model_costs import ModelCosts
from strategies.lowering.stage import Stage
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved


class Moves(NamedTuple):
    """What the ranks that share a stage's parameters move in a step, at least: bytes of full buffers per parameter.

    gathered, reduced: all-gathers and reduce-scatters at any time (an all-reduce is both), or with `late` not before the last
    backward pass of the stage begins; last: gathered after the update.
    """

    gathered: float = 0.0
    reduced: float = 0.0
    last: float = 0.0
    late: bool = False


class Hook(Declaration, ABC):
    """What ranks with the same parameters (along dp and cp) do together. Hooks add no communication when there is only one."""

    needs_gpus: ClassVar[str] = ""  # why it is not for processes without a GPU each

    @classmethod
    def check(cls, plan: Plan, nodes: int, where: str) -> None:
        """Raise UserError for what the real thing cannot do."""
        return

    @classmethod
    def for_plan(cls, plan: Plan) -> Hook:
        """The hook of a job's stages: it may remember what it has added to them."""
        return cls()

    def program(self, model: Model, plan: Resolved, parts: ModelCosts) -> Program | None:
        """The whole program (its FLOPs are filled in), of hooks whose ranks differ; None where a schedule makes it."""
        return None

    @classmethod
    def gathers_wait(cls, plan: Resolved) -> bool:
        """Whether what a forward pass gathers waits for the pipeline stage before, as its layers do."""
        return False

    def forward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...]) -> Ref:
        """Add the forward pass of a microbatch; returns the op whose end makes its output available."""
        return stage.forward(microbatch, after)

    @abstractmethod
    def backward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], last: bool, weights_only: bool = False) -> Ref:
        """Add the backward pass (weights_only: its second half, of a split one); `last`: no other microbatch follows."""

    def input_gradient(self, stage: Stage, microbatch: int, after: tuple[Ref, ...]) -> Ref:
        """Add the first half of a split backward pass; returns the op whose end makes the gradient of the input available."""
        return stage.input_gradient(microbatch, after)

    @classmethod
    def moves(cls, plan: Resolved) -> Moves:
        """For lower bounds of the step; a hook that does not say is bounded without its communication."""
        return Moves()

    @classmethod
    def in_turn(cls, plan: Plan) -> bool:
        """For lower bounds of the step: whether, with overlap=false, none of this communication runs beside passes of a rank."""
        return False

    @abstractmethod
    def update(self, stage: Stage) -> None:
        """Add the optimizer's update after everything in `stage.reduced`."""

    def shares(self, stage: Stage, state: str) -> float:
        """The number of shares of a model state of which a rank holds one; of unequal shares the largest counts."""
        return stage.plan.shards if state in self.shards else 1

    def resident(self, stage: Stage) -> Memory:
        """What the hook itself holds on the GPU all the time."""
        return ()

    def synchronise(self, stage: Stage) -> None:
        """Add what happens after the last of the local steps."""
        return


def hook_of(name: str) -> type[Hook]:
    """The hook of that name. Raises UserError for an unknown one."""
    hook = hooks[name]
    assert issubclass(hook, Hook)
    return hook
