"""What `shardyard advise` prints."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.words import count, gigabytes, percent, plural, seconds, step_of
from sim.timeline import AXES
from strategies.advise import Advice, Candidate
from strategies.job import Job
from topologies.reading import as_argument

SHOWN = 12


def advice(found: Advice, job: Job) -> RenderableType:
    """Questions, candidates and why the first one wins."""
    table = Table(box=None, pad_edge=False)
    for name in ("way to train", "step", "tokens/s/GPU", "MFU", "peak memory", "exposed", "bubble", "recompute"):
        table.add_column(name, justify="left" if name == "way to train" else "right")
    for one in found.candidates[:SHOWN]:
        summary = one.summary
        again = percent(summary.breakdown["recompute"] / summary.step_seconds)
        peak = f"{gigabytes(summary.worst.peak)} GB" if summary.fits else f"does not fit: {gigabytes(summary.worst.peak)} GB"
        rates = (seconds(summary.step_seconds), count(summary.tokens_per_second_per_gpu), percent(summary.mfu))
        table.add_row(one.name, *rates, peak, percent(summary.exposed), percent(summary.bubble), again)
    more = len(found.candidates) - SHOWN
    rest = [Text(f"… and {more} slower or too big", "dim")] if more > 0 else []
    lines = [Text(f"{question}? {answer}") for question, answer in found.questions]
    return Group(Text(verdict(found, job), "bold"), "", *lines, "", table, *rest)


def verdict(found: Advice, job: Job) -> str:
    """The winner, how to ask for it, and what it saves against the next one."""
    best, cluster = found.best, job.cluster
    batch = step_of(found.candidates[0].changes["global_batch"], job.plan.sequence_of(job.model))
    what = f"{job.model.name} on {cluster.nodes} × {cluster.name} ({plural(cluster.gpus, 'GPU')}), {batch}"
    if best is None:
        return f"{what}: none of the usual ways fits; more GPUs, a shorter sequence or a smaller batch are needed"
    settings = " ".join("--set " + as_argument(f"plan.{name}", value) for name, value in best.changes.items())
    why = f"; {_why(best, found.candidates[1])}" if len(found.candidates) > 1 and found.candidates[1].summary.fits else ""
    return f"{what}: {best.name}{why} ({settings})"


def _why(best: Candidate, other: Candidate) -> str:
    """Where the next one loses its time."""
    one, two = best.summary, other.summary
    gain = two.step_seconds / one.step_seconds - 1
    parts = {name: two.breakdown[name] - one.breakdown[name] for name in one.breakdown}
    most = max(parts, key=lambda name: parts[name])
    words = {"recompute": "recomputing", "bubble": "the pipeline's bubble"} | {f"{a} exposed": f"waiting for {a}" for a in AXES}
    return f"{percent(gain)} faster than {other.name}, which loses {seconds(parts[most])} more by {words.get(most, most)}"
