"""What people see of plans that PyTorch carried out: prediction beside measurement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.formatting import digits, percent, seconds, signed, size
from reports.terminal import progress_bar

if TYPE_CHECKING:
    from calibration.execute.servers import Served
    from calibration.launch.place import Hear
    from calibration.validate import Row, Validated

CLOSE = 0.10  # of the measurement
NOTES = 4  # about prices, on one screen
SAID = {"layer": "a layer's forward pass", "all_reduce": "an all-reduce of 16 MiB"}  # of calibration.drift
NOTABLE = 0.05  # of the time that a process waited for a core


def execution(validated: Validated) -> RenderableType:
    """One screen of one job: is it right, how long, what was sent, what was held; predictions beside."""
    run, compared = validated.execution, validated.execution.compared
    title = f"{validated.job.name} on {run.ranks} processes of {run.machine['machine']}"
    if run.times:
        title += f": {seconds(run.times['step'])} per step"
    gradient = f"gradients {compared['gradient']:.1g}, " if compared["gradient"] is not None else ""
    statistics = f", running statistics {compared['buffers']:.1g}" if compared["buffers"] is not None else ""
    loss = f"{compared['losses'][0]:.4f} → {compared['losses'][-1]:.4f}"
    same = (
        f"as one process: losses within {compared['loss']:.1g}, {gradient}updates {compared['update']:.1g}{statistics} "
        f"(allowed {compared['tolerance']:g}); loss {loss} in {len(compared['losses'])} steps"
    )
    sent = ", ".join(
        f"{entry['axis']} {entry['operation']} × {entry['count']} ({size(entry['sent'])})" for entry in run.operations
    )
    lines = [Text(_timing(run.times))] if run.times else []
    lines += [Text(f"sent by rank 0: {sent}")] if sent else []
    if run.wire and run.wire != run.volume:
        wire = ", ".join(f"{axis} {size(value)}" for axis, value in run.wire.items())
        lines.append(Text(f"on the wire, by gloo's algorithms: {wire}"))
    lines += _notes(run.notes, validated.summary.notes)
    provenance = (
        f"{run.machine['versions']} · {run.machine['date']} · profile {validated.summary.profile} · hash {validated.job.hash}"
    )
    return Group(Text(title, "bold"), Text(), _table([validated]), Text(), Text(same), *lines, Text(provenance, "dim"))


@contextmanager
def progress(executions: int, quiet: bool, keep: dict[str, Validated]) -> Iterator[Hear]:
    """A bar with the time that is left, moved by every execution that is done, which goes to `keep` by its job's name; on
    stderr, where that is a terminal and not `quiet`.
    """
    with progress_bar(quiet) as bar:
        task = bar.add_task("executing", total=executions)

        def hear(message: dict[str, Any]) -> None:
            keep[message["job"]] = message["validated"]
            bar.update(task, completed=message["done"], description=f"done: {message['job']}")

        yield hear


def _notes(first: Iterable[str], others: Iterable[str]) -> list[Text]:
    """Each once: of the execution all, of prices (what they were not measured for) not more than a screen takes."""
    mine = list(dict.fromkeys(first))
    further = [note for note in dict.fromkeys(others) if note not in mine]
    left = [f"… and {len(further) - NOTES} more notes about prices"] if len(further) > NOTES else []
    return [*(Text(f"note: {note}", "yellow") for note in [*mine, *further[:NOTES]]), *map(Text, left)]


def _timing(times: Mapping[str, Any]) -> str:
    """How the step was timed."""
    blocks, number, disturbed = len(times["blocks"]), times["steps_per_block"], times["disturbed"]
    what = f"{disturbed} more disturbed" if times["kept"] else "all of them disturbed: times are too long"
    load = f"(foreign load: median {percent(times['foreign'])} of the machine)"
    counted = f"{blocks} block{'s' * (blocks != 1)} of {number} step{'s' * (number != 1)}"
    return f"{counted}, spread ±{percent(times['spread'])}, {what} {load}"


def served(answer: Served) -> RenderableType:
    """Training with parameter servers: how fast, how old its parameters were, what was sent, and that it is right."""
    how = {0: "synchronous", None: "asynchronous"}.get(answer.bound, f"at most {answer.bound} steps ahead")
    rate = answer.steps * answer.workers / answer.seconds
    compared = answer.compared
    return Group(
        Text(f"{answer.name}: {answer.workers} workers and {answer.servers} servers, {how}: {digits(rate)} gradients/s", "bold"),
        Text(
            f"{answer.steps} steps of every worker in {seconds(answer.seconds)}; loss {compared['losses'][0]:.4f} → "
            f"{compared['losses'][-1]:.4f}"
        ),
        Text(
            f"updates between a gradient's parameters and its own: {digits(answer.mean_age)} in the mean, "
            f"{answer.most_age} at most"
        ),
        Text(f"sent in a step: {size(answer.sent_by_worker)} by a worker, {size(answer.sent_by_server)} by a server"),
        Text(
            f"as one process that replays the order of gradients: losses within {compared['loss']:.1g}, updates "
            f"{compared['update']:.1g} (allowed {compared['tolerance']:g})"
        ),
    )


def validation(every: Sequence[Validated]) -> RenderableType:
    """All jobs: a row per number, then the errors of step times."""
    from statistics import median

    off = sorted((abs(row.error), row.job) for validated in every for row in validated.rows if row.what == "step")
    volumes = [row for validated in every for row in validated.rows if row.what == "volume"]
    memory = [abs(row.error) for validated in every for row in validated.rows if row.what == "memory"]
    equal = sum(abs(row.predicted - row.measured) < 1 for row in volumes)
    lines = [
        f"volume: {equal} of {len(volumes)} equal to the byte",
        f"memory: median error {percent(median(memory))}, worst {percent(max(memory))}",
    ]
    if off:
        steps = f"median error {percent(median(error for error, _ in off))}, worst {percent(off[-1][0])} ({off[-1][1]})"
        lines.insert(0, f"step time: {steps}")
        lines += _drift(every)
        lines.append(f"worst step: {worst(every)}")
    apart = [
        (max(validated.launches) / min(validated.launches) - 1, validated.job.name)
        for validated in every
        if len(validated.launches) > 1
    ]
    if apart:
        middle, (most, name) = median(far for far, _ in apart), max(apart)
        times = max(len(validated.launches) for validated in every)
        lines.append(
            f"launches: {times} of each, of which the median counts; slowest over fastest +{percent(middle)} in the median, "
            f"+{percent(most)} at most ({name})"
        )
    notes = [note for validated in every for note in validated.execution.notes]
    disturbed = [validated.job.name for validated in every if validated.execution.times and not validated.execution.times["kept"]]
    if disturbed:
        notes.append(f"foreign load all the time, so that measured steps are too long: {', '.join(disturbed)}")
    prices = (note for validated in every for note in validated.summary.notes)
    return Group(_table(every), Text(), *map(Text, lines), *_notes(notes, prices))


def _drift(every: Sequence[Validated]) -> list[str]:
    """By how much this machine is slower than when it was calibrated, and the errors of steps without that."""
    from statistics import median

    left = [abs(validated.corrected.error) for validated in every if validated.corrected]
    if not left:
        return []
    names = dict.fromkeys(name for validated in every for name in validated.drift)
    each = {name: [validated.drift[name] for validated in every if name in validated.drift] for name in names}
    said = "; ".join(
        f"{SAID.get(name, name)} × {median(factors):.2f} ({min(factors):.2f} to {max(factors):.2f})"
        for name, factors in each.items()
    )
    return [
        f"this machine since its calibration, measured beside each job: {said}; with prices that have drifted so: "
        f"median error {percent(median(left))}, worst {percent(max(left))}"
    ]


def worst(every: Sequence[Validated]) -> str:
    """The worst step prediction in words: by how much, how much of it noise can be, and where the prediction spends the step."""
    timed = [(abs(row.error), row, validated) for validated in every for row in validated.rows if row.what == "step"]
    _, row, validated = max(timed, key=lambda entry: entry[0])
    times, summary = validated.execution.times or {}, validated.summary
    gap = abs(row.predicted - row.measured)
    sentence = f"{row.job} took {seconds(gap)} {'longer' if row.measured > row.predicted else 'less'} than predicted"
    causes = []
    if not times.get("kept"):
        causes.append(f"others took {percent(times.get('foreign', 0.0))} of the machine in every block")
    if times.get("waited", 0.0) > NOTABLE:
        causes.append(f"a process waited for a core for {percent(times['waited'])} of the time")
    if times.get("spread", 0.0) * row.measured > gap / 2:
        causes.append(f"blocks differ by ±{percent(times['spread'])}, most of the gap")
    parts = sorted(((share, name) for name, share in summary.breakdown.items() if share > 0), reverse=True)[:3]
    spent = ", ".join(f"{name} {seconds(share)}" for share, name in parts)
    outside = [note for note in summary.notes if "extrapolated" in note or "times the largest" in note]
    if outside:
        causes.append(f"prices beyond what was measured ({outside[0]})")
    why = (
        "; ".join(causes)
        or "nothing disturbed it: prices of its largest parts are off, or the framework does more than is simulated"
    )
    return f"{sentence}; {why}; predicted are {spent}"


def _table(every: Sequence[Validated]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    several = len(every) > 1
    drifts = any(validated.corrected for validated in every)
    for name in [*["job"] * several, "", "predicted", "measured", "error", *["without drift"] * drifts]:
        table.add_column(name, justify="right" if name not in ("", "job") else "left", header_style="dim", no_wrap=True)
    for validated in every:
        for number, row in enumerate(validated.rows):
            without = signed(validated.corrected.error) if validated.corrected and row.what == "step" else ""
            table.add_row(*[validated.job.name if not number else ""] * several, *_cells(row), *[without] * drifts)
    return table


def _cells(row: Row) -> tuple[str, str, str, Text]:
    show = seconds if row.what == "step" else size
    label = {"step": "step", "volume": f"sent along {row.of}", "memory": f"peak memory of stage {row.of}"}[row.what]
    exact = row.what == "volume" and abs(row.predicted - row.measured) < 1
    text = "equal" if exact else signed(row.error)
    return label, show(row.predicted), show(row.measured), Text(text, "green" if abs(row.error) <= CLOSE else "yellow")
