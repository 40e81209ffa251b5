"""What a checkpoint is and how long it takes, against hand-computed and published figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardyard import UserError, read_job
from sim.runs.transfer import shared_seconds
from strategies.resilience.checkpoint_plan import checkpoint_plan, expected_waste
from strategies.resilience.checkpoint_size import checkpoint_size
from strategies.resilience.checkpointing import SaveCosts, policies
from strategies.resilience.intervals import intervals
from strategies.resilience.save_costs import save_costs
from strategies.resilience.settings import RunSettings
from topologies.storage import load_storage

PLANS = [
    {"tp": 8, "pp": 2, "data_parallel": "zero1", "sequence_parallel": True},
    {"tp": 2, "pp": 4, "data_parallel": "ddp", "schedule": "interleaved", "accumulation": 8},
    {"data_parallel": "zero3"},
    {"data_parallel": "zero3", "shard": 8},
    {"tp": 4, "cp": 2, "data_parallel": "zero2"},
    {"pp": 2, "schedule": "chimera", "accumulation": 4},
    {"tp": 2, "ep": 8, "data_parallel": "zero1", "sequence_parallel": True},
    {"cp": 2, "ep": 8, "data_parallel": "zero1"},
]


def job(plan: dict, model: str = "llama-3.1-8b", nodes: int = 4, **more: object):  # type: ignore[no-untyped-def]
    return read_job(model=model, cluster="dgx-h100", nodes=nodes, plan={"auto": False, "sequence": 4096, **plan}, **more)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_checkpoint_has_every_state_once(plan: dict, parallel: bool) -> None:
    """2 bytes of weights and 12 of fp32 states for each parameter, whatever the plan; what nodes write adds up to it."""
    asked = job(plan, "mixtral-8x7b" if "ep" in plan else "llama-3.1-8b")
    size = checkpoint_size(asked, parallel)
    assert size.total == pytest.approx(14 * asked.model.parameters, rel=1e-3)
    assert size.write.sum() == pytest.approx(size.total, rel=1e-3)
    assert size.busiest_node <= size.total


@pytest.mark.parametrize("parallel", [True, False])
def test_frozen_layers_are_saved_without_states(parallel: bool) -> None:
    asked = job({"data_parallel": "zero1", "freeze": {"layers": 2, "embedding": False}})
    trained = asked.model.parameters - 2 * asked.model.layer_parameters(0)
    size = checkpoint_size(asked, parallel)
    assert size.total == pytest.approx(2 * asked.model.parameters + 12 * trained, rel=1e-9)
    assert size.write.sum() == pytest.approx(size.total, rel=1e-9)


def test_parallel_saves_spread_what_ranks_have_in_common() -> None:
    """DDP on four nodes: every GPU writes 1/32, or the first one everything."""
    every, first = (checkpoint_size(job({"data_parallel": "ddp"}), parallel) for parallel in (True, False))
    assert every.largest_rank == pytest.approx(every.total / 32)
    assert first.largest_rank == first.busiest_node == pytest.approx(first.total)
    assert list(first.write[1:]) == [0.0] * 3


def test_reading_needs_whole_weights_on_every_rank_and_a_shard_of_the_states() -> None:
    asked = job({"data_parallel": "zero1"})
    psi = asked.model.parameters
    assert list(checkpoint_size(asked).read) == pytest.approx([8 * (2 * psi + 12 * psi / 32)] * 4, rel=1e-3)


@pytest.mark.parametrize(("hook", "weights"), [("zero1", (32, 4)), ("zero3", (1, 1))])
@pytest.mark.parametrize("cp", [1, 2])
def test_states_of_experts_are_shared_by_fewer_ranks(hook: str, weights: tuple[int, int], cp: int) -> None:
    """Mixtral on 32 GPUs, 8 of which have one expert of each layer each: 12 bytes of states of everything are read once, and 2 of
    weights once too (zero3), or of experts by 4 and of the rest by 32 GPUs.
    """
    asked = job({"ep": 8, "cp": cp, "data_parallel": hook}, "mixtral-8x7b")
    experts, (all_ranks, alike) = 32 * 8 * 3 * 4096 * 14336, weights
    dense = asked.model.parameters - experts
    assert checkpoint_size(asked).read.sum() == pytest.approx(12 * (dense + experts) + 2 * (all_ranks * dense + alike * experts))


def test_second_copies_are_read_but_not_saved() -> None:
    """GPT-2's matrix of embedding and head is on both of two pipeline ranks; Chimera has all stages twice."""
    two = job({"pp": 2, "data_parallel": "ddp", "sequence": 1024}, "gpt2-1.5b")
    model, size = two.model, checkpoint_size(two)
    assert size.total == pytest.approx(14 * model.parameters)
    assert size.read.sum() == pytest.approx(16 * 14 * (model.parameters + model.padded_vocabulary * model.hidden))
    both = job({"pp": 2, "schedule": "chimera", "accumulation": 4})
    assert checkpoint_size(both).total == pytest.approx(14 * both.model.parameters)
    assert checkpoint_size(both).read.sum() == pytest.approx(16 * 2 * 14 * both.model.parameters)


