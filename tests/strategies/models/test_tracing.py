"""Modules of the user's, traced: against PyTorch's own counter, closed forms, and the same transformer by its description."""

from __future__ import annotations

import gc
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import shardyard
from shardyard import Job, read_job, simulate, summarise
from sim.program import Kernel
from strategies.layers.model_costs import parts
from strategies.models.model import Model
from strategies.models.tracing.inputs import parse_inputs
from strategies.models.tracing.model import _name
from strategies.models.tracing.records import Module
from strategies.models.tracing.tracer import trace_of
from tests.results.traced import MODULES
from topologies.reading import UserError

RESNET = Path(__file__).parents[3] / "examples/modules/resnet.py"
MLP = """
import torch
from torch import nn
print("the file runs")

def build():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def by_value():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 8)
        def forward(self, x):
            return self.one(x) if x.sum().item() > 0 else x
    return Picky()

def no_module():
    return 3

def broken():
    raise RuntimeError("no weights here")

def fft():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 8)
        def forward(self, x):
            return torch.fft.fft(self.one(x.float())).real
    return Spectral()

def skipping():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 8)
        def forward(self, x):
            return self.one(x).relu()
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(4))
        def forward(self, x):
            x = self.first(x)
            a = self.blocks[0](x)
            b = self.blocks[1](a)
            return self.blocks[3](torch.cat([self.blocks[2](b) + x, a], 0)[: len(x)])
    return Skips()

def recurrent():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.LSTM(8, 8, batch_first=True)
        def forward(self, x):
            return self.layers(x)[0]
    return Tagger()

def cell():
    return nn.LSTMCell(8, 8)

def of_a_dict():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 8)
        def forward(self, x):
            return self.one(x["x"])
    return Named()

def sparse():
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 8)
        def forward(self, x):
            return self.one(x)[(x > 0).any(-1)]
    return Some()

def solving():
    class Inverse(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 8)
        def forward(self, x):
            return torch.linalg.inv(self.one(x))
    return Inverse()

@torch.library.custom_op("mine::scan", mutates_args=())
def scan(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

scan.register_fake(torch.empty_like)
scan.register_autograd(lambda ctx, gradient: gradient)

def own_operator():
    class Scans(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 8)
        def forward(self, x):
            return scan(self.one(x))
    return Scans()

def headless():
    from types import SimpleNamespace
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 16)
        def forward(self, x):
            return SimpleNamespace(last_hidden_state=self.one(x), pooler_output=None)
    return Bare()

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MLP)
    return path


def job(model: Any, sample: str = "8", cluster: str = "dgx-a100", **plan: Any) -> Job:
    return read_job(None, model=model, input=sample, cluster=cluster, plan={"global_batch": 128, "microbatch": 4, **plan})


def kernels(asked: Job) -> list[Kernel]:
    """Of a microbatch's passes."""
    work = parts(asked.model, asked.resolve())
    every = [work.embedding, *map(work.layer, range(asked.model.layers)), work.head]
    return [item for part in every for way in (part.forward, part.backward) for item in way if isinstance(item, Kernel)]


@pytest.mark.parametrize(
    ("plan", "how"),
    [({"lora": {"rank": 8, "targets": ["q_proj"]}}, "get_peft_model"), ({"freeze": {"layers": 1}}, "requires_grad_")],
)
def test_what_is_trained_is_said_in_the_file(file: Path, plan: dict[str, Any], how: str) -> None:
    with pytest.raises(UserError, match=f"a traced module says itself what is trained: .*{how}"):
        simulate(job(f"{file}:build", **plan))


