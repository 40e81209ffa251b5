"""ZeRO-Offload and ZeRO-Infinity: what crosses PCIe and the disks, what stays where, and what bounds the step."""

from __future__ import annotations

import pytest

from sim.analysis.summary import Summary, summarise
from sim.engine.player import run
from sim.timeline import Timeline
from strategies.lowering.lower import lower
from topologies.reading import UserError

CPU = {
    "memory": "1 PB",
    "memory_bandwidth": "100 GB/s",
    "efficiency": 0.5,
    "disk": "1 PB",
    "disk_read": "2 GB/s",
    "disk_write": "1 GB/s",
}
OPTIMIZER, BOTH, DISKS = (
    {"optimizer": "cpu"},
    {"optimizer": "cpu", "parameters": "cpu"},
    {"optimizer": "nvme", "parameters": "nvme"},
)


@pytest.fixture
def played(toy_job, toy_prices):
    def play(
        hook: str, offload: dict | None, gpus: int = 8, nodes: int = 1, node: dict | None = None, fold=True, **plan
    ) -> Timeline:
        model = {"tied": False}
        job = toy_job(
            gpus, nodes, model, {"pcie": "1 GB/s", "cpu": CPU} | (node or {}), data_parallel=hook, offload=offload, **plan
        )
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices(), fold=fold)

    return play


def answer(timeline: Timeline) -> tuple[Summary, int]:
    return summarise(timeline), timeline.program.parameters


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize(
    ("hook", "offload", "rounds", "expected"),
    [
        ("zero1", OPTIMIZER, 3, 1 + 1),  # gradients once a step, parameters back
        ("zero2", OPTIMIZER, 3, 3 + 1),  # gradients in every microbatch
        ("zero3", OPTIMIZER, 1, 1 + 1),
        ("zero3", BOTH, 3, 3 * (1 + 2)),  # FSDP2's CPUOffloadPolicy: gradients, and parameters for both passes; none at the end
        ("zero3", {"parameters": "cpu"}, 2, 2 * 2 + 1),  # updated on the GPU, and stored
    ],
)
def test_elements_over_pcie(played, gpus, hook, offload, rounds, expected) -> None:
    """In units of Ψ/n: each rank copies its own part only."""
    summary, psi = answer(played(hook, offload, gpus, accumulation=rounds))
    assert summary.volume["host"].elements == pytest.approx(expected * psi / gpus, rel=1e-12)


def test_bytes_of_disks(played) -> None:
    """Adam's 12 bytes per parameter are read and written; parameters are read for both passes and written."""
    summary, psi = answer(played("zero3", DISKS))
    assert summary.volume["nvme"].bytes == pytest.approx((2 * 12 + (2 + 1) * 2) * psi / 8)


@pytest.mark.parametrize("gpus", [1, 8])
def test_memory_of_gpus_and_host(played, gpus) -> None:
    """ZeRO-Offload, arXiv:2101.06840: of 16Ψ bytes the GPU of a single-GPU job keeps the 2Ψ of parameters, the host has 14Ψ."""
    timeline = played("zero2", OPTIMIZER, gpus)
    summary, psi = answer(timeline)
    assert dict(timeline.program.cohorts[0].resident) == {"parameter": 2 * psi, "gradient": 0, "optimizer": 0}
    assert summary.offloaded.memory == pytest.approx(14 * psi)
    infinite, _ = answer(played("zero3", DISKS, gpus))
    assert infinite.offloaded.disk == pytest.approx(14 * psi)
    assert sum(infinite.worst.kinds[kind] for kind in ("parameter", "gradient", "optimizer")) == 0


def test_nodes_hold_what_their_ranks_do(played) -> None:
    """Two pipeline stages on a node each: the fuller one is reported."""
    timeline = played("zero2", OPTIMIZER, 4, 2, pp=2)
    stages = [4 * sum(size for _, size in cohort.hosted) for cohort in timeline.program.cohorts]
    host = summarise(timeline).offloaded
    assert sum(stages) == pytest.approx(14 * timeline.program.parameters)
    assert host.memory == pytest.approx(max(stages))
    assert host.node == stages.index(max(stages))


def test_the_cpus_update_at_the_speed_of_their_memory(played) -> None:
    """Alone on its node: 28 bytes per parameter (gradient, weight, states there and back) at 50 GB/s, then 2 bytes at 1 GB/s."""
    timeline = played("zero2", OPTIMIZER, 1)
    psi = timeline.program.parameters
    ends = {label: (start, end) for _, start, end, label in rows(timeline)}
    start, end = ends["adam on the CPUs"]
    assert end - start == pytest.approx(28 * psi / 50e9)
    start, end = ends["new parameters"]
    assert end - start == pytest.approx(2 * psi / 1e9)


def rows(timeline: Timeline) -> list[tuple[str, float, float, str]]:
    return [(row.op.stream, row.start, row.end, getattr(row.op.work, "label", "")) for row in timeline.rows()]


def test_tiles_overlap_update_and_copy(played) -> None:
    """With many tiles the copies hide behind the updates, or the updates behind the copies: here the copies take longer."""
    whole, tiled = (played("zero2", OPTIMIZER | {"tile": tile}, 1) for tile in (10**9, 4096))
    psi = whole.program.parameters
    assert whole.step - tiled.step == pytest.approx(28 * psi / 50e9, rel=0.05)


