"""The search finds what brute force finds, and says what it rules out."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from strategies.planner.search import search as module
from strategies.planner.search.answer import order, pareto
from strategies.planner.search.candidates import candidates
from strategies.planner.search.evaluate import evaluate
from strategies.planner.search.objective import Limits, objective
from strategies.planner.search.open_plans import Entry, OpenPlans
from strategies.planner.search.search import Search
from strategies.planner.search.selection import PROBING, Selection
from strategies.planner.search.site import told_memory
from strategies.planner.search.space import default_space, load_space, parse_axis, read_space
from tests.strategies.planner.conftest import SPACE, find, here, read
from topologies.reading import UserError


def every(space: dict[str, Any]) -> list[dict[str, Any]]:
    """Every plan of the space that fits, simulated."""
    plans = candidates(read({}), read_space(space, "space"))
    rows = [evaluate(plans.job_of(plan)) for plan in range(len(plans))]
    return sorted((row for row in rows if not row["error"] and row["fits"]), key=lambda row: row["step"])


def test_brute_force_finds_the_same_winners() -> None:
    space = SPACE | {"plan.data_parallel": ["zero1", "zero3"], "plan.microbatch": [1], "plan.pp": [1, 4]}
    answer, brute = find(space=space, top=3), every(space)
    assert answer.counts["simulated"] < len(brute)
    assert answer.proven >= 3
    assert [row["step"] for row in answer.rows[:3]] == [row["step"] for row in brute[:3]]


OTHERS = {
    "plan.offload": [None, {"optimizer": "cpu"}, {"optimizer": "cpu", "parameters": "cpu"}],
    "plan.overlap": [True, False],
    "plan.kernels": ["megatron", "torch"],
    "plan.deepspeed": [None, {"stage3_prefetch_bucket_size": 0}],
    "plan.schedule": ["1f1b", "1f1b-overlapped", "dualpipe-v", "chimera"],
    "plan.recompute": ["none", "full"],
    "plan.data_parallel": ["ddp", "ddp_fp16", "zero1", "zero3"],
    "plan.pp": [1, 2, 4],
    "plan.tp": [1, 4],
}


@pytest.mark.parametrize("seed", range(3))
def test_brute_force_finds_the_same_in_other_spaces(seed: int) -> None:
    """Some values of some fields, drawn at random."""
    draw = random.Random(seed)
    chosen = draw.sample(sorted(OTHERS), 5)
    space = {name: draw.sample(OTHERS[name], min(2, len(OTHERS[name]))) for name in chosen}
    answer, brute = find(space=space, top=2), every(space)
    assert len(brute) >= 2
    assert [row["step"] for row in answer.rows[:2]] == [row["step"] for row in brute[:2]]


def test_of_equals_the_plainest_plan_comes_first() -> None:
    sized = {"plan.overlap": True, "plan.offload": None, "nodes": 2}
    plain = {"value": 1.0, "fits": True, "memory": 2e9, "hash": "b", "changes": sized}
    others = [{"plan.overlap": False, "plan.offload": None}, {"plan.overlap": True, "plan.offload": {"optimizer": "cpu"}}]
    rows = [plain | {"memory": 1e9, "hash": "a", "changes": changes} for changes in others]
    assert min([*rows, plain], key=order) is plain


def test_the_front_is_that_of_brute_force() -> None:
    space = SPACE | {
        "plan.data_parallel": ["zero1", "zero3"],
        "plan.microbatch": [1],
        "plan.schedule": ["1f1b"],
        "plan.tp": [1, 2],
    }
    answer = find(space=space, front=True)
    every_row = [row | {"pace": row["step"], "spend": row["step"]} for row in every(space)]
    assert answer.front
    assert {(r["step"], r["memory"]) for r in pareto(answer.rows)} == {(r["step"], r["memory"]) for r in pareto(every_row)}


def test_objectives_choose_between_clusters() -> None:
    """Most nodes are fastest; fewest cost least, as there is less to communicate."""
    space = {"nodes": [1, 2, 4], "plan.tp": [1, 2], "plan.data_parallel": ["zero1", "zero3"]}
    fast, cheap = find(space=space), find(space=space, goal="cost")
    assert fast.best is not None
    assert cheap.best is not None
    assert fast.best["gpus"] > cheap.best["gpus"]
    scale = cheap.best["scale"]
    dollars = cheap.best["step"] * scale.gpus / 3600 * scale.rates.usd * 1e9 / scale.tokens_per_step
    assert cheap.best["value"] == pytest.approx(dollars)


def test_constraints_say_how_many_plans_they_rule_out_and_what_would_fit() -> None:
    small = find(limits=Limits(memory=1e9))
    assert small.best is None
    assert small.pruned["memory"] == small.counts["allowed"]
    assert "GB of 1.0 GB" in small.nearest["memory"]
    assert find(limits=Limits(gpus=8)).nearest["gpus ≤ 8"] == "the smallest needs 16"
    assert find(limits=Limits(days=1e-9)).pruned["days"] > 0
    assert find(limits=Limits(power=1e3)).pruned["power ≤ 1.0 kW"] > 0


def test_a_space_without_plans_says_which_rules_are_broken() -> None:
    with pytest.raises(UserError, match=r"none of the 2 combinations .* is a plan: .*tp"):
        find(space={"plan.tp": [3, 5]})


@pytest.mark.parametrize("text", ["plan.tpp=1,2", "plan.tp=", "plan.tp=1,1", "colour=1", "plan.tp=x"])
def test_bad_axes_are_one_line(text: str) -> None:
    with pytest.raises(UserError):
        Search(read, read_space({}, "space").varied([parse_axis(text)]), objective("step"), here()).run()


def test_the_usual_space_is_what_its_yaml_says(tmp_path: Path) -> None:
    space = default_space(read({}))
    file = tmp_path / "space.yaml"
    file.write_text(json.dumps({axis.name: list(axis.choices) for axis in space.axes}))
    assert load_space(str(file)) == space


def test_what_the_bounds_refuse_is_what_a_job_refuses() -> None:
    """A combination is dropped exactly when its job does not resolve, or when its schedule has nothing to do at pp=1."""
    space = read_space(SPACE | {"plan.tp": [1, 3, 32], "plan.microbatch": [1, 3], "plan.recompute": ["full"]}, "space")
    plans = candidates(read({}), space)
    kept, dropped = [plans.changes(plan) for plan in range(len(plans))], 0
    for several in itertools.product(*(axis.choices for axis in space.axes)):
        changes = {field: value for choice in several for field, value in choice.items()}
        try:
            read(changes).resolve()
            twin = changes["plan.pp"] == 1 and changes["plan.schedule"] != "1f1b"
            dropped += twin
            assert (changes in kept) == (not twin)
        except UserError:
            assert changes not in kept
    assert plans.same == dropped > 0


def test_memory_that_is_nearly_enough_is_told_with_as_many_places_as_show_it() -> None:
    assert told_memory(91.7e9, 85.5e9) == "91.7 GB of 85.5 GB"
    assert told_memory(85.5003e9, 85.5e9) == "85.5003 GB of 85.5000 GB"


def test_a_gap_that_is_accepted_ends_the_search_before_the_best_is_proven() -> None:
    best, near = find(top=6), find(top=6, within=0.2)
    assert best.best is not None
    assert near.best is not None
    assert near.counts["simulated"] < best.counts["simulated"]
    assert near.gap <= 0.2
    assert near.best["step"] * (1 - 0.2) <= best.best["step"]


def test_every_other_simulation_is_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing was found, plans after a while are, every other time, the first of their degrees and data parallelism."""
    asked: list[tuple[Any, ...]] = []
    first_row: dict[str, Any] = {}

    def none_fits(job: Any) -> dict[str, Any]:
        asked.append((job.plan.tp, job.plan.pp, job.plan.data_parallel))
        first_row.update(first_row or evaluate(job))  # of the others nothing but that they do not fit counts
        return first_row | {"fits": False}

    monkeypatch.setattr(module, "evaluate", none_fits)
    find(space=SPACE | {"plan.recompute": ["none"], "plan.tp": [1, 2]})
    first = PROBING + 1
    probes = range(first, first + 8, 2)
    assert all(asked[place] not in asked[:place] for place in probes)