def test_flops_are_those_that_torch_counts() -> None:
    """Forward and backward of ResNet-50, 1 × 1 to 7 × 7 convolutions; its first has no gradient of its input."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    asked = job(f"{RESNET}:resnet50", "3x64x64", microbatch=2)
    sys.path.insert(0, str(RESNET.parent))
    from resnet import resnet50  # type: ignore[import-not-found]

    with torch.device("meta"):
        net, images = resnet50(), torch.zeros(2, 3, 64, 64)
    with FlopCounterMode(display=False) as counter:
        net(images).sum().backward()
    assert sum(kernel.flops for kernel in kernels(asked)) == counter.get_total_flops()
    assert asked.model.parameters == sum(each.numel() for each in net.parameters()) == 25_557_032
    assert asked.model.forward_flops(2, 1, False) * 3 > counter.get_total_flops() > asked.model.forward_flops(2, 1, False) * 2.9


def test_resnet_50_by_its_published_figures() -> None:
    """4.1 · 10⁹ multiplications of an image (arXiv:1512.03385, table 1, says 3.8 without the shortcuts), in 16 blocks."""
    asked = job(f"{RESNET}:resnet50", "3x224x224")
    assert asked.model.forward_flops(1, 1, False) / 2 == pytest.approx(4.09e9, rel=0.003)
    assert asked.model.layers == 16
    assert len(set(parts(asked.model, asked.resolve()).kinds)) == 8  # in each group a first block and others
    assert any("were traced: 16 blocks, from 'blocks.0' to 'blocks.15'" in note for note in asked.notes)
    assert any("convolutions are priced as matrix products" in note for note in asked.notes)


def test_what_a_small_module_keeps_and_moves_by_hand(file: Path) -> None:
    """Of 4 samples in bf16 autograd keeps 16 features after the ReLU, and log-probabilities in fp32; inputs are not counted."""
    asked = job(f"{file}:build")
    trace = trace_of(asked.model.module, 4, "bf16")
    kept = sorted(size for tensors in trace.saved.values() for _, size in tensors)
    assert kept == [4, 4 * 4 * 4, 4 * 16 * 2]  # the loss's divisor, log-probabilities, what ReLU has made
    work = parts(asked.model, asked.resolve())
    layer = work.layer(0)
    assert layer.parameters == asked.model.parameters == 8 * 16 + 16 + 16 * 4 + 4
    products = [kernel.shape for kernel in kernels(asked) if kernel.kind == "gemm"]
    assert products == [(1, 4, 16, 8), (1, 4, 4, 16), (1, 4, 16, 4), (1, 4, 16, 4), (1, 16, 8, 4)]
    moved = next(kernel for kernel in layer.forward if kernel.label == "1 relu")
    assert moved.bytes == 2 * (2 * 4 * 16)


def test_of_a_model_without_a_head_the_last_hidden_state_is_summed(file: Path) -> None:
    """As transformers' bare classes return it: no class is predicted, so there is no cross-entropy."""
    trace = trace_of(job(f"{file}:headless").model.module, 4, "bf16")
    assert trace.loss == "the module has no head: the loss is the sum of its last hidden state"
    assert not any(size for tensors in trace.saved.values() for _, size in tensors)


RETURNING = """
from types import SimpleNamespace as Output
import torch
class Returning(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(8, 8)
    def forward(self, x):
        y = self.one(x)
        return {}
def build():
    return Returning()
"""


@pytest.mark.parametrize(
    ("returned", "loss"),
    [
        ("y", "cross-entropy"),
        ("y[:, :2]", "cross-entropy"),
        ("y[:, :1]", "the sum of the module's result"),  # of one class
        ("y.flatten()", "the sum of the module's result"),  # of no rows
        ("y.sum()", "the module's result is the loss"),
        ("(y, None)", "cross-entropy"),
        ("Output(loss=y.sum(), logits=y)", "the module's result is the loss"),
        ("Output(loss=None, logits=y, last_hidden_state=y)", "cross-entropy"),
        ("Output(last_hidden_state=y)", "has no head: the loss is the sum of its last hidden state"),
        ("y.long()", None),
        ("None", None),
    ],
)
def test_what_the_loss_of_a_result_is(tmp_path: Path, returned: str, loss: str | None) -> None:
    path = tmp_path / "returning.py"
    path.write_text(RETURNING.replace("{}", returned))
    if loss is None:
        with pytest.raises(UserError, match=r"the module's result is (Tensor|NoneType), of which no loss can be made"):
            trace_of(job(f"{path}:build").model.module, 4, "bf16")
        return
    trace = trace_of(job(f"{path}:build").model.module, 4, "bf16")
    assert loss in trace.loss


def test_what_is_there_does_not_depend_on_when_garbage_is_collected() -> None:
    """A tensor that its own gradient needs is gone when that is done, and no other is taken for one that is gone."""
    from strategies.models.tracing.recorder import record

    thresholds, lives = gc.get_threshold(), []
    module = job(f"{MODULES}:masked", "16:int64").model.module
    assert module is not None
    for threshold in (0, 50, 700, 0):  # 0: never
        gc.set_threshold(threshold)
        lives.append([op.live for op in record(module, 4, "bf16", fused_attention=True).ops])
    gc.set_threshold(*thresholds)
    assert all(each == lives[0] for each in lives)