def test_of_states_on_disks_three_tiles_are_in_memory(played) -> None:
    """The fourth tile is read when the first has been written, the fifth when the second has been, and so on."""
    ops = played("zero1", {"optimizer": "nvme", "tile": 20_000}, 2).program.cohorts[0].ops
    reads = [op for op in ops if op.stream == "nvme read"]
    writes = [number for number, op in enumerate(ops) if op.stream == "nvme write"]
    assert len(reads) == len(writes) > 4
    for tile, read in enumerate(reads):
        waits = [ref.op for ref in read.after if ref.op in writes]
        assert waits == ([] if tile < 3 else [writes[tile - 3]])


def test_gpus_of_a_switch_share_its_uplink(played) -> None:
    """Four GPUs behind one uplink of 1 GB/s: their copies take four times as long."""
    alone, shared = (played("zero2", OPTIMIZER, node=node) for node in ({}, {"gpus_per_switch": 4}))
    seconds = [
        sum(end - start for stream, start, end, _ in rows(timeline) if stream == "from host") for timeline in (alone, shared)
    ]
    assert seconds[1] == pytest.approx(4 * seconds[0])


def test_disks_and_memory_are_shared_by_the_node(played) -> None:
    """The states of all ranks cross the node's disks, however many ranks there are."""
    for gpus in (1, 4):
        timeline = played("zero3", {"optimizer": "nvme"}, gpus)
        psi = timeline.program.parameters
        reading = sum(end - start for stream, start, end, _ in rows(timeline) if stream == "nvme read")
        assert reading == pytest.approx(12 * psi / 2e9)


def test_copies_hide_behind_compute(played) -> None:
    """Nothing is exposed on a fast PCIe, though every byte still goes over it."""
    slow, fast = (summarise(played("zero3", BOTH, node={"pcie": rate}, microbatch=8)) for rate in ("1 MB/s", "1 TB/s"))
    assert slow.volume["host"] == fast.volume["host"]
    assert slow.breakdown["host exposed"] > 100 * fast.breakdown["host exposed"]


@pytest.mark.parametrize(("hook", "offload"), [("zero1", OPTIMIZER), ("zero2", OPTIMIZER), ("zero3", BOTH), ("zero3", DISKS)])
def test_folded_equals_unfolded(played, hook, offload) -> None:
    folded, unfolded = (played(hook, offload, 4, 2, fold=fold, accumulation=2, algorithm="ring") for fold in (True, False))
    assert folded.step == pytest.approx(unfolded.step)
    assert summarise(folded).offloaded == summarise(unfolded).offloaded


def test_out_of_host_memory_is_a_result(played) -> None:
    summary, psi = answer(played("zero2", OPTIMIZER, node={"cpu": CPU | {"memory": "1 MB"}}))
    assert not summary.fits
    assert summary.offloaded.memory_capacity == 1e6 < summary.offloaded.memory == pytest.approx(14 * psi)
    from reports.tables.step import verdict

    assert "node 0 is out of host memory by " in verdict(summary, {})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"data_parallel": "ddp", "offload": OPTIMIZER},
            "offload.optimizer=cpu needs data_parallel=zero1, zero2 or zero3, not ddp",
        ),
        ({"data_parallel": "zero2", "offload": {}}, "name what is kept where, such as offload="),
        ({"data_parallel": "zero2", "offload": BOTH}, "offload.parameters=cpu contradicts data_parallel=zero2"),
        (
            {
                "data_parallel": "zero3",
                "offload": OPTIMIZER,
                "ep": 2,
                "model": {"experts": {"experts": 8, "chosen": 2, "ffn": 64}},
            },
            "offload.optimizer=cpu with ep=2 is not simulated yet",
        ),
    ],
)
def test_refused(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(8, 1, node={"cpu": CPU}, **plan).resolve()


def test_a_cluster_without_cpus_or_disks(toy_job) -> None:
    with pytest.raises(UserError, match=r"offload needs node.cpu, which the cluster does not describe"):
        toy_job(8, 1, data_parallel="zero2", offload=OPTIMIZER).resolve()
    cpu = {"memory": "1 TB", "memory_bandwidth": "100 GB/s"}
    with pytest.raises(UserError, match=r"offload.optimizer=nvme needs node.cpu.disk"):
        toy_job(8, 1, node={"cpu": cpu}, data_parallel="zero2", offload={"optimizer": "nvme"}).resolve()


def test_what_a_rank_holds_outside_of_its_gpu(toy_job) -> None:
    """bf16, of 4 ranks: 12 bytes of states, 2 of gradients and of parameters each for a quarter of Ψ; of states on disks three
    tiles, and of parameters on disks the largest parts on their way: two layers of 12 · 64² matrix elements and 13 · 64 others.
    """

    def held(**offload: object) -> dict[str, float]:
        job = toy_job(4, 1, {"tied": False}, {"cpu": CPU}, data_parallel="zero3", offload=offload)
        program = lower(job.model, job.resolve())
        assert program.parameters == psi
        hosted = {"cpu": 0.0, "nvme": 0.0}
        for place, size in program.cohorts[0].hosted:
            hosted[place] += size
        return hosted

    layer = 12 * 64**2 + 13 * 64
    psi = 4 * layer + 512 * 64 * 2 + 32 * 64 + 2 * 64
    quarter = psi / 4
    assert held(optimizer="cpu") == {"cpu": (12 + 2) * quarter, "nvme": 0}
    assert held(optimizer="cpu", parameters="cpu") == {"cpu": (12 + 2 + 2) * quarter, "nvme": 0}
    tiles = {"cpu": 2 * quarter + 3 * 1000 * 12, "nvme": 12 * quarter}
    assert held(optimizer="nvme", tile=1000) == tiles
    assert held(parameters="nvme", buffers=2) == {"cpu": 2 * 2 * layer / 4, "nvme": 2 * quarter}
