"""Long lists of numbers, written in runs."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.plan.plan import Plan
from strategies.plan.repetitions import SHORT, in_runs, spelt_out
from strategies.planner.arguments import arguments_of
from strategies.read_job import read_job
from topologies.reading import UserError


@pytest.mark.parametrize(
    ("written", "numbers"),
    [([7, "3x8", 7], (7, 8, 8, 8, 7)), (["2 × 3"], (3, 3)), (["2*0", 4], (0, 0, 4)), ([5], (5,))],
)
def test_runs_are_numbers(written: list[object], numbers: tuple[int, ...]) -> None:
    assert Plan.model_validate({"layers_per_stage": written}).layers_per_stage == numbers


@given(st.lists(st.sampled_from([0, 7, 8]), min_size=1, max_size=40))
def test_what_is_written_is_read(numbers: list[int]) -> None:
    written = in_runs(numbers)
    assert spelt_out(written, 100) == numbers
    assert len(numbers) > SHORT or written == numbers


def test_many_stages_are_pasted_in_one_line() -> None:
    given = {"model": "gpt3-175b", "cluster": "dgx-h100", "nodes": 4}
    job = read_job(**given, plan={"pp": 32, "global_batch": 64})
    other = read_job(**given, plan={"pp": 32, "global_batch": 64, "layers_per_stage": [4, *[3] * 29, 3, 2]})
    text = arguments_of(job, other)
    assert text == "--set 'plan.layers_per_stage=[4, 30x3, 2]'"
    again = read_job(overrides=shlex.split(text)[1::2], **given, plan={"pp": 32, "global_batch": 64})
    assert again.hash == other.hash


@pytest.mark.parametrize("run", ["9999999x1", "2x", "x3", "2y3"])
def test_what_is_no_run_is_refused(run: str) -> None:
    with pytest.raises(UserError, match="layers_per_stage"):
        read_job(model="gpt3-175b", cluster="dgx-h100", plan={"pp": 2, "layers_per_stage": [run]})
