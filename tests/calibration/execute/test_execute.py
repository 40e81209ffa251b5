"""Plans carried out by PyTorch over gloo: they compute what one process does, and send and hold what the simulation says."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

import calibration.execute
from calibration.devices.cpu import CpuDevice
from calibration.execute import execute, room, worker
from calibration.execute.limits import ready
from calibration.execute.servers import serve
from calibration.launch.place import Place
from calibration.launch.ranks import launch
from calibration.validate import validate
from sim.program import Collective
from strategies.lowering.lower import lower
from strategies.read_job import read_job
from tests.calibration.execute.conftest import compiled_once
from tests.conftest import LLAMA_LAYER
from topologies.reading import UserError

GPT = {"name": "gpt", "hidden": 32, "layers": 4, "heads": 4, "vocabulary": 64, "context": 16}
LLAMA = GPT | {
    "name": "llama",
    "kv_heads": 2,
    "ffn": 48,
    **LLAMA_LAYER,
}
BERT = GPT | {
    "name": "bert",
    "layers": 2,
    "family": "encoder",
    "token_types": 2,
    "embedding_norm": True,
    "final_norm": False,
    "head_bias": True,
    "head_transform": True,
    "pooler": True,
    "pooler_classes": 2,
}
MOE = LLAMA | {"name": "moe", "layers": 2, "experts": {"experts": 4, "chosen": 2, "ffn": 24}}
SHARED = {"experts": 2, "chosen": 1, "ffn": 24, "shared": 1, "shared_gate": True, "first_dense": 1}
LORA = {"rank": 4, "targets": ["q_proj", "v_proj", "mlp"]}
FLAT, SHORT = GPT | {"layers": 2}, LLAMA | {"layers": 2}  # PyTorch takes long for every operator
ONE, ONE_LLAMA = GPT | {"layers": 1}, LLAMA | {"layers": 1}  # and longer to compile one
UNTIED = FLAT | {"tied": False}
PACKED = {"lengths": [3, 5, 9, 14]}
MIDDLE = {"pp": 2, "accumulation": 4}
DATA = Path(__file__).parents[2] / "data"


SIXTEEN = {"gpu": {"based_on": "cpu-core", "peak": dict.fromkeys(("fp32", "fp16", "bf16"), "120 GFLOP/s")}}


def job(name, gpus, model, **plan):
    cluster = {"based_on": "cpu-gloo", "node": {"gpus": gpus} | (SIXTEEN if plan.get("precision", "fp32") != "fp32" else {})}
    read = read_job(model=model, cluster=cluster, plan={"precision": "fp32", "microbatch": 2, "algorithm": "auto", **plan})
    return replace(read, name=name)


TWO = {
    "ddp, small buckets": job("ddp, small buckets", 2, GPT, accumulation=2, bucket="8 KiB"),
    "ddp without overlap": job("ddp without overlap", 2, FLAT, overlap=False),
    "ddp, views of buckets": job("ddp, views of buckets", 2, LLAMA, accumulation=2, gradient_as_bucket_view=True),
    "ddp, gradients that stay": job("ddp, gradients that stay", 2, GPT, set_to_none=False, bucket="8 KiB"),
    "16-bit gradients": job("16-bit gradients", 2, SHORT, data_parallel="ddp_fp16"),
    "powersgd": job("powersgd", 2, GPT | {"hidden": 64}, data_parallel="ddp_powersgd", accumulation=2),
    "fp16": job("fp16", 2, SHORT, precision="fp16", accumulation=2),
    "bf16": job("bf16", 2, SHORT, precision="bf16", accumulation=2),
    "bf16 without masters": job("bf16 without masters", 2, SHORT, precision="bf16", master_weights=False, accumulation=2),
    "zero3 without masters": job(
        "zero3 without masters", 2, SHORT, precision="bf16", master_weights=False, data_parallel="zero3"
    ),
    "zero1": job("zero1", 2, SHORT, data_parallel="zero1", accumulation=2, recompute="full"),
    "zero redundancy optimizer": job("zero redundancy optimizer", 2, FLAT, data_parallel="zero_redundancy_optimizer"),
    "zero2": job("zero2", 2, FLAT, data_parallel="zero2", accumulation=2),
    "zero2, reduced once": job("zero2, reduced once", 2, SHORT, data_parallel="zero2", accumulation=3, gradient_sync="last"),
    "zero3": job("zero3", 2, FLAT, data_parallel="zero3", accumulation=2),
    "zero3, reduced once": job("zero3, reduced once", 2, FLAT, data_parallel="zero3", accumulation=3, gradient_sync="last"),
    "zero3, kept units": job("zero3, kept units", 2, FLAT, data_parallel="zero3", root_unit=True, keep_last_unit=True),
    "zero3, not resharded": job("zero3, not resharded", 2, SHORT, data_parallel="zero3", reshard=False, precision="fp16"),
    "local sgd": job("local sgd", 2, FLAT, data_parallel="local_sgd", local_steps=2, optimizer="sgd"),
    "diloco": job("diloco", 2, SHORT, data_parallel="diloco", local_steps=2),
    "tp": job("tp", 2, FLAT, tp=2, attention="materialised"),
    "tp, sequence parallel": job("tp, sequence parallel", 2, SHORT, tp=2, sequence_parallel=True, recompute="operators"),
    "gpipe": job("gpipe", 2, FLAT, schedule="gpipe", **MIDDLE),
    "interleaved": job("interleaved", 2, LLAMA, schedule="interleaved", chunks=2, **MIDDLE),
    "packing": job("packing", 2, FLAT, packing=PACKED, accumulation=2),
    "packing, zero3": job("packing, zero3", 2, SHORT, packing=PACKED, data_parallel="zero3", recompute="full"),
    "packing, tp": job("packing, tp", 2, SHORT, packing=PACKED, tp=2, accumulation=2),
    "packing, pp": job("packing, pp", 2, SHORT, packing=PACKED, recompute="full", **MIDDLE),
    "packing, encoder": job("packing, encoder", 2, FLAT | {"family": "encoder"}, packing=PACKED),
    "pipedream": job("pipedream", 2, UNTIED, schedule="pipedream", optimizer="momentum", **MIDDLE),
    "pipedream-2bw": job("pipedream-2bw", 2, UNTIED, schedule="pipedream-2bw", dropout=True, **MIDDLE),
    "zb-v": job("zb-v", 2, GPT, schedule="zb-v", **MIDDLE),  # the first and the last stage on one rank share the embedding
    "zb-h1": job("zb-h1", 2, GPT, schedule="zb-h1", optimizer="momentum", **MIDDLE),  # PyTorch has no class of it
    "own schedule": job("own schedule", 2, GPT, pp=2, schedule=str(DATA / "own_schedule.csv")),
    "naive": job("naive", 2, LLAMA, schedule="naive", recompute="full", recompute_method="every", recompute_layers=2, **MIDDLE),
    "bert, tp": job("bert, tp", 2, BERT, tp=2),
    "bert, pp": job("bert, pp", 2, BERT, pp=2, accumulation=2),
    "lora": job("lora", 2, SHORT, lora=LORA | {"dropout": 0.1}, accumulation=2),
    "lora, zero3": job("lora, zero3", 2, SHORT, lora=LORA, data_parallel="zero3"),
    "frozen layers, zero1": job("frozen layers, zero1", 2, FLAT, freeze={"layers": 1}, data_parallel="zero1"),
    "frozen head, pp": job("frozen head, pp", 2, SHORT, freeze={"head": True}, pp=2, accumulation=2),
    "dropout, pp": job("dropout, pp", 2, LLAMA, dropout=True, schedule="interleaved", chunks=2, recompute="full", **MIDDLE),
    "compiled": job("compiled", 2, ONE, kernels="compiled", accumulation=2),
    "compiled, zero3": job("compiled, zero3", 2, ONE_LLAMA, kernels="compiled", data_parallel="zero3", recompute="full"),
    "context parallel": job("context parallel", 2, SHORT, cp=2, accumulation=2),
    "context parallel, learned positions": job("context parallel, learned positions", 2, FLAT, cp=2, data_parallel="zero1"),
    "context parallel, encoder": job("context parallel, encoder", 2, FLAT | {"family": "encoder"}, cp=2),
    "context parallel, zero2": job("context parallel, zero2", 2, SHORT, cp=2, data_parallel="zero2", recompute="full"),
    "context parallel, zero3": job("context parallel, zero3", 2, SHORT, cp=2, data_parallel="zero3"),
    "ulysses": job("ulysses", 2, SHORT, cp=2, cp_method="ulysses", recompute="full"),
    "experts": job("experts", 2, MOE),
    "expert parallel": job("expert parallel", 2, MOE, ep=2, accumulation=2),
    "expert parallel, zero3": job("expert parallel, zero3", 2, MOE, ep=2, data_parallel="zero3"),
    "shared experts": job("shared experts", 2, MOE | {"experts": SHARED}, ep=2, recompute="full", bucket="8 KiB"),
    "dropout, diloco": job("dropout, diloco", 2, FLAT, dropout=True, data_parallel="diloco", local_steps=2, bucket="8 KiB"),
}
OF_PARTS = ["16-bit gradients", "zero3", "tp", "zb-v", "bert, pp", "lora", "frozen layers, zero1", "context parallel"]
OF_PARTS += ["expert parallel", "expert parallel, zero3"]
PARTS = {f"{name}, layer by layer": replace(TWO[name], name=f"{name}, layer by layer") for name in OF_PARTS}
# parameters, Adam's states, DDP's buckets, and gradients where these stay or are there when the second microbatch's loss runs;
# while ranks agree a flat copy of all parameters, and the last gradients; half of states and gradients, and two flat buckets
HELD = {
    "ddp, small buckets": 20,
    "ddp, gradients that stay": 20,
    "ddp, views of buckets": 16,
    "local sgd": 4 + 4 + 4,
    "diloco": 4 + 8 + 8 + 4 + 4,
    "zero2": 4 + 4 + 2 + 2 * 4,
}
FOUR = {
    "ddp × tp": job("ddp × tp", 4, SHORT, tp=2, accumulation=2),
    "zero1 × tp": job("zero1 × tp", 4, SHORT, tp=2, data_parallel="zero1"),
    "zero2 × tp": job("zero2 × tp", 4, FLAT, tp=2, data_parallel="zero2", bucket="8 KiB", accumulation=2),
    "fsdp × tp": job("fsdp × tp", 4, SHORT, tp=2, data_parallel="zero3"),
    "hsdp": job("hsdp", 4, FLAT, data_parallel="zero3", shard=2),
    "pp × dp": job("pp × dp", 4, FLAT, **MIDDLE),
    "pp × zero redundancy optimizer": job(
        "pp × zero redundancy optimizer",
        4,
        LLAMA,
        data_parallel="zero_redundancy_optimizer",
        schedule="interleaved",
        chunks=2,
        **MIDDLE,
    ),
    "pp × ddp by hand": job(
        "pp × ddp by hand", 4, LLAMA, schedule="interleaved", chunks=2, gradient_as_bucket_view=True, **MIDDLE
    ),
    "pp × zero2": job("pp × zero2", 4, SHORT, data_parallel="zero2", bucket="4 KiB", **MIDDLE),
    "pp × fsdp": job("pp × fsdp", 4, SHORT, data_parallel="zero3", gradient_sync="every", pp=2, accumulation=2),
    "pp × fsdp, reduced once": job("pp × fsdp, reduced once", 4, SHORT, data_parallel="zero3", **MIDDLE),
    "pp × ddp, few microbatches": job("pp × ddp, few microbatches", 4, FLAT, pp=2, accumulation=2),
    "cp × dp": job("cp × dp", 4, SHORT, cp=2),
    "ring of four": job("ring of four", 4, SHORT, cp=4),
    "cp × pp": job("cp × pp", 4, SHORT, cp=2, pp=2, accumulation=2),
    "ep × dp": job("ep × dp", 4, MOE, ep=2),
    "ep × fsdp": job("ep × fsdp", 4, MOE, ep=2, data_parallel="zero3"),
    "ep × pp": job("ep × pp", 4, MOE, ep=2, pp=2, accumulation=2),
    "pipedream of four": job("pipedream of four", 4, UNTIED | {"layers": 4}, pp=4, accumulation=4, schedule="pipedream"),
    "pipedream × dp": job("pipedream × dp", 4, UNTIED, schedule="pipedream", **MIDDLE),
    "pp × tp": job("pp × tp", 4, SHORT, tp=2, sequence_parallel=True, pp=2, accumulation=2),
}


@pytest.mark.parametrize("jobs", [TWO | PARTS, FOUR], ids=["two ranks", "four ranks"])
def test_volumes_are_the_simulations_to_the_byte_and_results_those_of_one_process(jobs, monkeypatch):
    """One start of processes for all jobs. `validate` compares losses, gradients and parameters, and raises. Of a model that one
    process cannot hold the first step is compared, layer by layer; the same steps are with both.
    """
    parts = [job.name in PARTS for job in jobs.values()]
    assert room(list(map(ready, jobs.values())), "cpu") == [False] * len(jobs)
    monkeypatch.setattr(calibration.execute, "room", lambda *_: parts)
    monkeypatch.setattr(worker, "work", compiled_once)
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")  # compiled layers without SIMD: g++ is done in half the time
    peaks = {}  # by stage; of compiled layers no memory is followed
    for validated in validate(list(jobs.values()), seconds=0):
        name, compared = validated.job.name, validated.execution.compared
        peaks[name] = [(row.predicted, row.measured) for row in validated.rows if row.what == "memory"]
        assert compared["losses"][0] > compared["losses"][-1], name
        distances = compared["loss"], compared["gradient"] or 0.0, compared["norm"] or 0.0, compared["update"]
        assert max(distances) <= compared["tolerance"], name
        assert compared["streamed"] == (name in PARTS), name
        if name in PARTS:
            assert len(compared["expected_losses"]) == 1, name
            assert max(distances) > 0, name
        volumes = {row.of: (row.predicted, row.measured) for row in validated.rows if row.what == "volume"}
        assert volumes, name
        for axis, (predicted, measured) in volumes.items():
            assert measured == pytest.approx(predicted, abs=1e-6), (name, axis)
        if validated.job.plan.hook.local:
            program = lower(validated.job.model, validated.job.resolve())
            simulated = sum(isinstance(op.work, Collective) for op in program.cohorts[0].ops)
            assert simulated == sum(entry["count"] for entry in validated.execution.operations), name
        if name in HELD:  # bytes a parameter between steps; activations
            row = next(row for row in validated.rows if row.what == "memory")
            assert row.measured > HELD[name] * validated.job.model.parameters
            assert row.error == pytest.approx(0, abs=0.05), name
    if "bf16" in peaks:  # fp32 copies and two fp32 states, or two states in bf16: 4 + 8 − 4 bytes a parameter
        (whole,), (without,) = peaks["bf16"], peaks["bf16 without masters"]
        less = [a - b for a, b in zip(whole, without, strict=True)]
        assert less == [8 * jobs["bf16"].model.parameters] * 2


def test_it_is_taken_where_the_whole_model_does_not_fit(monkeypatch):
    """Ψ of 0.2 billion, 24 bytes each in one process; two ranks with ZeRO-3 hold half of 16, and one layer whole."""
    large = ready(job("large", 2, LLAMA | {"hidden": 1024, "heads": 16, "layers": 24}, data_parallel="zero3"))
    whole = 24 * large.model.parameters
    for part, streamed in ((1.1, False), (0.9, True)):
        monkeypatch.setattr(CpuDevice, "free", lambda self, ranks, part=part: part * whole)
        assert room([large], "cpu") == [streamed]
    monkeypatch.setattr(CpuDevice, "free", lambda self, ranks: 0.4 * whole)
    with pytest.raises(UserError, match="each of 2 processes needs .* layer by layer"):
        room([large], "cpu")
    alone = ready(job("alone", 2, LLAMA | {"hidden": 1024, "heads": 16, "layers": 24}, data_parallel="diloco", local_steps=2))
    monkeypatch.setattr(CpuDevice, "free", lambda self, ranks: 0.9 * whole)
    with pytest.raises(UserError, match="diloco needs the whole model in one process"):
        room([alone], "cpu")


def wrong(place, jobs):
    """What is said of each job when something of its execution, or of what it is compared with, is another."""
    import torch.distributed as dist

    from calibration.execute import runner
    from calibration.execute.data_parallel.local import LocalSGD
    from calibration.execute.reference import stale

    LocalSGD.synchronise = lambda self: dist.barrier()
    runner.documents = lambda *_: None
    stale.version_of = lambda setup, stage, microbatch: microbatch
    said = []
    for job in jobs:
        with pytest.raises(UserError) as error:
            worker.work(place, [job], 0.0)
        said.append(str(error.value))
    return said


def test_a_wrong_result_is_an_error():
    """Ranks that never agree are not what one process computes; whole sequences are another thing than the same documents one
    by one; one process in which every pass has the newest parameters is not what a pipeline without flushes does.
    """
    expected = (
        r"local sgd: executed, but the (loss|update|norm of gradients) differs by .* from one process",
        r"packing: executed, but the (loss|gradient) .*differs by",
        r"pipedream: executed, but the gradient of .* differs by",
    )
    for said in launch(wrong, 2, [ready(TWO[name]) for name in ("local sgd", "packing", "pipedream")]):
        assert all(re.match(text, each) for text, each in zip(expected, said, strict=True)), said


def test_an_asynchronous_server_does_what_a_replay_in_one_process_does():
    """`serve` replays the order in which gradients came. A worker sends Ψ gradients and gets Ψ parameters."""
    asked = job("servers", 3, GPT, accumulation=2)
    done = serve(asked, 1, "async", steps=3)
    assert done.compared["update"] <= done.compared["tolerance"]
    assert done.sent_by_worker == 4 * asked.model.parameters
    assert done.sent_by_server == 2 * 4 * asked.model.parameters
    assert 0 < done.most_age <= 4


def test_a_synchronous_server_uses_the_mean_of_all_gradients():
    done = serve(job("servers", 3, GPT), 1, "sync", steps=2)
    assert (done.most_age, done.compared["update"] <= done.compared["tolerance"]) == (0, True)


@pytest.mark.parametrize(
    ("servers", "staleness", "plan", "reason"),
    [
        (2, "sync", {}, "--servers 2: of 2 processes"),
        (1, "late", {}, "--staleness late"),
        (1, "sync", {"tp": 2}, "tp=2: a worker"),
        (1, "sync", {"packing": {"lengths": [3, 5]}}, "packing: workers of parameter servers"),
    ],
)
def test_parameter_servers_that_cannot_be(servers, staleness, plan, reason):
    with pytest.raises(UserError, match=reason):
        serve(job("servers", 2, GPT, **plan), servers, staleness, 1)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"cp": 2, "dropout": True}, "each rank drops of its own tokens"),
        ({"recompute": "selective"}, "recompute=selective"),
        ({"algorithm": "tree"}, "algorithm=tree: gloo has one"),
        ({"dropout": True, "tp": 2}, "plan.dropout=false"),
        ({"kernels": "megatron"}, "kernels=megatron is simulated only"),
        ({"pp": 2, "accumulation": 2, "schedule": "pipedream", "recompute": "full"}, "what runs again would have the newest"),
        ({"pp": 2, "accumulation": 2, "schedule": "chimera"}, "a stage of PyTorch's pipelines is on one rank"),
        ({"pp": 2, "schedule": str(DATA / "out_of_order.csv")}, r"stage 1 runs microbatches as \[1, 0\]"),
        ({"tp": 2, "sequence_parallel": True}, "learned positions"),
        ({"data_parallel": "zero3", "bucket": "1 MiB"}, "FSDP2 reduces layer by layer"),
        ({"gradient_sync": "last"}, "gradient_sync=last contradicts data_parallel=ddp"),
    ],
)
def test_what_cannot_be_executed_is_refused_with_the_reason(plan, reason):
    with pytest.raises(UserError, match=reason):
        execute([job("refused", 2, GPT | {"tied": False}, **plan)], 0)


def test_a_machine_that_is_too_small_is_refused():
    with pytest.raises(UserError, match="each of 2 processes needs .* GB, also to compare layer by layer with one process"):
        execute([job("large", 2, GPT | {"hidden": 32768, "heads": 32, "layers": 100})], 0)
    with pytest.raises(UserError, match="1024 processes on"):
        execute([job("many", 1024, GPT)], 0)


def test_data_parallel_threads_need_gpus():
    with pytest.raises(UserError, match="data_parallel=dataparallel needs GPUs"):
        execute([job("threads", 2, GPT, data_parallel="dataparallel")], 0)


def test_this_process_is_a_rank_where_a_launcher_says_so(monkeypatch):
    torch = pytest.importorskip("torch")
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as torchrun has it
    try:
        (done,) = validate([job("alone", 1, GPT)], seconds=0)
    finally:
        torch.set_num_threads(threads)
    assert (done.execution.ranks, done.execution.compared["update"]) == (1, 0.0)
    assert not torch.distributed.is_initialized()  # its groups are gone with the work


def test_nodes_that_are_not_the_launchers_are_refused(monkeypatch):
    """Two ranks, each the first of its node, and a job of one node with two."""
    monkeypatch.setattr(worker, "under_launcher", lambda: True)
    monkeypatch.setattr(worker.dist, "all_gather_object", lambda gathered, _: gathered.__setitem__(slice(None), [0, 0]))
    place = Place(0, 2, 0, "cpu", (), print)
    with pytest.raises(UserError, match="the launcher started rank 1 as number 0 of its node; --nodes 2 and --set cluster.node"):
        worker._laid_out(place, [TWO["zero3"]])
    worker._laid_out(place, [job("two nodes", 1, GPT)])


def test_one_rank_that_lacks_memory_decides_for_all(monkeypatch):
    """Under a launcher each has seen its own device's: compared in unlike ways they would wait for each other."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    asked = []
    monkeypatch.setattr(calibration.execute, "under_launcher", lambda: True)
    monkeypatch.setattr(CpuDevice, "free", lambda self, ranks: asked.append(self.index) or 1e12)
    assert room([ready(TWO["zero3"])], "cpu") == [False]
    assert asked == [1]
    place = Place(0, 2, 0, "cpu", (), print)
    assert worker._agreed(place, [False, True]) == [False, True]
    monkeypatch.setattr(worker, "under_launcher", lambda: True)
    other = lambda gathered, mine: gathered.__setitem__(slice(None), [mine, [True, False]])  # noqa: E731
    monkeypatch.setattr(worker.dist, "all_gather_object", other)
    assert worker._agreed(place, [False, False]) == [True, False]


def test_a_port_in_use_is_said(monkeypatch):
    with socket.create_server(("localhost", 0)) as listener:
        port = str(listener.getsockname()[1])
        given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"rank 0: cannot meet the others at localhost:{port}"):
            execute([job("port", 2, GPT)], 0)
