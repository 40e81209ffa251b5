"""What the terminal shows of one run: one line, one screen. rich leaves colours out by itself where none belong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.formatting import (
    KINDS,
    Job,
    bar,
    components,
    count,
    digits,
    filled,
    gigabytes,
    held,
    percent,
    plural,
    provenance,
    seconds,
    size,
    spread,
    stages,
    step_of,
    tokens_per_step,
    training,
    unit_of,
)
from reports.tables.fitting import FittingGrid
from sim.analysis.stage_memory import StageMemory
from sim.analysis.summary import Summary

LEAST = 0.0005  # of the step: less would show as 0.0 %
UNEVEN = 0.05  # of the step: from here on it is told what uneven stages cost
NOTES = 4  # notes on one screen; the page shows all


def verdict(summary: Summary, job: Job) -> str:
    """The answer in one line: how long, how fast, how well, whether it fits; if not, where, by how much, why, what to try."""
    worst, capacity = summary.worst, summary.memory_capacity
    plan = job.get("plan", {})
    batch = f", {step_of(plan['global_batch'], plan['sequence'])}" if plan.get("sequence") and plan.get("global_batch") else ""
    what = f"{job.get('model', 'model')} on {job.get('cluster', 'cluster')} ({plural(summary.gpus, 'GPU')}){batch}"
    speed = f"{seconds(summary.step_seconds)} per step, {count(summary.tokens_per_second)} {unit_of(job)}/s, MFU {mfu(summary)}"
    of = f"{gigabytes(worst.peak)} of {gigabytes(capacity)} GB"
    where = next((f" ({kind.gpu}, node {kind.node})" for kind in summary.gpu_kinds if kind.rank == worst.rank), "")
    if summary.fits:
        return f"{what}: {speed}, fits: {of} on stage {worst.stage}{where}"
    fixes = job.get("fixes", [])
    hopeless = "; no small change of the plan makes it fit, nor do more nodes" if "fixes" in job else ""
    hint = f"; fits with {', or '.join(fixes)}" if fixes else hopeless
    missing, reasons = lacking(summary), []
    if summary.offloaded and missing:
        reasons.append(f"node {summary.offloaded.node} is out of {' and '.join(missing)}")
    if worst.peak > capacity:
        most = sorted(((bytes_, kind) for kind, bytes_ in held(worst).items()), reverse=True)[:2]
        why = ", ".join(f"{kind} {gigabytes(bytes_)} GB" for bytes_, kind in most)
        reasons.insert(0, f"out of memory on stage {worst.stage}{where} by {size(worst.peak - capacity)}: {of}, mostly {why}")
    return f"{what}: {'; '.join(reasons)}{hint}; {speed} if it fitted"


def mfu(summary: Summary) -> str:
    """The model FLOPs utilisation, and of which peak."""
    return f"{percent(summary.mfu)} of the {summary.peak_dtype} peak"


def lacking(summary: Summary) -> list[str]:
    """What a node has too little of for what is offloaded to it."""
    node = summary.offloaded
    if node is None:
        return []
    places = (("host memory", node.memory, node.memory_capacity), ("NVMe", node.disk, node.disk_capacity))
    return [f"{name} by {size(used - has)}: {gigabytes(used)} of {gigabytes(has)} GB" for name, used, has in places if used > has]


def one_screen(summary: Summary, job: Job) -> RenderableType:
    """What people ask first, on at most 35 lines of 100 columns: answer, breakdown, volumes, memory, notes, provenance."""
    notes = [f"note: {note}" for note in summary.notes[:NOTES]]
    if len(summary.notes) > NOTES:
        notes.append(f"… and {plural(len(summary.notes) - NOTES, 'more note')}")
    middle = Table.grid(padding=(0, 2))
    middle.add_row(_breakdown(summary), _volumes(summary) if summary.volume else "")
    return Group(
        Text(verdict(summary, job), "bold green" if summary.fits else "bold red"),
        Text(),
        _headline(summary, job),
        Text(),
        middle,
        Text(),
        _memory(summary),
        Text(),
        *_offloaded(summary),
        *_hottest(summary),
        *(Text(note, "yellow") for note in notes),
        Text(provenance(summary, job), "dim"),
    )


def _offloaded(summary: Summary) -> list[Text]:
    """What a node holds outside of its GPUs, one line."""
    host = summary.offloaded
    if host is None:
        return []
    disks = f", NVMe {gigabytes(host.disk)} of {gigabytes(host.disk_capacity)} GB" if host.disk else ""
    memory = f"host memory {gigabytes(host.memory)} of {gigabytes(host.memory_capacity)} GB{disks}"
    return [Text(f"offloaded by the GPUs of node {host.node}: {memory}", "" if host.fits else "red"), Text("")]


def _hottest(summary: Summary) -> list[Text]:
    """Which links are busiest, one line."""
    loads = [f"{load.name} {percent(load.utilisation)}" for load in summary.links if load.utilisation >= 0.0005]
    return [Text(f"hottest links, of capacity over the step: {', '.join(loads[:3])}")] if loads else []


def headline(summary: Summary, job: Job) -> list[tuple[str, str]]:
    """(label, value) of the figures that come first, in the order in which people ask for them."""
    worst, unit = summary.worst, unit_of(job)
    return [
        _step(summary),
        (f"{unit}/s", count(summary.tokens_per_second)),
        (f"{unit}/s/GPU", count(summary.tokens_per_second_per_gpu)),
        ("MFU", percent(summary.mfu)),
        ("HFU", percent(summary.hfu)),
        ("peak memory", f"{gigabytes(worst.peak)} of {gigabytes(summary.memory_capacity)} GB"),
        ("exposed communication", percent(summary.exposed)),
        ("bubble", percent(summary.bubble)),
        (f"{unit} per step", count(tokens_per_step(summary))),
        *training(summary, job),
    ]


def _step(summary: Summary) -> tuple[str, str]:
    """The step, with its error bar where there is one."""
    step, bar = seconds(summary.step_seconds), summary.interval
    if bar is None:
        return "step", step
    return f"step ({100 * bar.level:.0f} % interval)", f"{step} ({spread(bar)})"


def _headline(summary: Summary, job: Job) -> RenderableType:
    """The headline in columns of label and value; the last, which may be long, on a line of their own."""
    every = headline(summary, job)
    short, long = every[:9], every[9:]
    grid = FittingGrid([(Text(name, "dim"), Text(text, "bold")) for name, text in short])
    return Group(grid, Text("    ").join(Text.assemble((f"{name}  ", "dim"), (text, "bold")) for name, text in long))


def _table(*columns: str, gap: int = 2) -> Table:
    """An airy table: the first column to the left, numbers to the right, a column without a name to the left."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number and column else "left", header_style="dim", no_wrap=True)
    return table