@pytest.mark.parametrize("parallel", [True, False])
def test_fsdp2_has_masters_alone(parallel: bool) -> None:
    """fp32 parameters and two moments: a state dict of torch.distributed.checkpoint has no weights in bf16."""
    asked = job({"data_parallel": "zero3", "kernels": "torch"})
    size = checkpoint_size(asked, parallel)
    assert [size.total, size.write.sum(), size.read.sum()] == [pytest.approx(12 * asked.model.parameters)] * 3
    assert size.largest_rank == pytest.approx(12 * asked.model.parameters / 32)  # its shard, of parameters too


@pytest.mark.parametrize("parallel", [True, False])
def test_states_that_do_not_go_by_parameters(parallel: bool) -> None:
    """Muon keeps a moment and the master, 10 bytes with the weight, and Adam's second moment of all but matrices of layers."""
    asked = job({"data_parallel": "zero1", "optimizer": "muon"})
    matrices = 32 * 4096 * (6144 + 4096 + 28672 + 14336)
    size = checkpoint_size(asked, parallel)
    expected = 10 * asked.model.parameters + 4 * (asked.model.parameters - matrices)
    assert [size.total, size.write.sum()] == [pytest.approx(expected)] * 2
    assert size.read.sum() == pytest.approx(expected + 31 * 2 * asked.model.parameters)


def test_bloom_and_mt_nlg() -> None:
    """BLOOM's 176 B parameters were 2.3 TB (bigscience chronicles); MT-NLG's fp32 states take 42 minutes at 20 Gb/s (GEMINI)."""
    gpt3 = read_job(model="gpt3-175b", cluster="dgx-a100", nodes=48, plan={"tp": 4, "pp": 12, "data_parallel": "zero1"})
    assert checkpoint_size(gpt3).total * 176 / 175 == pytest.approx(2.3e12, rel=0.08)
    nlg = read_job(model="mt-nlg-530b", cluster="dgx-a100", nodes=280, plan={"tp": 8, "pp": 35, "data_parallel": "zero1"})
    states = checkpoint_size(nlg).total * 12 / 14
    remote = load_storage("azure-20gbps", "storage")
    assert shared_seconds([states / 280] * 280, math.inf, remote.write) == pytest.approx(42 * 60, rel=0.02)


def test_nodes_share_storage_fairly() -> None:
    """Three nodes of 10 GB and one of 40 GB, 5 GB/s each, 10 GB/s together: 2.5 GB/s each for 4 s, then 5 GB/s for 6 s."""
    assert shared_seconds([10e9, 10e9, 10e9, 40e9], 5e9, 10e9) == pytest.approx(10.0)
    assert shared_seconds([10e9, 40e9], 5e9, math.inf) == pytest.approx(8.0)
    assert shared_seconds([0.0, 0.0], 5e9, 1e9) == 0.0
    assert shared_seconds([10e9], math.inf, math.inf) == 0.0


def test_costs_of_a_save_by_hand() -> None:
    """Four DGX H100, 8 B parameters: 112 GB in all, 28 GB per node, 3.5 GB per GPU over 63 GB/s of PCIe."""
    asked = job({"data_parallel": "zero1"})
    size = checkpoint_size(asked)
    storage = load_storage(
        {"write": "20 GB/s", "node_write": "4 GB/s", "read": "40 GB/s", "node_read": "8 GB/s", "latency": "1 s"}, "storage"
    )
    costs = save_costs(asked, size, storage, overhead=0.5)
    assert costs.snapshot == pytest.approx(size.total / 32 / 63e9 + 0.5)
    assert costs.write == pytest.approx(size.total / 16e9 + 1)  # 4 GB/s each
    assert costs.read == pytest.approx(size.read[0] / 8e9 + 1)
    assert costs.disk == pytest.approx(size.total / 4 / 25e9)
    assert costs.peer == pytest.approx(size.total / 4 / 400e9)


