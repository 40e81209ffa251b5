"""Objectives and constraints of a search, worked out for one plan, and how what they rule out is told."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest

from reports.commands.plan import command as plan
from strategies.planner.ranking import HEADROOM
from strategies.planner.search.answer import pareto
from strategies.planner.search.best_plans import BestPlans
from strategies.planner.search.objective import OBJECTIVES, Limits, Scale, objective
from strategies.planner.search.probes import Probes
from strategies.planner.search.search import Search
from strategies.planner.search.site import RuledOut, Site, budget, told_memory
from strategies.planner.search.space import parse_axis, read_space
from topologies.costs import Rates
from topologies.reading import UserError

# 16 GPUs of 2 dollars an hour and 500 W; 4,000 tokens a step, 14.4 million in all: 3,600 steps
SCALE = Scale(16, 4e3, 14.4e6, Rates(2.0, "said", 500.0, "said"))


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("step", 10.0, (10.0, "s")),
        ("throughput", 16 * 10 / 4e3, (25.0, "tokens/s/GPU")),
        ("time", 10 * 3600 / 86400, (10 * 3600 / 86400, "days")),
        ("gpu-hours", 160.0, (160.0, "GPU-hours")),
        ("cost", 320.0, (320.0, "dollars")),
        ("energy", 80.0, (80.0, "kWh")),
    ],
)
def test_a_step_of_ten_seconds_as_each_objective(name: str, value: float, shown: tuple[float, str]) -> None:
    """3,600 steps of 10 s are 10 hours."""
    chosen = objective(name)
    assert 10 * chosen.per_second(SCALE) == pytest.approx(value)
    assert chosen.display(10 * chosen.per_second(SCALE)) == (pytest.approx(shown[0]), shown[1])


def test_unknown_objectives_and_costs_without_a_price_are_refused() -> None:
    assert sorted(OBJECTIVES) == ["cost", "energy", "goodput", "goodput-cost", "gpu-hours", "step", "throughput", "time"]
    with pytest.raises(UserError, match="--objective fun: unknown"):
        objective("fun")
    free = Scale(16, 4e3, 14.4e6, Rates(None, "no price is known", 500.0, ""))
    with pytest.raises(UserError, match="cost: no price is known"):
        objective("cost").per_second(free)


def test_the_longest_step_that_days_and_dollars_allow() -> None:
    """3,600 steps in a day: 24 s each; 3,600 steps of 16 GPUs for 64 dollars: 32 GPU-hours, 2 hours, 2 s each."""
    assert Limits(days=1.0, cost=64.0).of_step(SCALE) == {"days": pytest.approx(24.0), "cost": pytest.approx(2.0)}
    assert Limits(days=1.0).of_step(SCALE).keys() == {"days"}
    assert Limits(memory=1.0, gpus=1, power=1.0).of_step(SCALE) == {}


def test_what_rules_out_every_plan_on_so_many_gpus() -> None:
    """16 GPUs take 8 kW."""
    assert Limits().of_site(SCALE) is None
    assert Limits(gpus=16, power=8e3).of_site(SCALE) is None
    assert Limits(gpus=15).of_site(SCALE) == "gpus ≤ 15: 16"
    assert Limits(power=7.9e3).of_site(SCALE) == "power ≤ 7.9 kW: 8.0 kW"


def test_memory_is_told_with_as_many_places_as_tell_it_apart() -> None:
    assert told_memory(81.23e9, 80e9) == "81.2 GB of 80.0 GB"
    assert told_memory(80.004e9, 80e9) == "80.004 GB of 80.000 GB"
    assert told_memory(80e9, 80e9) == "80.00000000 GB of 80.00000000 GB"
    assert told_memory(1234.5e9, 80e9) == "1,234.5 GB of 80.0 GB"


def test_a_share_of_a_budget() -> None:
    assert budget("days", 2.0)(1.5) == "3 days, of 2"
    assert budget("cost", 40000.0)(1.25) == "50,000 dollars, of 4e+04"


def test_of_plans_that_are_ruled_out_the_nearest_is_named() -> None:
    out = RuledOut()
    out.add("memory", 3, 2.0, "far")
    out.add("memory", 2, 1.5, "near")
    out.add("memory", 1, 1.7, "between")
    out.add("days", 1, 9.0, "late")
    assert out.plans == {"memory": 6, "days": 1}
    assert out.nearest == {"memory": (1.5, "near"), "days": (9.0, "late")}


def site(memory: float = 80e9, **fields: Any) -> Site:
    """Three plans, of 1, 2 and 4 s and of 60, 70 and 90 GB at least, on GPUs of so much memory."""
    result = object.__new__(Site)
    cluster = SimpleNamespace(gpus=SCALE.gpus, node=SimpleNamespace(gpu=SimpleNamespace(memory=memory)))
    result.job, result.tokens, result.rates = cast(Any, SimpleNamespace(cluster=cluster)), SCALE.tokens, SCALE.rates
    bounds = {"step": np.array([1.0, 2.0, 4.0]), "memory": np.array([60e9, 70e9, 90e9]), "possible": np.ones(3, dtype=bool)}
    result.limits = cast(Any, SimpleNamespace(**bounds | fields))
    same = np.zeros(3, dtype=np.int64)
    each = [SCALE.tokens_per_step], same
    result.plans = cast(Any, SimpleNamespace(rule=same, job=result.job, each=lambda ask: each))
    result.scale = lambda plan: SCALE  # type: ignore[method-assign]
    return result


def test_constraints_rule_out_plans_by_their_bounds() -> None:
    """Steps of at most 2 s fit 64 dollars; what is exactly as much as it may be stays."""
    out = RuledOut()
    keep, value = site().promising(Limits(cost=64.0), objective("gpu-hours"), out)
    assert keep.tolist() == [True, True, False]
    assert value.tolist() == pytest.approx([16, 32, 64])
    assert out.plans == {"memory": 1}  # what is ruled out once is not counted again
    tight = RuledOut()
    assert site().promising(Limits(cost=63.0, memory=65e9), objective("step"), tight)[0].tolist() == [True, False, False]
    assert tight.plans == {"memory": 2}
    dear = RuledOut()
    assert not site(memory=1e12).promising(Limits(cost=16.0), objective("step"), dear)[0].any()
    assert dear.plans == {"cost": 3}
    assert dear.nearest["cost"] == (pytest.approx(2.0), "none of them needs less than 32 dollars, of 16")
    assert not site(possible=np.zeros(3, dtype=bool)).promising(Limits(), objective("step"), RuledOut())[0].any()


def test_memory_is_what_a_gpu_has_or_what_is_asked_for_if_that_is_less() -> None:
    """80 GB, of which 5 % are kept free if nothing else is said."""
    assert site().capacity(Limits()) == pytest.approx(76e9)
    assert site().capacity(Limits(headroom=0.0)) == 80e9
    assert site().capacity(Limits(memory=40e9)) == 40e9
    assert site().capacity(Limits(memory=90e9, headroom=0.0)) == 80e9


def test_plans_that_turn_out_too_slow_or_too_big() -> None:
    out = RuledOut()
    asked = Limits(cost=64.0, days=1.0, headroom=0.0)
    assert not site().over_budget(0, 2.0, asked, out)
    assert not out.plans
    assert site().over_budget(0, 3.0, asked, out)
    assert (out.plans, out.nearest["cost"][0]) == ({"cost": 1}, pytest.approx(1.5))
    site().too_big({"memory": 81e9}, asked, out)
    site().too_big({"memory": 80e9}, asked, out)
    assert out.nearest["memory"] == (81e9, "81.0 GB of 80.0 GB")
    assert out.nearest["memory of the nodes"] == (80e9, "what is offloaded has no room there")


def test_the_pareto_front_has_one_of_equal_plans_and_none_that_is_only_worse() -> None:
    """Of time per token, cost per token and memory: by name, in which order they are the fastest."""
    plans = {
        "fast": (1, 4, 9),
        "same": (1, 4, 9),
        "dearer": (1, 5, 9),
        "cheap": (2, 2, 9),
        "small": (3, 4, 1),
        "large": (3, 4, 2),
    }
    rows = [{"hash": name, "pace": pace, "spend": spend, "memory": memory} for name, (pace, spend, memory) in plans.items()]
    assert [row["hash"] for row in pareto(reversed(rows))] == ["fast", "cheap", "small"]


def test_a_plan_that_is_refused_says_nothing_of_the_same_with_offload() -> None:
    """Plan 1 is plan 0 with offload: its floor is the bound of plan 0, or its step once that is known."""
    place = site(step=np.array([0.25, 1.0, 4.0]))
    place.base, place.steps, place.changes = np.array([-1, 0, -1]), {}, {}
    place.plans = cast(Any, SimpleNamespace(changes=lambda plan: {}))
    assert [place.floor(plan) for plan in range(3)] == [0.0, 0.25, 0.0]
    search = MagicMock(refused=Counter())
    search.best.rows, search.selection.sites = [], [place]
    row = {"step": None, "error": "broken", "hash": "me"}
    Search._decide(search, 0, 0, row, fresh=False)
    assert search.refused == {"broken": 1}
    assert place.floor(1) == 0.25
    place.steps[0] = 0.5
    assert place.floor(1) == 0.5


def probed(kinds: list[int], base: list[int], keep: list[bool], value: list[float]) -> Probes:
    probes = Probes()
    plans = SimpleNamespace(kinds=lambda fields: np.array(kinds))
    probes.add(cast(Any, SimpleNamespace(plans=plans, base=np.array(base))), np.array(keep), np.array(value))
    return probes


def test_one_plan_of_each_kind_is_probed_the_least_bound_first() -> None:
    """Kinds 0, 1 and 2; what is ruled out or offloaded is not probed."""
    probes = probed([0, 0, 1, 1, 2, 2], [-1, -1, -1, -1, 0, -1], [True, True, False, True, True, True], [3, 2, 1, 4, 0, 5])
    assert [probes.next(9.0) for _ in range(4)] == [(0, 1), (0, 3), (0, 5), None]


def test_kinds_that_were_simulated_and_bounds_that_cannot_win_are_not_probed() -> None:
    probes = probed([0, 1, 2], [-1] * 3, [True] * 3, [1, 2, 3])
    probes.simulated(0, 0)
    assert probes.next(3.0) == (0, 1)
    assert probes.next(3.0) is None  # 3 is no better than the worst
    assert probes.next(3.1) == (0, 2)


def best_of(*plans: tuple[float, float], usd: float | None = 2.0) -> tuple[BestPlans, Site]:
    """The best plans after these (step, memory) were simulated on 16 GPUs, 4,000 tokens a step."""
    place, best = site(), BestPlans(objective("step"), 1)
    place.scale = lambda plan: Scale(16, 4e3, 14.4e6, Rates(usd, "", 500.0, ""))  # type: ignore[method-assign]
    for step, memory in plans:
        best.add(place, 0, {"step": step, "memory": memory})
    return best, place


def test_time_and_cost_per_token_of_a_simulated_plan() -> None:
    """8 s for 4,000 tokens: 2 ms a token; 16 GPUs of 2 dollars: 64 thousandths of GPU-seconds in dollars an hour. Without a price
    GPU-seconds stand for dollars.
    """
    row = best_of((8.0, 60e9))[0].rows[0]
    assert (row["value"], row["pace"], row["spend"]) == (8.0, 2e-3, pytest.approx(64e-3))
    assert best_of((8.0, 60e9), usd=None)[0].rows[0]["spend"] == pytest.approx(32e-3)


@pytest.mark.parametrize("usd", [None, 0.5, 2.0])
def test_a_plan_is_dominated_by_one_that_is_as_good_in_everything(usd: float | None) -> None:
    """Plans 0, 1 and 2 need 60, 70 and 90 GB at least."""
    best, place = best_of((3.0, 70e9), usd=usd)
    assert not best.dominates(place, 0, 4.0)  # needs less memory
    assert best.dominates(place, 1, 3.0)
    assert not best.dominates(place, 1, 2.999)
    assert best.dominates(place, 2, 3.0)


def test_a_bound_of_any_objective_is_a_step_again() -> None:
    """3,600 steps of 16 GPUs: a second of a step is 16 GPU-hours. 3 s dominate 48 GPU-hours, and not 47.9."""
    place, best = site(), BestPlans(objective("gpu-hours"), 1)
    best.add(place, 0, {"step": 3.0, "memory": 60e9})
    assert best.rows[0]["value"] == pytest.approx(48.0)
    assert best.dominates(place, 1, 48.0001)
    assert not best.dominates(place, 1, 47.9)


def test_what_the_next_plan_must_beat() -> None:
    best, _ = best_of((3.0, 1.0), (2.0, 1.0))
    assert best.worst == 2.0
    best.top = 2
    assert best.worst == 3.0
    best.top = 3
    assert best.worst == float("inf")


def test_an_axis_replaces_the_one_of_its_name_and_stays_in_its_place() -> None:
    space = read_space({"plan.tp": [1, 2], "plan.pp": [1, 2], "plan.cp": [1]}, "space")
    other, new = parse_axis("plan.pp=4,8,16"), parse_axis("nodes=1,2")
    assert [axis.name for axis in space.varied([other]).axes] == ["plan.tp", "plan.pp", "plan.cp"]
    assert space.varied([other]).axes[1] == other
    assert [axis.name for axis in space.varied([new, other]).axes] == ["plan.tp", "plan.pp", "plan.cp", "nodes"]
    assert space.varied([new, other]).size == 2 * 3 * 1 * 2
    assert [axis.name for axis in space.without(["plan.tp", "plan.cp"]).axes] == ["plan.pp"]
    assert [axis.name for axis in space.varied([new]).plan_axes] == ["plan.tp", "plan.pp", "plan.cp"]
    assert list(space.varied([new]).sites()) == [{"nodes": 1}, {"nodes": 2}]


def test_commands_keep_as_much_memory_free_as_searches() -> None:
    (option,) = (option for option in plan.params if option.name == "headroom")
    assert option.default == HEADROOM == Limits().headroom
