"""What the planner says: bounds of plans, searches, advice, and what it would cost to do it differently."""

from __future__ import annotations

import random
from typing import Any

from reports.api.jobs import reader
from strategies.job import Job
from strategies.planner.advise import advise as advised
from strategies.planner.arguments import arguments_of
from strategies.planner.auto_plan import quick_way, with_auto_plan
from strategies.planner.balance import allotted, balanced, paces
from strategies.planner.bounds.every_plan import bounds as bounds_of
from strategies.planner.bounds.layer_cost_table import kinds_of
from strategies.planner.bounds.longest_path import expected_path, longest_path
from strategies.planner.bounds.network_bound import hosted_update
from strategies.planner.bounds.single_plan import Refiner
from strategies.planner.fixes import fixes as fixes_of
from strategies.planner.multiples import absolute
from strategies.planner.search.answer import pareto
from strategies.planner.search.candidates import candidates
from strategies.planner.search.objective import OBJECTIVES, Limits
from strategies.planner.search.search import Search
from strategies.planner.search.site import started
from strategies.planner.search.space import Space, default_space, parse_axis, read_space
from strategies.planner.search.workers.in_process import in_process
from strategies.planner.sensitivity import Play
from strategies.planner.spending.budget import budget as budget_of
from strategies.planner.spending.budget import shown
from strategies.planner.spending.purchase import Offer, buy, crossovers, same_batch
from strategies.planner.uncertainty import interval_of, tied
from strategies.planner.whatif import ask, batched, combinations, impossible, one_at_a_time, scaling, sizes
from strategies.planner.whatif import crossovers as crossovers_of
from strategies.predict import played, predict, prices_of, simulate
from strategies.read_job import stated_job
from tests.random_jobs import MODELS
from tests.results.jobs import random_question_job
from tests.results.questions import question
from topologies.reading import UserError

VALUES: dict[str, list[Any]] = {  # of the axes of random spaces
    "plan.tp": [1, 2, 4],
    "plan.pp": [1, 2, 4],
    "plan.cp": [1, 2],
    "plan.data_parallel": ["ddp", "zero1", "zero2", "zero3"],
    "plan.schedule": ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "pipedream-2bw", "chimera"],
    "plan.microbatch": [1, 2, 4],
    "plan.recompute": ["none", "selective", "full"],
    "plan.sequence_parallel": [False, True],
    "plan.overlap": [False, True],
    "plan.gradient_sync": [None, "every", "last"],
    "plan.bucket": [None, "1 MB"],
    "plan.kernels": ["megatron", "torch", "compiled"],
    "plan.shard": [None, 2],
    "plan.optimizer": ["adam", "sgd"],
    "plan.gradients": ["same", "fp32"],
    "plan.offload": [None, {"optimizer": "cpu"}],
}


def _space(draw: random.Random, most: int) -> Space:
    axes = draw.sample(sorted(VALUES), draw.choice([2, 3]))
    chosen = {axis: draw.sample(VALUES[axis], min(len(VALUES[axis]), draw.choice([2, most]))) for axis in axes}
    return read_space(chosen, "space")


@question
def bounds(draw: random.Random) -> Any:
    """Every bound of every plan of a space."""
    job = started(random_question_job(draw))
    return bounds_in(job, _space(draw, 3))


def bounds_in(job: Job, space: Space) -> dict[str, Any]:
    """Every bound of every plan of a space of a job that a search began with."""
    plans, prices = candidates(job, space), prices_of(job)
    kinds = kinds_of(plans, prices)
    limits = bounds_of(plans, kinds, prices)
    refiner = Refiner(plans, kinds, limits, prices)
    refined, paths = [], []
    for plan in range(min(len(plans), 8)):
        ways = (refiner.waiting, refiner.passes, refiner.exchange, refiner.expected_exchange)
        resolved = refiner.resolved(plan)
        refined.append([way(plan) for way in ways] + [hosted_update(plans.job_of(plan), resolved)])
        asked = plans.job_of(plan), resolved, prices
        try:
            paths.append([*longest_path(*asked), *(expected_path(*asked) or (0.0, 0.0))])
        except UserError:
            paths.append([])
    return {
        "limits": limits,
        "refined": refined,
        "paths": paths,
        "refused": plans.refused,
        "same": plans.same,
        "number": plans.number,
        "plans": [str(plans.changes(plan)) for plan in range(len(plans))],
        "without offload": plans.at_choice("plan.offload", None),
        "microbatches": plans.microbatches,
    }