def test_a_norm_reads_and_writes_its_rows_once_and_its_gradient_takes_two_passes(tmp_path: Path) -> None:
    """8 rows of 16 fp32 numbers: forward reads and writes them; backward reads two and writes one, and sums two over rows."""
    path = tmp_path / "norm.py"
    path.write_text("from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))\n")
    found = [kernel for kernel in kernels(job(f"{path}:build", "16", microbatch=8, precision="fp32")) if "norm" in kernel.label]
    rows = 8 * 16 * 4
    assert sorted((kernel.phase, kernel.bytes) for kernel in found) == [
        ("backward", 2 * rows),
        ("backward", 3 * rows),
        ("forward", 2 * rows),
    ]


@pytest.mark.parametrize(("arguments", "kernels_of_it"), [("0.1", 1), ("0.0", 0), ("0.1, inplace=True", 0)])
def test_dropout_is_a_kernel_where_it_drops_something(tmp_path: Path, arguments: str, kernels_of_it: int) -> None:
    """With no chance PyTorch runs nothing; in place it multiplies by a mask, operator by operator."""
    path = tmp_path / "dropout.py"
    layers = f"nn.Linear(16, 16), nn.Dropout({arguments}), nn.Linear(16, 16)"
    path.write_text(f"from torch import nn\ndef build():\n    return nn.Sequential({layers})\n")
    forward = [kernel for kernel in kernels(job(f"{path}:build", "16")) if kernel.phase == "forward"]
    assert sum(kernel.variant == "dropout" for kernel in forward) == kernels_of_it


def test_an_embedding_moves_the_rows_that_are_looked_up(tmp_path: Path) -> None:
    """Three tokens of 4 samples, 8 features in bf16: read and written."""
    path = tmp_path / "words.py"
    path.write_text(
        "import torch\n\ndef build():\n"
        "    return torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Flatten(), torch.nn.Linear(24, 4))\n"
    )
    moved = [kernel.bytes for kernel in kernels(job(f"{path}:build", "3:int64")) if "embedding" in kernel.label]
    assert moved[0] == 2 * (4 * 3 * 8 * 2)


def test_rows_are_looked_up_and_added_to_without_the_rest(tmp_path: Path) -> None:
    """Of tables of 1,000 rows of 8 features in bf16 4 samples read 3 rows each, with their numbers: as a sum (EmbeddingBag), and
    by indices. Their gradients are zeros, to which rows are added.
    """
    path = tmp_path / "rows.py"
    path.write_text(
        "import torch\n\nclass Rows(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.bag, self.table = torch.nn.EmbeddingBag(1000, 8, mode='sum'), torch.nn.Parameter(torch.zeros(1000, 8))\n"
        "    def forward(self, x):\n"
        "        return self.bag(x) + self.table[x].sum(1)\n"
    )
    moved = {kernel.label.rpartition(" ")[2]: kernel.bytes for kernel in kernels(job(f"{path}:Rows", "3:int64"))}
    rows, numbers, table = 4 * 3 * 8 * 2, 4 * 3 * 8, 1000 * 8 * 2
    assert moved["index"] == 2 * rows + numbers
    assert rows < moved["_embedding_bag"] < table / 10
    assert (moved["new_zeros"], moved["index_put"]) == (table, 3 * rows + numbers)
    assert moved["_embedding_bag_backward"] == pytest.approx(table + 3 * rows, rel=0.02)


def test_ddp_and_zero_move_what_they_move(file: Path) -> None:
    """2Ψ(n − 1)/n and 3Ψ(n − 1)/n in bf16."""
    for hook, times in (("ddp", 2), ("zero3", 3)):
        asked = job(f"{RESNET}:resnet50", "3x64x64", data_parallel=hook, global_batch=32)
        volume = summarise(simulate(asked)).volume["dp"]
        psi, width = asked.model.parameters, asked.plan.bytes_per_element
        assert volume.bytes == pytest.approx(times * psi * width * 7 / 8, rel=0.002)


OWN: dict[str, Any] = {"name": "own", "hidden": 1024, "layers": 4, "heads": 16, "vocabulary": 32000, "context": 1024}
LLAMA = OWN | {
    "positions": "rotary",
    "norm": "rmsnorm",
    "gated": True,
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "tied": False,
    "ffn": 2816,
    "kv_heads": 4,
}


