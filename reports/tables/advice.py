"""What `shardyard advise` prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from reports.formatting import (
    count,
    digits,
    dollars,
    gigabytes,
    notes_of,
    percent,
    plural,
    rates_text,
    seconds,
    spread,
    step_of,
    tie_rule,
    tokens_text,
    training_cost,
    unit_of_job,
)
from reports.tables.fitting import FittingTable
from sim.analysis.breakdown import AXES
from strategies.job import Job
from strategies.planner.advise import Advice, Candidate
from strategies.planner.arguments import arguments_of
from topologies.cluster import UnequalCluster
from topologies.costs import Rates
from topologies.reading import as_argument

SHOWN = 12
NAMED = 3  # ties that are named
STAKE = 0.02  # of the step, from which on it is said
MORE = "also tries schedules, other microbatches and orders of ranks, and proves the best"


def advice(result: Advice, job: Job, rates: Rates, tokens: float) -> RenderableType:
    """Questions, candidates and why the first one wins; days and cost of so many tokens."""
    unit, rows, ties = unit_of_job(job), list[list[str]](), _ties(result)
    shares = ("exposed", "bubble", "recompute")
    heads = ("way to train", "", "step", f"{unit}/s/GPU", "MFU", "peak memory", *shares, "days", "cost")
    for candidate in result.candidates[:SHOWN]:
        summary = candidate.summary
        whole = training_cost(summary, {"rates": rates, "tokens": tokens})
        again = percent(summary.breakdown["recompute"] / summary.step_seconds)
        why = "" if candidate.comfortable else "tight: " if summary.fits else "does not fit: "
        peak = f"{why}{gigabytes(summary.worst.peak)} GB"
        speed = (seconds(summary.step_seconds), count(summary.tokens_per_second_per_gpu), percent(summary.mfu))
        mark = "★" if candidate is result.best else "≈" if candidate in ties else ""
        money = "–" if whole.usd is None else dollars(whole.usd)
        lost = percent(summary.exposed), percent(summary.bubble), again
        rows.append([candidate.name, mark, *speed, peak, *lost, digits(whole.seconds / 86400), money])
    table = FittingTable(heads, rows, ("recompute", "bubble", "days", "exposed", "MFU"), heads[:1])
    more = len(result.candidates) + len(result.slower) - SHOWN
    rest = [Text(f"… and {more} slower or too big", "dim")] if more > 0 else []
    rest += [Text(tie_rule(), "dim")] if ties else []
    rest += [Text(f"days and cost are of {tokens_text(tokens, unit)}; {rates_text(rates, power=False)}", "dim")]
    rest += [Text(line, "dim") for line in _dropped(result, job)]
    if not isinstance(job.cluster, UnequalCluster):  # which `plan` does not search
        rest += [Text(f"`shardyard plan`, with the same arguments, {MORE}{_at_stake(result)}", "dim")]
    rest += notes_of(job)
    lines = [Text(f"{question}? {answer}") for question, answer in result.questions]
    return Group(Text(verdict(result, job), "bold"), *_arguments(result, job), "", *lines, "", table, *rest)


def _at_stake(answer: Advice) -> str:
    """What the best of the usual ways loses to what `plan` has more choices for."""
    if answer.best is None:
        return ", offload included"
    summary = answer.best.summary
    lost = {"bubble": summary.bubble, "exposed communication": summary.exposed}
    lost["recomputation"] = summary.breakdown["recompute"] / summary.step_seconds
    most = {name: part for name, part in lost.items() if part >= STAKE}
    if not most:
        return f"; little is left to gain: ★ loses less than {percent(STAKE)} each to {', '.join(lost)}"
    return f"; it is worth it where ★ loses much: {', '.join(f'{percent(part)} to {name}' for name, part in most.items())}"


def _arguments(answer: Advice, job: Job) -> list[Text]:
    """What makes the job the best one, or the one that lacks least."""
    settings = arguments_of(job, answer.candidates[0].job)
    return [Text(f"as arguments: {settings}")] if settings else []


def _dropped(answer: Advice, job: Job) -> Iterator[str]:
    """What the job's plan says and some ways leave out, as it does not apply to them."""
    for field, names in answer.dropped.items():
        value = as_argument(f"plan.{field}", getattr(job.plan, field))
        others = f" and {plural(len(names) - NAMED, 'other')}" if len(names) > NAMED else ""
        yield f"{value} does not apply to, and is left out of: {', '.join(names[:NAMED])}{others}"


def verdict(answer: Advice, job: Job) -> str:
    """The winner, and what it saves against the next one."""
    best, cluster = answer.best, job.cluster
    batch = step_of(answer.candidates[0].job.global_batch, job.plan.sequence_of(job.model))
    what = f"{job.model.name} on {cluster.described} ({plural(cluster.gpus, 'GPU')}), {batch}"
    if best is None:
        nearest = answer.candidates[0]
        most, of = nearest.summary.worst.peak, nearest.summary.memory_capacity
        needs = f"{gigabytes(most)} GB of a GPU" + ("" if most > of else ", but has no room on its nodes for what is offloaded")
        hint = f"it fits with {', or '.join(answer.fixes)}" if answer.fixes else "no small change of it fits, nor do more nodes"
        return f"{what}: none of the usual ways fits; {nearest.name} needs least memory, {needs}: {hint}"
    bar = best.summary.interval
    step = seconds(best.summary.step_seconds) + (f" ({100 * bar.level:.0f} % interval {spread(bar)})" if bar else "")
    ties = _ties(answer)
    others = [candidate for candidate in answer.candidates[1:] if candidate.comfortable and candidate not in ties]
    named = ", ".join(candidate.name for candidate in ties[:NAMED]) + (
        f" and {plural(len(ties) - NAMED, 'other')}" if len(ties) > NAMED else ""
    )
    why = "" if best.comfortable else ", with less memory free than --headroom asks for"
    why += f"; a tie with {named}" if ties else ""
    why += f"; {_why(best, others[0])}" if others else ""
    return f"{what}: {best.name}, {step} per step{why}"


def _ties(answer: Advice) -> list[Candidate]:
    """What fits and is as good as the best, as far as can be told."""
    from strategies.planner.uncertainty import tied

    best = answer.best
    fitting = [candidate for candidate in answer.candidates[1:] if candidate.comfortable]
    return [
        candidate for candidate in fitting if best is not None and tied(candidate.summary.step_seconds, best.summary.step_seconds)
    ]


def _why(best: Candidate, other: Candidate) -> str:
    """Where the next one loses its time."""
    mine, two = best.summary, other.summary
    gain = two.step_seconds / mine.step_seconds - 1
    parts = {name: two.breakdown[name] - mine.breakdown[name] for name in mine.breakdown}
    most = max(parts, key=lambda name: parts[name])
    words = {"recompute": "recomputing", "bubble": "the pipeline's bubble"} | {f"{a} exposed": f"waiting for {a}" for a in AXES}
    return f"{percent(gain)} faster than {other.name}, which loses {seconds(parts[most])} more by {words.get(most, most)}"
