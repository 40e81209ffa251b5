"""What is done and what would be lost: steps of 10 s, a checkpoint every tenth that takes a while to be complete."""

from __future__ import annotations

import pytest

from sim.runs import ledger as causes
from sim.runs.ledger import Ledger
from sim.runs.progress import Progress
from sim.runs.spec import Pace, RunSpec, Saving

PACE = Pace(10.0, 1.0)
STORAGE = Saving("storage", 10, flush=100.0, restore=50.0)
MEMORY = Saving("memory", 5, flush=1.0, restore=5.0, copies=2)


def trained(seconds: float, now: float, *savings: Saving) -> Progress:
    """After so many seconds of training without a pause, which ended `now`."""
    spec = RunSpec(step=10.0, work=1000.0, nodes=4, gpus_per_node=8, steps=100, savings=savings)
    progress = Progress(spec, Ledger(spec.gpus))
    segment, _, _ = progress.ahead(PACE, 1.0)
    progress.stop(segment, PACE, seconds, now)
    return progress


def test_steps_that_are_done_and_the_one_that_is_lost() -> None:
    progress = trained(153.0, 2153.0)
    assert (progress.step, progress.whole, progress.remaining) == (15, 15.0, 85.0)
    assert progress.ledger.entries[causes.PRODUCTIVE] == 32 * 150.0
    assert progress.ledger.entries[causes.WASTED] == 32 * 3.0


@pytest.mark.parametrize(("until", "step", "place"), [(2199.0, 0, None), (2200.0, 10, 0)])
def test_a_checkpoint_counts_once_it_is_complete(until: float, step: int, place: int | None) -> None:
    """Training began at 2000 s; the save after 100 s is complete at 2200 s, unless the processes have ended before."""
    progress = trained(153.0, 2153.0, STORAGE)
    assert progress.flushing == [(0, 10, 2200.0)]
    assert progress.roll_back(1, False, until) == place
    assert (progress.step, progress.whole, progress.flushing) == (step, float(step), [])
    assert progress.ledger.entries[causes.WASTED] == 32 * (3.0 + 10.0 * (15 - step))


def test_of_two_that_are_as_new_the_one_that_is_read_sooner_is_taken() -> None:
    progress = trained(250.0, 250.0, STORAGE, MEMORY)
    assert progress.durable == [10, 20]  # the save of step 20 is complete in storage at 300 s, that of step 25 in memory at 251 s
    assert progress.roll_back(1, False, 300.0) == 1
    assert progress.step == 25
    both = trained(103.0, 103.0, Saving("storage", 10, flush=1.0, restore=50.0), MEMORY)
    assert (both.durable, both.roll_back(1, False, 103.0), both.step) == ([10, 10], 1, 10)


def test_memory_is_lost_with_as_many_nodes_as_have_a_copy() -> None:
    progress = trained(250.0, 250.0, STORAGE, MEMORY)
    assert progress.roll_back(2, False, 250.0) == 0
    assert (progress.step, progress.durable) == (10, [10, 0])


def test_a_warning_leaves_time_for_a_last_checkpoint_in_the_safest_place() -> None:
    progress = trained(158.0, 158.0, MEMORY, STORAGE)
    assert progress.roll_back(4, True, 158.0) == 1
    assert (progress.step, progress.whole) == (15, 15.0)
