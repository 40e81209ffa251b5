"""ZeRO-1, 2 and 3 by DeepSpeed itself (`plan.deepspeed`): its engine wraps the module, and does backward passes and updates.

Its gradients are not looked at: they lie in its buffers. Masters of fp32 weights are copies there, which the simulation has not
(deepspeed/runtime/zero/stage_1_and_2.py, single_partition_of_fp32_groups): memory is more than predicted.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Any

from torch import Tensor, nn

from calibration.execute.chunks import Chunk
from calibration.execute.clipping import LARGEST
from calibration.execute.data_parallel import Hook, executed
from calibration.execute.optimizers import optimizer_of
from calibration.execute.setup import Setup
from strategies.frameworks.settings import frameworks
from strategies.job import Job
from strategies.plan.resolved import Resolved

OPTIONS = (  # that its engine is given; others are simulated only
    "reduce_bucket_size",
    "allgather_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)


@executed("deepspeed")
class DeepSpeedZero(Hook):
    """One engine for the one chunk of a rank."""

    divided = True
    engine: Any

    @classmethod
    def check(cls, job: Job, resolved: Resolved) -> str | None:
        """What its engine is not given, and where there is none."""
        plan = job.plan
        assert plan.deepspeed is not None
        for option, value in plan.deepspeed:
            if option not in OPTIONS and value != type(plan.deepspeed).model_fields[option].default:
                return f"deepspeed.{option}={value} is simulated only"
        for axis, degree in (("tp", plan.tp), ("pp", plan.pp), ("cp", plan.cp)):
            if degree > 1:
                return f"deepspeed with {axis}={degree}: its engine is given whole models"
        if plan.bytes_per_element != 4:
            return f"deepspeed with precision={plan.precision}: masters and loss scale are inside of its engine"
        if plan.kernel_set.compiled or job.model.module is not None or plan.lora is not None or plan.freeze is not None:
            return f"deepspeed with {job.model.name}: its engine is given plain models, not compiled and trained as a whole"
        if importlib.util.find_spec("deepspeed") is None:
            return f"data_parallel={plan.data_parallel} by DeepSpeed, which is not installed: `pip install deepspeed`"
        return None

    def wrap(self, chunk: Chunk) -> nn.Module:
        """In an engine with the optimizer of the plan."""
        os.environ.setdefault("DS_ACCELERATOR", self.setup.place.device)  # by which it knows cores from GPUs
        import deepspeed

        kind, arguments = optimizer_of(self.setup.plan)
        self.engine, *_ = deepspeed.initialize(
            model=chunk.net,
            optimizer=kind(chunk.trained, **arguments),
            config=config(self.setup),
            dist_init_required=False,
        )
        return self.engine  # type: ignore[no-any-return]

    def make_optimizer(self) -> Any:
        """Inside of the engine."""
        return self.engine.optimizer

    def zero(self) -> None:
        """An update has done it."""

    def backward(self, loss: Tensor, count: int, last: bool) -> None:
        """The engine's, which divides by the number of microbatches; what is called a step only counts but for the last."""
        self.engine.backward(loss)
        if not last:
            self.engine.step()

    def update(self) -> None:
        """The engine's step, with the norm that it clips by."""
        self.engine.step()
        if self.setup.plan.clip_gradients:
            self.clipping.norm = float(self.engine.get_global_grad_norm())

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """In the engine's buffers."""
        return None

    def value(self, chunk: Chunk, name: str) -> Tensor:
        """Gathered, where ranks hold parts of it."""
        parameter = chunk.held[name]
        if not hasattr(parameter, "ds_id"):
            return super().value(chunk, name)
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()


def config(setup: Setup) -> dict[str, Any]:
    """For `deepspeed.initialize`: what `shardyard export` writes, and the norm to clip by; the optimizer is given beside it."""
    given: dict[str, Any] = json.loads(frameworks["deepspeed"].write(setup.job).text)
    given.pop("optimizer", None)
    clipping = {"gradient_clipping": LARGEST} if setup.plan.clip_gradients else {}
    return given | clipping | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
