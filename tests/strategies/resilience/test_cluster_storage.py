"""A cluster says where its jobs save; a job may say otherwise, one field at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardyard import UserError, read_job
from strategies.resilience.run_spec import prepare
from strategies.resilience.settings import RunSettings
from topologies.cluster_files import load_cluster

JOB = {"model": "llama-3.1-8b", "nodes": 16, "plan": {"data_parallel": "zero1", "sequence": 4096}}


def storage(cluster: object, changes: dict[str, Any] | None = None, **job: object) -> Any:
    read = read_job({**JOB, "cluster": cluster, **job}, changes or {})
    return prepare(read, read.run or RunSettings(), 1).settings.checkpoint.shared


def test_a_cluster_says_its_own_and_others_have_the_default() -> None:
    assert storage("meta-24k").name == "tectonic"
    assert storage("dgx-h100").name == "superpod-better"
    assert storage("meta-24k", run={"checkpoint": {"storage": "jean-zay"}}).name == "jean-zay"


def test_single_fields_of_it_change_from_cluster_or_run(tmp_path: Path) -> None:
    """2 TB/s of Tectonic's in a file of its own, half of it by the cluster's field, a tenth by the run's."""
    own = tmp_path / "own.yaml"
    own.write_text("based_on: dgx-h100\nnodes: 16\nstorage: {based_on: tectonic, node_write: 5 GB/s}\n")
    assert (storage(str(own)).write, storage(str(own)).node_write) == (2e12, 5e9)
    halved = storage(str(own), {"cluster.storage.write": "1 TB/s"})
    assert (halved.write, halved.node_write, halved.read) == (1e12, 5e9, 2e12)
    tenth = storage(str(own), {"run.checkpoint.storage.write": "200 GB/s"})
    assert (tenth.write, tenth.node_write, tenth.read) == (2e11, 5e9, 2e12)
    named = storage("dgx-h100", {"cluster.storage": "azure-20gbps"})
    assert named.write == 2.5e9


def test_saves_take_what_the_clusters_storage_makes_of_them() -> None:
    """112.4 GB of 8B parameters (14 bytes each) at 2.5 GB/s: 45 s, by whichever way it is said."""
    job = read_job({**JOB, "cluster": "dgx-h100"}, {"cluster.storage": "azure-20gbps"})
    prepared = prepare(job, RunSettings(), 1)
    assert prepared.costs.write == pytest.approx(prepared.size.total / 2.5e9)
    assert prepared.size.total == pytest.approx(14 * job.model.parameters, rel=1e-3)


def test_a_cluster_without_storage_is_the_job_that_it_was() -> None:
    """Only clusters that say theirs have it in their hash."""
    assert "storage" not in load_cluster("dgx-h100").model_dump()
    plain, other = (read_job({**JOB, "cluster": "dgx-h100"}, changes) for changes in ({}, {"cluster.storage": "tectonic"}))
    assert plain.hash != other.hash


def test_mistakes_are_one_line() -> None:
    with pytest.raises(UserError, match="unknown storage 'tectonik'; did you mean 'tectonic'"):
        read_job({**JOB, "cluster": "dgx-h100"}, {"cluster.storage": "tectonik"})
    with pytest.raises(UserError, match="write"):
        read_job({**JOB, "cluster": "dgx-h100"}, {"cluster.storage": {"write": "3"}})
