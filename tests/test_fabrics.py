"""Jobs played on new fabrics: folded is unfolded, and what crosses slower links takes longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardyard

ROOT = Path(__file__).parents[1]
TORUS = str(ROOT / "examples" / "clusters" / "tpu-v4.yaml")
MODEL = {"name": "small", "hidden": 1024, "layers": 4, "heads": 16, "vocabulary": 32000, "context": 512}


def step(cluster: Any, *changes: str, fold: bool = True, **plan: Any) -> float:
    job = shardyard.read_job(
        None, changes, model=MODEL, cluster=cluster, plan={"auto": False, "sequence": 512, **plan}, profile="h100"
    )
    return shardyard.summarise(shardyard.simulate(job, fold=fold)).step_seconds


@pytest.mark.parametrize("plan", [{"data_parallel": "ddp"}, {"tp": 4, "pp": 2, "accumulation": 2}])
def test_folded_and_unfolded_are_the_same_on_a_torus(plan: dict[str, Any]) -> None:
    small = ("cluster.nodes=4", "cluster.fabric.dims=[4, 4]")
    folded, unfolded = (step(TORUS, *small, fold=fold, **plan) for fold in (True, False))
    assert folded == pytest.approx(unfolded, rel=1e-12)


def test_slower_links_of_a_torus_slow_a_step_down() -> None:
    fast, slow = (step(TORUS, f"cluster.fabric.link={rate} GB/s") for rate in (50, 5))
    assert slow > 1.5 * fast


def test_a_machine_as_it_describes_itself_takes_as_long_as_the_catalogues() -> None:
    dump = str(ROOT / "tests" / "data" / "topologies" / "h100.topo.txt")
    assert step(dump, "cluster.node.gpu=h100-sxm", tp=8) == pytest.approx(step("dgx-h100", tp=8), rel=1e-12)


def test_a_pod_between_slows_what_crosses_pods() -> None:
    tree = ("cluster.fabric.kind=fat_tree", "cluster.fabric.leaf_nodes=2", "cluster.fabric.pod_nodes=4")
    times = [step("dgx-h100", "cluster.nodes=8", *tree, f"cluster.fabric.pod_oversubscription={by}") for by in (1, 32)]
    assert times[1] > times[0]
