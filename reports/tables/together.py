"""Jobs side by side: a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.formatting import plural, seconds, signed
from strategies.together import Neighbour

if TYPE_CHECKING:
    from rich.console import RenderableType


def table(cluster: str, jobs: Sequence[Neighbour]) -> RenderableType:
    """Each job's step alone and beside the others, and which kinds of links they share."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("job", "on", "GPUs", "alone", "beside the others", "", "steps", "shared links"):
        rows.add_column(column, justify="left" if column in ("job", "on", "shared links") else "right", no_wrap=True)
    for job in jobs:
        beside = seconds(job.together), signed(job.slowdown - 1), str(len(job.steps))
        rows.add_row(job.name, job.where, str(job.gpus), seconds(job.alone), *beside, ", ".join(job.kinds) or "none")
    worst = max(jobs, key=lambda job: job.slowdown)
    said = f"{plural(len(jobs), 'job')} on {cluster}: "
    if signed(worst.slowdown - 1) != signed(0.0):
        said += f"{worst.name} takes {signed(worst.slowdown - 1)} longer beside the others"
    else:
        said += "none slows another down"
    kinds = {"GPUs of one kind alike" if job.ideal else "expected ones, of GPUs that are not quite alike" for job in jobs}
    how = kinds.pop() if len(kinds) == 1 else "expected ones, where GPUs of one kind are not taken as alike"
    return Group(
        Text(said, "bold"), rows, f"of steps that follow each other without a pause, all jobs from the same moment on; {how}"
    )
