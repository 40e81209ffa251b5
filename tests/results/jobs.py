"""Jobs for questions: those of tests/random_jobs.py, and what these have not: adapters, packing, unequal nodes, effects, runs."""

from __future__ import annotations

import random
from typing import Any

from strategies.job import Job
from strategies.read_job import read_job
from tests.random_jobs import random_job
from topologies.reading import UserError

MOST = 32  # GPUs
FEW = 48  # microbatches
TRIES = 200
MORE: list[dict[str, Any]] = [  # fields of plans
    {"lora": {"rank": 8, "targets": "attention"}},
    {"lora": {"rank": 8, "targets": ["q_proj"], "weights": "nf4"}, "data_parallel": "zero3"},
    {"lora": {"rank": 16, "targets": "all", "dropout": 0.1}, "tp": 2, "sequence_parallel": True},
    {"freeze": {"layers": 2}},
    {"freeze": {"layers": 1, "embedding": False}, "pp": 2},
    {"freeze": {"layers": 0, "head": True}},
    {"packing": {"lengths": [20, 30, 300, 700]}, "data_parallel": "zero3"},
    {"packing": {"lengths": [100, 500]}, "cp": 2},
    {"microbatches_per_replica": [1, 2], "pp": 2, "accumulation": None},
    {"uneven_batch": "drop_last", "global_batch": 27, "accumulation": None},
    {"uneven_batch": "join", "global_batch": 27, "accumulation": None},
    {"first_stage_layers": 1, "pp": 2},
    {"last_stage_layers": 1, "pp": 4},
    {"layers_per_stage": [2, 6], "pp": 2},
    {"broadcast_buffers": True, "data_parallel": "ddp"},
    {"deepspeed": {"cpu_checkpointing": True, "partition_activations": True}, "tp": 2, "recompute": "full"},
    {"deepspeed": {"zero_hpz_partition_size": 4}, "data_parallel": "zero3", "pp": 1},
    {"fp8": {"gather": True}, "data_parallel": "zero3", "precision": "bf16"},
    {"ep": 2, "ep_nodes": 2, "routed_nodes": 1},
    {"ep": 4, "capacity_factor": 1.25, "pad_to_capacity": True},
    {"optimizer": "muon"},
    {"optimizer": "adafactor"},
    {"exp_avg_sq_dtype": "bf16", "exp_avg_dtype": "bf16"},
    {"overlap_tp": "pieces", "tp": 4, "sequence_parallel": True},
    {"data_parallel": "dataparallel", "pp": 1, "tp": 1},
    {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2},
    {"scatter_gather": "deepspeed_forward", "tp": 2, "pp": 2, "sequence_parallel": False},
    {"sync_norm": True, "kernels": "torch"},
    {"local_steps": 3, "data_parallel": "diloco"},
]
SPACE = {"heads": 16, "head_dim": 64, "state": 64, "groups": 4, "chunk": 128}
LATENT = {"q_rank": 192, "kv_rank": 128, "nope_head_dim": 64, "rope_head_dim": 32, "v_head_dim": 64}
LLAMA: dict[str, Any] = {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 32000, "context": 1024, "norm": "rmsnorm"}
LLAMA |= {"gated": True, "positions": "rotary", "tied": False} | dict.fromkeys(
    ("attention_bias", "output_bias", "mlp_bias"), False
)
UNUSUAL: list[dict[str, Any]] = [  # models whose layers those of tests/random_jobs.py have not
    LLAMA | {"name": "mixers", "state_space": SPACE, "mixer": "state_space", "feed_forward": False, "positions": "none"},
    LLAMA | {"name": "side by side", "state_space": SPACE | {"norm": False, "bias": True}, "mixer": "both"},
    LLAMA
    | {"name": "blocks", "state_space": SPACE | {"conv_bias": False, "output_bias": True}, "pattern": ["s", "a", "m", "e"]}
    | {"experts": {"experts": 8, "chosen": 2, "ffn": 256, "shared": 1, "shared_ffn": 384}}
    | {
        "kinds": [
            {"name": "s", "mixer": "state_space", "feed_forward": False, "dense": True},
            {"name": "a", "feed_forward": False, "dense": True},
            {"name": "m", "mixer": "none", "dense": True},
            {"name": "e", "mixer": "none"},
        ]
    },
    LLAMA | {"name": "ahead", "mtp": 2, "latent": LATENT, "experts": {"experts": 8, "chosen": 2, "ffn": 256, "first_dense": 1}},
    LLAMA
    | {"name": "windows", "kv_heads": 2, "pattern": ["w", "f", "c"], "norms": 4, "qk_norm": True, "logit_softcap": True}
    | {"kinds": [{"name": "w", "window": 200}, {"name": "c", "chunk": 300}], "embedding_scale": True},
    LLAMA | {"name": "parallel", "parallel": True, "norms": 1, "norm": "layernorm", "rotary_dim": 16, "sinks": True},
    LLAMA | {"name": "distances", "positions": "alibi", "qk_norm": "whole", "dropout": True, "attention_dropout": True, "mtp": 1},
]
NODES: list[Any] = [
    [{"count": 1}, {"count": 1, "missing": ["nic 1"]}],
    [{"count": 1}, {"count": 1, "missing": ["gpu 3", "nic 3"]}],
    [{"count": 1, "clock": 0.8}, {"count": 1}],
    [{"count": 1}, {"count": 2, "node": "dgx-a100"}],
]
CLUSTERS = ["gb200-nvl72", "rtx-4090", "mi300x", "dgx-2", "gaudi2", "hgx-h800", "azure-ndv4", "aws-g5-48xl"]
FILES = ["fat-tree", "dragonfly", "nvlink-pairs", "pcie-ethernet", "tpu-v5e-pod", "mi300x"]  # in examples/clusters
EFFECTS = [
    "gpu 3: speed 0.8",
    "all: jitter 0.02",
    "all: jitter 0.05 per step",
    "gpu 1: throttle 0.7 after 1 ms over 10 ms",
    "gpu 0: preempted 2 ms at 1 ms every 10 ms",
    "node 0 nic 1 out: rate 0.5 latency 10 us",
    "node 0 nic 0: down 3 ms at 1 ms every 20 ms",
    "node 0 nic 1: background 0.4 at 1 ms lasting 5 ms every 10 ms",
    "node 0 nic 1: lost",
    "node 0: speed 0.9 from 1 ms to 20 ms",
]


