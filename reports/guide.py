"""The pages of docs/ about strategies: every example played, with its picture, and which parts combine, found by trying.

`python -m reports.guide` (in `make docs`) writes them.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reports.figures.gantt import gantt
from reports.figures.staleness import staleness
from reports.formatting import digits, gigabytes, percent, seconds
from sim.analysis.summary import Summary, summarise
from sim.timeline import Timeline
from strategies.data_parallel import hooks
from strategies.job import Job
from strategies.lowering.lower import lower
from strategies.lowering.parameter_servers import Answer, parameter_servers
from strategies.predict import prices_of, simulate
from strategies.read_job import read_job
from strategies.schedules import schedules
from topologies.documents.writing import write_whole
from topologies.reading import UserError

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
GROUPS = {
    "data_parallel": "Data parallel hooks",
    "schedules": "Pipeline schedules",
    "layers": "Inside a layer",
    "hybrids": "All together",
}


class Example(NamedTuple):
    """A job with the paragraph that its file begins with."""

    path: Path
    title: str
    text: str
    job: Job


def example(path: Path) -> Example:
    """The first line of a file's leading comment is its title, the rest a paragraph. Raises UserError without one."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].strip())
    if not lines or not lines[0]:
        raise UserError(f"{path}: an example begins with a comment: a title, and a paragraph about it")
    return Example(path, lines[0], " ".join(filter(None, lines[1:])), read_job(path))


def examples(group: str) -> list[Example]:
    """Examples of a group, by name."""
    return [example(path) for path in sorted((EXAMPLES / group).glob("*.yaml"))]


def write_guide(folder: Path) -> list[Path]:
    """Write strategies.md with its pictures, and combinations.md; returns the paths."""
    pictures = folder / "strategies"
    pictures.mkdir(parents=True, exist_ok=True)
    parts = ["# Strategies, one by one\n", _INTRODUCTION]
    written = []
    for group, heading in GROUPS.items():
        parts.append(f"\n## {heading}\n")
        for shown in examples(group):
            timeline = simulate(shown.job)
            written.append(gantt(timeline, pictures / f"{shown.path.stem}.png"))
            parts.append(_entry(shown, timeline, summarise(timeline)))
    parts.append("\n## Parameter servers\n")
    for shown in examples("servers"):
        served = functools.partial(parameter_servers, shown.job, prices_of(shown.job), 8, steps=50, jitter=0.2, seed=0)
        answers = {name: served(staleness=name) for name in ("sync", "1", "async")}
        written.append(staleness(answers, pictures / f"{shown.path.stem}.png"))
        parts.append(_picture(shown, f"8 servers, 50 steps: {_served(answers)}"))
    for name, text in (("strategies.md", "\n".join(parts)), ("combinations.md", combinations())):
        write_whole(folder / name, text)
        written.append(folder / name)
    return written


_INTRODUCTION = """Each example can be run: `shardyard simulate examples/…`. Pictures show one step: a row per pipeline rank; the
height of a colour in a pass is its share of the pass's time; strips below are transfers. Which parts combine:
[combinations.md](combinations.md). This page is made by `make docs`.
"""


def _entry(shown: Example, timeline: Timeline, summary: Summary) -> str:
    where = f"{shown.job.model.name} on {shown.job.cluster.nodes} × {shown.job.cluster.name}"
    moved = ", ".join(f"{axis} {digits(volume.psi)} Ψ" for axis, volume in summary.volume.items()) or "nothing"
    peak = f"{gigabytes(summary.worst.peak)} of {gigabytes(summary.memory_capacity)} GB"
    facts = [
        ("step", seconds(summary.step_seconds)),
        ("MFU", percent(summary.mfu)),
        ("bubble", percent(summary.bubble)),
        ("exposed communication", percent(summary.exposed)),
        ("peak memory", peak + ("" if summary.fits else ": does not fit")),
        ("sent by a rank", moved),
    ]
    return _picture(shown, f"{where}: " + "; ".join(f"{name} {value}" for name, value in facts))


def _picture(shown: Example, facts: str) -> str:
    file = shown.path.relative_to(ROOT).as_posix()
    return f"\n### {shown.title}\n\n{shown.text}\n\n![{shown.title}](strategies/{shown.path.stem}.png)\n\n`{file}`: {facts}.\n"


def _served(answers: Mapping[str, Answer]) -> str:
    """Throughput and staleness of each."""
    each = (
        f"{name} {digits(answer.tokens_per_second / 1e3)} k tokens/s, {digits(answer.played.staleness.mean)} updates missed"
        for name, answer in answers.items()
    )
    return "; ".join(each)


