"""What somebody adds in a folder of their own behaves as its family: a hook, a schedule, a collective, a framework's kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reports.glossary import explain
from shardyard import UserError, read_job, simulate, summarise
from sim.collectives import algorithms
from strategies.data_parallel import hooks
from strategies.frameworks import kernel_set, kernel_sets
from strategies.lowering.optimizer_step import before_reduction
from strategies.plan.plan import Plan
from strategies.planner.search.space import parse_axis
from strategies.schedules import schedules

FILES = {
    "their_hook": """
from strategies.data_parallel import hooks
from strategies.data_parallel.zero12 import Zero1

@hooks("their_zero1")
class TheirZero1(Zero1):
    '''Sharded optimizer states, by another name.'''
""",
    "their_schedule": """
from strategies.schedules import schedule
from strategies.schedules.one_f_one_b import one_f_one_b

@schedule("their_1f1b")
def order(rank, ranks, microbatches, chunks):
    yield from one_f_one_b(rank, ranks, microbatches, chunks)
""",
    "their_collective": """
from sim.collectives import algorithms
from sim.collectives.ring import all_reduce

algorithms("all_reduce/their_ring")(all_reduce)
""",
    "their_kernels": """
from strategies.frameworks import kernel_sets
from strategies.frameworks.megatron.kernels import Megatron

@kernel_sets("their_kernels")
class TheirKernels(Megatron):
    '''Megatron-LM's, by another name.'''
""",
    "their_framework": """
from pydantic import Field
from strategies.frameworks import kernel_sets
from strategies.frameworks.megatron.kernels import Megatron
from strategies.frameworks.megatron.options import MegatronOptions

class TheirOptions(MegatronOptions):
    bucket_scale: int = Field(1, ge=1, description="buckets are so many times as large")

@kernel_sets("their_framework")
class TheirFramework(Megatron):
    '''Megatron-LM's with an option of its own.'''

    options: TheirOptions = TheirOptions.model_validate({})

    def bucket(self, overlap, first, dp):
        return self.options.bucket_scale * super().bucket(overlap, first, dp)
""",
}


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    registries = (hooks, schedules, algorithms, kernel_sets)
    for registry in registries:
        list(registry)  # what ships is there before
    before = [dict(registry._things) for registry in registries]
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
        __import__(name)
    yield
    for registry, things in zip(registries, before, strict=True):
        registry._things.clear()
        registry._things.update(things)
    for name in FILES:
        del sys.modules[name]


PLAN = {
    "tp": 2,
    "pp": 2,
    "sequence": 1024,
    "accumulation": 4,
    "data_parallel": "zero1",
    "schedule": "1f1b",
    "kernels": "megatron",
    "gradients": "fp32",
    "algorithm": "all_reduce/ring",
}


THEIRS = {
    "data_parallel": "their_zero1",
    "schedule": "their_1f1b",
    "kernels": "their_kernels",
    "algorithm": "all_reduce/their_ring",
}


@pytest.mark.parametrize(("field", "theirs_is"), THEIRS.items())
def test_what_others_add_is_as_what_it_extends(theirs: None, field: str, theirs_is: str) -> None:
    """To the bit: time, volume and memory of every op."""
    own, other = (read_job(model="gpt3-175b", cluster="dgx-a100", plan=PLAN | changes) for changes in ({}, {field: theirs_is}))
    assert simulate(own).frame().equals(simulate(other).frame())
    answers = [summarise(simulate(job)).to_dict() for job in (own, other)]
    assert answers[0]["breakdown"] == answers[1]["breakdown"]
    assert answers[0]["memory"] == answers[1]["memory"]


def test_a_hook_that_extends_zero1_keeps_its_kernels(theirs: None) -> None:
    """Megatron-LM checks and scales gradients of its distributed optimizer, whatever its name."""
    own, other = (
        read_job(model="gpt3-175b", cluster="dgx-a100", plan=PLAN | {"data_parallel": name}).plan
        for name in ("zero1", "their_zero1")
    )
    assert before_reduction(other, 8) == before_reduction(own, 8) == [("gradient check", 4), ("gradient scale", 8)]


def test_a_framework_brings_its_own_options(theirs: None) -> None:
    """In a plan's group or beside its fields, asked for by nobody else, explained, and refused for other kernels."""
    kernels, own = {"kernels": "their_framework"}, {"bucket_scale": 2, "check_gradients": False}
    grouped, beside = Plan.model_validate(kernels | {"framework": own}), Plan.model_validate(kernels | own)
    assert grouped == beside
    assert grouped.kernel_set.bucket(True, True, 8) == 80e6
    assert before_reduction(grouped, 8) == [("gradient scale", 4)]
    assert grouped.model_dump(mode="json", exclude_unset=True) == kernels | {"framework": own}
    assert "kernels=their_framework" in explain("bucket_scale")
    job = {"model": "gpt3-175b", "cluster": "dgx-a100"}
    with pytest.raises(
        UserError, match="bucket_scale=2 contradicts kernels=megatron: it is an option of kernels=their_framework"
    ):
        read_job(plan=PLAN | {"bucket_scale": 2}, **job).resolve()
    with pytest.raises(UserError, match="framework.bucket_scale=0: input should be greater"):
        read_job(plan=PLAN | kernels | {"bucket_scale": 0}, **job)
    with pytest.raises(UserError, match="unknown field 'framework.bucket_scal'; did you mean 'bucket_scale'"):
        read_job(plan=PLAN | kernels | {"framework": {"bucket_scal": 2}}, **job)
    with pytest.raises(UserError, match="no framework has all of these options: bucket_scale .*, timers"):
        read_job(plan=PLAN | kernels | {"bucket_scale": 2, "timers": True}, **job)


def test_an_option_of_a_framework_is_varied_with_its_group() -> None:
    with pytest.raises(UserError, match="plan.timers is an option of the framework: name values of plan.framework"):
        parse_axis("plan.timers=true,false")
    assert [choice["plan.framework"] for choice in parse_axis("plan.framework=[null, {timers: true}]").choices] == [
        None,
        {"timers": True},
    ]


def test_kernels_are_asked_what_they_do(theirs: None) -> None:
    assert kernel_set("their_kernels").bucket(True, True, 64) == 64e6
    assert kernel_set("their_kernels").bucket(True, True, 8) == 40e6