def random_fields(draw: random.Random) -> dict[str, Any]:
    """Fields of a job; some are refused."""
    fields = random_job(draw.randrange(10**6))
    cluster = draw.random()
    if cluster < 0.12:
        fields |= {"cluster": draw.choice(["dgx-h100", "dgx-a100"]), "nodes": draw.choice(NODES)}
    elif cluster < 0.24:
        fields |= {"cluster": draw.choice(CLUSTERS), "nodes": draw.choice([1, 2])}
    elif cluster < 0.3:
        fields |= {"cluster": f"examples/clusters/{draw.choice(FILES)}.yaml", "nodes": draw.choice([1, 2])}
    if draw.random() < 0.5:
        fields["plan"] |= draw.choice(MORE)
        if fields["plan"].get("global_batch"):
            fields["plan"].pop("microbatch", None)
    if draw.random() < 0.1:
        fields["variability"] = draw.choice([0, 0.05])
    return fields


def random_question_job(draw: random.Random, overrides: dict[str, Any] | None = None, **given: Any) -> Job:
    """A job of few GPUs that can be asked, with some fields as they are given; those of the plan are put into the plan."""
    for _ in range(TRIES):
        fields = random_fields(draw)
        plan = fields["plan"] | given.get("plan", {})
        try:
            job = read_job(None, overrides or {}, **{**fields, **given, "plan": plan})
            resolved = job.resolve()
        except UserError:
            continue
        if job.cluster.gpus <= MOST and resolved.microbatches * resolved.pp * resolved.local_steps <= 4 * FEW:
            return job
    raise AssertionError(f"{TRIES} random jobs were refused")
