"""Parts of activations between pipeline stages: what section 4.1 of Narayanan et al. 2021 (arXiv:2104.04473) says of them."""

from __future__ import annotations

import pytest

from sim.prices import Prices
from sim.run import run
from sim.timeline import Timeline
from strategies.job import Job
from strategies.lower import lower
from topologies.reading import UserError

MICROBATCHES = 6


def played(job: Job, prices: Prices) -> Timeline:
    return run(lower(job.model, job.resolve()), job.cluster.topology(), prices)


@pytest.mark.parametrize("tp", [2, 4])
def test_stages_send_a_part_and_gather_the_whole(toy_job, toy_prices, tp) -> None:
    """Between stages b·s·h/t goes instead of b·s·h; all-gathers among t ranks make it whole again."""
    plan = {"tp": tp, "pp": 2, "dp": 1, "accumulation": MICROBATCHES, "sequence": 32, "kernels": "apex", "overlap_tp": "none"}
    whole, parted = (played(toy_job(tp, 2, **plan, scatter_gather=wanted), toy_prices()).volumes()[0] for wanted in (False, True))
    model = toy_job(tp, 2, **plan).model
    activation = 32 * model.hidden * 2
    assert whole["pp"][0] - parted["pp"][0] == MICROBATCHES * activation * (tp - 1) / tp
    assert parted["tp"][0] - whole["tp"][0] == MICROBATCHES * activation * (tp - 1) / tp  # of gradients that come back


def test_it_pays_where_links_inside_a_node_are_fast(toy_job, toy_prices) -> None:
    """The same section: all ranks of a node would otherwise send the same over slow links between nodes."""
    model = {"hidden": 512, "heads": 8}
    plan = {"tp": 8, "pp": 2, "dp": 1, "accumulation": 8, "sequence": 32, "kernels": "apex", "overlap_p2p": False}
    slow = {"nic": "0.1 GB/s"}
    whole, parted = (
        played(toy_job(8, 2, model=model, node=slow, **plan, scatter_gather=wanted), toy_prices()).step
        for wanted in (False, True)
    )
    assert parted < 0.8 * whole


@pytest.mark.parametrize(("plan", "said"), [
    ({"tp": 1, "pp": 2}, "scatter_gather=true needs tp > 1 and pp > 1, and tp=1, pp=2"),
    ({"tp": 2, "pp": 1}, "scatter_gather=true needs tp > 1 and pp > 1, and tp=2, pp=1"),
    ({"tp": 2, "pp": 2, "sequence_parallel": True}, "scatter_gather=true contradicts sequence_parallel=true"),
])  # fmt: skip
def test_what_it_goes_with(toy_job, plan, said) -> None:
    with pytest.raises(UserError, match=said):
        toy_job(8, **plan, scatter_gather=True).resolve()


def test_paired_passes_are_refused(toy_job) -> None:
    job = toy_job(4, tp=2, pp=2, schedule="1f1b-overlapped", accumulation=4, scatter_gather=True)
    with pytest.raises(UserError, match="scatter_gather=true with schedule=1f1b-overlapped"):
        lower(job.model, job.resolve())
