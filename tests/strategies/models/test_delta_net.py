"""Gated delta nets: parameters of published models and of classes, the delta rule against the algorithm in PyTorch."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardyard import Job, read_job, simulate, summarise
from sim.program import Collective, Kernel, Start
from strategies.layers.model_costs import parts, saved_tensors
from strategies.models.importers import read_hugging_face
from strategies.models.model import Model, load_model
from tests.strategies.models.test_families import built
from topologies.reading import UserError

HEADS = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
SIZES: dict[str, dict[str, Any]] = {  # of published models; keys as their files have them
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        **HEADS,
        **{"hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "head_dim": 256},
        **{"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 262144, "full_attention_interval": 4},
        **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        **{"linear_num_value_heads": 32, "decoder_sparse_step": 1, "mlp_only_layers": [], "partial_rotary_factor": 0.25},
        **{"use_sliding_window": False, "norm_topk_prob": True, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False},
    },
    "qwen3.5-27b": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        **HEADS,
        **{"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24, "head_dim": 256},
        **{"num_key_value_heads": 4, "vocab_size": 248320, "max_position_embeddings": 262144, "attn_output_gate": True},
        **{"linear_num_value_heads": 48, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"},
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    },
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **HEADS,
        **{"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
        **{"vocab_size": 248320, "max_position_embeddings": 262144, "num_experts": 256, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "linear_num_value_heads": 32},
    },
}


def model_of(name: str, **changes: Any) -> Model:
    fields, _ = read_hugging_face(SIZES[name] | changes, "config.json")
    return Model(name=name, **fields)


def test_parameters_are_those_of_the_published_weights() -> None:
    """Qwen3-Next-80B-A3B-Instruct has 81,324,862,720 elements on the hub, its prediction layer among them (safetensors metadata,
    github.com/debaditc/kvfit scripts/build_registry.py); 3 of 80 billion are active.
    """
    model = model_of("qwen3-next-80b-a3b")
    assert Model(**model.model_dump(exclude_unset=True) | {"mtp": 1}).parameters == 81_324_862_720
    assert round(model.parameters / 1e9) == 80
    ends = model.embedding_parameters + model.vocabulary * model.hidden
    assert round((model.active_parameters - ends) / 1e9) == 3


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_of_the_class(name: str) -> None:
    assert model_of(name).parameters == sum(each.numel() for each in built(SIZES[name]).parameters())


def test_parameters_of_a_layer_by_hand() -> None:
    """Matrices, convolution, two numbers per value head and a norm of a value head's features, two norms."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
    small |= {"num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    small |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "vocab_size": 100, "layer_types": None}
    model = model_of("qwen3.5-27b", **small)
    mlp, norms = 3 * 64 * 96, 2 * 64
    net = 64 * (2 * 2 * 8 + 2 * 4 * 12 + 2 * 4) + 4 * 12 * 64 + 4 * (2 * 2 * 8 + 4 * 12) + 4 + 4 + 12
    attention = 64 * (2 * 64) + 2 * 64 * 32 + 64 * 64 + 2 * 16
    assert [model.layer_parameters(layer) for layer in range(4)] == [net + mlp + norms] * 3 + [attention + mlp + norms]
    biased = model_of("qwen3.5-27b", **small, attention_bias=True)
    assert biased.layer_parameters(3) - model.layer_parameters(3) == 2 * 64 + 2 * 32 + 64
    assert biased.layer_parameters(0) == model.layer_parameters(0)


def test_layers_are_those_that_the_file_names() -> None:
    """By a list, or by how many there are to one that attends; some of them dense."""
    changes = {"num_hidden_layers": 6, "full_attention_interval": 3, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    model = model_of("qwen3-next-80b-a3b", **changes)
    assert [own.mixer for own in model.layer_models] == (["delta_net"] * 2 + ["attention"]) * 2
    assert [model.is_mixture(layer) for layer in range(6)] == [False, True, False, False, False, True]
    listed = model_of("qwen3-next-80b-a3b", num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
    assert [own.has_attention for own in listed.layer_models] == [True, False]
    assert not any(map(model_of("qwen3-next-80b-a3b", num_experts=0).is_mixture, range(48)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 5}, "key_heads=5 must divide value_heads=32"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types has 'sliding_attention', which is not simulated"),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3 must be a list of layers"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 must be a positive whole number"),
        ({"conv_size": 7}, "conv_size=7 is not known of a 'qwen3_next'"),
    ],
)
def test_files_that_are_refused(changes: dict[str, Any], message: str, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES["qwen3-next-80b-a3b"] | changes))
    with pytest.raises(UserError, match=message):
        load_model(str(path))


@pytest.mark.parametrize("name", SIZES)
def test_layer_work_has_the_parameters_and_flops_of_the_model(name: str) -> None:
    model = model_of(name).model_dump(exclude_unset=True)
    job = read_job(None, model=model, cluster="dgx-h100", plan={"sequence": 2048, "global_batch": 8, "microbatch": 1})
    work = parts(job.model, job.resolve())
    every = [work.embedding, work.head, *map(work.layer, range(job.model.layers))]
    assert sum(part.parameters for part in every) == job.model.parameters
    flops = 3 * job.model.forward_flops(1, 2048, False)
    assert sum(part.model_flops for part in every) == pytest.approx(flops, rel=1e-12)


def net_job(tp: int = 1, sequence: int = 256, plan: dict[str, Any] | None = None, **own: Any) -> Job:
    """A model of delta nets alone: 4 value heads on 2 key heads."""
    sizes = {"key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 12, "chunk": 32} | own
    model = {"name": "nets", "hidden": 64, "layers": 2, "heads": 8, "head_dim": 8, "vocabulary": 512, "context": 4096, "ffn": 96}
    model |= {"mixer": "delta_net", "delta_net": sizes, "norm": "rmsnorm", "positions": "none", "mlp_bias": False}
    plan = {"tp": tp, "sequence": sequence, "global_batch": 8, "microbatch": 1} | (plan or {})
    return read_job(None, model=model, cluster="dgx-h100", plan=plan)


def rule_products(job: Job, phase: str) -> float:
    """FLOPs of the delta rule's products in one direction of a layer."""
    layer = parts(job.model, job.resolve()).layer(0)
    items = layer.forward if phase == "forward" else layer.backward
    return sum(each.flops for each in items if isinstance(each, Kernel) and each.kind == "gemm" and "delta rule" in each.label)


def test_products_are_those_of_the_chunked_algorithm() -> None:
    """Section 3.3 of the paper in PyTorch's products: it is the recurrence, with as many FLOPs forward; backward has autograd's
    and what the kernels compute again: inverse times keys and values, states, the scores twice, and keys times keys.
    """
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    job, tokens = net_job(), 256
    own = job.model.delta_net
    assert own is not None
    heads, size, keys, values = own.value_heads, own.chunk, own.key_head_dim, own.value_head_dim
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Any:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    q, k, v = (random(heads, tokens, features) - 0.5 for features in (keys, keys, values))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta, decay = random(heads, tokens), -random(heads, tokens)
    state = torch.zeros(heads, keys, values, dtype=torch.float64, requires_grad=True)

    def chunked(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        result, before = [], state
        lower = torch.tril(torch.ones(size, size, dtype=torch.float64))
        for start in range(0, tokens, size):
            block = slice(start, start + size)
            qs, ks, vs, b, total = q[:, block], k[:, block], v[:, block], beta[:, block, None], decay[:, block].cumsum(-1)
            between = torch.exp((total[:, :, None] - total[:, None, :]) * lower) * lower
            strict = (ks * b) @ ks.transpose(1, 2) * torch.tril(between, -1)
            inverse = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + strict)
            w, u = inverse @ (ks * b * torch.exp(total)[..., None]), inverse @ (vs * b)
            new = u - w @ before
            scores = qs @ ks.transpose(1, 2) * between
            result.append((qs * torch.exp(total)[..., None]) @ before + scores @ new)
            into = (ks * torch.exp(total[:, -1:] - total)[..., None]).transpose(1, 2)
            before = before * torch.exp(total[:, -1])[:, None, None] + into @ new
        return torch.cat(result, 1), before

    with FlopCounterMode(display=False) as counter:
        result, last = chunked(q, k, v)
    assert rule_products(job, "forward") == counter.get_total_flops()
    each, expected = torch.zeros(heads, keys, values, dtype=torch.float64), []
    for token in range(tokens):
        each = each * torch.exp(decay[:, token])[:, None, None]
        there = (each * k[:, token, :, None]).sum(1)
        each = each + k[:, token, :, None] * ((v[:, token] - there) * beta[:, token, None])[:, None, :]
        expected.append((each * q[:, token, :, None]).sum(1))
    assert torch.allclose(result, torch.stack(expected, 1))
    assert torch.allclose(last, each)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    with FlopCounterMode(display=False) as both:
        sum(each.sum() for each in chunked(*leaves)).backward()
    again = 2 * tokens * heads * (size * keys + size * values + 2 * keys * values + 3 * size * keys)
    assert rule_products(job, "backward") == both.get_total_flops() - counter.get_total_flops() + again
    per_token = heads * (20 * size * keys + 10 * size * values + 16 * keys * values + 4 * size**2)
    assert rule_products(job, "backward") == tokens * per_token


def test_a_step_grows_by_tokens_not_by_their_square() -> None:
    short, long = (sum(rule_products(net_job(sequence=tokens), way) for way in ("forward", "backward")) for tokens in (512, 2048))
    assert long == 4 * short


def test_what_autograd_keeps() -> None:
    """By tensors that the convolution, norms, the delta rule and the gated norm keep, with two value heads to a key head."""
    tokens, keys, values, heads = 256, 2 * 8, 4 * 12, 4
    kept = saved_tensors(net_job().model, net_job().resolve())
    assert kept["delta net in input"] == 2 * tokens * 64
    assert kept["delta net input"] == 2 * tokens * (2 * keys + values + 2 * heads)  # before the convolution
    assert kept["delta net queries and keys"] == 2 * tokens * 2 * keys  # normed, before copies
    assert kept["delta rule queries and keys"] == 2 * tokens * 2 * heads * 8
    assert kept["delta rule values"] == kept["delta net gate"] == kept["delta rule result"] == 2 * tokens * values
    assert kept["delta rule inverse"] == 2 * tokens * heads * 32
    assert kept["delta rule decays"] == (2 + 4) * tokens * heads
    assert kept["delta net out input"] == 2 * tokens * values
    alike = net_job(key_heads=4)  # nothing is copied
    assert "delta net queries and keys" not in saved_tensors(alike.model, alike.resolve())


def test_tensor_parallel_ranks_share_heads() -> None:
    """Half of the parameters, but norms; half of the products; an all-reduce for each of two blocks, forward and backward."""
    (one, two) = (parts(job.model, job.resolve()).layer(0) for job in (net_job(), net_job(tp=2)))
    assert two.parameters == (one.parameters + 2 * 64 + 12) / 2
    assert rule_products(net_job(tp=2), "backward") == rule_products(net_job(), "backward") / 2
    for items in (two.forward, two.backward):
        every = [item.collective if isinstance(item, Start) else item for item in items]
        assert [each.bytes for each in every if isinstance(each, Collective)] == [2 * 256 * 64] * 2
    with pytest.raises(UserError, match="tp=4 does not divide 2 key heads of the delta-net layers of nets"):
        simulate(net_job(tp=4))


@pytest.mark.parametrize("plan", [{"kernels": "torch"}, {"cp": 2}, {"packing": {"lengths": [100]}}, {"deterministic": True}])
def test_refusals(plan: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="delta-net layers of nets are not simulated with"):
        simulate(net_job(plan=plan))


@pytest.mark.parametrize(
    "change", [{"mixer": "delta_net"}, {"attention_gate": True, "latent": {"kv_rank": 8, "nope_head_dim": 8}}]
)
def test_models_that_contradict_themselves_are_refused(change: dict[str, Any]) -> None:
    model = {"name": "m", "hidden": 64, "layers": 2, "heads": 8, "vocabulary": 512, "context": 4096} | change
    if "latent" in change:
        model["latent"] |= {"rope_head_dim": 8, "v_head_dim": 8}
        model["head_dim"] = 16
    with pytest.raises(UserError, match="mixer=delta_net needs delta_net|attention_gate=True is for ordinary attention"):
        read_job(None, model=model, cluster="dgx-h100", plan={"sequence": 512})


def test_a_gate_of_attention_costs_its_columns_and_two_tensors() -> None:
    """The query matrix is twice as wide; backward keeps the core's result and the gate."""
    model = {"name": "m", "hidden": 64, "layers": 2, "heads": 8, "vocabulary": 512, "context": 4096, "positions": "rotary"}
    plain, gated = (
        read_job(None, model=model | more, cluster="dgx-h100", plan={"sequence": 256, "global_batch": 8, "microbatch": 1})
        for more in ({}, {"attention_gate": True})
    )
    layers = [parts(job.model, job.resolve()).layer(0) for job in (plain, gated)]
    assert layers[1].parameters - layers[0].parameters == 64 * 64 + 64
    both = [saved_tensors(job.model, job.resolve()) for job in (plain, gated)]
    assert both[1] == both[0] | {"attention result": 2 * 256 * 64, "attention gate": 2 * 256 * 64}
    assert gated.model.forward_flops(1, 256, False) - plain.model.forward_flops(1, 256, False) == 2 * 2 * 256 * 64 * 64


def test_a_hybrid_is_simulated() -> None:
    """Qwen3-Next 80B trains on 64 H100 with 8 ep ranks at a plausible share of their peak."""
    model = model_of("qwen3-next-80b-a3b").model_dump(exclude_unset=True)
    plan = {"sequence": 4096, "global_batch": 256, "data_parallel": "zero1", "ep": 8, "tp": 2, "sequence_parallel": True, "pp": 2}
    plan |= {"microbatch": 1, "recompute": "full"}
    summary = summarise(simulate(read_job(None, {"cluster.nodes": 8}, model=model, cluster="dgx-h100", plan=plan)))
    assert 0.02 < summary.mfu < 0.5
