"""Ranks start, meet, answer and die."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
import yaml

from calibration.launch import local as local_ranks
from calibration.launch.instructions import launch_text
from calibration.launch.local import LocalRanks
from calibration.launch.place import RankError, need_torch, patience
from calibration.launch.ranks import launch
from topologies.reading import UserError


def add_ranks(place, start):
    import torch
    import torch.distributed as dist

    destroy = dist.destroy_process_group

    def leave():
        destroy()
        place.tell({"left": place.rank})

    dist.destroy_process_group = leave
    total = torch.tensor([start + place.rank])
    dist.all_reduce(total)
    place.tell({"rank": place.rank})
    return place.rank, int(total), os.environ["MALLOC_TRIM_THRESHOLD_"]


def fail(place, how):
    import torch
    import torch.distributed as dist

    if place.rank == 1 and how == "raise":
        raise ValueError("the line\nand more")
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_every_rank_answers_and_tells():
    heard = []
    assert launch(add_ranks, 2, 10, hear=heard.append) == [(0, 21, str(2**33)), (1, 21, str(2**33))]
    assert sorted(message["rank"] for message in heard if "rank" in message) == [0, 1]
    assert sorted(message["left"] for message in heard if "left" in message) == [0, 1]  # what NCCL has under way is waited for


def wait_in_vain(place):
    """Rank 1 waits for a collective of a group that rank 0 is in, and never begins."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from calibration.execute.setup import group_of, mesh_of

    mesh = mesh_of("cpu", (("dp", 2), ("tp", 1)))
    part, alone = mesh.get_group("dp"), mesh.get_group("tp")  # the group of all ranks, and one that the mesh has made
    every = [alone, group_of((0, 1)), dist.group.WORLD]
    place.tell([group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in every])
    if place.rank == 0:
        dist.recv(torch.ones(1), 1)
    part._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=0.1))
    dist.all_reduce(torch.ones(1), group=part)


def test_every_group_waits_as_long_as_the_ranks_do():
    """Groups of a device mesh have a timeout of their own, half an hour with gloo, ten minutes with NCCL."""
    heard = []
    with patience(90.0), pytest.raises(RankError, match=r"ranks wait 90 s for each other \(--timeout SECONDS\)"):
        launch(wait_in_vain, 2, hear=heard.append)
    assert heard == [[90.0, 90.0, 90.0]] * 2


@pytest.mark.parametrize(("how", "line"), [("raise", "ValueError: the line"), ("kill", "ended by SIGKILL (out of memory?)")])
def test_a_dead_rank_is_named_with_its_error(how, line):
    with pytest.raises(RankError) as caught:
        launch(fail, 2, how)
    assert str(caught.value) == f"rank 1 of 2 failed: {line}"


def test_a_rank_that_dies_before_it_meets_the_others_is_named(monkeypatch):
    """Rank 0 waits for it at the meeting, which nobody else would end for minutes."""
    start = LocalRanks._start

    def killed(self, rank):
        start(self, rank)
        if rank == 1:
            self.processes[1].kill()

    monkeypatch.setattr(LocalRanks, "_start", killed)
    with pytest.raises(RankError, match="rank 1 of 2 failed: ended by SIGKILL"):
        launch(add_ranks, 2, 10)


def wait(place):
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    place.tell(cache_dir())  # which torch makes in the folder of temporary files unless it is told another
    time.sleep(300)


def test_a_signal_ends_the_ranks_and_leaves_no_folder(tmp_path, monkeypatch):
    def hear(_):
        raise KeyboardInterrupt(signal.SIGTERM)

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        launch(wait, 2, hear=hear)
    assert list(tmp_path.iterdir()) == []


def stop(place):
    import torch
    import torch.distributed as dist

    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))
    return place.rank


