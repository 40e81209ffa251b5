"""DDP with 16-bit gradients on the way."""

from __future__ import annotations

import pytest

from sim.analysis.memory import ledger
from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.timeline import Timeline
from strategies.lowering.lower import lower
from topologies.reading import UserError


@pytest.fixture
def played(toy_job, toy_prices):
    def play(hook: str, gpus: int = 8, **plan) -> Timeline:
        job = toy_job(gpus, 1, data_parallel=hook, **{"precision": "fp32"} | plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())

    return play


@pytest.mark.parametrize("plan", [{}, {"bucket": "20 kB"}, {"precision": "bf16", "gradients": "fp32"}, {"overlap": False}])
def test_half_the_bytes(played, plan) -> None:
    """As many elements, 2Ψ·(n − 1)/n, of 2 bytes instead of 4."""
    whole, half = (summarise(played(hook, **plan)).volume["dp"] for hook in ("ddp", "ddp_fp16"))
    assert half.bytes == pytest.approx(whole.bytes / 2)
    assert half.elements == pytest.approx(whole.elements)
    assert half.psi == pytest.approx(2 * 7 / 8)


def test_time(played) -> None:
    """Without overlap: half of the all-reduce, and per parameter two passes over 4 + 2 bytes and one over 2 + 2, at 1 TB/s."""
    plain = {"overlap": False, "algorithm": "ring", "check_gradients": False, "average_in_collective": True}
    whole, half = (played(hook, **plain) for hook in ("ddp", "ddp_fp16"))
    psi = whole.program.parameters
    assert whole.step - half.step == pytest.approx(2 * 2 * psi * 7 / 8 / 1e9 - 16 * psi / 1e12)


def test_memory_comes_back(played) -> None:
    """The 16-bit copy of a bucket is given back with the reduction; nothing else is more than DDP's."""
    whole, half = (ledger(played(hook), 0).at_peak for hook in ("ddp", "ddp_fp16"))
    psi = played("ddp").program.parameters
    assert sum(whole.values()) <= sum(half.values()) <= sum(whole.values()) + 2 * psi


def test_accumulation_and_one_rank(played) -> None:
    once, thrice = (summarise(played("ddp_fp16", accumulation=count)).volume["dp"].bytes for count in (1, 3))
    assert once == thrice
    assert played("ddp_fp16", 1).step == played("ddp", 1).step


def test_refused(toy_job) -> None:
    with pytest.raises(UserError, match=r"they have 2 \(precision=bf16, gradients=same\)"):
        toy_job(8, 1, data_parallel="ddp_fp16").resolve()