def _breakdown(summary: Summary) -> RenderableType:
    table = _table("component", "time", "of step", "")
    for name in components([summary.breakdown]):
        share = summary.breakdown[name] / summary.step_seconds
        if share >= LEAST:
            table.add_row(name, seconds(summary.breakdown[name]), percent(share), Text(bar(share, 24), "cyan"))
    return Group(Text("where the step goes (mean over ranks)", "bold"), table)


def _shown(summary: Summary) -> list[StageMemory]:
    """At most four stages: first, last, worst, and the one after the first."""
    every = stages(summary)
    numbers = sorted({every[0].stage, summary.worst.stage, every[-1].stage, every[min(1, len(every) - 1)].stage})
    return [entry for entry in every if entry.stage in numbers]


def _memory(summary: Summary) -> RenderableType:
    shown, capacity = _shown(summary), summary.memory_capacity
    used = [kind for kind in KINDS if any(held(entry)[kind] for entry in shown)]
    left = len(stages(summary)) - len(shown)
    more = f"; stages not shown hold no more than stage {summary.worst.stage}" if left else ""
    table = _table("stage", *used, "peak", "used", gap=1 if len(used) > 5 else 2)
    for entry in shown:
        style = "red" if filled(entry, summary) > 1 else ""
        sizes = (gigabytes(held(entry)[kind]) for kind in used)
        table.add_row(str(entry.stage), *sizes, gigabytes(entry.peak), f"{100 * filled(entry, summary):.0f} %", style=style)
    return Group(Text(f"peak memory of one GPU in GB, of {gigabytes(capacity)}{more}", "bold"), table)


def _volumes(summary: Summary) -> RenderableType:
    total = summary.total or {}
    table = _table("axis", "bytes", "elements", *(("all ranks", "elements") if total else ()))
    for axis, volume in summary.volume.items():
        shown = [volume, total[axis]] if total else [volume]
        table.add_row(axis, *(text for each in shown for text in (size(each.bytes), f"{digits(each.psi)} Ψ")))
    return Group(Text("sent by a rank in a step" + (", and by all" if total else ""), "bold"), table)


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dots in the names."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            result |= flatten(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
