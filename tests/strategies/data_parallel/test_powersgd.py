"""DDP with low-rank gradients, against PyTorch's own hook."""

from __future__ import annotations

import pytest

from shardyard import read_job, simulate
from sim.analysis.memory import ledger
from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.program import Block, Kernel
from sim.timeline import Timeline
from strategies.lowering.lower import lower
from topologies.reading import UserError


@pytest.fixture
def played(toy_job, toy_prices):
    def play(gpus: int = 8, hook: str = "ddp_powersgd", **plan) -> Timeline:
        job = toy_job(gpus, 1, data_parallel=hook, **{"precision": "fp32"} | plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())

    return play


# the toy model: GPT of 4 layers, hidden 64, 512 words, 32 positions, tied
MATRICES = [(512, 64), (32, 64), *4 * [(192, 64), (64, 64), (256, 64), (64, 256)]]


def sent(rank: int, rate: float, psi: int) -> int:
    """Elements that the hook reduces, by its rule, matrix by matrix."""
    total = psi
    for n, m in MATRICES:
        r = min(n, m, rank)
        if (n + m) * r * rate < n * m:
            total += (n + m) * r - n * m
    return total


@pytest.mark.parametrize(("rank", "rate"), [(1, 2.0), (4, 2.0), (4, 8.0), (16, 1.0), (64, 0.5)])
@pytest.mark.parametrize("plan", [{}, {"overlap": False}, {"bucket": "20 kB"}, {"precision": "bf16", "accumulation": 3}])
def test_volume_is_the_hooks_rule(played, rank, rate, plan) -> None:
    """2 · (n − 1)/n of the vectors, the small matrices and (n + m) · r of every other matrix; once per step."""
    timeline = played(powersgd={"matrix_approximation_rank": rank, "min_compression_rate": rate}, **plan)
    expected = 2 * 7 / 8 * sent(rank, rate, timeline.program.parameters)
    assert summarise(timeline).volume["dp"].elements == pytest.approx(expected, rel=1e-12)


def test_volume_is_what_torch_sends() -> None:
    """What the real hook hands to all_reduce, counted."""
    torch = pytest.importorskip("torch")
    counted = _torch_hook(torch, [(512, 64), (192, 64), (64, 64), (64,), (192,), (3, 5)], rank=4)
    assert counted == 4 * (512 + 64 + 192 + 64) + 4 * (64 + 64) + 64 + 192 + 15


def _torch_hook(torch, shapes: list[tuple[int, ...]], rank: int) -> int:
    """Elements that PyTorch's powerSGD_hook reduces of gradients of these shapes in one bucket, after its first iteration."""
    from unittest import mock

    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    gradients = [torch.randn(shape) for shape in shapes]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    bucket = mock.Mock(index=lambda: 0, buffer=lambda: flat, gradients=lambda: gradients, is_last=lambda: True)
    counted = 0

    class Work:
        def __init__(self, tensor) -> None:
            self.future = torch.futures.Future()
            self.future.set_result([tensor])

        def get_future(self):
            return self.future

    def all_reduce(tensor, **_) -> Work:
        nonlocal counted
        counted += tensor.numel()
        return Work(tensor)

    group = mock.Mock(size=lambda: 2)
    state = hook.PowerSGDState(process_group=group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    state.iter = 2
    with mock.patch.object(dist, "all_reduce", all_reduce):
        hook.powerSGD_hook(state, bucket).wait()
    return counted


def test_memory(played) -> None:
    """Errors are a copy of all gradients; P and Q stay with a warm start; a bucket's copy lives while it is on its way."""
    warm, cold, none = (
        ledger(played(powersgd={"matrix_approximation_rank": 4, "warm_start": warm, "use_error_feedback": feedback}), 0).held[-1]
        for warm, feedback in ((True, True), (False, True), (False, False))
    )
    psi = played().program.parameters
    thin = sum(4 * (n + m) for n, m in MATRICES if (n + m) * 4 * 2 < n * m)
    assert cold.sum() - none.sum() == 4 * psi
    assert warm.sum() - cold.sum() == 4 * thin


def test_compute_of_one_matrix(played) -> None:
    """Without overlap, at 1 TB/s and 1 TFLOP/s: three thin products and the passes of error feedback."""
    slow, fast = played(overlap=False), played(overlap=False, powersgd={"use_error_feedback": False})
    assert slow.step - fast.step == pytest.approx(8 * 4 * slow.program.parameters / 1e12)


def test_flops_of_the_thin_products(played) -> None:
    """P = MQ, Q = MᵀP and PQᵀ of an n × m matrix with rank r: 2·n·m·r each, for all that are compressed."""
    timeline = played(overlap=False, powersgd={"matrix_approximation_rank": 4}, bucket="1 GB")
    flops = dict.fromkeys(("P", "Q", "gradient"), 0.0)
    for _, op in timeline.ops(0):
        for times, item in op.work.items() if isinstance(op.work, Block) else ():
            if item.label.startswith("PowerSGD ") and isinstance(item, Kernel) and item.label[9:] in flops:
                flops[item.label[9:]] += times * item.flops
    compressed = [n * m for n, m in MATRICES if (n + m) * 4 * 2 < n * m]
    assert flops == dict.fromkeys(flops, 2 * 4 * sum(compressed))


def test_one_rank_sends_nothing(played) -> None:
    assert played(1).step == played(1, "ddp").step


def test_refused(toy_job) -> None:
    with pytest.raises(UserError, match=r"powersgd contradicts data_parallel=ddp; it describes ddp_powersgd"):
        toy_job(8, 1, powersgd={"matrix_approximation_rank": 4}).resolve()
    experts = {"experts": {"experts": 8, "chosen": 2, "ffn": 64}}
    with pytest.raises(UserError, match="experts that are spread over ep=2"):
        toy_job(8, 1, model=experts, data_parallel="ddp_powersgd", ep=2).resolve()


def test_rank_1_is_bound_by_memory() -> None:
    """Each gradient is read for P and for Q, and written: on an A100 no dearer than 1.5 passes of its 1.9 TB/s."""
    plan = {"data_parallel": "ddp_powersgd", "sequence": 128, "gradients": "fp32"}
    timeline = simulate(read_job(model="gpt2-1.5b", cluster="dgx-a100", nodes=1, plan=plan))
    price, seconds, moved = timeline.op_costs.prices, 0.0, 0.0
    for _, op in timeline.ops(0):
        for times, item in op.work.items() if isinstance(op.work, Block) else ():
            if isinstance(item, Kernel) and item.label in ("PowerSGD P", "PowerSGD Q", "PowerSGD gradient"):
                seconds, moved = seconds + times * price.seconds(item), moved + times * item.bytes
    assert moved == pytest.approx(3 * 4 * 1.557e9, rel=0.01)
    assert seconds < 1.5 * moved / 2.039e12
