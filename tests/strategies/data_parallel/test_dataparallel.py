"""torch.nn.DataParallel against what its source does and what closed forms give."""

from __future__ import annotations

import pytest

from sim.analysis.memory import ledger
from sim.analysis.summary import summarise
from sim.analysis.volume import volumes
from sim.engine.player import run
from sim.program import MEMORY_KINDS, Block, Collective
from sim.timeline import Timeline
from strategies.lowering.lower import lower
from strategies.models.tracing.records import LOSS
from strategies.read_job import read_job
from topologies.reading import UserError


@pytest.fixture
def played(toy_job, toy_prices):
    """played(gpus, prices={…}, **plan): a step by DataParallel on toy hardware of 1 GB/s."""

    def play(gpus: int = 4, prices: dict | None = None, fold: bool = True, **plan) -> Timeline:
        job = toy_job(gpus, 1, **{"data_parallel": "dataparallel", "model": {"tied": False}} | plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices(**(prices or {})), fold=fold)

    return play


def seconds(timeline: Timeline, label: str) -> float:
    """How long GPU 0's ops of this label take together."""
    frame = timeline.frame()
    ours = frame[(frame["rank"] == 0) & (frame["op"] == label)]
    return float((ours["end"] - ours["start"]).sum())


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_what_goes_out_and_comes_back(played, gpus) -> None:
    """At 1 GB/s: Ψ out and Ψ back down a chain of 64 pieces; (n − 1) shares of tokens, logits and their gradients, one by one."""
    timeline = played(gpus)
    psi, tokens = timeline.program.parameters, 32
    chain = 1 + (gpus - 2) / 64
    assert seconds(timeline, "parameters") == pytest.approx(2 * psi / 1e9 * chain)
    assert seconds(timeline, "gradients") == pytest.approx(2 * psi / 1e9 * chain)
    assert seconds(timeline, "inputs") == pytest.approx((gpus - 1) * tokens * 8 / 1e9)
    for label in ("outputs", "output gradients"):
        assert seconds(timeline, label) == pytest.approx((gpus - 1) * tokens * 512 * 2 / 1e9)


def test_volume(played) -> None:
    """2Ψ per microbatch: accumulation saves nothing, unlike DDP's no_sync.

    Parameters run down a chain from the root to the last GPU, gradients back: all but the end of a chain pass on Ψ. The root
    sends n − 1 shares of tokens and of the logits' gradient, every other GPU its logits.
    """
    tokens, vocabulary = 32, 512
    for count in (1, 3):
        timeline = played(4, accumulation=count)
        psi = timeline.program.parameters
        root, last = psi + 3 * tokens * (1 + vocabulary), psi + tokens * vocabulary
        between = last + psi
        expected = [count * elements for elements in (root, between, between, last)]
        assert [volume["dp"][1] for volume in volumes(timeline)] == pytest.approx(expected)
        assert summarise(timeline).volume["dp"].elements == pytest.approx(count * between)


def test_memory_of_the_root(played) -> None:
    """Only GPU 0 has optimizer states; replicas have parameters and gradients while they compute; GPU 0 has all logits."""
    timeline = played(4)
    psi = timeline.program.parameters
    root, replica = (ledger(timeline, lane).at_peak for lane in (0, 1))
    assert (root["optimizer"], root["parameter"]) == (12 * psi, 2 * psi)
    assert replica.get("optimizer", 0.0) == 0.0
    assert replica["parameter"] == 2 * psi
    assert replica["gradient"] < ledger(timeline, 1).held[:, MEMORY_KINDS.index("gradient")].max() == 2 * psi
    assert not timeline.program.cohorts[1].resident
    peaks = [stage.peak for stage in summarise(timeline).memory]
    assert peaks[0] > peaks[1] == peaks[3]


def test_gpu_0_gathers_all_logits_and_gives_out_their_gradients(played) -> None:
    """Of 4 GPUs with 32 tokens each, in bf16; a replica takes the parameters instead, which GPU 0 has."""
    program = played(4).program
    logits = 4 * 32 * 512 * 2.0
    root, replica = ({op.work.label: op.allocate for op in cohort.ops if op.stream == "dp"} for cohort in program.cohorts[:2])
    assert (root["outputs"], root["parameters"]) == ((("activation", logits),), ())
    assert [op.allocate for op in program.cohorts[0].ops].count((("temporary", logits),)) == 1  # by the loss's backward pass
    assert (replica["outputs"], replica["output gradients"]) == ((), ())
    assert replica["parameters"] == (("parameter", 2.0 * program.parameters),)


