"""Mamba-2 and hybrids: parameters and FLOPs against transformers' own classes, the scan against the algorithm in PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard import Job, read_job, simulate, summarise
from sim.program import Kernel
from strategies.layers.model_costs import parts, saved_tensors
from strategies.models.importers import read_hugging_face
from strategies.models.model import Model, load_model
from strategies.models.state_space import StateSpace
from tests.strategies.models.test_families import built
from topologies.reading import UserError

MAMBA = {"mamba_d_state": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 256}
DECODER = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "max_position_embeddings": 8192}
SIZES: dict[str, dict[str, Any]] = {  # of published models; keys as their files have them
    "mamba2-130m": {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        **{"hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1},
        **{"expand": 2, "vocab_size": 50288, "conv_kernel": 4, "chunk_size": 256, "tie_word_embeddings": True},
    },
    "mamba-130m": {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        **{"hidden_size": 768, "num_hidden_layers": 24, "intermediate_size": 1536, "state_size": 16, "time_step_rank": 48},
        **{"expand": 2, "vocab_size": 50280, "conv_kernel": 4, "d_inner": 1536, "d_model": 768, "n_layer": 24, "ssm_cfg": {}},
    },
    "falcon-mamba-7b": {
        "model_type": "falcon_mamba",
        "architectures": ["FalconMambaForCausalLM"],
        **{"hidden_size": 4096, "num_hidden_layers": 64, "intermediate_size": 8192, "state_size": 16, "time_step_rank": 256},
        **{"expand": 16, "vocab_size": 65024, "tie_word_embeddings": False, "mixer_rms_eps": 1e-06},
    },
    "jamba-v0.1": {
        "model_type": "jamba",
        "architectures": ["JambaForCausalLM"],
        **DECODER,
        **{"num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 65536, "num_experts": 16, "num_experts_per_tok": 2},
        **{"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_inner_layernorms": True, "mamba_proj_bias": False},
    },
    "codestral-mamba-7b": {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        **{"hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "n_groups": 8, "vocab_size": 32768},
    },
    "bamba-9b": {
        "model_type": "bamba",
        "architectures": ["BambaForCausalLM"],
        **DECODER,
        **MAMBA,
        **{"num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256, "attn_layer_indices": [9, 18, 27]},
        "mamba_n_heads": 128,
    },
    "granite-4.0-h-small": {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **DECODER,
        **MAMBA,
        **{"num_hidden_layers": 40, "intermediate_size": 768, "shared_intermediate_size": 1536, "vocab_size": 100352},
        **{"num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128, "tie_word_embeddings": True},
        **{"position_embedding_type": "nope", "embedding_multiplier": 12, "logits_scaling": 16},
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    },
    "granite-4.0-h-micro": {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **DECODER,
        **MAMBA,
        **{"hidden_size": 2048, "num_hidden_layers": 40, "intermediate_size": 8192, "shared_intermediate_size": 8192},
        **{"vocab_size": 100352, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 64},
        **{"tie_word_embeddings": True, "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)]},
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        **DECODER,
        **{"head_dim": 128, "intermediate_size": 21504, "vocab_size": 131072, "num_hidden_layers": 52},
        **{"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    },
    "nemotron-3-nano-30b": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        **{"hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131072},
        **{"intermediate_size": 1856, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8},
        **{"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1},
        **{"moe_shared_expert_intermediate_size": 3712, "max_position_embeddings": 262144, "num_hidden_layers": 52},
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    },
    "falcon-h1-1.5b": {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        **{"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
        **{"intermediate_size": 4096, "vocab_size": 65537, "max_position_embeddings": 131072, "mamba_d_ssm": 3072},
        **{"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_n_groups": 1, "tie_word_embeddings": False},
    },
    "zamba2-2.7b": {
        "model_type": "zamba2",
        "architectures": ["Zamba2ForCausalLM"],
        **{"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32, "num_key_value_heads": 32},
        **{"attention_hidden_size": 5120, "attention_head_dim": 160, "kv_channels": 80, "vocab_size": 32000},
        **{"mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_headdim": 64, "mamba_ngroups": 1},
        **{"n_mamba_heads": 80, "num_mem_blocks": 2, "use_shared_mlp_adapter": True, "use_shared_attention_adapter": False},
        **{"adapter_rank": 128, "num_hidden_layers": 54, "hybrid_layer_ids": [6, 12, 18, 24, 30, 36, 42, 47, 51]},
    },
    "zamba2-1.2b": {
        "model_type": "zamba2",
        "architectures": ["Zamba2ForCausalLM"],
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 38},
        **{"mamba_d_state": 128, "n_mamba_heads": 64, "num_mem_blocks": 1, "use_shared_attention_adapter": True},
        **{"adapter_rank": 128, "use_mem_rope": True, "vocab_size": 32000},
        "layers_block_type": ["hybrid" if layer in (5, 11, 17, 23, 29, 35) else "mamba" for layer in range(38)],
    },
}


def model_of(data: dict[str, Any], tmp_path: Path) -> Model:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    return load_model(str(path))[0]


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_of_the_class(name, tmp_path) -> None:
    assert model_of(SIZES[name], tmp_path).parameters == sum(each.numel() for each in built(SIZES[name]).parameters())


@pytest.mark.parametrize("change", ["mamba_conv_bias", "mamba_proj_bias", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("name", ["bamba-9b", "falcon-h1-1.5b"])
def test_biases_are_those_of_the_class(name, change, tmp_path) -> None:
    data = SIZES[name] | {change: change != "mamba_conv_bias"}
    data |= {"mamba_rms_norm": True, "projectors_bias": True} if name.startswith("falcon") else {}
    assert model_of(data, tmp_path).parameters == sum(each.numel() for each in built(data).parameters())


TINY: dict[str, dict[str, Any]] = {
    "mamba-130m": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "time_step_rank": 4},
    "falcon-mamba-7b": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 1024, "time_step_rank": "auto"},
    "jamba-v0.1": {"mamba_dt_rank": "auto", "attn_layer_period": 2, "attn_layer_offset": 0, "num_experts": 1},
    "mamba2-130m": {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16},
    "bamba-9b": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "granite-4.0-h-micro": {"mamba_n_heads": 8, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    "nemotron-h-8b": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "hybrid_override_pattern": "M*-"},
    "falcon-h1-1.5b": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "zamba2-1.2b": {
        **{"n_mamba_heads": 8, "num_hidden_layers": 4, "num_mem_blocks": 2, "adapter_rank": 8},
        "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"],
    },
}


@pytest.mark.parametrize("name", TINY)
def test_flops_of_matrices_are_those_of_the_class(name, tmp_path) -> None:
    """Products with weights, by PyTorch's counter. Of the scan transformers multiplies and adds element by element."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    common |= {"intermediate_size": 96, "shared_intermediate_size": 96, "vocab_size": 128}
    data = {key: value for key, value in (common | TINY[name]).items() if key in SIZES[name] or key in TINY[name]}
    data = SIZES[name] | data
    model, batch, tokens = model_of(data, tmp_path), 2, 32
    module = built(data).to_empty(device="cpu")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(input_ids=torch.zeros(batch, tokens, dtype=torch.long), use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    own = model.state_space
    assert own is not None
    scans = sum(layer.recurrence is not None for layer in model.layer_models) * own.scan_flops(batch * tokens)
    attends = sum(layer.has_attention for layer in model.layer_models)
    attends += sum(layer.shared_block is not None for layer in model.layer_models)
    scores = 4.0 * attends * batch * model.heads * tokens**2 * model.head_dim
    matrices = sum(flops for op, flops in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    assert matrices == model.forward_flops(batch, tokens, causal=False) - scans - scores


@pytest.mark.parametrize("name", SIZES)
def test_layer_work_has_the_parameters_and_flops_of_the_model(name, tmp_path) -> None:
    model = model_of(SIZES[name], tmp_path)
    job = read_job(
        None,
        {"plan.auto": False, "plan.sequence": 2048, "plan.global_batch": 8},
        model=str(tmp_path / "config.json"),
        cluster="dgx-h100",
    )
    work = parts(model, job.resolve())
    every = [work.embedding, work.head, *map(work.layer, range(model.layers))]
    assert sum(part.parameters for part in every) == model.parameters
    assert sum(part.model_flops for part in every) == pytest.approx(3 * model.forward_flops(1, 2048, False), rel=1e-12)


def mixer_job(tp: int = 1, sequence: int = 512, **own: Any) -> Job:
    """A model of mixers alone."""
    sizes = {"heads": 8, "head_dim": 16, "state": 32, "groups": 2, "chunk": 64} | own
    model = {"name": "mixers", "hidden": 64, "layers": 2, "heads": 8, "head_dim": 8, "vocabulary": 512, "context": 4096}
    model |= {"mixer": "state_space", "feed_forward": False, "state_space": sizes, "norm": "rmsnorm", "positions": "none"}
    return read_job(
        None, model=model, cluster="dgx-h100", plan={"tp": tp, "sequence": sequence, "global_batch": 8, "microbatch": 1}
    )


def scan_products(job: Job, phase: str) -> float:
    """FLOPs of the scan's products in one direction of a layer."""
    layer = parts(job.model, job.resolve()).layer(0)
    items = layer.forward if phase == "forward" else layer.backward
    return sum(item.flops for item in items if isinstance(item, Kernel) and item.kind == "gemm" and item.label.startswith("scan"))


def test_products_of_a_scan_are_those_of_the_algorithm() -> None:
    """Section 6 of the paper written with PyTorch's products: the same FLOPs forward; backward twice as many, and those of states
    and scores once more. And it is the recurrence.
    """
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    job = mixer_job()
    own = job.model.state_space
    assert isinstance(own, StateSpace)
    heads, dim, state, groups, size, tokens = own.heads, own.head_dim, own.state, own.groups, own.chunk, 512
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, heads, dim, generator=generator, dtype=torch.float64)
    decay = -torch.rand(tokens, heads, generator=generator, dtype=torch.float64)
    b, c = (torch.randn(tokens, groups, state, generator=generator, dtype=torch.float64) for _ in range(2))

    def chunked(x, b, c):
        blocks = tokens // size
        each = heads // groups
        xs, ds = x.view(blocks, size, heads, dim).transpose(1, 2), decay.view(blocks, size, heads).transpose(1, 2)
        bs, cs = (t.view(blocks, size, groups, state).transpose(1, 2) for t in (b, c))
        total = ds.cumsum(-1)
        scores = (cs @ bs.transpose(2, 3)).repeat_interleave(each, 1)
        mask = torch.tril(torch.ones(size, size, dtype=torch.float64))
        within = scores * torch.exp((total[..., :, None] - total[..., None, :]) * mask) * mask
        bh, ch = (t.repeat_interleave(each, 1) for t in (bs, cs))
        ends = (xs * torch.exp(total[..., -1:] - total)[..., None]).transpose(2, 3) @ bh
        before, states = torch.zeros_like(ends[0]), []
        for block in range(blocks):
            states.append(before)
            before = before * torch.exp(total[block, :, -1])[:, None, None] + ends[block]
        across = (ch * torch.exp(total)[..., None]) @ torch.stack(states).transpose(2, 3)
        return (within @ xs + across).transpose(1, 2).reshape(tokens, heads, dim)

    with FlopCounterMode(display=False) as counter:
        result = chunked(x, b, c)
    assert scan_products(job, "forward") == counter.get_total_flops()
    hidden, expected = torch.zeros(heads, dim, state, dtype=torch.float64), []
    for token in range(tokens):
        into, out = (t[token].repeat_interleave(heads // groups, 0) for t in (b, c))
        hidden = hidden * torch.exp(decay[token])[:, None, None] + x[token][:, :, None] * into[:, None, :]
        expected.append((hidden * out[:, None, :]).sum(-1))
    assert torch.allclose(result, torch.stack(expected))
    leaves = [t.requires_grad_() for t in (x, b, c)]
    with FlopCounterMode(display=False) as both:
        chunked(*leaves).sum().backward()
    again = 2 * tokens * (heads * dim * state + groups * size * state)
    assert scan_products(job, "backward") == both.get_total_flops() - counter.get_total_flops() + again


def test_tensor_parallel_ranks_share_heads_and_groups() -> None:
    """Half of the parameters, but norms; the volume of a layer with one block: an all-reduce forward and one backward."""
    (one, two) = (parts(job.model, job.resolve()).layer(0) for job in (mixer_job(), mixer_job(tp=2)))
    assert two.parameters == (one.parameters + 64) / 2
    assert sum(item.flops for item in two.forward if isinstance(item, Kernel)) == pytest.approx(
        sum(item.flops for item in one.forward if isinstance(item, Kernel)) / 2
    )
    with pytest.raises(UserError, match="tp=4 does not divide 2 groups"):
        simulate(mixer_job(tp=4))


def test_a_step_grows_by_tokens_not_by_their_square() -> None:
    """Attention's share is not there: a sequence of four times the tokens has four times the work."""
    short, long = (
        sum(scan_products(mixer_job(sequence=tokens), way) for way in ("forward", "backward")) for tokens in (512, 2048)
    )
    assert long == 4 * short


def selective_job(**own: Any) -> Job:
    """Mixers of Mamba: 32 channels of 8 states, steps of rank 4."""
    sizes = {"head_dim": 1, "groups": 1, "heads": 32, "state": 8, "norm": False, "step_rank": 4} | own
    return mixer_job(sequence=512, **sizes)


@pytest.mark.parametrize("norms", [False, True])
def test_a_selective_scan_moves_and_keeps_what_it_reads_and_writes(norms: bool) -> None:
    """Per token in 16 bits: channels, steps, gate, result and gated result, B and C; backward these (with the gradient in place
    of the gated result), gradients of three, those of B and C in fp32, and again the gated result that was not kept.
    """
    job = selective_job(step_norms=norms)
    layer, tokens, channels, state = parts(job.model, job.resolve()).layer(0), 512, 32, 8
    there, back = (
        next(item.bytes for item in items if isinstance(item, Kernel) and item.label == "selective scan")
        for items in (layer.forward, layer.backward)
    )
    assert there == 2 * tokens * (5 * channels + 2 * state)
    again = 0 if norms else channels
    assert back == 2 * tokens * (5 * channels + 2 * state + 3 * channels + again) + 4 * tokens * 2 * state
    inner = {"layer input": 64, "state space in input": 64, "scan input": 64, "scan B and C": 16, "scan result": 32}
    inner |= {"state space steps input": 4}
    if (
        norms
    ):  # as operators of their own: convolved channels, B, C and steps' input before the norms, steps, what is multiplied out
        inner |= {"state space choice input": 32, "scan norms input": 20, "scan steps": 32, "state space out input": 32}
    assert saved_tensors(job.model, job.resolve()) == {name: 2.0 * tokens * features for name, features in inner.items()}


def test_a_selective_scan_computes_again_what_it_does_not_keep() -> None:
    """The steps' product, 2 · tokens · rank · channels, and the convolution."""
    products = [scan_flops(selective_job(step_norms=norms)) for norms in ("unweighted", True)]
    assert products[0] - products[1] == 2 * 512 * 4 * 32


def scan_flops(job: Job) -> float:
    """FLOPs of a layer's products backward."""
    return sum(
        item.flops for item in parts(job.model, job.resolve()).layer(0).backward if isinstance(item, Kernel) and item.shape
    )


@pytest.mark.parametrize(("plan", "message"), [({"tp": 2}, "not simulated with tp=2"), ({"fp8": {}}, "not simulated with fp8")])
def test_what_mambas_mixer_is_not_simulated_with(plan: dict[str, Any], message: str) -> None:
    model = selective_job().model.model_dump(exclude_unset=True)
    with pytest.raises(UserError, match=message):
        simulate(read_job(None, model=model, cluster="dgx-h100", plan={"auto": False, "sequence": 512, "global_batch": 8} | plan))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"head_dim": 2}, r"step_rank=4 \(Mamba's mixer\) needs head_dim=1, groups=1 and norm=false"),
        ({"step_rank": None, "step_norms": True}, "step_norms=True needs step_rank"),
    ],
)
def test_sizes_of_mambas_mixer(own: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        selective_job(**own)


@pytest.mark.parametrize("plan", [{"kernels": "torch"}, {"cp": 2}, {"lora": {"rank": 4, "targets": ["q_proj"]}}])
def test_refusals(plan) -> None:
    job = mixer_job()
    with pytest.raises(UserError, match="state-space layers of mixers are not simulated with|has no|targets"):
        simulate(
            read_job(
                None,
                {f"plan.{key}": value for key, value in plan.items()},
                model=job.model.model_dump(exclude_unset=True),
                cluster="dgx-h100",
                plan={"sequence": 512, "global_batch": 8},
            )
        )


def test_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UserError, match=r"num_heads·head_dim = 128·64 must be expand·hidden_size = 2·4000"):
        read_hugging_face({"model_type": "mamba2", "hidden_size": 4000}, "config.json")
    with pytest.raises(UserError, match=r"head_dim=None must be a positive whole number"):
        read_hugging_face({"model_type": "mamba2", "head_dim": None}, "config.json")
    sizes = {"hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32, "intermediate_size": 8192, "vocab_size": 100}
    bamba = sizes | {"model_type": "bamba", "max_position_embeddings": 100}
    nothing = dict.fromkeys(("mamba_expand", "mamba_n_heads"))  # null is as good as nothing
    assert read_hugging_face(bamba | nothing, "config.json") == read_hugging_face(bamba, "config.json")
    with pytest.raises(UserError, match=r"mamba_n_heads·mamba_d_head = 128·32 must be the 8192 channels of the mixer"):
        read_hugging_face(bamba | {"mamba_d_head": 32}, "config.json")
    with pytest.raises(UserError, match=r"hybrid_override_pattern='MX' must have a letter of"):
        read_hugging_face({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "config.json")


def test_layers_that_share_a_block_have_its_parameters_once(tmp_path) -> None:
    """Zamba2 2.7B by hand: two blocks over 5,120 features, nine adapters of rank 128 and matrices, 54 mixers, the embedding."""
    h, ffn, channels, convolved = 2560, 10240, 5120, 5120 + 2 * 64
    block = 3 * (2 * h) ** 2 + 2 * h * h + 3 * h * ffn + 2 * h + h
    beside = h * h + 128 * (h + 2 * ffn)
    mixer = h * (channels + convolved + 80) + channels * h + 5 * convolved + 3 * 80 + channels + h
    model = model_of(SIZES["zamba2-2.7b"], tmp_path)
    assert model.parameters == 2 * block + 9 * beside + 54 * mixer + 32000 * h + h
    assert model.layer_parameters(18) == beside + mixer == model.layer_parameters(6) - block
    flops = [parts(model, zamba_job(tmp_path).resolve()).layer(layer).model_flops for layer in (6, 18)]
    assert flops[0] == flops[1]  # every layer runs all of its block


def zamba_job(tmp_path: Path, **plan: Any) -> Job:
    """Zamba2 on eight GPUs, of the file in tmp_path."""
    plan = {"sequence": 2048, "global_batch": 8, "microbatch": 1, "data_parallel": "zero1"} | plan
    return read_job(None, model=str(tmp_path / "config.json"), cluster="dgx-h100", plan=plan)


def test_gradients_of_a_shared_block_are_reduced_once(tmp_path) -> None:
    """DDP by rings sends 2 · 7/8 of each parameter's gradient: a shared one's when the first layer that has it has gone back."""
    model = model_of(SIZES["zamba2-2.7b"], tmp_path)
    summary = summarise(simulate(zamba_job(tmp_path, data_parallel="ddp", algorithm="ring")))
    assert summary.volume["dp"].elements == pytest.approx(2 * 7 / 8 * model.parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("plan", "said"),
    [({"tp": 2}, "tp=2"), ({"pp": 2}, "pp=2"), ({"data_parallel": "zero3"}, "data_parallel=zero3"), ({"cp": 2}, "cp=2")],
)
def test_what_shared_blocks_are_not_simulated_with(plan, said, tmp_path) -> None:
    model_of(SIZES["zamba2-2.7b"] | {"mamba_ngroups": 2}, tmp_path)
    with pytest.raises(UserError, match=f"are not simulated with {said}"):
        simulate(zamba_job(tmp_path, **plan))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_layer_ids": [5]}, r"hybrid_layer_ids=\[5\] must be the hybrid layers of layers_block_type"),
        ({"num_mem_blocks": 10}, "num_mem_blocks=10 must be at most the 9 hybrid layers"),
        ({"n_mamba_heads": 77}, "n_mamba_heads=77 must divide mamba_expand·hidden_size = 5120"),
        ({"layers_block_type": ["mamba"]}, "must be a list of num_hidden_layers=54 entries"),
        ({"use_shared_attention_adapter": True, "num_key_value_heads": 8}, "needs num_key_value_heads=32"),
    ],
)
def test_zamba2_sizes_that_contradict_each_other_are_refused(changes, message, tmp_path) -> None:
    with pytest.raises(UserError, match=message):
        model_of(SIZES["zamba2-2.7b"] | changes, tmp_path)


def test_a_hybrid_is_simulated(tmp_path) -> None:
    """Nemotron-H 8B trains on 8 H100 at a plausible share of their peak."""
    model_of(SIZES["nemotron-h-8b"], tmp_path)
    plan = {"sequence": 8192, "global_batch": 32, "data_parallel": "zero1", "tp": 2, "sequence_parallel": True}
    summary = summarise(simulate(read_job(None, model=str(tmp_path / "config.json"), cluster="dgx-h100", plan=plan)))
    assert 0.25 < summary.mfu < 0.6