@pytest.mark.parametrize(
    ("asked", "tightened", "simulated", "proven"),
    [
        ({}, 6, 2, 1),
        ({"top": 3}, 8, 4, 3),
        ({"front": True}, 12, 9, 9),
        ({"goal": "cost"}, 6, 2, 1),
        ({"limits": Limits(days=0.001)}, 0, 0, 0),
    ],
    ids=str,
)
def test_few_plans_of_a_space_are_simulated(asked: dict[str, Any], tightened: int, simulated: int, proven: int) -> None:
    """432 combinations. Without a pipeline (a third of them) two schedules of three are left out: 96; at tp=4, pp=4 nothing is
    shared by data parallelism, and three strategies of four are left out: 36. All others are plans, and none is refused.
    """
    answer = find(**asked)
    assert answer.combinations == 432
    assert answer.counts["same"] == 96 + 36
    assert answer.counts["allowed"] == answer.counts["bounded"] == 432 - 132
    assert not answer.refused
    assert {name: answer.counts[name] for name in ("known", "too big", "set aside", "unseen", "open")} == dict.fromkeys(
        ("known", "too big", "set aside", "unseen", "open"), 0
    )
    assert (answer.counts["tightened"], answer.counts["simulated"], answer.proven) == (tightened, simulated, proven)
    assert len(answer.rows) == simulated
    assert (answer.interrupted, answer.front) == ("", "front" in asked)