def test_scalable_units_come_with_nodes() -> None:
    storage = load_storage("superpod-better", "storage")
    assert [storage.in_all(storage.write, nodes) for nodes in (1, 32, 33, 128)] == [20e9, 20e9, 40e9, 80e9]
    faster = load_storage({"based_on": "superpod-better", "node_write": "8 GB/s"}, "storage")
    assert (faster.write, faster.node_write, faster.unit) == (20e9, 8e9, 32)


def test_policies_need_what_they_use() -> None:
    costs = SaveCosts(1.0, 10.0, 20.0)
    assert policies["synchronous"](costs)[0].blocking == 10.0
    assert (policies["asynchronous"](costs)[0].blocking, policies["asynchronous"](costs)[0].flush) == (1.0, 10.0)
    with pytest.raises(UserError, match="needs node.cpu.disk"):
        policies["multi_tier"](costs)
    with pytest.raises(UserError, match="at least two nodes"):
        policies["in_memory"](costs)
    assert policies["in_memory"](SaveCosts(1.0, 10.0, 20.0, peer=2.0, peer_read=3.0))[0].copies == 2


@pytest.mark.parametrize(
    ("mtbf", "minutes"), [(24 * 60.0, 117.0), (6 * 60.0, 57.0), (15.0, 9.1)]
)  # Daly 2006, figures 3 to 5: a save of 5 minutes
def test_dalys_own_examples(mtbf: float, minutes: float) -> None:
    assert intervals["daly"](5.0, mtbf, 10.0) == pytest.approx(minutes, rel=0.006)


def test_rules_agree_where_failures_are_rare() -> None:
    for rule in intervals:
        assert intervals[rule](10.0, 1e9, 0.0) == pytest.approx(math.sqrt(2e10), rel=1e-3)
        assert intervals[rule](10.0, math.inf, 0.0) == math.inf


def test_waste_by_hand() -> None:
    """Saves of 10 s every 90 s that are complete 20 s later: a tenth, and of an MTBF of 1,000 s 20 + 50 s."""
    assert expected_waste(90.0, 10.0, 20.0, 1000.0) == pytest.approx(0.1 + 0.07)
    assert expected_waste(90.0, 10.0, 20.0, 10.0) == 1.0


def test_the_bandwidth_to_buy_keeps_the_waste() -> None:
    plan = checkpoint_plan(job({"data_parallel": "zero1"}, nodes=16), RunSettings())
    mtbf, size, snapshot = plan.prepared.mtbf, plan.prepared.size.total, plan.prepared.costs.snapshot
    for part, waiting, beside in plan.bandwidth:
        save = size / waiting
        assert math.sqrt(2 * save / mtbf) == pytest.approx(part)
        flush = size / beside
        interval = max(flush, math.sqrt(2 * snapshot * mtbf))
        assert expected_waste(interval, snapshot, flush, mtbf) == pytest.approx(part, rel=0.01)
    assert np.all(np.diff([waiting for _, waiting, _ in plan.bandwidth]) < 0)


def test_replicas_can_have_what_they_lack_from_each_other() -> None:
    """Llama 8B on 16 nodes by ZeRO-1: weights of 16 GB on every GPU. Each node reads a sixteenth of the checkpoint, and gets the
    rest of its eight copies over its eight NICs.
    """
    job = read_job(
        {"model": "llama-3.1-8b", "cluster": "dgx-h100", "nodes": 16, "plan": {"data_parallel": "zero1", "sequence": 4096}}
    )
    size, storage = checkpoint_size(job), load_storage({"read": "10 GB/s"}, "")
    each, once = (save_costs(job, size, storage, parallel_load=parallel).read for parallel in (False, True))
    assert each == pytest.approx(float(size.read.sum()) / 10e9)
    rest = float(size.read.max()) - size.total / 16
    assert once == pytest.approx(size.total / 10e9 + rest / (8 * 50e9))
    assert once < each / 10
