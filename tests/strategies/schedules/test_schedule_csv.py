"""Schedules go to PyTorch's CSV and come back; PyTorch reads them; mistakes name file, row and column."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import yaml
from click.testing import CliRunner

import shardyard
from sim.engine.player import run
from strategies.lowering.lower import lower
from strategies.schedules import actions, schedules
from strategies.schedules.schedule_csv import read_schedule
from strategies.schedules.table import cells, write_schedule
from topologies.reading import UserError

EXAMPLES = Path(__file__).parents[3] / "examples"
# PyTorch's form with everything in it: a V of two ranks, an overlapped pair, a split backward pass, communication, empty cells
MIXED = """\
0F0,0SEND_F0,,3RECV_F0,3F0,"(0F1;3B0)OVERLAP_F_B",3F1,0B0,3I1,3W1,0B1,0REDUCE_GRAD
1UNSHARD,1F0,2F0,1F1,2F1,,2B0,1B0,2B1,1B1
"""


def written(folder: Path, text: str) -> str:
    (folder / "order.csv").write_text(text)
    return str(folder / "order.csv")


WRITABLE = [name for name in schedules if schedules[name].copies == 1]


@pytest.mark.parametrize("name", WRITABLE)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (4, 8)])
def test_round_trip(name: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    chunks = schedules[name].chunks or 2
    path = str(write_schedule(cells(name, ranks, microbatches, None)[0], tmp_path / "order.csv"))
    again = read_schedule(path)
    assert (again.ranks, again.microbatches, again.chunks, again.notes) == (ranks, microbatches, chunks, ())
    for rank in range(ranks):
        assert [again.stage(rank, ranks, c) for c in range(chunks)] == [
            schedules[name].stage(rank, ranks, c) for c in range(chunks)
        ]
        assert actions(path, rank, ranks, microbatches, chunks) == actions(name, rank, ranks, microbatches, chunks)
    assert cells(path, None, None, None)[0] == cells(name, ranks, microbatches, None)[0]


@pytest.mark.parametrize("name", WRITABLE)
def test_pytorch_loads_what_is_written(name: str, tmp_path: Path) -> None:
    """`_load_csv` checks every pass and adds the communication; its dry run (of passes and transfers) does not deadlock."""
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    from torch.distributed.pipelining.stage import PipelineStage

    ranks, microbatches, chunks = 4, 8, schedules[name].chunks or 2
    path = write_schedule(cells(name, ranks, microbatches, None)[0], tmp_path / "order.csv")
    stage = mock.Mock(spec=PipelineStage)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, ranks, None, ranks * chunks
    runtime = theirs._PipelineScheduleRuntime([stage] * chunks, microbatches)
    runtime._load_csv(str(path), format="compute_only")
    placed = {s: rank for rank in range(ranks) for s in read_schedule(str(path)).placement[rank]}
    assert runtime.stage_index_to_group_rank == placed
    ours = {
        r: [a for a in row if "SHARD" not in str(a) and "REDUCE" not in str(a)]
        for r, row in runtime.pipeline_order_with_comms.items()
    }
    if "OVERLAP_F_B" in path.read_text():  # its dry run does not know pairs
        return
    assert theirs._simulate_comms_compute(ours, placed.__getitem__, ranks * chunks)


def test_what_pytorch_writes_is_read(tmp_path: Path) -> None:
    """Its lowered form too, whose communication is left out."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    ops = visualizer.get_schedule_ops("ZBVZeroBubble", 2, 4, num_stages_per_rank=2, with_comms=True)
    path = str(write_schedule([[str(op) for op in row] for row in ops], tmp_path / "order.csv"))
    assert "cells of communication ignored" in read_schedule(path).notes[0]
    for rank in range(2):
        assert actions(path, rank, 2, 4, 2) == actions("zb-v", rank, 2, 4, 2)


def test_a_file_plays_as_the_schedule_that_it_holds(tmp_path, toy_job, toy_prices) -> None:
    path = str(write_schedule(cells("zb-v", 2, 4, None)[0], tmp_path / "order.csv"))
    steps = []
    for name in ("zb-v", path):
        job = toy_job(2, pp=2, schedule=name, accumulation=4 if name == "zb-v" else None)
        steps.append(run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices()).step)
    assert steps[0] == steps[1]


def test_pairs_are_played_in_order_and_communication_is_counted(tmp_path: Path) -> None:
    path = written(tmp_path, MIXED)
    assert cells(path, None, None, None)[0][0] == ["0F0", "3F0", "(0F1;3B0)OVERLAP_F_B", "3F1", "0B0", "3I1", "3W1", "0B1"]
    assert read_schedule(path).placement == ((0, 3), (1, 2))
    assert read_schedule(path).notes == (f"{path}: 4 cells of communication ignored; it follows from the plan",)