def test_every_combination_is_a_plan_or_another_plan_or_refused_with_its_reason() -> None:
    """16 GPUs: 3 pipeline ranks never divide them (a third of 144, or 48), 8 × 2 × 2 of tp, cp and pp are too many (6); of what
    is left, microbatches of 3 never divide 32 sequences.
    """
    space = {
        "plan.tp": [1, 2, 4, 8],
        "plan.cp": [1, 2],
        "plan.pp": [1, 2, 3],
        "plan.microbatch": [1, 3],
        "plan.schedule": ["1f1b", "dualpipe-v", "pipedream"],
    }
    answer = find(space=space)
    assert answer.counts["allowed"] + answer.counts["same"] + answer.refused.total() == answer.combinations == 144
    degrees = sum(count for reason, count in answer.refused.items() if "does not divide" in reason)
    batches = sum(count for reason, count in answer.refused.items() if "is not a multiple of" in reason)
    assert (degrees, batches) == (48 + 6, (144 - 54) // 2)
    assert all(answer.examples[reason] for reason in answer.refused)


def test_what_nothing_keeps_is_told_by_the_nearest() -> None:
    """Of 300 plans 116 need more than 4 GB, the least of them 4.01 GB; in a thousandth of a day none trains a billion tokens."""
    small, late = find(limits=Limits(memory=4e9)), find(limits=Limits(days=0.001))
    assert small.pruned == {"memory": 116}
    assert small.nearest == {"memory": "none of them needs less than 4.01 GB of 4.00 GB"}
    assert small.best is not None
    assert small.best["memory"] <= 4e9
    assert late.pruned == {"days": 300}
    assert late.nearest == {"days": "none of them needs less than 0.0018651 days, of 0.001"}


def test_progress_says_by_how_much_an_open_plan_may_be_better() -> None:
    """No plan is better than the best by more than the gap that was told before, and the gap closes."""
    told = []
    space = SPACE | {"plan.data_parallel": ["zero1", "zero3"], "plan.schedule": ["1f1b"]}
    answer = Search(read, read_space(space, "space"), objective("step"), here(), tell=told.append).run()
    best = answer.rows[0]["step"]
    gaps = [event.gap for event in told if event.best]
    assert all(event.best * (1 - event.gap) <= best <= event.best for event in told if event.best)
    assert all(event.best * (1 - event.gap) >= 0.5 * best for event in told if event.best and event.open)  # bounds are no looser
    assert gaps[-1] < 0.05


def test_plans_that_are_being_simulated_count_as_open() -> None:
    """And so does what waits for them; the one that was just decided does not."""
    plans = OpenPlans()
    plans.add(0, [(0, 3.0), (1, 2.0)])
    plans.running = {(0, 2), (0, 3)}
    part = cast(Any, SimpleNamespace(open=plans, _entry=lambda site, plan: Entry({2: 1.0, 3: 1.2}[plan], site, plan, 0)))
    assert Selection.least(part, (0, 2)) == 1.2
    assert Selection.least(part, (0, 3)) == 1.0
    plans.running = {(0, 2)}
    assert Selection.least(part, (0, 2)) == 2.0
    plans.wait(Entry(1.5, 0, 4, 0), (0, 2))
    assert Selection.least(part, (0, 2)) == 1.5
