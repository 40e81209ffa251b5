"""What parameter servers do to a job, on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.formatting import bar, count, counted, digits, percent, plural, seconds
from strategies.lowering.parameter_servers import Answer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sim.analysis.summary import Summary

ROWS = 12  # of the histogram


def overview(answer: Answer, name: str, reduced: Summary | None = None) -> RenderableType:
    """Throughput, who waits for whom, how stale gradients are, and all-reduce on the workers' GPUs (`reduced`)."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for label, value in labelled(answer):
        table.add_row(label, value)
    if reduced is not None:
        instead = (
            f"{count(reduced.tokens_per_second)} {counted(answer.sequence)}/s on the workers' {plural(reduced.gpus, 'GPU')}, "
            "no servers, no staleness"
        )
        table.add_row("by all-reduce instead", instead)
    heads = Text(settings(answer, name), "bold"), Text("updates missed by a gradient", "bold")
    return Group(heads[0], table, heads[1], _histogram(answer.played.staleness.histogram))


def asynchrony(answer: Answer) -> str:
    """Who waits for whom."""
    return {0: "synchronous", None: "asynchronous"}.get(answer.bound, f"at most {answer.bound} steps ahead")


def settings(answer: Answer, name: str) -> str:
    """What was asked, in a line."""
    servers = plural(answer.servers, "server")
    return f"{name}: {answer.setting.workers} workers, {servers}, {asynchrony(answer)}; {answer.steps} steps each"


def labelled(answer: Answer) -> list[tuple[str, str]]:
    """(label, value) of what matters."""
    played, stale = answer.played, answer.played.staleness
    per_second = f"{digits(played.gradients_per_second)} of at most {digits(answer.most)}"
    return [
        (f"{counted(answer.sequence)}/s", count(answer.tokens_per_second)),
        ("gradients/s, all workers", f"{per_second} that the servers let through"),
        ("a worker's step", f"{seconds(played.seconds / answer.steps)}, of which compute {percent(played.computing)}"),
        ("links into / out of servers", f"{percent(played.pushing)} / {percent(played.pulling)} of capacity"),
        ("servers updating", f"{percent(played.updating)} of the time"),
        ("staleness of gradients", f"mean {digits(stale.mean)}, p50 {stale.p50:.0f}, p99 {stale.p99:.0f}, most {stale.largest}"),
        ("steps ahead of the slowest", f"at most {stale.ahead}"),
        *_tables(answer),
        ("memory of a worker / server", f"{_memory(answer)}"),
    ]


def _tables(answer: Answer) -> list[tuple[str, str]]:
    """What of a worker's step is of embedding tables."""
    if answer.embeddings is None or answer.sparse is None:
        return []
    rows, sparse = sum(table.rows for table in answer.embeddings.tables), answer.sparse
    tables = f"{plural(len(answer.embeddings.tables), 'table')}, {count(rows)} rows, {digits(answer.embeddings.held / 1e9)} GB"
    moved = f"{digits(sparse.pushed / 1e6)} MB pushed, {digits(sparse.pulled / 1e6)} MB pulled"
    return [("embeddings on the servers", tables), ("of a worker's step", f"{count(sparse.rows)} rows: {moved}")]


def _memory(answer: Answer) -> str:
    sizes = " / ".join(digits(size / 1e9) for size in (answer.worker_memory, answer.server_memory))
    return f"{sizes} of {digits(answer.memory_capacity / 1e9)} GB{'' if answer.fits else ': does not fit'}"


def _histogram(counts: dict[int, int]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    first, total = min(counts), sum(counts.values())
    width = -(-(max(counts) - first + 1) // ROWS)
    for low in range(first, max(counts) + 1, width):
        share = sum(counts.get(value, 0) for value in range(low, low + width)) / total
        table.add_row(str(low) if width == 1 else f"{low}–{low + width - 1}", percent(share), bar(share, 24))
    return table
