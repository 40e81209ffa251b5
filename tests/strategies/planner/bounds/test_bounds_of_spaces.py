"""What is worked out for a whole space at once is, of each plan, what is worked out for that plan alone: plans that share a
number agree in all that it depends on, and the order of an axis's values does not matter.
"""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.pricing.prices import Prices
from strategies.job import Job
from strategies.plan.plan import Plan
from strategies.planner.applicable import applicable
from strategies.planner.bounds.every_plan import bounds
from strategies.planner.bounds.layer_cost_table import kinds_of
from strategies.planner.bounds.single_plan import Refiner
from strategies.planner.search.candidates import Candidates, candidates
from strategies.planner.search.space import Axis, Space
from tests.strategies.planner.bounds.test_bounds import CPU, GPU, LINKS, OLDER, OVERHEAD, PLAN, RARE, jobs
from topologies.reading import UserError

FIELDS = {name: values for name, values in (PLAN | RARE).items() if name in Plan.model_fields}  # options are no axes


@st.composite
def spaces(draw: Any) -> dict[str, Any]:
    """A job, and values of two or three fields of its plan, in any order."""
    job = draw(jobs())
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=2, max_size=3, unique=True))
    return job | {"axes": {name: draw(st.lists(FIELDS[name], min_size=1, max_size=3)) for name in names}}


def space_of(axes: dict[str, list[Any]]) -> Space:
    different = {name: [v for number, v in enumerate(values) if v not in values[:number]] for name, values in axes.items()}
    return Space(tuple(Axis(f"plan.{name}", tuple({f"plan.{name}": v} for v in values)) for name, values in different.items()))


@pytest.fixture
def make(toy_job: Any, toy_profile: Any) -> Any:
    """The job that is described, and its prices."""
    profile = toy_profile(links=LINKS, launch="1 us", collective_launch="3 us", overhead=OVERHEAD, older=OLDER)

    def build(gpus: int, nodes: int, model: dict[str, Any], plan: dict[str, Any]) -> tuple[Job, Prices]:
        job = toy_job(gpus, nodes, model=model, node={"nvlink": "9 GB/s", "cpu": CPU, "gpu": GPU}, **plan)
        return job, Prices(profile, job.cluster.node.gpu)

    return build


def numbers(plans: Candidates, prices: Prices) -> list[tuple[float, ...]]:
    """Of each plan: what is known of it without its program."""
    kinds = kinds_of(plans, prices)
    rough = bounds(plans, kinds, prices)
    finer = Refiner(plans, kinds, rough, prices)
    return [
        (
            rough.step[i],
            rough.first[i],
            rough.update[i],
            rough.memory[i],
            rough.possible[i],
            rough.slower[i],
            *((finer.passes(i), finer.exchange(i)) if rough.possible[i] else ()),
        )
        for i in range(len(plans))
    ]


def check(job: Job, prices: Prices, axes: dict[str, list[Any]]) -> int:
    """The law of one space; how many plans it has."""
    together = candidates(job, space_of(axes))
    among = numbers(together, prices) if len(together) else []
    assert len(together) + together.same == sum(resolves(job, changes) for changes in every(together))
    for plan, expected in enumerate(among):
        alone = together.job_of(plan)
        single = candidates(alone, Space((Axis("plan.tp", ({"plan.tp": alone.plan.tp},)),)))
        assert numbers(single, prices) == [pytest.approx(expected, rel=1e-9)], together.changes(plan)
    return len(together)


def every(plans: Candidates) -> list[dict[str, Any]]:
    """All combinations of the space."""
    return [
        {field.removeprefix("plan."): value for choice in chosen for field, value in choice.items()}
        for chosen in product(*(axis.choices for axis in plans.axes))
    ]


def resolves(job: Job, changes: dict[str, Any]) -> bool:
    """Whether there is such a plan, where what the job's own plan says and does not apply to it is left out."""
    try:
        applicable(job, changes)
    except UserError:
        return False
    return True


@given(drawn=spaces())
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
)
def test_a_plan_has_the_same_bounds_alone_and_among_others(make, drawn) -> None:
    try:
        count = check(*make(*drawn["shape"], drawn["model"], drawn["plan"]), drawn["axes"])
    except UserError:  # the job itself, or layers that are not simulated
        count = 0
    assume(count > 1)


