"""Answers as hashes: what a change that only moves or renames must not change (`python tests/corpus.py`).

Random jobs with every op of their timelines, all examples, published rows, searches, what-ifs, pages and exports, each as a hash
of its exact numbers (sentences may be worded anew). `--write` keeps them in tests/data/corpus.json; without it those that differ
are named, and the exit code is 1.
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
KEPT = ROOT / "tests" / "data" / "corpus.json"
JOBS, PER_CHUNK = 2000, 50
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
TRACES = (  # of a few more commands: their numbers
    "plan examples/llama-3.1-70b.yaml --json --vary plan.tp=1,2,4,8 --vary plan.pp=1,2,4 --vary plan.data_parallel=zero1,zero3 --workers 1",
    "advise examples/mixtral-8x7b.yaml --json",
    "advise examples/demo.yaml --json",
    "advise --model llama-3.1-8b --cluster dgx-a100 --nodes 2 --json",
    "sensitivity examples/llama-3.1-70b.yaml --json",
    "whatif examples/llama-3.1-70b.yaml --vary nodes=8,16 --vary cluster.node.nic=x1,x2 --json --workers 1",
    "whatif examples/data_parallel/zero3.yaml --vary plan.kernels=torch,compiled --json --workers 1",
    "whatif examples/data_parallel/ddp.yaml --vary plan.bucket=1MiB,25MiB --json --workers 1",
    "compare examples/llama-3.1-70b.yaml examples/llama-3.1-70b-zero3.yaml --json",
    "server examples/servers/parameter-server.yaml --json",
    "server examples/servers/parameter-server.yaml --staleness 2 --json",
    "collective all_reduce --cluster dgx-h100 --nodes 4 --json",
    "collective all_gather --cluster dgx-a100 --nodes 2 --json",
    "collective all_to_all --cluster pcie-l40s --json",
    "topology dgx-h100 --nodes 4 --json",
    "topology examples/clusters/tpu-v4.yaml --json",
    "ranks --nodes 2 --gpus 4 --json",
    "schedule zb-v --pp 4 --microbatches 8 --json",
    "list data_parallel --json",
    "list schedules --json",
    "list clusters --json",
    "list models --json",
)


def digest(answer: Any) -> str:
    """Hash of an answer: its exact numbers and names, whatever its sentences say."""
    return hashlib.sha256(json.dumps(_worded(answer), sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _worded(answer: Any) -> Any:
    match answer:
        case str() if answer.count(" ") > 1:
            return "…"
        case dict():
            return {key: _worded(value) for key, value in answer.items() if key not in ("version", "command")}
        case list() | tuple():
            return [_worded(value) for value in answer]
    return answer


def played(job: Any) -> str:
    """Hash of a job's summary and of every op of its timeline."""
    from shardyard import simulate, summarise

    timeline = simulate(job)
    frame = timeline.frame()
    columns = {name: hashlib.sha256(frame[name].to_json(double_precision=15).encode()).hexdigest() for name in frame}
    numbers = [float(time).hex() for time in (*timeline.start, *timeline.end)]
    return digest([summarise(timeline).to_dict(), columns, hashlib.sha256("".join(numbers).encode()).hexdigest()])


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


def random_jobs(chunk: int) -> dict[str, str]:
    """PER_CHUNK random jobs that are possible; "refused" of those that are not."""
    from shardyard import UserError, read_job

    answers: dict[str, str] = {}
    first = chunk * 100_000
    possible = 0
    while possible < PER_CHUNK:
        fields = random_job(first)
        try:
            job = read_job(None, {}, **fields)
            answers[f"job {first}"] = played(job) if job.cluster.gpus <= MOST else "large"
            possible += job.cluster.gpus <= MOST
        except UserError:
            answers[f"job {first}"] = "refused"
        first += 1
    accepted = {name: answer for name, answer in answers.items() if answer not in ("refused", "large")}
    return accepted | {f"jobs {chunk} refused": digest(sorted(set(answers) - set(accepted)))}


