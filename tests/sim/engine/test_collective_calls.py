"""The host's time for the call of a collective: layers bound by launches get slower with tensor parallelism, others do not."""

from __future__ import annotations

import pytest

from shardyard import read_job, simulate
from sim.pricing.shipped import load_profile

SMALL = {"hidden": 512, "layers": 8, "heads": 8, "vocabulary": 8192, "context": 1024, "name": "small"}
LARGE = {"hidden": 8192, "layers": 4, "heads": 64, "vocabulary": 8192, "context": 1024, "name": "large"}


def seconds(model: dict[str, object], tp: int, call: float | None = None) -> float:
    """Of a step of one microbatch on 8 A100. call: seconds in place of the profile's."""
    plan = {"tp": tp, "microbatch": 1, "sequence": 1024, "global_batch": 8 // tp}
    job = read_job({"model": model, "plan": plan, "cluster": "dgx-a100", "nodes": 1})
    profile = load_profile("a100")
    return simulate(job, profile=profile if call is None else profile.model_copy(update={"collective_call": call})).step


def test_a_layer_bound_by_launches_gets_slower_by_its_calls() -> None:
    """Four all-reduces per layer (two forward, two backward; Shoeybi et al. 2019), each 45 instead of 38 us of the host."""
    alone = seconds(SMALL, 1)
    assert min(seconds(SMALL, tp) for tp in (2, 4, 8)) > 1.03 * alone
    more = seconds(SMALL, 8, 1038e-6) - seconds(SMALL, 8, 38e-6)
    assert more == pytest.approx(1e-3 * 4 * SMALL["layers"], rel=0.25)  # and of the embedding, loss and gradients


def test_a_large_layer_hides_them() -> None:
    assert seconds(LARGE, 8, 44.8e-6) == pytest.approx(seconds(LARGE, 8, 38e-6), rel=2e-3)


def test_what_compiled_code_or_a_cpu_calls() -> None:
    a100, cpu = load_profile("a100"), load_profile("cpu-gloo")
    assert a100.calling(True) == pytest.approx(44.8e-6 - a100.eager)
    assert a100.calling(False) == 0  # a launch as others
    assert cpu.calling(True) == 0  # its collectives were timed with their calls
