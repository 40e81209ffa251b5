"""What if: a job simulated with other inputs, all combinations of them or one at a time, by one plan or by several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

from sim.analysis.summary import Summary
from strategies.job import Job
from strategies.planner.auto_plan import CHOSEN
from strategies.planner.replanned import Tell, answered, replanned, silent
from strategies.planner.search.space import Axis
from strategies.planner.search.workers.executors import Engine
from strategies.resilience.runs import RunAnswer, run_training
from topologies.costs import Cost, Rates, cost, mean_rates
from topologies.reading import UserError

Changes = Mapping[str, Any]
Read = Callable[[dict[str, Any]], Job]


@dataclass(frozen=True)
class Case:
    """One set of inputs, and the answer: None and the reason where the job is refused."""

    changes: Changes
    plan: str  # which of the plans that are compared
    summary: Summary | None
    training: Cost | None  # with failures and checkpoints where there are runs
    refused: str = ""
    run: RunAnswer | None = None
    batch: int = 0  # sequences of a step
    found: Changes = field(default_factory=dict)  # of the plan, where it is found anew: its fields
    remarks: tuple[str, ...] = ()  # what of the cluster's description cannot be reached
    hash: str = ""  # of the job


BATCHES = ("keep", "scale")


def ask(
    read: Read,
    cases: Sequence[tuple[Changes, str, Changes]],
    engine: Engine,
    tokens: float,
    price: float | None,
    seed: int | None = None,
    replan: bool = False,
    tell: Tell = silent,
) -> list[Case]:
    """Simulate cases: (inputs, name of the plan, fields of the plan). Equal jobs are simulated once. seed: run them over days as
    well, all with the same failures. replan: all but the first have the best plan that a short search finds for any of them, with
    the fields that the inputs and a job of `plan: auto` say. tell: hears how far that is.
    """
    jobs: list[Job | str] = []
    for changes, _, plan in cases:
        own = {name: value for name, value in {**plan, **changes}.items() if name != "price"}
        try:
            jobs.append(read(own))
        except UserError as error:
            jobs.append(str(error))
    kept = [_kept(jobs[0], changes) if replan and number else None for number, (changes, _, _) in enumerate(cases)]
    wanted = {(job.hash, fields): job for job, fields in zip(jobs, kept, strict=True) if isinstance(job, Job)}
    as_said = {key: (job,) for key, job in wanted.items() if key[1] is None}
    anew = {key: (job, key[1]) for key, job in wanted.items() if key[1] is not None}
    steps = engine.results(answered, list(as_said.values()), lambda number, of: tell(f"{number} of {of} simulated"))
    answers = dict(zip(as_said, steps, strict=True))
    answers |= dict(zip(anew, replanned(list(anew.values()), engine, tell), strict=True))
    result = []
    for (changes, name, _), asked, fields in zip(cases, jobs, kept, strict=True):
        job, outcome = (None, asked) if isinstance(asked, str) else answers[asked.hash, fields]
        if isinstance(outcome, str) or job is None:
            result.append(Case(changes, name, None, None, str(outcome)))
            continue
        rate = mean_rates(job.cluster, changes.get("price", price), "price")
        whole = cost(rate, outcome.gpus, outcome.step_seconds, outcome.tokens_per_second * outcome.step_seconds, tokens)
        found = {} if fields is None else {f"plan.{name}": getattr(job.plan, name) for name in CHOSEN}
        batch = job.resolve().global_batch
        case = Case(changes, name, outcome, whole, batch=batch, found=found, remarks=job.cluster.remarks, hash=job.hash)
        result.append(case if seed is None else _run(case, job, tokens, rate, seed, engine))
    return result


def _kept(own: Job | str, changes: Changes) -> frozenset[str]:
    """Fields of a plan that are said where it is found anew: by the inputs, or by a job that leaves the others to be found."""
    said = own.said if isinstance(own, Job) else frozenset()
    return frozenset(name for name in CHOSEN if name in said or f"plan.{name}" in changes)


def _run(case: Case, job: Job, tokens: float, money: Rates, seed: int, engine: Engine) -> Case:
    """The case over days; a job that cannot be run, or does not fit, is refused."""
    assert case.summary is not None
    try:
        answer = run_training(job, case.summary, tokens, money, seed, engine.map)
    except UserError as error:
        return replace(case, summary=None, training=None, refused=str(error))
    return replace(case, run=answer, training=answer.cost(money))


def impossible(cases: Sequence[Case]) -> list[tuple[str, Any]]:
    """Fields and values that no case with them has an answer for."""
    possible: dict[tuple[str, str], bool] = {}
    values: dict[tuple[str, str], tuple[str, Any]] = {}
    for case in cases:
        for name, value in case.changes.items():
            key = name, str(value)
            values[key] = name, value
            possible[key] = possible.get(key, False) or not case.refused
    return [values[key] for key, able in possible.items() if not able]


def combinations(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """Every combination of the axes' values."""
    return [{k: v for choice in chosen for k, v in choice.items()} for chosen in product(*(axis.choices for axis in axes))]


