"""Jobs drawn at random from all that combines: models, plans, clusters. Each is named by its number."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import assume

from sim.timeline import Timeline
from strategies.job import Job
from strategies.predict import simulate
from strategies.read_job import read_job
from topologies.reading import UserError

MOST = 64  # GPUs of a random job
CPU = {"memory": "1 TB", "memory_bandwidth": "200 GB/s", "disk": "4 TB", "disk_read": "2 GB/s", "disk_write": "1 GB/s"}
EXPERTS = {"experts": 8, "chosen": 2, "ffn": 512, "shared": 1, "first_dense": 1}
GATED = {"gated": True, "norm": "rmsnorm", "positions": "rotary", "tied": False}
MODELS: list[dict[str, Any]] = [
    {"name": "small", "hidden": 512, "layers": 8, "heads": 8, "vocabulary": 32000, "context": 1024},
    {"name": "gated", "hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 8, "vocabulary": 32000, "context": 2048} | GATED,
    {"name": "experts", "hidden": 512, "layers": 8, "heads": 8, "vocabulary": 32000, "context": 1024, "experts": EXPERTS},
    {"name": "odd", "hidden": 768, "layers": 6, "heads": 12, "vocabulary": 50257, "context": 1024, "tied": True},
]
AXES = ("tp", "cp", "ep", "dp", "pp")
USUAL: dict[str, list[Any]] = {
    "tp": [1, 1, 2, 4, 3],
    "pp": [1, 1, 2, 4],
    "cp": [1, 1, 1, 2],
    "ep": [1, 1, 2],
    "microbatch": [1, 2],
    "accumulation": [1, 2, 4, 8],
    "sequence_parallel": [False, True],
    "kernels": ["megatron", "torch", "compiled", "apex"],
    "data_parallel": """
        ddp zero1 zero2 zero3 zero3 ddp_fp16 ddp_powersgd zero_redundancy_optimizer local_sgd diloco
    """.split(),
    "schedule": """
        1f1b 1f1b gpipe naive interleaved zb-h1 zb-h2 zb-v interleaved-zb looped-bfs dualpipe-v dualpipe chimera pipedream
        pipedream-2bw 1f1b-overlapped interleaved-overlapped
    """.split(),
    "precision": ["bf16", "bf16", "fp16", "fp32"],
    "optimizer": ["adam", "adam", "sgd"],
    "recompute": ["none", "selective", "full", "operators"],
}
RARE: dict[str, list[Any]] = {
    "gradients": ["fp32"],
    "overlap": [False],
    "overlap_p2p": [False],
    "overlap_tp": ["none", "weight_gradient", "pieces"],
    "attention": ["flash2", "sdpa", "materialised"],
    "cp_method": ["ulysses"],
    "bucket": ["1 MB", "25 MB", "1 GB"],
    "shard": [2],
    "reshard": [False],
    "gradient_sync": ["every", "last"],
    "set_to_none": [False, True],
    "gradient_as_bucket_view": [True],
    "deepspeed": [
        {},
        {"zero_quantized_weights": True, "zero_quantized_gradients": True},
        {"stage3_prefetch_bucket_size": 100000, "stage3_max_live_parameters": 3000000, "reduce_bucket_size": 500000},
        {"version": "0.5"},
    ],
    "offload": [{"optimizer": "cpu"}, {"optimizer": "cpu", "parameters": "cpu"}, {"optimizer": "nvme", "parameters": "nvme"}],
    "fp8": [{}, {"scaling": "tensorwise"}, {"scaling": "delayed"}],
    "flat_parameters": [True],
    "sync_norm": [True],
    "scatter_gather": ["megatron", "deepspeed"],
    "chunks": [2, 3],
    "blocking_launches": [True],
    "persistent_norm": [True],
    "accumulation_fusion": [True, False],
    "joined_products": [True, False],
    "complex_rotary": [True],
    "repeated_keys": [True],
    "loss": ["torch", "fused", "operators"],
    "loss_metrics": [2],
    "deterministic": [True],
    "check_gradients": [False],
    "average_in_collective": [True],
    "fused_optimizer": [False],
    "timers": [True],
    "early_stop": [True, False],
    "exp_avg_dtype": ["bf16"],
    "dropout": [True],
    "unpad": [True],
    "expandable_segments": [True],
    "clip_gradients": [False],
    "capacity_factor": [1.25],
    "expert_tp": [1],
    "algorithm": ["ring", "all_reduce/tree", "auto/simple", "ring/ll128"],
    "order": ["dp-tp-pp-cp-ep", "pp-tp-cp-ep-dp", "tp-cp-ep-pp-dp"],
    "recompute_method": ["block", "uniform", "every"],
    "recompute_modules": [["layernorm"], ["core_attn"], ["mlp"]],
    "embedding_as_layer": [True],
    "loss_as_layer": [True],
    "imbalance": [1.3],
    "powersgd": [{"matrix_approximation_rank": 4}],
}
NEEDS: dict[str, dict[str, Any]] = {  # what a rare field is about, most of the time
    "reshard": {"data_parallel": "zero3"},
    "gradient_sync": {"data_parallel": "zero3"},
    "deepspeed": {"data_parallel": "zero3", "pp": 1},
    "offload": {"data_parallel": "zero3", "pp": 1},
    "flat_parameters": {"data_parallel": "zero3", "kernels": "torch"},
    "gradient_as_bucket_view": {"data_parallel": "ddp", "kernels": "torch"},
    "set_to_none": {"data_parallel": "ddp", "kernels": "compiled"},
    "shard": {"data_parallel": "zero3"},
    "scatter_gather": {"tp": 2, "pp": 2, "sequence_parallel": False},
    "fp8": {"precision": "bf16"},
    "blocking_launches": {"overlap": False},
    "persistent_norm": {"kernels": "apex"},
    "complex_rotary": {"kernels": "torch"},
    "repeated_keys": {"kernels": "compiled"},
    "recompute_method": {"recompute": "full", "recompute_layers": 2},
    "recompute_modules": {"recompute": "selective"},
    "overlap_tp": {"tp": 2, "sequence_parallel": True},
    "chunks": {"schedule": "interleaved", "pp": 2},
    "cp_method": {"cp": 2},
    "timers": {"kernels": "apex"},
    "deterministic": {"kernels": "megatron"},
    "powersgd": {"data_parallel": "ddp_powersgd"},
}
CLUSTERS = ["dgx-h100", "dgx-h100", "dgx-a100", "hgx-b200", "pcie-l40s", "aws-p4d", "dgx-1v", "meta-24k", "perlmutter"]


def random_job(number: int) -> dict[str, Any]:
    """Fields of a job; some are refused."""
    draw = random.Random(number)
    model = draw.choice(MODELS)
    plan = {name: draw.choice(values) for name, values in USUAL.items() if draw.random() < 0.6}
    for name in draw.sample(sorted(RARE), draw.choice([0, 0, 1, 1, 2, 3])):
        plan[name] = draw.choice(RARE[name])
        if draw.random() < 0.8:
            plan |= NEEDS.get(name, {})
    if plan.get("tp", 1) == 1 and draw.random() < 0.9:
        plan.pop("sequence_parallel", None)
    if plan.get("data_parallel") in ("local_sgd", "diloco"):
        plan["local_steps"] = 2
    if "experts" not in model:
        for name in ("ep", "capacity_factor", "expert_tp", "imbalance"):
            plan.pop(name, None)
    cluster = draw.choice(CLUSTERS)
    if cluster == "dgx-1v" and plan.get("precision", "bf16") == "bf16":
        plan["precision"] = "fp16"
    node: dict[str, Any] = {"cpu": CPU} if draw.random() < 0.7 else {}
    if cluster in ("dgx-h100", "dgx-a100") and draw.random() < 0.2:
        node |= {"gpus": 6, "nics": 2}
    return {
        "model": model,
        "cluster": {"based_on": cluster, "node": node},
        "nodes": draw.choice([1, 1, 2, 2, 3, 4]),
        "plan": plan,
    }


def played(number: int) -> tuple[Job, Timeline]:
    """A random job and its step; hypothesis draws anew where it is refused or large."""
    try:
        job = read_job(None, {}, **random_job(number))
        assume(job.cluster.gpus <= MOST // 2)
        return job, simulate(job)
    except UserError:
        assume(False)
        raise
