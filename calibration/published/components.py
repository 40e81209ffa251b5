"""What a published step consists of, where rows differ in their layers and microbatches only: errors of parts, not of sums.

Without a pipeline a step of L layers and m microbatches takes

    m · (L · layer + rest of a microbatch) + L · once per layer + once

where the rest of a microbatch is embedding, head and loss, and what happens once is the reduction of gradients and the update.
Four rows or more, of two numbers of each at least, tell the four apart: least squares, of published and of predicted steps alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from calibration.published import DEFAULT, Row
from calibration.published.comparison import Compared

PARTS = ("layer", "rest of a microbatch", "once per layer", "once")


@dataclass(frozen=True)
class Components:
    """Seconds of PARTS by what was published and by prediction. name: what the rows have in common."""

    source: str
    name: str
    rows: int
    published: tuple[float, ...]
    predicted: tuple[float, ...]

    def errors(self) -> dict[str, float]:
        """Predicted over published, minus 1, of the parts that take time."""
        pairs = zip(PARTS, self.published, self.predicted, strict=True)
        return {part: predicted / measured - 1 for part, measured, predicted in pairs if measured > 0}


def components(rows: Iterable[tuple[Row, Compared]]) -> Iterator[Components]:
    """Of each set of rows that can be told apart, in the rows' order."""
    sets: dict[tuple[str, str], list[tuple[float, float, float, float]]] = {}
    for row, compared in rows:
        if compared.step is None or compared.predicted_step is None:
            continue
        job = row.job()
        plan = job.resolve()
        if plan.pp == 1:
            point = job.model.layers, plan.microbatches, compared.step, compared.predicted_step
            sets.setdefault((row.group, _common(row)), []).append(point)
    for (source, name), points in sets.items():
        layers, microbatches, *steps = np.array(points).T
        terms = np.stack([layers * microbatches, microbatches, layers, np.ones(len(points))], axis=1)
        if np.linalg.matrix_rank(terms) == len(PARTS):
            published, predicted = (tuple(np.linalg.lstsq(terms, step)[0].tolist()) for step in steps)
            yield Components(source, name, len(points), published, predicted)


def _common(row: Row) -> str:
    """All that is said of a row besides layers and batch."""
    model = {name: value for name, value in row.fields["model"].items() if name != "layers"}
    plan = {name: value for name, value in row.fields["plan"].items() if name not in ("global_batch", "accumulation")}
    fields = {"GPUs": row.gpus, **model, **plan}
    if row.machine != DEFAULT:
        fields["machine"] = row.machine
    if row.model not in (row.group, DEFAULT):
        fields["model"] = row.model
    return " ".join(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in fields.items())
