"""Plans that `execute` refuses: every reason in the code, as docs/accuracy.md lists them.

`python tests/calibration/execute/test_refused.py` writes the table there anew.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from calibration.execute import limits
from calibration.execute.servers import reasons
from strategies.job import Job
from strategies.read_job import read_job
from tests.conftest import LLAMA_LAYER
from topologies.reading import UserError

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "accuracy.md"
BEGIN, END = "<!-- refused: written by tests/calibration/execute/test_refused.py -->\n", "<!-- end of refused -->\n"
LIMITS = [ROOT / "calibration/execute/limits.py", ROOT / "calibration/execute/traced/limits.py"]
SOURCES = [*LIMITS, ROOT / "calibration/execute/servers.py", *sorted((ROOT / "calibration/execute/data_parallel").glob("*.py"))]
GPT = {"name": "gpt", "hidden": 32, "layers": 4, "heads": 4, "vocabulary": 64, "context": 16}
LLAMA = GPT | {"name": "llama", "kv_heads": 2, "ffn": 48, **LLAMA_LAYER}
SIXTEEN = {"gpu": {"based_on": "cpu-core", "peak": {"fp32": "120 GFLOP/s", "fp16": "120 GFLOP/s"}}}
KINDS = [{"name": "encoder", "family": "encoder"}, {"name": "decoder", "family": "decoder", "cross": True}]
NF4 = {"rank": 4, "targets": ["q_proj"], "weights": "nf4"}
EXPERTS = {"experts": 4, "chosen": 2, "ffn": 48}
OWN = {"model": f"{ROOT}/tests/data/modules/normalised.py:Net", "job": {"input": "3x8x8"}}
PACKED: dict[str, Any] = {"packing": {"lengths": [7, 9]}}
PP: dict[str, Any] = {"pp": 2, "accumulation": 4}
DS: dict[str, Any] = {"data_parallel": "zero1", "deepspeed": {}}
ZRO = "zero_redundancy_optimizer"


def linear() -> Any:
    """A module."""
    import torch

    return torch.nn.Linear(8, 8)


Case = tuple[str, dict[str, Any]]  # what is said of it; model, cluster, node, plan, job where they are not the usual ones
CASES: list[Case] = [
    ("kernels of other frameworks", {"plan": {"kernels": "megatron"}}),
    ("compiled layers with collectives inside", {"plan": {"kernels": "compiled", "tp": 2}}),
    ("compiled layers with dropout", {"plan": {"kernels": "compiled", "dropout": True}}),
    ("dropout by cp ranks", {"plan": {"cp": 2, "dropout": True}}),
    ("local steps of cp ranks", {"plan": {"cp": 2, "data_parallel": "local_sgd", "local_steps": 2}}),
    ("replicas of cp ranks", {"node": {"gpus": 8}, "plan": {"cp": 2, "data_parallel": "zero3", "shard": 2}}),
    ("context with tensor parallelism", {"plan": {"cp": 2, "tp": 2}}),
    ("context parallelism with classes", {"model": GPT | {"family": "encoder", "classes": 2}, "plan": {"cp": 2}}),
    ("experts with unequal numbers of tokens", {"model": {"experts": EXPERTS | {"experts": 5}}}),
    ("biases of experts", {"model": {"experts": EXPERTS, "mlp_bias": True}}),
    ("experts with tensor or context parallelism", {"model": {"experts": EXPERTS}, "plan": {"cp": 2}}),
    ("expert parallelism but with DDP and FSDP2", {"model": {"experts": EXPERTS}, "plan": {"ep": 2, "data_parallel": "zero1"}}),
    ("other models than plain decoders and encoders", {"model": {"window": 8}}),
    ("encoders with decoders", {"model": {"family": "encoder_decoder", "kinds": KINDS, "pattern": ["encoder", "decoder"]}}),
    ("models without a loss", {"model": {"head": False}}),
    ("a pooler alone", {"model": {"pooler": True}}),
    ("ALiBi, relative positions", {"model": {"positions": "alibi"}}),
    ("dropout by tp ranks", {"plan": {"dropout": True, "tp": 2}}),
    ("dropout by threads", {"cluster": {"based_on": "dgx-h100"}, "plan": {"dropout": True, "data_parallel": "dataparallel"}}),
    ("selective recomputation of Megatron-LM", {"plan": {"recompute": "selective"}}),
    ("LoRA beside narrow matrices", {"node": SIXTEEN, "plan": {"precision": "fp16", "lora": NF4}}),
    ("packing with dropout", {"plan": PACKED | {"dropout": True}}),
    ("packing with experts", {"model": {"experts": EXPERTS}, "plan": PACKED}),
    ("packing with classes", {"model": GPT | {"family": "encoder", "classes": 2}, "plan": PACKED}),
    ("packing with compiled layers", {"plan": PACKED | {"kernels": "compiled"}}),
    ("packing with PowerSGD", {"plan": PACKED | {"data_parallel": "ddp_powersgd"}}),
    ("effects other than a speed", {"job": {"effects": ["gpu 0: speed 0.5 from 1 s"]}}),
    ("GPUs at another speed", {"cluster": {"based_on": "dgx-h100"}, "job": {"effects": ["gpu 0: speed 0.5"]}}),
    ("a speed without cores of their own", {"job": {"effects": ["gpu 0: speed 0.5"]}}),
    ("a speed near to none", {"node": {"gpus": 2}, "job": {"effects": ["gpu 0: speed 0.05"]}}),
    ("other optimizers", {"plan": {"optimizer": "lion"}}),
    ("attention kernels that PyTorch has not", {"plan": {"attention": "flash1"}}),
    ("a forced algorithm", {"plan": {"algorithm": "ring"}}),
    ("offload", {"cluster": {"based_on": "dgx-h100"}, "plan": {"data_parallel": "zero3", "offload": {"optimizer": "cpu"}}}),
    ("a module that a program gives", OWN | {"model": linear}),
    ("cuts of a module", OWN | {"plan": PP}),
    ("recomputation of a module's blocks", OWN | {"plan": {"recompute": "full"}}),
    ("synchronised norms and dropout", OWN | {"model": OWN["model"].replace("Net", "dropping"), "plan": {"sync_norm": True}}),
    ("synchronised norms and a sum as loss", OWN | {"model": OWN["model"].replace("Net", "Summed"), "plan": {"sync_norm": True}}),
    ("any other field of a plan: fp8, sync_norm of a transformer …", {"plan": {"fused_optimizer": False}}),
    ("options of how a model is written", {"plan": {"joined_products": True, "kernels": "torch"}}),
    ("fp32 gradients of 16-bit weights", {"node": SIXTEEN, "plan": {"precision": "fp16", "gradients": "fp32"}}),
    ("fp16 without masters", {"node": SIXTEEN, "plan": {"precision": "fp16", "master_weights": False}}),
    ("sequence parallelism with learned positions", {"model": GPT, "plan": {"tp": 2, "sequence_parallel": True}}),
    ("nodes without a launcher", {"cluster": {"based_on": "dgx-h100", "nodes": 2}}),
    ("many more processes than cores", {"node": {"gpus": 1024}}),
    ("asynchronous pipelines on GPUs", {"cluster": {"based_on": "dgx-h100"}, "plan": PP | {"schedule": "pipedream"}}),
    ("asynchronous pipelines with other axes inside", {"plan": PP | {"schedule": "pipedream", "tp": 2}}),
    ("asynchronous pipelines with recomputation", {"plan": PP | {"schedule": "pipedream", "recompute": "full"}}),
    ("asynchronous pipelines in fp16", {"node": SIXTEEN, "plan": PP | {"schedule": "pipedream-2bw", "precision": "fp16"}}),
    ("stages with copies", {"plan": PP | {"schedule": "chimera"}}),
    ("losses out of order", {"plan": {"pp": 2, "schedule": str(ROOT / "tests/data/out_of_order.csv")}}),
    ("1F1B of fewer microbatches than stages", {"plan": {"pp": 4, "accumulation": 2}}),
    ("sends that hold up compute", {"plan": PP | {"overlap_p2p": False}}),
    ("DDP: views of buckets by hand", {"plan": {"tp": 2, "overlap": False, "gradient_as_bucket_view": True, "kernels": "torch"}}),
    ("DDP's fp16 hook by hand", {"plan": {"data_parallel": "ddp_fp16", "overlap": False}}),
    ("PowerSGD by hand", {"plan": {"data_parallel": "ddp_powersgd", "overlap": False}}),
    ("PowerSGD in several buckets", {"plan": {"data_parallel": "ddp_powersgd", "bucket": "8 KiB"}}),
    ("PowerSGD with other axes", {"plan": {"data_parallel": "ddp_powersgd", "tp": 2}}),
    ("ZeRO-1, 2 with sequence parallelism", {"plan": {"data_parallel": "zero1", "tp": 2, "sequence_parallel": True}}),
    ("ZeRO-1, 2 with replicas", {"plan": {"data_parallel": "zero1", "shard": 2}}),
    ("ZeRO-1, 2 with a tied embedding in a pipeline", {"model": GPT, "plan": PP | {"data_parallel": "zero1"}}),
    ("ZeRO-2 with split backward passes", {"plan": PP | {"data_parallel": "zero2", "schedule": "zb-h1"}}),
    ("ZeroRedundancyOptimizer with tp", {"plan": {"data_parallel": ZRO, "tp": 2}}),
    ("ZeroRedundancyOptimizer in fp16", {"node": SIXTEEN, "plan": {"data_parallel": ZRO, "precision": "fp16"}}),
    ("ZeroRedundancyOptimizer with a shared matrix", {"model": GPT, "plan": PP | {"data_parallel": ZRO, "schedule": "zb-v"}}),
    ("FSDP2 over gloo with overlap", {"plan": {"data_parallel": "zero3", "overlap": True}}),
    (
        "FSDP2 on GPUs without overlap",
        {"cluster": {"based_on": "dgx-h100"}, "plan": {"data_parallel": "zero3", "overlap": False}},
    ),
    ("FSDP2 with buckets", {"plan": {"data_parallel": "zero3", "bucket": "1 MiB"}}),
    ("FSDP2 with split backward passes", {"plan": PP | {"data_parallel": "zero3", "schedule": "zb-h1"}}),
    ("FSDP2 with a shared matrix", {"model": GPT, "plan": PP | {"data_parallel": "zero3", "schedule": "zb-v"}}),
    (
        "FSDP2: one reduction in interleaved pipelines",
        {"plan": PP | {"data_parallel": "zero3", "schedule": "interleaved", "chunks": 2, "gradient_sync": "last"}},
    ),
    ("DeepSpeed where it is not installed", {"plan": DS}),
    ("DeepSpeed with what is no option of ZeRO", {"plan": DS | {"data_parallel": "zero3", "deepspeed": {"version": "0.5"}}}),
    ("DeepSpeed with other axes", {"plan": DS | {"tp": 2}}),
    ("DeepSpeed in 16 bits", {"node": SIXTEEN, "plan": DS | {"precision": "fp16"}}),
    ("DeepSpeed with adapters, frozen or compiled layers, modules", {"plan": DS | {"freeze": {"layers": 1}}}),
    ("workers of parameter servers over several processes", {"plan": {"tp": 2}, "served": {}}),
    ("workers of parameter servers with packed documents", {"plan": PACKED, "served": {}}),
    ("parameter servers with sharded states", {"plan": {"data_parallel": "zero1"}, "served": {}}),
    ("parameter servers without workers", {"plan": {}, "served": {"servers": 4}}),
    ("asynchronous parameter servers on GPUs", {"plan": {}, "served": {"staleness": "async", "any_source": False}}),
]


def job_of(model: Any = None, cluster: Any = None, node: Any = None, plan: Any = None, job: Any = None) -> Job:
    """The usual model on four processes, but for what is given."""
    here = {"based_on": "cpu-gloo"} | (cluster or {})
    if here["based_on"] == "cpu-gloo":
        here["node"] = {"gpus": 4} | (node or {})
    given = {"precision": "fp32", "microbatch": 2, "algorithm": "auto"} | (plan or {})
    own = model if callable(model) or (model and ("name" in model or isinstance(model, str))) else LLAMA | (model or {})
    return read_job(model=own, cluster=here, plan=given, **(job or {}))


def reason(case: dict[str, Any]) -> str:
    """Why it is refused."""
    from calibration.execute.data_parallel import hook_class

    case = dict(case)
    served = case.pop("served", None)  # how many servers there are, and how far workers may run ahead
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(limits, "available_cores", lambda: (0, 1))
            patch.setitem(sys.modules, "deepspeed", None)
            job = limits.ready(job_of(**case))
            said = hook_class(job.plan).reason(job, job.resolve())
            if served is not None:
                said = next(reasons(job, **{"servers": 1, "staleness": "sync"} | served), None)
    except UserError as error:
        said = str(error)
    assert said, f"{case} is executed"
    return said.removeprefix("plan: ").removeprefix("not executed: ").replace(str(ROOT / "tests/data") + "/", "")


def reasons_in(path: Path) -> Iterator[int]:
    """Lines that give a reason: what `check` returns, what limits.py yields and raises, and servers.py yields."""
    for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            refuses = path.name in ("limits.py", "servers.py") and isinstance(node, ast.Yield)
            refuses |= path.name == "limits.py" and isinstance(node, ast.Raise)
            checks = (
                function.name in ("check", "reason") and isinstance(node, ast.Return) and isinstance(node.value, ast.JoinedStr)
            )
            if refuses or checks:
                yield node.lineno


def test_every_reason_has_a_row() -> None:
    pytest.importorskip("torch")
    import calibration.execute.data_parallel  # noqa: F401

    seen: set[tuple[str, int]] = set()
    files = {str(path) for path in SOURCES}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename in files:
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            return trace
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _, case in CASES:
            reason(case)
    finally:
        sys.settrace(before)
    missing = [f"{path.name}:{line}" for path in SOURCES for line in reasons_in(path) if (str(path), line) not in seen]
    assert not missing


def table() -> str:
    rows = "".join(f"| {what} | {reason(case)} |\n" for what, case in CASES)
    return f"| not executed | because |\n|---|---|\n{rows}"


def test_the_page_lists_them() -> None:
    pytest.importorskip("torch")
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table(), (
        "run python tests/calibration/execute/test_refused.py"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=f"Write the table of {PAGE.name} anew.").parse_args()
    old = PAGE.read_text()
    PAGE.write_text(old[: old.index(BEGIN) + len(BEGIN)] + table() + old[old.index(END) :])
