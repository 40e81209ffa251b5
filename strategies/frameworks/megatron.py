"""Megatron-LM: a shell script (or a list of arguments in YAML or JSON) with torchrun's and pretrain_gpt.py's arguments.

Names and defaults: NVIDIA/Megatron-LM, megatron/training/arguments.py (biases, learned positions, dropout 0.1 and a vocabulary
padded to 128·tp unless told otherwise).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from strategies.frameworks import Found, Framework, Keys, Told, Written, frameworks
from topologies.reading import UserError, load_text

if TYPE_CHECKING:
    from strategies.job import Job
    from strategies.model import Model

_SIZES = {
    "layers": "num-layers", "hidden": "hidden-size", "ffn": "ffn-hidden-size", "heads": "num-attention-heads",
    "head_dim": "kv-channels", "vocabulary": "vocab-size", "context": "max-position-embeddings",
}  # fmt: skip
_DEGREES = {
    "tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size", "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size", "microbatch": "micro-batch-size", "global_batch": "global-batch-size",
    "sequence": "seq-length",
}  # fmt: skip
_SHARDING = {"no_shard": "ddp", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}
_CP = {"p2p": "ring", "a2a": "ulysses"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary"}
_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
_ORDERS = {False: "tp-cp-ep-dp-pp", True: "tp-cp-ep-pp-dp"}


def _arguments(path: Path) -> dict[str, Any]:
    """Flags of the text, without dashes in front and with "-" between words: their number, text, list, or true."""
    text = load_text(path)
    if path.suffix in (".yaml", ".yml", ".json"):
        words = yaml.safe_load(text)
        if not isinstance(words, list):
            raise UserError(f"{path}: expected a list of arguments, found {type(words).__name__}")
        words = [str(word) for word in words]
    else:
        words = _words(text, path)
    flags: dict[str, Any] = {}
    name: str = ""
    values: list[Any] = []
    for word in [*words, "--"]:
        if word.startswith("--"):
            if name:
                flags[name] = True if not values else values[0] if len(values) == 1 else values
            name, _, value = word[2:].replace("_", "-").partition("=")
            values = [_value(value)] if value else []
        elif name:
            values.append(_value(word))
    return flags


def _words(text: str, path: Path) -> list[str]:
    """The words of a shell script, with its own variables in place of their names."""
    text = re.sub(r"\\\r?\n", " ", text)
    known = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=([^\s(;]+)", text, re.MULTILINE))
    for _ in range(8):  # variables of variables
        text = re.sub(r"\$\{?(\w+)\}?", lambda found: known.get(found[1], found[0]).strip("\"'"), text)
    text = re.sub(r"\$\(\(\s*(\d+)\s*([*/])\s*(\d+)\s*\)\)", lambda m: str(_product(int(m[1]), m[2], int(m[3]))), text)
    try:
        words = [word.strip("()") for word in shlex.split(text, comments=True)]
    except ValueError as error:
        raise UserError(f"{path}: not a shell line: {error}") from None
    return ["--" if not word or word.endswith(("=", ".py")) else word for word in words]  # what ends a list of arguments


def _product(left: int, sign: str, right: int) -> int:
    return left * right if sign == "*" else left // max(1, right)


def _value(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text


def _read(path: Path) -> Found:
    flags = Keys(_arguments(path), str(path), "--")
    model = _read_model(flags)
    plan: dict[str, Any] = {field: value for field, name in _DEGREES.items() if (value := flags.optional(name)) is not None}
    plan |= {
        "precision": "bf16" if flags.flag("bf16", False) else "fp16" if flags.flag("fp16", False) else "fp32",
        "data_parallel": flags.choice("data-parallel-sharding-strategy", _SHARDING, "no_shard"),
        "overlap": flags.flag("overlap-grad-reduce", False),
        "overlap_p2p": not flags.flag("no-overlap-p2p-communication", False),
        "sequence_parallel": flags.flag("sequence-parallel", False),
        "order": _ORDERS[flags.flag("use-tp-pp-dp-mapping", False)],
    }
    flags.flag("overlap-param-gather", False)  # what the parameters are gathered beside is overlapped with the gradients
    if plan["data_parallel"] == "ddp" and flags.flag("use-distributed-optimizer", False):
        plan["data_parallel"] = "zero1"
    if plan["precision"] == "bf16" or flags.flag("accumulate-allreduce-grads-in-fp32", False):
        plan["gradients"] = "fp32"  # Megatron-LM sets the flag itself for bf16
    if flags.choice("fp8-format", {None: False, "e4m3": True, "hybrid": True}):
        scaling = flags.choice("fp8-recipe", {name: name for name in _RECIPES}, "delayed")
        plan["fp8"] = {"scaling": scaling, "gather": flags.flag("fp8-param-gather", False)}
    if plan.get("cp", 1) > 1:
        plan["cp_method"] = flags.choice("cp-comm-type", _CP, "p2p")
    if elements := flags.optional("ddp-bucket-size"):
        plan["bucket"] = f"{elements * (4 if 'gradients' in plan else 2)} B"
    plan |= _read_recompute(flags) | _read_experts(flags, plan.get("tp", 1)) | _read_pipeline(flags, model, plan.get("pp", 1))
    nodes, each = flags.optional("nnodes"), flags.optional("nproc-per-node")
    gpus = nodes * each if nodes and each else None
    return Found(str(path), plan, model, nodes, gpus, flags.ignored)


def _read_recompute(flags: Keys) -> dict[str, Any]:
    granularity = flags.choice("recompute-granularity", {None: "none", "selective": "selective", "full": "full"})
    found: dict[str, Any] = {"recompute": "selective" if flags.flag("recompute-activations", False) else granularity}
    method = flags.choice("recompute-method", {None: None, "uniform": "uniform", "block": "block"})
    number = flags.optional("recompute-num-layers") or 1
    if found["recompute"] == "full" and (method, number) not in ((None, 1), ("uniform", 1)):  # which is every layer by itself
        found |= {"recompute_method": method, "recompute_layers": number}
    return found


def _read_experts(flags: Keys, tp: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if flags.flag("tp-comm-overlap", False) and tp > 1:
        found["overlap_tp"] = "pieces"
    if (degree := flags.optional("expert-tensor-parallel-size")) is not None:
        found["expert_tp"] = degree
    if (factor := flags.value("moe-expert-capacity-factor", None)) is not None:
        found["capacity_factor"] = _number(flags, "moe-expert-capacity-factor", factor)
    if flags.flag("moe-pad-expert-input-to-capacity", False):
        found["pad_to_capacity"] = True
    return found


def _read_pipeline(flags: Keys, model: Mapping[str, Any], pp: int) -> dict[str, Any]:
    each, chunks = flags.optional("num-layers-per-virtual-pipeline-stage"), flags.optional("num-virtual-stages-per-pipeline-rank")
    layers = model.get("layers", 0)
    if each and layers:
        if layers % (pp * each):
            rule = f"{pp} stages · {each} do not divide num-layers={layers}"
            raise UserError(f"{flags.where}: --num-layers-per-virtual-pipeline-stage={each}: {rule}")
        chunks = layers // pp // each
    first, last = flags.optional("decoder-first-pipeline-num-layers"), flags.optional("decoder-last-pipeline-num-layers")
    found: dict[str, Any] = {"schedule": "interleaved", "chunks": chunks} if chunks and chunks > 1 else {}
    if (first or last) and layers:
        middle = pp - bool(first) - bool(last)
        each, rest = divmod(layers - (first or 0) - (last or 0), max(1, middle))
        if rest or not middle or found:
            raise UserError(
                f"{flags.where}: {layers} layers with {first or last} on an end do not spread evenly over {pp} stages"
            )
        found["layers_per_stage"] = [*[first] * bool(first), *[each] * middle, *[last] * bool(last)]
    return found


def _read_model(flags: Keys) -> dict[str, Any]:
    """Fields of a model, when the file has its sizes."""
    model: dict[str, Any] = {field: value for field, name in _SIZES.items() if (value := flags.optional(name)) is not None}
    if not {"layers", "hidden", "heads"} <= model.keys():
        return {}
    model.setdefault("context", flags.optional("seq-length") or 1024)
    model.setdefault("vocabulary", 50257)  # of the GPT-2 tokenizer, whose size the script does not say
    linear_bias = not flags.flag("disable-bias-linear", False)
    model |= {
        "name": "megatron", "gated": flags.flag("swiglu", False),
        "tied": not flags.flag("untie-embeddings-and-output-weights", False),
        "norm": flags.choice("normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}, "LayerNorm"),
        "positions": flags.choice("position-embedding-type", _POSITIONS, "learned_absolute"),
        "attention_bias": linear_bias or flags.flag("add-qkv-bias", False), "output_bias": linear_bias, "mlp_bias": linear_bias,
        "qk_norm": flags.flag("qk-layernorm", False), "dropout": _rate(flags, "hidden-dropout"),
        "attention_dropout": _rate(flags, "attention-dropout"),
        "vocabulary_multiple": (flags.optional("make-vocab-size-divisible-by") or 128)
        * (flags.optional("tensor-model-parallel-size") or 1),
    }  # fmt: skip
    if flags.flag("group-query-attention", False):
        model["kv_heads"] = flags.integer("num-query-groups")
    if experts := flags.optional("num-experts"):
        ffn = flags.optional("moe-ffn-hidden-size") or model.get("ffn", 4 * model["hidden"])
        shared = flags.optional("moe-shared-expert-intermediate-size")
        model["experts"] = {"experts": experts, "chosen": flags.optional("moe-router-topk", 2), "ffn": ffn}
        model["experts"] |= {"shared": 1, "shared_ffn": shared} if shared else {}
    return model


def _rate(flags: Keys, name: str) -> bool:
    return _number(flags, name, flags.value(name, 0.1)) > 0


def _number(flags: Keys, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"{flags.where}: --{name}={value!r} must be a number") from None


def _write(job: Job) -> Written:
    told, plan = Told(job), job.resolve()
    batch = {"microbatch": job.plan.microbatch, "global_batch": plan.global_batch, "sequence": plan.sequence}
    flags = [*_model_flags(job.model), *(("--" + name, batch[field] if field in batch else told(field))
             for field, name in _DEGREES.items())]  # fmt: skip
    flags += [("--" + told("precision", only=("bf16", "fp16", "fp32")), None)] if job.plan.precision in ("bf16", "fp16") else []
    told("precision", only=("fp32",))
    told("kernels", only=("megatron",))
    if (fp8 := told("fp8")) is not None:
        flags += [("--fp8-format", "hybrid"), ("--fp8-recipe", fp8.scaling)] + [("--fp8-param-gather", None)] * fp8.gather
    flags += [("--sequence-parallel", None)] * told("sequence_parallel")
    flags += [("--overlap-grad-reduce", None)] * told("overlap")
    flags += [("--no-overlap-p2p-communication", None)] * (not told("overlap_p2p"))
    flags += [("--use-tp-pp-dp-mapping", None)] * (told("order", only=tuple(_ORDERS.values())) == _ORDERS[True])
    if job.plan.cp > 1:
        flags.append(("--cp-comm-type", {ours: theirs for theirs, ours in _CP.items()}[told("cp_method")]))
    flags += (
        _sharding_flags(told) + _expert_flags(told) + _recompute_flags(told) + _pipeline_flags(told, plan.chunks, plan.layers)
    )
    if told("gradients") == "fp32" and job.plan.precision != "bf16":
        flags.append(("--accumulate-allreduce-grads-in-fp32", None))
    if job.plan.data_parallel in ("ddp", "zero1", "zero2"):
        flags.append(("--ddp-bucket-size", round(told("bucket") / job.plan.bytes_per_gradient)))
    flags += [("--use-flash-attn", None)] * (told("attention") != "materialised")
    wanted = job.model.dropout if told("dropout") is None else job.plan.dropout
    flags += [("--hidden-dropout", 0.1 if wanted else 0), ("--attention-dropout", 0.1 if wanted else 0)]
    start = (f"torchrun --nnodes {job.cluster.nodes} --nproc-per-node {job.cluster.node.gpus} --rdzv-backend c10d "
             '--rdzv-endpoint "$HEAD_NODE:29500" pretrain_gpt.py')  # fmt: skip
    lines = [start, *(f"{name} {value}" if value is not None else name for name, value in flags)]
    parts = [f"model: {name}" for name in ("latent", "window") if getattr(job.model, name)]
    unsaid = (*told.rest, *parts, "data, tokenizer, learning rate and checkpoints: add your own arguments")
    return Written(" \\\n    ".join(lines) + "\n", "sh FILE    # on every node, with HEAD_NODE set", unsaid)


_Flags = list[tuple[str, Any]]


def _sharding_flags(told: Told) -> _Flags:
    hook = told("data_parallel", only=("ddp", "zero1", "zero2", "zero3"))
    if hook == "zero1":
        return [("--use-distributed-optimizer", None), ("--overlap-param-gather", None)][: 1 + bool(told("overlap"))]
    if hook in ("zero2", "zero3"):
        strategy = next(theirs for theirs, ours in _SHARDING.items() if ours == hook)
        return [("--use-megatron-fsdp", None), ("--data-parallel-sharding-strategy", strategy)]
    return []


def _recompute_flags(told: Told) -> _Flags:
    recompute = told("recompute")
    flags: _Flags = [("--recompute-granularity", recompute)] if recompute != "none" else []
    method, number = told("recompute_method", only=(None, "uniform", "block")), told("recompute_layers")
    if recompute == "full" and method != "every":
        flags += [("--recompute-method", method or "uniform"), ("--recompute-num-layers", number or 1)]
    return flags + [("--tp-comm-overlap", None)] * (told("overlap_tp", only=(None, "weight_gradient", "pieces")) == "pieces")


def _expert_flags(told: Told) -> _Flags:
    degree, factor = told("expert_tp"), told("capacity_factor")
    flags: _Flags = [("--expert-tensor-parallel-size", degree)] if degree is not None else []
    flags += [("--moe-expert-capacity-factor", factor)] if factor is not None else []
    return flags + [("--moe-pad-expert-input-to-capacity", None)] * told("pad_to_capacity")


def _pipeline_flags(told: Told, chunks: int, layers: tuple[int, ...]) -> _Flags:
    schedule = told("schedule", only=("1f1b", "interleaved"))
    told("chunks")
    flags: _Flags = [("--num-virtual-stages-per-pipeline-rank", chunks)] if schedule == "interleaved" else []
    if chunks == 1 and len(layers) > 2 and len(set(layers)) > 1 and len(set(layers[1:-1])) == 1:
        told("layers_per_stage")
        flags += [("--decoder-first-pipeline-num-layers", layers[0]), ("--decoder-last-pipeline-num-layers", layers[-1])]
    return flags


def _model_flags(model: Model) -> _Flags:
    flags: _Flags = [("--" + name, getattr(model, field)) for field, name in _SIZES.items()]
    if model.kv_heads != model.heads:
        flags += [("--group-query-attention", None), ("--num-query-groups", model.kv_heads)]
    flags += [("--position-embedding-type", "rope" if model.positions == "rotary" else "learned_absolute")]
    flags += [("--normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm")]
    said = {
        "swiglu": model.gated, "untie-embeddings-and-output-weights": not model.tied, "disable-bias-linear": not model.mlp_bias,
        "add-qkv-bias": model.attention_bias and not model.mlp_bias, "qk-layernorm": model.qk_norm,
    }  # fmt: skip
    flags += [("--" + name, None) for name, wanted in said.items() if wanted]
    if model.experts:
        flags += [("--num-experts", model.experts.experts), ("--moe-router-topk", model.experts.chosen),
                  ("--moe-ffn-hidden-size", model.experts.ffn), ("--moe-token-dispatcher-type", "alltoall")]  # fmt: skip
        if model.experts.shared:
            flags.append(("--moe-shared-expert-intermediate-size", model.experts.shared * model.experts.shared_ffn))
    return flags


frameworks("megatron")(Framework("pretrain.sh", _read, _write))
