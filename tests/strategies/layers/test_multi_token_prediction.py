"""Multi-token prediction: parameters of the published weights, FLOPs by PyTorch's counter, where it is in a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from sim.analysis.summary import summarise
from sim.engine.player import run
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from strategies.models.importers import read_hugging_face
from strategies.models.model import Model, load_model
from topologies.reading import UserError

LLAMA = {
    "gated": True,
    "positions": "rotary",
    "norm": "rmsnorm",
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "dropout": False,
}


def with_mtp(model: Model, mtp: int) -> Model:
    return Model.model_validate(model.model_dump(exclude_unset=True) | {"mtp": mtp})


def test_parameters_of_deepseek_v3() -> None:
    """huggingface.co/deepseek-ai/DeepSeek-V3: its safetensors have 3,918,786,560 bf16 and 680,571,043,840 fp8 numbers, among them
    the copies of embedding and head that the prediction layer brings; scales, and the router's biases (256 of each of 58 + 1
    mixtures), are fp32. README_WEIGHTS.md: 11.5 B of the prediction layer alone.
    """
    main, _ = load_model("deepseek-v3")
    whole = with_mtp(main, 1)
    copies = 2 * 129280 * 7168
    assert whole.parameters + copies == 3_918_786_560 + 680_571_043_840 + 59 * 256
    assert whole.mtp_parameters == pytest.approx(11.5e9, rel=0.01)
    assert whole.active_parameters - main.active_parameters < 0.7e9  # a layer, and not its 256 experts


@pytest.mark.parametrize("mtp", [1, 2])
def test_flops_are_those_that_pytorch_counts(mtp) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    hidden, heads, ffn, vocabulary, batch, sequence = 32, 4, 96, 80, 2, 16

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (torch.nn.Linear(hidden, hidden, bias=False) for _ in range(4))
            self.gate, self.up = (torch.nn.Linear(hidden, ffn, bias=False) for _ in range(2))
            self.down = torch.nn.Linear(ffn, hidden, bias=False)
            self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden) for _ in range(2))

        def forward(self, x):
            y = self.norms[0](x)
            q, k, v = (each(y).view(batch, sequence, heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
            y = torch.softmax(q @ k.transpose(2, 3), -1) @ v
            x = x + self.o(y.transpose(1, 2).reshape(batch, sequence, hidden))
            y = self.norms[1](x)
            return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(vocabulary, hidden)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
            self.norm, self.head = torch.nn.RMSNorm(hidden), torch.nn.Linear(hidden, vocabulary, bias=False)
            depth = {"join": lambda: torch.nn.Linear(2 * hidden, hidden, bias=False), "layer": Layer}
            depth |= dict.fromkeys(("enorm", "hnorm", "norm"), lambda: torch.nn.RMSNorm(hidden))
            self.depths = torch.nn.ModuleList(
                torch.nn.ModuleDict({name: make() for name, make in depth.items()}) for _ in range(mtp)
            )

        def forward(self, ids):
            x = self.tokens(ids)
            for layer in self.layers:
                x = layer(x)
            results = [self.head(self.norm(x))]
            for depth in self.depths:
                ids = ids.roll(-1, 1)
                x = torch.cat((depth["enorm"](self.tokens(ids)), depth["hnorm"](x)), -1)
                x = depth["layer"](depth["join"](x))
                results.append(self.head(depth["norm"](x)))
            return results

    with torch.device("meta"):
        net, ids = Net(), torch.zeros(batch, sequence, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        net(ids)
    sizes = {"name": "small", "hidden": hidden, "layers": 3, "heads": heads, "ffn": ffn, "vocabulary": vocabulary}
    model = Model.model_validate(sizes | LLAMA | {"context": sequence, "tied": False, "mtp": mtp})
    assert model.parameters == sum(weight.numel() for weight in net.parameters())
    assert model.forward_flops(batch, sequence, causal=False) == counter.get_total_flops()


@pytest.fixture
def job(toy_job):
    def make(mtp: int, **plan: Any):
        model = LLAMA | {"tied": plan.pop("tied", False), "mtp": mtp}
        return toy_job(8, 1, model, None, **plan)

    return make


@pytest.fixture
def answer(job, toy_prices):
    def play(mtp: int, **plan: Any):
        mine = job(mtp, **plan)
        program = lower(mine.model, mine.resolve())
        return summarise(run(program, mine.cluster.topology(), toy_prices())), program

    return play


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("mtp", [1, 3])
def test_work_is_that_of_the_model(job, mtp, recompute) -> None:
    """Parts hold all parameters once, and have three times the forward FLOPs."""
    mine = job(mtp, recompute=recompute)
    plan = mine.resolve()
    work = parts(mine.model, plan)
    assert sum(part.parameters for part in (work.embedding, *work.stage(0, 4), work.head)) == mine.model.parameters
    flops = 3 * mine.model.forward_flops(plan.microbatch, plan.sequence, causal=False)
    assert sum(part.model_flops for part in (work.embedding, *work.stage(0, 4), work.head)) == pytest.approx(flops)


@pytest.mark.parametrize("tied", [False, True])
def test_the_last_stage_has_a_copy_of_the_embedding(answer, job, tied) -> None:
    """Its gradient is summed over both stages, once for all depths (Megatron-Core shares it with the first stage)."""
    (without, _), (one, program), (three, _) = (answer(mtp, pp=4, tied=tied, accumulation=4) for mtp in (0, 1, 3))
    stream, copy = 2 * 32 * 64, 2 * 512 * 64  # an all-reduce of two ranks sends as much as the matrix
    last = 4 * stream + copy  # of the last rank, which sends gradients of four microbatches
    assert without.volume["pp"].bytes == pytest.approx(last if tied else 2 * 4 * stream)
    assert one.volume["pp"].bytes == three.volume["pp"].bytes == pytest.approx(last)
    resident = [dict(cohort.resident)["parameter"] for cohort in program.cohorts]
    model = job(1, tied=tied).model
    assert sum(resident) == pytest.approx(2 * (model.parameters + 512 * 64))


def test_tensor_parallel_volume(answer) -> None:
    """A depth adds what a layer, an embedding and a head move, and for its joint matrix the sum of the input's gradient
    (2 · hidden) and a gather of the result (hidden). Of 2 ranks all-reduces send the size of the tensor, all-gathers half.
    """
    (without, _), (one, _) = (answer(mtp, tp=2) for mtp in (0, 1))
    tokens = 32
    stream, small = 2 * tokens * 64, 3 * 4 * tokens
    layer, head, embedding = 4 * stream, stream + small, stream
    join = 2 * stream + stream / 2
    assert one.volume["tp"].bytes - without.volume["tp"].bytes == pytest.approx(layer + head + embedding + join)


def test_memory_grows_by_what_a_depth_keeps(job) -> None:
    plan = dict(microbatch=4)
    without, one = (parts(job(mtp, **plan).model, job(mtp, **plan).resolve()).head for mtp in (0, 1))
    layer = parts(job(0, **plan).model, job(0, **plan).resolve()).layer(0).saved
    stream = 2 * 4 * 32 * 64
    assert one.saved - without.saved == pytest.approx(without.saved + layer + 4 * stream)  # and inputs of two norms and a product


def test_a_config_says_how_to_have_them() -> None:
    config = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1, "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64}
    config |= {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": None}
    _, ignored = read_hugging_face(config, "config.json")
    assert "num_nextn_predict_layers (model.mtp=1 has them)" in ignored


@pytest.mark.parametrize("plan", [{"data_parallel": "zero3"}, {"lora": {"rank": 4, "targets": ["q_proj"]}}])
def test_refusals(answer, plan) -> None:
    with pytest.raises(UserError, match="mtp=1 with"):
        answer(1, **plan)