def test_a_rank_that_is_stopped_is_told_and_goes_on(monkeypatch, capsys):
    """Said once, with the command that lets it go on, which is what the test does."""
    monkeypatch.setattr(local_ranks, "SILENCE", 0.2)
    heard = []

    def go_on(pid):
        heard.append(capsys.readouterr().err)
        if heard[-1]:
            os.kill(int(re.search(r"kill -CONT (\d+)", heard[-1])[1]), signal.SIGCONT)
        return is_stopped(pid)

    is_stopped = local_ranks._is_stopped
    monkeypatch.setattr(local_ranks, "_is_stopped", go_on)
    assert launch(stop, 2) == [0, 1]
    (line,) = filter(None, heard)
    assert line.startswith("rank 1 of 2 was stopped by a signal: `kill -CONT ")
    assert line.endswith("` lets it go on; all are ended after 600 s (--timeout)\n")


def test_a_rank_that_stays_stopped_ends_all_after_the_time_that_was_given(monkeypatch):
    start = LocalRanks._start

    def impatient(self, rank):
        start(self, rank)
        assert self.patience == 90
        self.patience = 1 if rank == 1 else 90  # the ranks themselves have time to meet

    monkeypatch.setattr(LocalRanks, "_start", impatient)
    with pytest.raises(RankError, match="rank 1 of 2 was stopped by a signal and did not go on for 1 s"), patience(90):
        launch(stop, 2)


def test_torch_that_cannot_be_imported_is_one_line(monkeypatch):
    def broken(name, *_):
        raise ImportError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "torch.distributed")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=broken)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    with pytest.raises(UserError, match="torch is installed, but cannot be imported: ImportError: libtorch_cpu.so"):
        need_torch()


def test_the_environment_of_a_launcher_must_fit(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="WORLD_SIZE=4 of the launcher ≠ 2 ranks of the job"):
        launch(add_ranks, 2, 10)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(UserError, match="environment: RANK=4: must be below WORLD_SIZE=4"):
        launch(add_ranks, 4, 10)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UserError, match="environment: RANK='first': must be a whole number"):
        launch(add_ranks, 2, 10)


def test_commands_for_clusters():
    command = ["execute", "my job.yaml"]
    assert launch_text("local", command, 1, 2).endswith(
        "torchrun --standalone --nproc-per-node=2 -m shardyard execute 'my job.yaml'"
    )
    assert "#SBATCH --nodes=4" in launch_text("slurm", command, 4, 8)
    service, job = yaml.safe_load_all(launch_text("k8s", command, 4, 8))
    assert service["metadata"]["name"] == "shardyard"
    assert job["spec"]["completions"] == 4
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    *_, job = yaml.safe_load_all(launch_text("k8s", ["execute", 'it\'s "mine".yaml'], 1, 2, gpus=False))
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert shlex.split(container["command"][2])[-1] == 'it\'s "mine".yaml'
    assert container["resources"]["limits"] == {"cpu": 2}
    assert "gpus" not in launch_text("slurm", command, 4, 8, gpus=False)
    # srun gives a task one core unless it is told otherwise, and gloo and NCCL a network by chance where there are several
    assert "srun --cpus-per-task=$SLURM_CPUS_ON_NODE env" in launch_text("slurm", command, 4, 8)
    assert "srun --cpus-per-task=8 env" in launch_text("slurm", command, 4, 8, gpus=False)
    assert "NCCL_SOCKET_IFNAME" in launch_text("slurm", command, 4, 8)
    meeting = "--nnodes=4 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$head:29500"
    assert meeting in launch_text("slurm", command, 4, 8)
    assert "--node-rank=$JOB_COMPLETION_INDEX --master-addr=shardyard-0.shardyard" in launch_text("k8s", command, 4, 8)
    assert "rdma/hca" in launch_text("k8s", command, 4, 8)
    for how in ("local", "slurm"):
        subprocess.run(["bash", "-n"], input=launch_text(how, command, 1, 2), text=True, check=True)
    with pytest.raises(UserError, match="the job has 2 nodes"):
        launch_text("local", command, 2, 8)