@cache
def builder(llama: bool) -> Any:
    def build() -> Any:
        from calibration.execute.model import Transformer

        return Transformer(Model(**(LLAMA if llama else OWN)), 1024)

    return build


@pytest.mark.parametrize(
    ("llama", "plan"),
    [
        (False, {}),
        (False, {"precision": "fp32"}),
        (False, {"data_parallel": "zero3"}),
        (False, {"data_parallel": "zero1", "recompute": "full"}),
        (False, {"pp": 2}),
        (False, {"pp": 2, "schedule": "zb-h1"}),
        (False, {"data_parallel": "zero3", "shard": 4}),
        (True, {"precision": "fp32"}),
        (True, {"precision": "fp32", "data_parallel": "zero2"}),
        (True, {"precision": "fp32", "recompute": "full"}),
    ],
    ids=str,
)
def test_a_transformer_traced_is_the_one_described(llama: bool, plan: dict[str, Any]) -> None:
    """FLOPs, parameters and volumes to the last digit, the step within 3 %, memory within 5 %."""
    described = read_job(
        None,
        model=LLAMA if llama else OWN,
        cluster="dgx-a100",
        plan={"global_batch": 128, "microbatch": 4, "kernels": "torch", **plan},
    )
    without = {} if "data_parallel" in plan or not llama else {"broadcast_buffers": False}  # of rotary angles: not described
    traced = job(builder(llama), "1024:int64", **plan, **without)
    assert traced.model.parameters == described.model.parameters
    assert traced.model.forward_flops(2, 1024, False) == described.model.forward_flops(2, 1024, False)
    one, other = (summarise(simulate(each)) for each in (described, traced))
    assert {axis: v.bytes for axis, v in other.volume.items()} == {axis: v.bytes for axis, v in one.volume.items()}
    assert other.step_seconds == pytest.approx(one.step_seconds, rel=0.03)
    assert other.worst.peak == pytest.approx(one.worst.peak, rel=0.05)
    assert other.mfu == pytest.approx(one.mfu, rel=0.03)


def test_a_checkpoint_of_the_modules_own_is_recomputation() -> None:
    """Of two matrices as large as each other the first is multiplied again, up to what the second keeps: 7 products, not 6."""
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Any) -> Any:
            return checkpoint(lambda x: self.down(self.up(x).relu()), x, use_reentrant=False)

    plain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)))
    own, without = (summarise(simulate(job(net, "64"))) for net in (nn.Sequential(*(Block() for _ in range(3))), plain))
    assert own.hfu / own.mfu == pytest.approx(7 / 6)
    assert without.hfu == without.mfu
    assert own.breakdown["recompute"] > 0.0 == without.breakdown["recompute"]


@pytest.mark.parametrize("plan", [{"data_parallel": "zero2"}, {"data_parallel": "zero3"}, {"pp": 2}], ids=str)
def test_the_loss_begins_the_backward_pass_and_a_pipeline_keeps_what_it_returns(plan: dict[str, Any]) -> None:
    """Peaks are those of the described transformer: with the loss's gradients no others are there yet, parameters of blocks are
    not gathered yet, and PyTorch's last stage keeps its logits.
    """
    described = read_job(
        None, model=OWN, cluster="dgx-a100", plan={"global_batch": 128, "microbatch": 4, "kernels": "torch", **plan}
    )
    one, other = (summarise(simulate(each)).worst.peak for each in (described, job(builder(False), "1024:int64", **plan)))
    assert other == pytest.approx(one, rel=1e-5)


def test_a_module_that_cannot_be_trained_on_one_sample() -> None:
    """ResNet-18 makes one number a channel of an image of CIFAR's size, of which PyTorch normalises no batch of one."""
    resnet = "examples/modules/resnet.py:resnet18"
    small, large = (job(resnet, f"3x{size}x{size}", microbatch=4, kernels="torch") for size in (32, 64))
    assert small.model.parameters == large.model.parameters
    one, four = (each.model.forward_flops(4, 1, False) for each in (small, large))
    assert 4 * one - four == 3 * 4 * 2 * 512 * 1000  # all but the last matrix has four times as many places
    with pytest.raises(UserError, match=r"more than 1 value per channel.*: take more samples, as plan.microbatch=2"):
        simulate(job(resnet, "3x32x32", microbatch=1))