@pytest.mark.parametrize(
    ("gpus", "prices", "slower"),
    [
        (4, {"launch": "1 ms"}, 4),  # nobody told Python from the launch
        (4, {"launch": "1 ms", "eager": "5 ms"}, 4 * (5 - 1) / 5),  # launches of others go on beside
        (2, {"launch": "4 ms", "eager": "5 ms"}, 1),  # Python is done before it is asked for again
    ],
)
def test_threads_take_turns_at_python(played, gpus: int, prices: dict[str, str], slower: float) -> None:
    """When launches take all of the time, n threads behind one interpreter lock take n times as long for what Python does before
    them in the forward pass; autograd's threads wait for no other.
    """
    alone, several = (played(count, prices, data_parallel=hook) for count, hook in ((1, "ddp"), (gpus, "dataparallel")))
    assert seconds(several, "forward") / seconds(alone, "forward") == pytest.approx(slower, rel=0.02)
    assert seconds(several, "backward") / seconds(alone, "backward") == pytest.approx(1, rel=0.02)


def test_slower_than_ddp(played) -> None:
    """What every tutorial says: the root's work, the broadcast and the gather stand between the passes."""
    assert played(8).step > 1.2 * played(8, data_parallel="ddp").step
    assert played(1).step == played(1, data_parallel="ddp").step


def test_same_answer_rank_by_rank(played) -> None:
    assert played(4).step == played(4, fold=False).step


def test_same_work(played) -> None:
    """The batch is the same as DDP's, and so are its FLOPs and, but for the loss, each GPU's compute."""
    ours, theirs = played(4).program, played(4, data_parallel="ddp").program
    assert (ours.model_flops, ours.tokens) == (theirs.model_flops, theirs.tokens)
    seconds = [summarise(played(4, data_parallel=hook)).breakdown for hook in ("dataparallel", "ddp")]
    assert seconds[0]["forward"] == pytest.approx(seconds[1]["forward"])
    assert seconds[0]["backward"] == pytest.approx(seconds[1]["backward"])


def test_a_traced_module_gathers_what_it_returns() -> None:
    """LeNet on CIFAR-10 on 8 GPUs in bf16: images of 3 × 32 × 32 go out, 10 logits come back, and their loss is made on GPU 0."""
    pytest.importorskip("torch")
    plan = {"data_parallel": "dataparallel", "microbatch": 16, "global_batch": 128}
    job = read_job(None, model="examples/modules/lenet.py:lenet", input="3x32x32", cluster="dgx-a100", plan=plan)
    root, other = lower(job.model, job.resolve()).cohorts[:2]
    sent = {op.work.label: op.work.bytes * op.work.repeat for op in root.ops if isinstance(op.work, Collective)}
    assert sent["inputs"] == 8 * 16 * 3 * 32 * 32 * 2
    assert sent["outputs"] == sent["output gradients"] == 8 * 16 * 10 * 2
    assert sent["parameters"] == sent["gradients"] == 62_006 * 2
    runs = [[run for op in cohort.ops if isinstance(op.work, Block) for run in op.work.runs] for cohort in (root, other)]
    losses = [[item for run in own for item in run.items if item.label.startswith(LOSS)] for own in runs]
    assert sum(item.bytes for item in losses[0]) > 4 * 128 * 10 * 4
    assert not losses[1]


@pytest.mark.parametrize(
    ("nodes", "plan", "message"),
    [
        (2, {}, "one process, which drives the GPUs of 1 node, not of 2"),
        (1, {"tp": 2}, "which tp=2 contradicts"),
        (1, {"pp": 2}, "which pp=2 contradicts"),
        (1, {"bucket": "1 MiB"}, "has no bucket"),
    ],
)
def test_refused(toy_job, nodes, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(4, nodes, data_parallel="dataparallel", **plan).resolve()


def test_refused_without_gpus() -> None:
    with pytest.raises(UserError, match="data_parallel=dataparallel needs GPUs: .* calls the module in one process; take ddp"):
        read_job(model="gpt2-1.5b", cluster="cpu-gloo", plan={"data_parallel": "dataparallel"}).resolve()