@question
def search(draw: random.Random) -> Any:
    """A search: rows in their order, what was ruled out and why, what it told meanwhile."""
    job = random_question_job(draw)
    space = _space(draw, 3)
    if draw.random() < 0.3:
        space = space.varied([parse_axis(draw.choice(["nodes=1,2", "cluster.node.nic=25 GB/s,50 GB/s", "nodes=2,1,3"]))])
    limits = [{}, {}, {"memory": 4e9}, {"memory": 1.5e9}, {"days": 0.02}, {"cost": 20.0}, {"gpus": 8}, {"power": 2e4}]
    goal = OBJECTIVES[draw.choice(["step", "step", "throughput", "time", "gpu-hours", "energy", "cost", "goodput"])]
    steps: list[Any] = []
    asked = Search(
        reader(job),
        space,
        goal,
        in_process(),
        Limits(**draw.choice(limits)),  # type: ignore[arg-type]
        tokens=1e8,
        price=draw.choice([2.0, None]),
        top=draw.choice([1, 2, 5]),
        front=draw.random() < 0.3,
        within=draw.choice([0.0, 0.0, 0.2]),
        tell=steps.append,
    )
    found = asked.run()
    rows = [{name: value for name, value in row.items() if name not in ("hash", "version")} for row in found.rows]
    told = [(told.stage, told.simulated, told.open, told.best, told.gap, told.pruned) for told in steps]
    return {
        "rows": [row | {"changes": str(row["changes"])} for row in rows],
        "front": [str(row["changes"]) for row in pareto(found.rows)] if found.rows and "pace" in found.rows[0] else [],
        "proven": found.proven,
        "bound": found.bound,
        "gap": found.gap,
        "combinations": found.combinations,
        "counts": found.counts,
        "refused": found.refused,
        "pruned": found.pruned,
        "nearest": found.nearest,
        "interrupted": found.interrupted,
        "proves front": found.front,
        "examples": found.examples,
        "told": told,
    }


@question
def advice(draw: random.Random) -> Any:
    """The usual ways to train, ranked, and the usual questions."""
    job = random_question_job(draw)
    found = advised(job, predict, depth=2, headroom=draw.choice([0.05, 0.3]), more=quick_way(job))
    rows = [
        {
            "name": each.name,
            "arguments": arguments_of(job, each.job),
            "comfortable": each.comfortable,
            "step": each.summary.step_seconds,
            "peak": each.summary.worst.peak,
            "dropped": each.dropped,
        }
        for each in found.candidates
    ]
    return {"questions": found.questions, "candidates": rows, "dropped": found.dropped, "best": found.best and found.best.name}


@question
def fixes(draw: random.Random) -> Any:
    """What makes a job fit into GPUs of little memory."""
    memory = draw.choice(["2 GB", "3 GB", "5 GB"])
    cluster = {"based_on": draw.choice(["dgx-h100", "pcie-l40s"]), "node": {"gpus": 4, "nics": 2, "gpu": {"memory": memory}}}
    job = random_question_job(draw, cluster=cluster, nodes=1)
    summary = predict(job)
    return {
        "peak": summary.worst.peak,
        "fits": summary.fits,
        "fixes": [(each.arguments, each.summary.step_seconds) for each in fixes_of(job, summary, predict, effort=20_000)],
    }


@question
def whatif(draw: random.Random) -> Any:
    """A job with other inputs."""
    job = random_question_job(draw, nodes=draw.choice([1, 2]), cluster=draw.choice(["dgx-h100", "pcie-l40s", "dgx-a100"]))
    read, texts = (
        reader(job),
        ["nodes=x0.5,x2", "cluster.node.nic=x2", "price=1,3", "plan.tp=1,2", "cluster.node.gpu.memory=x0.02"],
    )
    axes = [absolute(parse_axis(text), job, 2.0) for text in draw.sample(texts, 2)]
    inputs = combinations(axes) if draw.random() < 0.5 else one_at_a_time(axes)
    plans = [("", {}), ("zero3", {"plan.data_parallel": "zero3"})]
    seed = draw.choice([None, None, 3])
    changed = batched(read, inputs, draw.choice([None, "keep", "scale"]))
    cases = ask(read, [(case, name, plan) for case in changed for name, plan in plans], in_process(), 1e8, 2.0, seed)
    rows = [
        {
            "changes": str(case.changes),
            "plan": case.plan,
            "step": case.summary and case.summary.step_seconds,
            "cost": case.training and case.training.usd,
            "days": case.run and case.run.days.mean,
            "batch": case.batch,
            "refused": case.refused,
        }
        for case in cases
    ]
    scaled = [scaling(read, parse_axis("nodes=1,2,4"), weak) for weak in (False, True)]
    crossed = crossovers_of(cases, lambda case: case.summary.step_seconds if case.summary else float("inf"))
    named = [(str(first.changes), str(second.changes)) for first, second in crossed]
    return {"cases": rows, "impossible": impossible(cases), "scaled": str(scaled), "sizes": sizes(job), "crossed": named}