def one_at_a_time(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """Each value of each axis, the others as the job has them."""
    return [dict(choice) for axis in axes for choice in axis.choices]


def batched(read: Read, inputs: Sequence[Changes], how: str | None) -> list[dict[str, Any]]:
    """Inputs with a global batch: keep, the job's own; scale, as many sequences for each GPU, in whole microbatches of all dp
    ranks; None: what the job says, where the inputs say none themselves. What else says a batch (accumulation, dp) is set aside.
    """
    base = read({})
    batch, gpus = base.resolve().global_batch, base.cluster.gpus
    result = []
    for changes in inputs:
        free: dict[str, Any] = {"plan.accumulation": None, "plan.dp": None}
        if "plan.global_batch" in changes:
            result.append(dict(changes) | free)
        elif how is None or "plan.accumulation" in changes:
            freed: dict[str, Any] = {"plan.global_batch": None} if "plan.accumulation" in changes else {}
            freed |= {"plan.dp": None} if base.plan.dp and "plan.dp" not in changes else {}
            result.append(dict(changes) | freed)
        else:
            result.append(dict(changes) | free | {"plan.global_batch": _batch(read, changes, batch, gpus, how)})
    return result


def _batch(read: Read, changes: Changes, batch: int, gpus: int, how: str) -> int:
    """Sequences of a step; the job's own where the inputs are refused, whose simulation says why."""
    if how == "keep":
        return batch
    try:
        job = read({**changes, "plan.accumulation": None, "plan.dp": None, "plan.global_batch": None})
    except UserError:
        return batch
    plan = job.plan
    least = max(1, plan.microbatch * (job.cluster.gpus // (plan.tp * plan.cp * plan.pp)))
    return least * max(1, round(batch * job.cluster.gpus / gpus / least))


def scaling(read: Read, axis: Axis, weak: bool) -> list[dict[str, Any]]:
    """The values of `nodes`; weak: the global batch grows with them. Raises UserError for a batch that cannot."""
    if axis.name != "nodes" or len(axis.choices) < 2:
        raise UserError("--weak, --strong: need at least two values of nodes, as --vary nodes=8,16,32")
    base = read({})
    batch, gpus, each = base.resolve().global_batch, base.cluster.gpus, base.cluster.node.gpus
    result = []
    for choice in axis.choices:
        grown, rest = divmod(batch * int(choice["nodes"]) * int(choice.get("cluster.node.gpus", each)), gpus)
        if weak and rest:
            raise UserError(
                f"--weak: global_batch={batch} of {base.cluster.nodes} nodes is no whole number at nodes={choice['nodes']}"
            )
        plan: dict[str, Any] = {"plan.global_batch": grown if weak else batch, "plan.accumulation": None, "plan.dp": None}
        result.append({**choice, **plan})
    return result


def sizes(job: Job, smaller: int = 3, larger: int = 2) -> Axis:
    """The job's nodes halved and doubled so many times, and below one node parts of it that still hold a copy of the model."""
    plan, node = job.resolve(), job.cluster.node
    least = job.cluster.gpus // plan.copies
    choices: list[dict[str, Any]] = [{"nodes": job.cluster.nodes * 2**times} for times in range(larger + 1)]
    nodes, gpus = job.cluster.nodes, node.gpus
    for _ in range(smaller):
        if nodes % 2 == 0:
            nodes //= 2
            choice: dict[str, Any] = {"nodes": nodes}
        elif nodes == 1 and gpus % 2 == 0:
            gpus //= 2
            choice = {"nodes": 1, "cluster.node.gpus": gpus, "cluster.node.nics": min(node.nics, gpus)}
        else:
            break
        if nodes * gpus < least:
            break
        choices.insert(0, choice)
    return Axis("nodes", tuple(choices))


def crossovers(cases: Sequence[Case], value: Callable[[Case], float]) -> list[tuple[Case, Case]]:
    """Where the best plan changes along the inputs: (last of the old winner, first of the new one)."""
    winners: list[Case] = []
    for changes in _distinct(cases):
        able = [case for case in cases if case.changes == changes and case.summary is not None and case.summary.fits]
        if able:
            winners.append(min(able, key=value))
    return [(a, b) for a, b in pairwise(winners) if a.plan != b.plan]


def _distinct(cases: Sequence[Case]) -> list[Changes]:
    result: list[Changes] = []
    for case in cases:
        if case.changes not in result:
            result.append(case.changes)
    return result