def examples(part: int) -> dict[str, str]:
    """Half of the examples, played, and exported to each framework."""
    from shardyard import read_job
    from strategies.frameworks.export import export
    from strategies.frameworks.settings import frameworks

    answers = {}
    for path in sorted((ROOT / "examples").rglob("*.yaml"))[part::2]:
        if path.parent.name == "clusters":
            continue
        name = path.relative_to(ROOT).as_posix()
        job = read_job(path)
        answers[name] = played(job)
        for framework in frameworks:
            answers[f"{name} for {framework}"] = _or_refused(lambda job=job, to=framework: repr(export(to, job)))
    return answers


def _or_refused(answer: Callable[[], Any]) -> str:
    from shardyard import UserError

    try:
        return digest(answer())
    except UserError:
        return "refused"


def published_rows(part: int) -> dict[str, str]:
    """Predictions for a quarter of the published rows."""
    from calibration.published import published
    from shardyard import UserError, predict

    answers = {}
    for row in list(published())[part::4]:
        try:
            answers[row.name] = digest(predict(row.job()).to_dict())
        except UserError:
            answers[row.name] = "refused"
    return answers


def commands(part: int) -> dict[str, str]:
    """What a third of the commands print, and pages."""
    from click.testing import CliRunner

    from reports.commands import main

    answers = {}
    for line in TRACES[part::3]:
        result = CliRunner().invoke(main, line.split())
        if result.exit_code:
            sys.exit(f"{line}: {result.output}")
        answers[line] = digest(json.loads(result.stdout))
    return answers


def pages(part: int) -> dict[str, str]:
    """Files of a report: their numbers."""
    from click.testing import CliRunner

    from reports.commands import main

    example = ("llama-3.1-70b", "mixtral-8x7b", "data_parallel/zero-offload")[part]
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        result = CliRunner().invoke(main, ["simulate", f"examples/{example}.yaml", "--report", folder])
        if result.exit_code not in (0, 2):
            sys.exit(f"{example}: {result.output}")
        for path in sorted(Path(folder).iterdir()):
            content = path.read_bytes()
            if path.suffix in (".html", ".json", ".csv"):
                text = content.decode().replace(folder, "")
                content = " ".join(re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text)).encode()
            answers[f"{example} {path.name}"] = hashlib.sha256(content).hexdigest()[:16]
    return answers


PARTS: dict[str, tuple[Callable[[int], dict[str, str]], int]] = {
    "published": (published_rows, 4),
    "commands": (commands, 3),
    "pages": (pages, 3),
    "examples": (examples, 2),
    "jobs": (random_jobs, JOBS // PER_CHUNK),
}


def answers_of(part: tuple[str, int]) -> dict[str, str]:
    """One part of the corpus, in a process of its own."""
    name, number = part
    return PARTS[name][0](number)


def corpus(names: list[str]) -> Iterator[tuple[str, str]]:
    """Every answer of some parts."""
    parts = [(name, number) for name in names for number in range(PARTS[name][1])]
    with ProcessPoolExecutor(2) as pool:
        for answers in pool.map(answers_of, parts):
            yield from answers.items()


def main() -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    options = parser.parse_args()
    answers = dict(corpus(options.only or list(PARTS)))
    if options.write:
        before = json.loads(KEPT.read_text()) if KEPT.exists() and options.only else {}
        KEPT.write_text(json.dumps(before | answers, indent=0, sort_keys=True) + "\n")
        print(f"{len(answers)} answers written")
        return 0
    kept = json.loads(KEPT.read_text())
    wrong = [name for name, answer in answers.items() if kept.get(name) != answer]
    if not options.only:
        wrong += sorted(set(kept) - set(answers))
    for name in wrong:
        print(f"differs: {name}")
    print(f"{len(answers) - len(wrong)} of {len(answers)} answers are the same")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
