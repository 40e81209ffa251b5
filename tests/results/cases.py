"""Jobs that have what few random ones have: each has a name, and says it here."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from reports.tables.checkpoint import as_data as checkpoint_data
from reports.tables.loop import as_data as loop_data
from shardyard import read_job
from sim.replay.step import StepReplay
from sim.runs.replications import recorded
from strategies.job import Job
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from strategies.memory_by_layer import memory_by_layer
from strategies.planner.search.site import started
from strategies.planner.search.space import Space
from strategies.predict import predict, simulate
from strategies.resilience.checkpoint_plan import checkpoint_plan
from strategies.resilience.run_spec import prepare
from strategies.resilience.runs import run_days
from strategies.resilience.settings import RunSettings
from tests.random_jobs import CPU, EXPERTS, MODELS
from tests.results.jobs import LLAMA, UNUSUAL, random_question_job
from tests.results.plain import plain
from tests.results.planning import bounds_in
from tests.results.questions import answer, question
from tests.results.runs import run_job
from tests.results.steps import tables
from tests.test_programs import Texts
from topologies.reading import UserError

GPT, GATED, MIXED, ODD = MODELS
PLAIN = LLAMA | {"name": "plain"}
MIXTURE = LLAMA | {"name": "mixture", "experts": {"experts": 8, "chosen": 2, "ffn": 256}}
IMAGES = {"image": 64, "size": 16, "class_token": True}
VISION: dict[str, Any] = {"name": "vision", "family": "encoder", "hidden": 256, "layers": 4, "heads": 4, "vocabulary": 0}
VISION |= {"patches": IMAGES, "context": 17, "positions": "learned", "classes": 10, "head": False}
SCAN = {"heads": 1024, "head_dim": 1, "state": 16, "step_rank": 32, "norm": False}
SCANS: dict[str, Any] = PLAIN | {"name": "scans", "state_space": SCAN, "mixer": "state_space", "positions": "none"}
WIDE = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "stage3_param_persistence_threshold": 0}
LIMITS = {"stage3_prefetch_bucket_size": 10**6, "stage3_max_live_parameters": 3 * 10**6, "stage3_max_reuse_distance": 10**6}

# model, fields of the plan, and of the job where they are not a node of 8 GPUs
CASES: dict[str, tuple[dict[str, Any] | str, dict[str, Any], dict[str, Any]]] = {
    "operators eager": (PLAIN, {"recompute": "operators", "kernels": "torch", "tp": 2, "sequence_parallel": True}, {}),
    "operators compiled": (PLAIN, {"recompute": "operators", "kernels": "compiled", "tp": 2}, {}),
    "operators fp8": (
        PLAIN | {"gated": False},
        {"recompute": "operators", "kernels": "compiled", "fp8": {"scaling": "tensorwise"}, "precision": "bf16"},
        {},
    ),
    "images": (VISION, {"kernels": "torch", "sequence": 17, "tp": 2}, {}),
    "images of megatron": (
        VISION | {"patches": IMAGES | {"class_token": False}, "context": 16, "dropout": True, "attention_dropout": True},
        {"microbatch": 2},
        {},
    ),
    "t5": ("tests/data/models/t5-small.json", {"attention": "materialised", "sequence": 128, "tp": 2}, {}),
    "t5 recomputed": ("tests/data/models/t5-small.json", {"recompute": "full", "sequence": 128, "data_parallel": "zero3"}, {}),
    "2021 tensors": (GPT, {"data_parallel": "zero3", "deepspeed": {"version": "0.3.13"} | LIMITS, "recompute": "full"}, {}),
    "2021 no trace": (
        GATED,
        {"data_parallel": "zero3", "deepspeed": {"version": "0.5"} | LIMITS, "overlap": False},
        {"nodes": 2},
    ),
    "2021 small ones": (
        ODD,
        {"data_parallel": "zero3", "deepspeed": {"version": "0.3.13", "stage3_param_persistence_threshold": 800}, "tp": 2},
        {},
    ),
    "quantised": (GATED, {"data_parallel": "zero3", "deepspeed": WIDE | {"zero_hpz_partition_size": 8}}, {"nodes": 2}),
    "quantised in turn": (GPT, {"data_parallel": "zero3", "deepspeed": WIDE, "overlap": False, "accumulation": 2}, {"nodes": 2}),
    "checkpoints on cpus": (
        GPT,
        {"data_parallel": "zero3", "recompute": "full", "deepspeed": {"cpu_checkpointing": True, "partition_activations": True}}
        | {"tp": 2, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
        {"node": {"cpu": CPU}},
    ),
    "lora": (
        PLAIN,
        {
            "lora": {"rank": 8, "targets": ["linear_qkv", "down_proj"], "dropout": 0.1},
            "tp": 2,
            "pp": 2,
            "sequence_parallel": True,
        },
        {},
    ),
    "lora nf4": (
        PLAIN,
        {"lora": {"rank": 4, "targets": ["q_proj", "up_proj"], "weights": "nf4"}, "data_parallel": "zero3", "kernels": "torch"},
        {},
    ),
    "frozen": (ODD, {"freeze": {"layers": 2, "head": True}, "data_parallel": "zero2", "recompute": "full"}, {}),
    "packed": (GATED, {"packing": {"lengths": [100, 500, 900]}, "tp": 2, "accumulation": 3}, {"nodes": 2}),
    "dropped": (GPT, {"uneven_batch": "drop_last", "global_batch": 27, "microbatch": 2, "accumulation": None}, {}),
    "joined": (GPT, {"uneven_batch": "join", "global_batch": 27, "accumulation": None, "overlap": False}, {}),
    "beyond the context": (GPT | {"positions": "rotary"}, {"sequence": 2048, "pp": 1, "schedule": "gpipe"}, {}),
    "every microbatch": (GPT, {"data_parallel": "zero2", "pp": 2, "accumulation": 4}, {}),
    "lamb": (GATED, {"optimizer": "lamb", "data_parallel": "ddp", "pp": 2}, {}),
    "lion": (GPT, {"optimizer": "lion", "gradients": "fp32", "kernels": "torch", "data_parallel": "zero3"}, {}),
    "muon": (MIXED, {"optimizer": "muon", "pp": 2, "data_parallel": "ddp"}, {}),
    "adafactor": (ODD, {"optimizer": "adafactor", "pp": 2, "kernels": "compiled"}, {}),
    "complex rotary": (GATED, {"kernels": "torch", "complex_rotary": True, "repeated_keys": True, "precision": "fp32"}, {}),
    "dataparallel": (GPT, {"data_parallel": "dataparallel", "kernels": "torch"}, {"node": {"gpus": 4, "nics": 4}}),
    "experts in order": (
        MIXTURE,
        {"ep": 4, "capacity_factor": 1.5, "pad_to_capacity": True, "imbalance": 1.2, "tp": 2, "sequence_parallel": True},
        {"nodes": 2},
    ),
    "experts by nodes": (MIXTURE, {"ep": 8, "ep_nodes": 2, "routed_nodes": 1, "token_dispatcher": "deepep"}, {"nodes": 2}),
    "experts of tp ranks": (GPT | {"experts": EXPERTS}, {"ep": 2, "tp": 2, "expert_tp": 1, "sequence_parallel": True}, {}),
    "ulysses": (GATED, {"cp": 4, "cp_method": "ulysses", "recompute": "full", "fp8": {}, "precision": "bf16"}, {}),
    "pieces": (GATED, {"tp": 4, "sequence_parallel": True, "overlap_tp": "pieces", "fp8": {"scaling": "delayed"}}, {}),
    "late": (UNUSUAL[3], {"pp": 2, "tp": 2, "accumulation": 4, "schedule": "interleaved", "chunks": 2}, {}),
    "activations away": (GPT, {"offload_activations": 3, "accumulation": 3}, {"node": {"cpu": CPU}}),
    "on disks": (
        GPT,
        {"data_parallel": "zero3", "offload": {"optimizer": "nvme", "parameters": "nvme", "tile": 50000}, "accumulation": 2},
        {"node": {"cpu": CPU}},
    ),
    "powersgd": (GPT, {"data_parallel": "ddp_powersgd", "kernels": "torch", "powersgd": {"warm_start": False}}, {"nodes": 2}),
    "tiles": (
        GATED,
        {"data_parallel": "zero3", "deepspeed": {"tiles": 3, "stage3_prefetch_bucket_size": 10**6}, "kernels": "torch"},
        {"nodes": 2},
    ),
    "tiles in turn": (
        GPT,
        {"data_parallel": "zero3", "deepspeed": {"tiles": 4} | LIMITS, "overlap": False, "recompute": "full", "accumulation": 2},
        {},
    ),
    "gathers in buckets": (
        GPT,
        {"data_parallel": "zero1", "deepspeed": {"reduce_bucket_size": 10**6, "allgather_bucket_size": 3 * 10**6}},
        {},
    ),
    "padded buckets": (
        ODD,
        {"data_parallel": "zero1", "bucket": "1 MB", "framework": {"pad_buckets_for_high_nccl_busbw": True}},
        {"nodes": 3},
    ),
    "small buckets": (GATED, {"kernels": "torch", "bucket": "300 kB", "accumulation": 2}, {}),
    "selective scans": (SCANS, {"recompute": "full", "precision": "fp32"}, {}),
    "selective scans of megatron": (SCANS | {"mixer": "both", "positions": "rotary"}, {"pp": 2, "data_parallel": "zero1"}, {}),
    "normed scans": (SCANS | {"state_space": SCANS["state_space"] | {"step_norms": True}}, {"kernels": "compiled"}, {}),
    "spread experts": (MIXTURE, {"ep": 4, "expert_spread": 0.3, "accumulation": 2}, {}),
    "on cpus": (GPT, {"precision": "fp32", "accumulation": 2}, {"cluster": "cpu-gloo", "nodes": 1}),
    "on other GPUs": (GATED, {"tp": 2, "data_parallel": "zero3"}, {"cluster": "examples/clusters/mi300x.yaml", "nodes": 2}),
}


@question
def case(name: str) -> Any:
    """What ranks do, layers cost, the step says, and what was assumed."""
    model, plan, more = CASES[name]
    node, rest = more.get("node", {}), {key: value for key, value in more.items() if key != "node"}
    usual = {"cluster": {"based_on": "dgx-h100", "node": node}, "nodes": 1} | rest
    job = read_job(None, {}, model=model, plan={"accumulation": 1} | plan, **usual)
    answers = _answers(job)
    return answers | {name: _hash(answers[name]) for name in ("parts", "program")}


@question
def brief(draw: random.Random) -> Any:
    """A step of a random job, with a hash of all that is said of it."""
    job = random_question_job(draw)
    timeline = simulate(job)
    answers = _answers(job) | {"tables": plain(tables(timeline)), "replayed": plain(StepReplay(timeline).times().ends)}
    step = {"step": timeline.step, "peak": answers["summary"]["memory"][0]["peak"]}
    return step | {name: _hash(each) for name, each in answers.items()}


@question
def digest(name: str) -> Any:
    """The results of another question as one hash."""
    return {"all": _hash(answer(name))}


@question
def brief_run(draw: random.Random) -> Any:
    """Runs over hours, with hashes of what happened and of what a checkpoint and the loop around a step are."""
    job = run_job(draw)
    days = draw.choice([0.05, 0.2])
    days_of_training = run_days(job, days, price=2.0, seed=draw.randrange(9), count=2)
    prepared = prepare(job, job.run or RunSettings(), days)
    spans = [(span.start, span.end, span.cause) for span in recorded(prepared.spec, 1).timeline]
    said = {
        "answer": plain(days_of_training),
        "spec": plain(prepared.spec),
        "spans": plain(spans),
        "checkpoint": plain(checkpoint_data(checkpoint_plan(job, job.run or RunSettings()))),
        "loop": plain({name: value for name, value in loop_data(prepared).items() if name != "hash"}),
    }
    return {"tokens": days_of_training.tokens.mean, "goodput": days_of_training.goodput.mean} | {
        name: _hash(each) for name, each in said.items()
    }


def _answers(job: Job) -> dict[str, Any]:
    costs, summary = parts(job.model, job.resolve()), predict(job)
    return {
        "notes": job.notes,
        "parts": [costs.embedding, *costs.layers, costs.head],
        "program": lower(job.model, job.resolve()),
        "summary": summary.to_dict(),
        "layers": memory_by_layer(job, summary),
        "active": job.model.active_parameters,
        "bounds": _bounds(job),
    }


def _bounds(job: Job) -> Any:
    try:
        return plain(bounds_in(started(job), Space(())))
    except UserError as error:  # nodes that are not alike
        return str(error)


def _hash(value: Any) -> str:
    """Of every field, numbers to nine digits."""
    return hashlib.sha256(Texts().of(value).encode()).hexdigest()[:16]
