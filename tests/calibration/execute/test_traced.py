"""Modules of the user's own, trained by PyTorch: volumes to the byte, results and running statistics as in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from calibration.execute import execute
from calibration.execute.limits import ready
from calibration.launch.ranks import launch
from calibration.validate import validate
from strategies.read_job import read_job
from topologies.reading import UserError

ROOT = Path(__file__).parents[3]
NORMALISED = f"{ROOT}/tests/data/modules/normalised.py"
NET = (f"{NORMALISED}:Net", "3x8x8")


def job(name, module, sample, gpus=2, **plan):
    given = {"precision": "fp32", "microbatch": 4, **plan}
    read = read_job(model=module, input=sample, cluster={"based_on": "cpu-gloo", "node": {"gpus": gpus}}, plan=given)
    return replace(read, name=name)


@cache
def jobs():
    """Traced when they are asked for, and not when tests are collected."""
    return [
        job("ddp", *NET, accumulation=2),
        job("ddp without overlap", *NET, accumulation=2, overlap=False),
        job("ddp, own statistics", *NET, broadcast_buffers=False),
        job("synchronised", *NET, accumulation=2, sync_norm=True),
        job("dropout", f"{NORMALISED}:dropping", "3x8x8", accumulation=2),
        job("a sum", f"{NORMALISED}:Summed", "3x8x8"),
        job("16-bit gradients", *NET, data_parallel="ddp_fp16"),
        job("powersgd", *NET, data_parallel="ddp_powersgd"),
        job("zero1", *NET, data_parallel="zero1"),
        job("zero2", *NET, data_parallel="zero2", accumulation=2, sync_norm=True),
        job("zero3", *NET, data_parallel="zero3", accumulation=2),
        job("zero redundancy optimizer", *NET, data_parallel="zero_redundancy_optimizer"),
        job("local sgd", *NET, data_parallel="local_sgd", local_steps=2, optimizer="sgd"),
        job("diloco", *NET, data_parallel="diloco", local_steps=2),
        job("lenet", f"{ROOT}/examples/modules/lenet.py:lenet", "3x32x32", data_parallel="zero3"),
        job("two inputs", f"{ROOT}/examples/modules/dlrm.py:dlrm", "13,26x128"),
        job("resnet-18", f"{ROOT}/examples/modules/resnet.py:resnet18_cifar", "3x32x32", microbatch=2),
    ]


def test_volumes_are_the_simulations_to_the_byte_and_results_those_of_one_process():
    """Both in fp64, in which a ReLU never turns rounding into another gradient: equal to 1e-6 and less."""
    executed = validate(jobs(), seconds=0)
    for validated in executed:
        name, compared = validated.job.name, validated.execution.compared
        allowed = 3e-2 if name == "16-bit gradients" else 1e-6
        assert compared["losses"][0] > compared["losses"][-1], name
        assert max(compared["loss"], compared["gradient"] or 0.0, compared["update"]) <= compared["tolerance"] == allowed, name
        assert (compared["buffers"] is None) == (name in ("lenet", "two inputs")), name
        volumes = {row.of: (row.predicted, row.measured) for row in validated.rows if row.what == "volume"}
        assert volumes, name
        for predicted, measured in volumes.values():
            assert measured == pytest.approx(predicted, abs=1e-6), name
    assert executed[-1].rows[-1].error == pytest.approx(0, abs=0.03)  # memory of ResNet-18
    # rank 0 sends its running statistics down a chain of two: means and variances of three norms of 8 channels, three counters
    sent = {entry["operation"]: (entry["count"], entry["sent"]) for entry in executed[0].execution.operations}
    assert sent["broadcast"] == (2, (192 + 24) / 2)


def own_statistics(place, jobs, seconds):
    from calibration.execute.setup import Setup

    before = Setup.broadcasts_buffers.fget
    Setup.broadcasts_buffers = property(lambda self: before(self) and self.place.rank == 9)
    import calibration.execute.reference.compare as compare
    from calibration.execute import worker

    of = compare.Buffers
    compare.Buffers = lambda states, ranks, _: of(states, ranks, True)
    return worker.work(place, jobs, seconds)


def test_statistics_that_are_not_broadcast_are_an_error():
    with pytest.raises(UserError, match="ddp: executed, but the running statistics differs by"):
        launch(own_statistics, 2, [ready(jobs()[0])], 0.0)


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 7), (6, 5, 3, 4)])
def test_a_norm_of_one_rank_is_pytorchs(tmp_path, shape):
    """Results, gradients, and running statistics, in fp64; a process group of one."""
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    from calibration.execute.traced.batch_norm import BatchNorm, Exchanged

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(1)
        x = torch.randn(shape, dtype=torch.float64)
        answers = []
        for group in (None, dist.group.WORLD):
            plain = torch.nn.BatchNorm1d(5) if len(shape) < 4 else torch.nn.BatchNorm2d(5)
            norm, given = BatchNorm(plain.double(), group), x.clone().requires_grad_()
            y = norm(given)
            (y * y.sin()).sum().backward()
            answers.append([y, given.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var])
        for theirs, ours in zip(*answers, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-10, atol=1e-10)
        fine = x.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda each: Exchanged.apply(each, None, None, 1e-5, dist.group.WORLD)[0], [fine])
    finally:
        dist.destroy_process_group()


def test_ranks_that_drop_cannot_be_one_batch():
    with pytest.raises(UserError, match="sync_norm=true of a module that draws random numbers"):
        execute([job("drops", f"{NORMALISED}:dropping", "3x8x8", sync_norm=True)], 0)


def test_a_module_that_does_not_fit_is_refused(monkeypatch):
    from calibration.devices.cpu import CpuDevice

    monkeypatch.setattr(CpuDevice, "free", lambda self, ranks: 1000.0)
    with pytest.raises(UserError, match="each of 2 processes needs .* GB, also to compare with one process"):
        execute(jobs()[:1], 0)