def test_a_module_itself_and_a_job_file(file: Path, tmp_path: Path) -> None:
    from torch import nn

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    by_itself, by_name = job(net), job(f"{file}:build")
    assert by_itself.model.parameters == by_name.model.parameters
    assert net[0].weight.device.type == "cpu"
    (tmp_path / "job.yaml").write_text(
        "model: {module: 'mine.py:build', input: 8}\ncluster: dgx-a100\nplan: {global_batch: 64}\n"
    )
    from_file = read_job(tmp_path / "job.yaml")
    assert summarise(simulate(from_file)).step_seconds > 0
    file.write_text(MLP.replace("16", "32"))
    assert read_job(tmp_path / "job.yaml").model.parameters > by_name.model.parameters
    assert read_job(tmp_path / "job.yaml").hash != from_file.hash


def test_a_file_runs_only_when_it_is_named_and_that_is_said(file: Path) -> None:
    command = ["simulate", "--cluster", "dgx-a100", "--model", f"{file}:build"]
    run = CliRunner().invoke(shardyard.main, [*command, "--input", "8"])
    assert run.exit_code == 0, run.stderr
    assert "the file runs" in run.stdout
    assert f"{file}:build was run, and its passes on samples of 8 were traced: no repeated blocks" in run.stdout
    refused = CliRunner().invoke(shardyard.main, command)
    assert refused.exit_code == 2
    assert "the file runs" not in refused.stdout
    assert "needs the sizes of one sample: --input 3x224x224" in refused.stderr


@pytest.mark.parametrize(
    ("name", "sample", "plan", "message"),
    [
        ("nothing", "8", {}, "'nothing' is not there"),
        ("number", "8", {}, "'number' is no function or class"),
        ("no_module", "8", {}, "made int, which is no torch.nn.Module"),
        ("broken", "8", {}, "failed while it was made: RuntimeError: no weights here"),
        ("build", "9", {}, "its passes on --input 9 failed: RuntimeError"),
        ("build", "8:int9", {}, "must be the sizes of one sample, such as 3x224x224"),
        ("build", "8x", {}, "must be the sizes of one sample"),
        ("by_value", "8", {}, "values of tensors cannot be looked at"),
        ("recurrent", "4x8", {}, "layers is an nn.LSTM: GPUs run it as one kernel of cuDNN, .* trace the module without it"),
        ("cell", "8", {}, "it is an nn.LSTMCell: GPUs run what follows its products as one kernel"),
        ("of_a_dict", "8", {}, "give a dict's by name to a module of yours that makes the dict"),
        ("sparse", "8", {}, "torch.nonzero makes as many rows as values say, and there are none; give every row its place"),
        ("fft", "8", {}, "operator aten::_fft_r2c in .* has no price"),
        ("solving", "8x8", {"precision": "fp32"}, "operator aten::linalg_inv_ex in .* has no price"),
        ("solving", "8x8", {}, "torch.bfloat16; precision=fp32 may do"),
        ("own_operator", "8", {}, "operator mine::scan in .* has no price: .* trace the module without it"),
        ("build", "8", {"tp": 2}, "tp=2: how tp ranks cut a traced module has to be said"),
        ("build", "8", {"kernels": "compiled"}, "kernels=compiled: a traced module runs PyTorch's own operators"),
        ("build", "8", {"recompute": "selective"}, "recompute=selective: of a traced module whole blocks"),
        ("build", "8", {"sequence": 4}, "sequence=4 contradicts a sample of 1 tokens"),
        ("build", "8", {"dropout": False}, "dropout=False: is not done to a traced module"),
        ("build", "8", {"framework": {"joined_products": True}}, "options of how a model is written"),
    ],
)
def test_mistakes_are_one_line(file: Path, name: str, sample: str, plan: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        simulate(job(f"{file}:{name}", sample, **plan))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [((8, 8), 1024 * 14 * 14), ((3, 13), 256 * 56 * 56), ((12, 4), 1024 * 14 * 14), ((14, 2), 2048 * 7 * 7)],
    ids=str,
)
def test_a_pipeline_sends_what_its_blocks_hand_on(layers: tuple[int, int], numbers: int) -> None:
    """ResNet-50's groups of 3, 4, 6 and 3 bottlenecks have 256 to 2048 channels and 56 to 7 pixels a side (arXiv:1512.03385,
    table 1); a stage sends them forward, and the next one their gradient.
    """
    asked = job(f"{RESNET}:resnet50", "3x224x224", pp=2, microbatch=4, accumulation=2, global_batch=None, layers_per_stage=layers)
    summary = summarise(simulate(asked))
    assert summary.volume["pp"].bytes == 2 * 4 * numbers * 2  # microbatches, images, bytes
    whole = summarise(simulate(job(f"{RESNET}:resnet50", "3x224x224", microbatch=4, accumulation=2, global_batch=None)))
    assert max(stage.kinds["optimizer"] for stage in summary.memory) < whole.worst.kinds["optimizer"]


