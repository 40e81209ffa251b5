"""Parts of published steps, told apart by rows that differ in layers and microbatches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from calibration.published import Row, published
from calibration.published.comparison import Compared, compare
from calibration.published.components import PARTS, components
from reports.tables.components import every_set, overview

LAYER, REST, PER_LAYER, ONCE = 3e-3, 5e-3, 2e-4, 1e-3


def rows() -> list[Row]:
    """Of 12 and 24 layers, two numbers of microbatches each, on two GPUs with tensor parallelism."""
    every = [row for row in published(("vtrain-2024",)) if row.gpus == 2 and row.fields["plan"]["tp"] == 2]
    return [row for row in every if row.fields["plan"]["microbatch"] == 2 and row.fields["plan"]["global_batch"] in (8, 16)]


def made_up(row: Row, faster: float = 1.0) -> Compared:
    """A row whose step is the sum of known parts, and is predicted with a layer that takes `faster` of its time."""
    job = row.job()
    layers, microbatches = job.model.layers, job.resolve().microbatches
    rest = microbatches * REST + layers * PER_LAYER + ONCE
    step, predicted = (microbatches * layers * each + rest for each in (LAYER, faster * LAYER))
    return Compared(row.name, row.group, "", "", "", step=step, predicted_step=predicted)


def test_known_parts_are_found_again() -> None:
    (found,) = components((row, made_up(row, 0.9)) for row in rows())
    assert found.rows == 4
    assert found.published == pytest.approx((LAYER, REST, PER_LAYER, ONCE))
    assert found.errors() == pytest.approx(dict.fromkeys(PARTS, 0.0) | {"layer": -0.1}, abs=1e-9)


def test_parts_of_what_was_published_and_predicted_add_up() -> None:
    """A node's published times are straight lines over microbatches; predicted ones are too where every layer is alike."""
    asked = rows()
    (found,) = components((row, compare(row)) for row in asked)
    for row in asked:
        job = row.job()
        layers, microbatches = job.model.layers, job.resolve().microbatches
        terms = (layers * microbatches, microbatches, layers, 1)
        for parts, step in ((found.published, row.measured["step"]), (found.predicted, compare(row).predicted_step)):
            assert sum(part * term for part, term in zip(parts, terms, strict=True)) == pytest.approx(step, rel=1e-6)
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(overview([found]), every_set([found]))
    text = console.export_text()
    assert "once per layer" in text
    assert "microbatch=2" in text


def test_what_cannot_be_told_apart_is_left_out() -> None:
    """Of one number of layers only, of stages, and of rows that are not published or not predicted."""
    asked = rows()
    assert not list(components((row, made_up(row)) for row in asked if row.fields["model"]["layers"] == 12))
    piped = [row for row in published(("vtrain-2024",)) if row.gpus == 2 and row.fields["plan"]["pp"] == 2][:8]
    assert not list(components((row, made_up(row)) for row in piped))
    assert not list(components((row, replace(made_up(row), predicted_step=None)) for row in asked))