# -- what combines -----------------------------------------------------------------------------------------------------------

_MODEL: dict[str, Any] = dict(name="dense", hidden=64, layers=16, heads=8, vocabulary=128, context=256, tied=False)
_MIXTURE = {**_MODEL, "name": "mixture", "experts": {"experts": 8, "chosen": 2, "ffn": 64}}

WITHIN: dict[str, dict[str, Any]] = {  # what changes the work of a layer
    "tp": dict(tp=2),
    "tp + sp": dict(tp=2, sequence_parallel=True),
    "tp in pieces": dict(tp=2, sequence_parallel=True, overlap_tp="pieces"),
    "ring attention": dict(cp=2),
    "Ulysses": dict(cp=2, cp_method="ulysses"),
    "ep": dict(ep=2),
    "sync norms": dict(sync_norm=True),
    "selective": dict(recompute="selective"),
    "full recompute": dict(recompute="full"),
}
LOCAL = dict(local_steps=4)


def hook_plans() -> dict[str, dict[str, Any]]:
    """A plan of every data parallel hook."""
    plans = {
        name: {"data_parallel": name, "gradients": "fp32", **(LOCAL if hooks[name].local else {})} for name in hooks
    }  # in fp32, which compression needs
    plans["zero3"]["gradients"] = "same"
    offload = dict(data_parallel="zero2", offload={"optimizer": "cpu"})
    return plans | {
        "hsdp": plans["zero3"] | {"shard": 2, "dp": 4},
        "zero++": plans["zero3"] | {"deepspeed": {"zero_quantized_weights": True, "zero_quantized_gradients": True}},
        "zero-offload": offload,
    }


def schedule_plans() -> dict[str, dict[str, Any]]:
    """A plan of every schedule: 4 ranks, 8 microbatches."""
    return {name: dict(pp=4, schedule=name, accumulation=8) for name in schedules if not name.endswith(".csv")}


def combined(*plans: Mapping[str, Any]) -> str:
    """Why these parts do not combine; empty when they do."""
    plan: dict[str, Any] = {}
    for part in plans:
        plan |= part
    gpus = plan.get("dp", 2) * plan.get("tp", 1) * plan.get("cp", 1) * plan.get("pp", 1)
    nodes = max(1, gpus // 8)
    cluster = {"based_on": "dgx-h100", "node": {"gpus": min(8, gpus)}}
    try:
        job = read_job(model=_MIXTURE if "ep" in plan else _MODEL, cluster=cluster, nodes=nodes, plan=plan)
        lower(job.model, job.resolve())
    except UserError as error:
        return re.sub(r"(schedule|data_parallel)=[\w-]+", r"\1=…", str(error).removeprefix("job: ").removeprefix("plan: "))
    return ""


def combinations() -> str:
    """The tables of docs/combinations.md."""
    reasons: dict[str, int] = {}
    tables = [
        ("Pipeline schedules with data parallel hooks", schedule_plans(), hook_plans()),
        ("Data parallel hooks with the work of layers", hook_plans(), WITHIN),
        ("Pipeline schedules with the work of layers", schedule_plans(), WITHIN),
        ("The work of layers with itself", WITHIN, WITHIN),
    ]
    legend = (
        "✓ means that the step can be simulated; a number is the reason why not, below. Everything has dp = 2 and a small model."
    )
    parts = [f"# What combines with what\n\nTried by `make docs`: {legend}\n"]
    for title, rows, columns in tables:
        parts += [f"\n## {title}\n", *_table(rows, columns, reasons)]
    parts.append("\n## Reasons\n")
    return "\n".join([*parts, *(f"{number}. {reason}" for reason, number in reasons.items()), ""])


def _table(rows: Mapping[str, Any], columns: Mapping[str, Any], reasons: dict[str, int]) -> Iterator[str]:
    yield f"| | {' | '.join(columns)} |"
    yield f"|---|{':-:|' * len(columns)}"
    for row, mine in rows.items():
        cells = []
        for column, other in columns.items():
            clash = any(mine[field] != other[field] for field in mine.keys() & other.keys())
            reason = "" if row == column else "two values of one field" if clash else combined(mine, other)
            cells.append("·" if row == column else str(reasons.setdefault(reason, len(reasons) + 1)) if reason else "✓")
        yield f"| {row} | {' | '.join(cells)} |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in write_guide(ROOT / "docs"):
        print(f"wrote {path.relative_to(ROOT)}")