def test_other_mistakes_are_one_line(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone.py: cannot be read: no such file"):
        job(f"{tmp_path / 'gone.py'}:build")
    with pytest.raises(UserError, match=r"pp=2: a last stage without blocks is simulated where all blocks hand on as much"):
        simulate(job(f"{RESNET}:resnet50", "3x224x224", pp=2, layers_per_stage=(16, 0)))
    with pytest.raises(UserError, match=r"--input '8': is for a module"):
        job("gpt2-1.5b")
    with pytest.raises(UserError, match="only module, input, name, parallelize can be given"):
        read_job(None, {"model.hidden": 3}, model=f"{file}:build", input="8", cluster="dgx-a100")
    (tmp_path / "wrong.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(UserError, match=r"wrong.py: failed while it was run: ModuleNotFoundError"):
        job(f"{tmp_path / 'wrong.py'}:build")


def test_inputs() -> None:
    assert [(each.shape, each.dtype) for each in parse_inputs("3x224x224, 77:int64")] == [
        ((3, 224, 224), "float"),
        ((77,), "int64"),
    ]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(RESNET), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["1", "8", "16", "64", "256"]
    assert float(rows[0][1]) < float(rows[-1][1])


def test_a_class_of_transformers_by_its_config() -> None:
    """With --input a config.json is traced by its own class: as many parameters and FLOPs as its importer counts."""
    pytest.importorskip("transformers")
    file = str(Path(__file__).parents[2] / "data/models/qwen2.5-0.5b.json")
    traced = job(file, "256:int64", data_parallel="zero3")
    read = read_job(None, model=file, cluster="dgx-a100", plan={"auto": False, "sequence": 256})
    assert traced.model.parameters == read.model.parameters
    assert traced.model.forward_flops(2, 256, False) == read.model.forward_flops(2, 256, False)
    assert traced.model.layers == read.model.layers == 24
    assert traced.model.name == read.model.name
    assert any("transformers' class of" in note and "was made" in note for note in traced.notes)
    assert summarise(simulate(traced)).step_seconds > 0


def test_a_class_that_runs_other_kernels_on_gpus_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for kind, name, why in (
        ("rwkv", "RwkvForCausalLM", "it has recurrent or state-space layers"),
        ("mamba2", "Mamba2ForCausalLM", "on GPUs its recurrent layers run other kernels .* without --input the file is read"),
    ):
        path.write_text(f'{{"model_type": "{kind}", "architectures": ["{name}"]}}')
        with pytest.raises(UserError, match=f"model_type '{kind}': {why}"):
            job(str(path), "256:int64")


def test_what_skips_blocks_is_handed_on_by_all_between(tmp_path: Path) -> None:
    """Blocks are given x; a and x; b, a and x; the sum of the third's result and x beside a: 16 numbers of 16 bits each."""
    file = tmp_path / "net.py"
    file.write_text(MLP)
    model = read_job(None, model=f"{file}:skipping", input="8", cluster="dgx-a100", plan={"microbatch": 2}).model
    assert model.module is not None
    trace = trace_of(model.module, 2, "bf16")
    assert trace.boundaries == [32.0, 32.0, 32.0, 32.0]
    assert trace.handed_on == [32.0, 64.0, 96.0, 64.0]


def test_a_config_in_a_folder_has_the_folder_s_name(tmp_path: Path) -> None:
    """Hugging Face keeps every model's sizes in a file `config.json`."""
    (tmp_path / "tiny").mkdir()
    paths = [tmp_path / "tiny" / "config.json", tmp_path / "small.json"]
    names = [_name(Module(source=str(path), input=())) for path in paths]
    assert names == ["tiny", "small"]
    assert _name(Module(source="a.py:build", input=())) == "build"
