"""Passes of a step as one CUDA graph: the host launches none of their kernels, but those of the update."""

from __future__ import annotations

import pytest

from sim.analysis.breakdown import breakdown
from strategies.predict import played
from tests.strategies.layers.test_mixture_of_experts import MOE
from topologies.reading import UserError


@pytest.mark.parametrize(
    "plan", [{}, {"tp": 2, "pp": 2, "accumulation": 4}, {"data_parallel": "zero1", "overlap_param_gather": True}]
)
def test_no_pass_waits_for_the_host(toy_job, plan) -> None:
    """Layers of 64 features are bound by launches; in a graph the compute stream is busy, or waits for something else. The update
    is launched by the host, which has read the norm of all gradients; in a pipeline it is ahead.
    """
    usual, graphed = (played(toy_job(8, **plan, **more)) for more in ({}, {"cuda_graph": True}))
    assert breakdown(usual)["launch"] > 0.3 * usual.step
    updated = [row for row in graphed.rows() if row.kind == "optimizer"]
    assert max(row.end for row in graphed.rows() if row.kind == "backward") <= updated[0].start
    launch = breakdown(graphed)["launch"]
    assert launch == 0 if "pp" in plan else 0 < launch <= updated[-1].end - updated[0].start
    assert graphed.step < usual.step


def test_what_the_host_waits_for_is_in_no_graph(toy_job) -> None:
    fields = {name: value for name, value in MOE.items() if name != "name"}
    with pytest.raises(UserError, match="cuda_graph=true with experts needs pad_to_capacity=true"):
        toy_job(1, model=fields, cuda_graph=True).resolve()
    toy_job(1, model=fields, cuda_graph=True, capacity_factor=1.0, pad_to_capacity=True).resolve()
    with pytest.raises(UserError, match="blocking_launches=true contradicts cuda_graph=true"):
        toy_job(1, cuda_graph=True, blocking_launches=True, overlap=False).resolve()