MISTAKES = [
    ("0F0,0X0", "row 1, column 2: '0X0' is no pass"),
    ("0F0,(0F1;)OVERLAP_F_B", "row 1, column 2: '(0F1;)OVERLAP_F_B' is no pass"),
    ("0F0,0B0\n\n1F0,1B0", "row 2 has 0 stages, and row 1 has 1"),
    ("0F0,0B0\n1F0,0F1,1B0", "row 2, column 2: stage 0 is in row 1 already"),
    ("0F0,0B0\n2F0,2B0", "stage 1 has no passes, and stage 2 has"),
    ("0F0,0B0\n1B0,1F0", "row 2, column 1: 1B0 is repeated or too early"),
    ("0F0,0B0,0I0,0W0", "row 1, column 3: 0I0 is repeated or too early"),
    ("0F0,(0F1;0B1)OVERLAP_F_B,0B0", "row 1, column 2: 0F1 is paired with what is no other microbatch's pass the other way"),
    ("0F0,(0F1;0F2)OVERLAP_F_B,0B0", "row 1, column 2: 0F1 is paired with what is no other microbatch's pass the other way"),
    ("0F0,0F1,0B1", "row 1: no B, nor I and W, of stage 0 and microbatch 0"),
    ("0F0,0I0", "row 1: no B, nor I and W, of stage 0 and microbatch 0"),
    ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", "row 1, column 2: 0B0 waits for ever: rows wait for each other's passes"),
    (",,\n", "no passes; expected a row per rank"),
    ("0F0,\0", ""),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[text for text, _ in MISTAKES])
def test_mistakes_name_file_row_and_column(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_schedule(path)
    assert str(caught.value).startswith(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_for_its_own_sizes(tmp_path, toy_job) -> None:
    path = written(tmp_path, MIXED)
    assert toy_job(2, pp=2, schedule=path).resolve().microbatches == 2
    with pytest.raises(UserError, match=r"pp=4 contradicts schedule=.*, which is for pp=2"):
        toy_job(4, pp=4, schedule=path).resolve()
    with pytest.raises(UserError, match=r"microbatches=3 contradicts schedule=.*, which is for microbatches=2"):
        toy_job(2, pp=2, schedule=path, accumulation=3).resolve()
    with pytest.raises(UserError, match="cannot be read"):
        toy_job(2, pp=2, schedule="nowhere.csv")


def test_a_file_lies_beside_the_job_and_counts_in_its_hash(tmp_path: Path) -> None:
    written(tmp_path, MIXED)
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({"model": "llama-3.1-8b", "cluster": "dgx-h100", "plan": {"pp": 2, "schedule": "order.csv"}}))
    before = shardyard.read_job(job)
    assert before.resolve().chunks == 2
    assert any("4 cells of communication ignored" in note for note in before.notes)
    known = before.hash
    written(tmp_path, MIXED.replace("3I1,3W1", "3B1"))
    assert shardyard.read_job(job).hash != known


def test_the_example_is_what_the_command_writes() -> None:
    job = shardyard.read_job(EXAMPLES / "schedule-from-csv.yaml")
    assert job.resolve().microbatches == 8
    assert cells(job.plan.schedule, None, None, None)[0] == cells("zb-v", 2, 8, None)[0]


def test_two_copies_are_shown_but_not_written(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    call = ["schedule", "chimera", "--pp", "2", "--microbatches", "2"]
    assert CliRunner().invoke(shardyard.main, call).output == "rank 0  0F0 3F1 3B1 0B0\nrank 1  2F1 1F0 1B0 2B1\n"
    refused = CliRunner().invoke(shardyard.main, [*call, "--csv", str(path)])
    assert "schedule chimera has two copies of each stage" in refused.output
    assert not path.exists()


def test_command(tmp_path: Path) -> None:
    def call(*arguments: str) -> str:
        return CliRunner().invoke(shardyard.main, ["schedule", *arguments]).output

    assert call("1f1b", "--pp", "2", "--microbatches", "2") == "rank 0  0F0 0F1 0B0 0B1\nrank 1  1F0 1B0 1F1 1B1\n"
    path = tmp_path / "out.csv"
    assert call("interleaved", "--pp", "2", "--microbatches", "2", "--chunks", "3", "--csv", str(path)) == f"wrote {path}\n"
    assert path.read_text().splitlines()[1].startswith("1F0,1F1,3F0,3F1,5F0,5B0")
    assert call("1f1b", "--pp", "2") == "error: --microbatches: is required for schedule 1f1b\n"
    assert call(str(path), "--pp", "3") == f"error: --pp 3: schedule {path} is for 2\n"
    assert "--chunks 2: schedule 1f1b is for 1" in call("1f1b", "--pp", "2", "--microbatches", "2", "--chunks", "2")
    assert "--chunks 1: schedule interleaved takes 2 or more" in call(
        "interleaved", "--pp", "2", "--microbatches", "2", "--chunks", "1"
    )
