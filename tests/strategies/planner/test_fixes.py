"""What is proposed when a job does not fit does fit, and is no more than is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import shardyard
from sim.analysis.summary import Summary
from strategies.frameworks.settings import EVERYTHING
from strategies.job import Job
from strategies.planner.fixes import fixes


def answer(job: Job) -> Summary:
    return shardyard.summarise(shardyard.simulate(job))


def test_states_that_a_node_cannot_hold_need_more_nodes() -> None:
    """Llama-3.1 70B has 16 bytes of states per parameter: 1.13 TB, more than the 684 GB of 8 H100 however they are divided."""
    given = {"model": "llama-3.1-70b", "cluster": "dgx-h100"}
    plan = {"tp": 8, "sequence_parallel": True, "sequence": 2048, "global_batch": 16, "kernels": "compiled"}
    job = shardyard.read_job(nodes=1, plan=plan, **given)
    (fix,) = fixes(job, answer(job), answer)
    nodes = fix.changes["nodes"]
    assert nodes >= 2
    changed = {name: value for name, value in fix.changes.items() if name != "nodes"}
    assert answer(shardyard.read_job(nodes=nodes, plan=plan | changed, **given)).fits


def test_changes_of_the_plan_come_before_more_nodes() -> None:
    """Llama-3.1 8B by DDP: 128 GB of states fit no H100, but shards of them do."""
    job = shardyard.read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=1, plan={"sequence": 4096, "kernels": "compiled"})
    found = fixes(job, answer(job), answer)
    assert found
    assert all("nodes" not in fix.changes for fix in found)
    assert any(fix.changes.get("data_parallel", "").startswith("zero") for fix in found)


def test_what_is_offloaded_may_be_more_than_the_optimizer() -> None:
    """A sharded job whose optimizer is on the CPUs already fits when its parameters are there, too."""
    plan = {"data_parallel": "zero3", "offload": {"optimizer": "cpu"}}
    job = shardyard.read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=1, plan=plan)

    def pretended(changed: Job) -> Any:
        fits = changed.plan.offload == EVERYTHING
        return SimpleNamespace(fits=fits, events=1, tokens_per_second=1.0, worst=SimpleNamespace(peak=1.0))

    assert {"offload": EVERYTHING} in [fix.changes for fix in fixes(job, pretended(job), pretended, effort=50)]