@pytest.mark.parametrize(
    ("plan", "axes"),
    [
        ({}, {"offload_activations": [1], "recompute": ["none", "selective"]}),  # Megatron-LM has one or the other
        ({"data_parallel": "dataparallel"}, {"offload_activations": [1], "recompute": ["none", "selective"]}),
    ],
    ids=str,
)
def test_rules_on_recomputation_are_asked_of_each_plan(make, plan, axes) -> None:
    assert check(*make(8, 1, {}, plan), axes)


@pytest.mark.parametrize(
    ("plan", "axes"),
    [
        ({"kernels": "compiled", "data_parallel": "zero1"}, {"pp": [4, 2, 1]}),  # gradients of other numbers of microbatches
        ({"gradients": "fp32"}, {"gradients": ["same", "fp32"]}),  # other volumes
        ({"data_parallel": "zero1", "offload": {"optimizer": "cpu"}}, {"optimizer": ["adam", "sgd"]}),  # other updates by CPUs
        ({"kernels": "compiled", "early_stop": False}, {"recompute": ["none", "full"]}),  # a rule that looks at another field
        ({"sync_norm": True, "gradients": "fp32"}, {"pp": [1, 2]}),  # statistics of other numbers of ranks
    ],
    ids=str,
)
def test_the_order_of_values_does_not_matter(make, plan, axes) -> None:
    job, prices = make(4, 2, {}, plan | {"global_batch": 16})
    ((name, values),) = axes.items()
    for order in permutations(values):
        assert check(job, prices, {name: list(order)})


def test_every_combination_of_what_layers_do_is_priced(toy_job, toy_prices) -> None:
    """2 microbatches of 3 settings of recomputation with 2 attentions are 12 kinds of layer work; what runs beside does not
    matter to it.
    """
    axes = {"microbatch": [1, 2], "recompute": ["none", "selective", "full"], "attention": ["flash", "materialised"]}
    axes |= {"overlap": [True, False]}
    space = Space(tuple(Axis(name, tuple({f"plan.{name}": value} for value in values)) for name, values in axes.items()))
    plans = candidates(toy_job(2, global_batch=8), space)
    kinds = kinds_of(plans, toy_prices())
    assert len(plans) == 2 * len(kinds.kinds) == 24
    fields = [tuple(getattr(plans.job_of(i).plan, name) for name in list(axes)[:3]) for i in range(len(plans))]
    assert len(set(zip(fields, kinds.of.tolist(), strict=True))) == len(set(fields)) == 12


def test_the_same_plan_without_offload(toy_job) -> None:
    """Of each plan with offload, wherever its axis stands among the others; −1 of those without, and of other fields."""
    job = toy_job(2, node={"cpu": CPU}, global_batch=8, data_parallel="zero1")
    offload = Axis("plan.offload", tuple({"plan.offload": place} for place in (None, {"optimizer": "cpu"})))
    others = [
        Axis(f"plan.{name}", tuple({f"plan.{name}": value} for value in values))
        for name, values in {"microbatch": [1, 2, 4], "recompute": ["none", "full"]}.items()
    ]
    plans = candidates(job, Space((others[0], offload, others[1])))
    assert len(plans) == 12
    settings = [plans.job_of(number).plan for number in range(12)]
    for plan, same in zip(settings, plans.at_choice("plan.offload", None).tolist(), strict=True):
        if plan.offload is None:
            assert same == -1
        else:
            assert settings[same] == plan.model_copy(update={"offload": None})
    assert set(plans.at_choice("plan.overlap", None).tolist()) == {-1}


def test_rules_on_deepspeed_look_at_the_order_of_axes(toy_job: Any) -> None:
    """ZeRO++'s second copy needs neighbouring dp ranks on a node: in another order it does not apply."""
    axes = {"order": ["tp-cp-ep-dp-pp", "dp-tp-pp-cp-ep"]}
    asked = {"data_parallel": "zero3", "tp": 2}
    job = toy_job(8, 2, **asked, deepspeed={"zero_hpz_partition_size": 4})
    plans = candidates(job, space_of(axes))
    assert len(plans) == 2
    for plan in range(2):
        plans.job_of(plan).resolve()  # which would refuse the second copy