@question
def prices(draw: random.Random) -> Any:
    """What each price does to a step, and how sure the step is."""
    job = random_question_job(draw, plan={"accumulation": draw.choice([2, 20])})
    play = Play.of(job)
    names = {price.name: 1.1 for price in play.relevant()}
    spread = interval_of(played(job), play.seconds)
    near = [tied(play.seconds, play.seconds * factor) for factor in (1.001, 1.1)]
    return {"seconds": play.seconds, "swings": play.swings(names), "faster": play.faster(2.0), "interval": spread, "tied": near}


@question
def auto(draw: random.Random) -> Any:
    """The plan that a short search finds, with some fields said."""
    said = draw.choice([{}, {"global_batch": 32}, {"tp": 2}, {"data_parallel": "zero3"}, {"recompute": "full", "pp": 2}])
    cluster = {"based_on": draw.choice(["dgx-h100", "pcie-l40s", "perlmutter"]), "node": {"gpus": 4, "nics": 2}}
    plan = {"auto": True, "global_batch": 16} | said
    job = stated_job(model=draw.choice(MODELS), cluster=cluster, nodes=draw.choice([1, 2]), plan=plan)
    found = with_auto_plan(job)
    return {"arguments": arguments_of(job, found), "remarks": list(found.remarks), "space": str(default_space(job))}


@question
def shares(draw: random.Random) -> Any:
    """Layers by stage and microbatches by replica that would be better."""
    nodes = draw.choice([[{"count": 1, "clock": 0.7}, {"count": 1}], [{"count": 1}, {"count": 1, "node": "dgx-a100"}]])
    plan = {
        "pp": draw.choice([1, 2, 4]),
        "order": "tp-cp-ep-pp-dp",
        "accumulation": 4,
        "data_parallel": draw.choice(["ddp", "zero1"]),
    }
    job = random_question_job(draw, cluster="dgx-h100", nodes=nodes, plan=plan)
    timeline, busy = simulate(job), [draw.uniform(1, 3) for _ in range(job.resolve().pp)]
    pace = paces(job, timeline)
    better, shared = balanced(job, busy, pace), allotted(job, timeline, simulate)
    return {
        "paces": pace,
        "layers": list(better.plan.layers_per_stage or ()) if better else [],
        "microbatches": list(shared[0].plan.microbatches_per_replica or ()) if shared else [],
        "step": timeline.step,
        "shared": shared[1].step if shared else None,
    }


@question
def offers(draw: random.Random) -> Any:
    """Clusters that may be bought."""
    names = draw.sample(["dgx-h100", "dgx-a100", "pcie-l40s", "aws-p4d"], 2)
    model = draw.choice(MODELS)
    jobs = [stated_job(model=model, cluster={"based_on": name, "node": {"gpus": 4, "nics": 2}}, nodes=1) for name in names]
    bought = buy(same_batch([Offer(name, job) for name, job in zip(names, jobs, strict=True)], False), 1e9, in_process(), 1)
    rows = [
        {
            "name": each.offer.name,
            "refused": each.refused,
            "fits": each.fits,
            "job": repr(each.job),
            "step": each.summary and each.summary.step_seconds,
            "usd": each.training and each.training.usd,
            "seconds": each.training and each.training.seconds,
        }
        for each in bought
    ]
    return {"bought": rows, "crossovers": list(crossovers(bought, 1e9, in_process()))}


@question
def spending(draw: random.Random) -> Any:
    """The largest model that some days are enough for."""
    models = {str(model["name"]): model | {"layers": draw.choice([2, 4, 12])} for model in draw.sample(MODELS, 3)}
    cluster = {"based_on": draw.choice(["dgx-a100", "dgx-h100"]), "node": {"gpus": 2, "nics": 1}}
    days = draw.choice([0.01, 0.1, 0.5])
    found = budget_of(
        models,
        lambda name: stated_job(model=models[name], cluster=cluster, nodes=1),
        days,
        draw.choice([5.0, 20.0]),
        2.0,
        map,
        map,
    )
    rows = [
        {
            "model": each.model,
            "parameters": each.parameters,
            "needed": each.needed,
            "most": each.most,
            "enough": each.enough,
            "refused": each.refused,
            "arguments": each.arguments,
            "tokens": each.answer and each.answer.tokens.mean,
        }
        for each in found
    ]
    return {"models": rows, "shown": [each.model for each in shown(found)]}
