"""Adapters: published numbers of parameters, what is sharded, sent and held of them, and what contradicts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard import Job, Summary, read_job, simulate, summarise
from strategies.layers.fine_tuning.parts import trained_parameters
from strategies.layers.model_costs import parts
from strategies.models.model import load_model
from strategies.plan.fine_tuning import Lora
from strategies.plan.plan import Plan
from strategies.planner.advise import advise
from strategies.predict import predict
from strategies.resilience.checkpoint_size import checkpoint_size
from tests.strategies.layers.fine_tuning.small_decoder import SIZES
from topologies.reading import UserError

QV: dict[str, Any] = {"rank": 8, "targets": ["q_proj", "v_proj"]}
ATTENTION: dict[str, Any] = {"rank": 16, "targets": "attention"}


def job(model: str = "llama-2-7b", nodes: int = 1, **plan: Any) -> Job:
    return read_job(
        None, model=model, cluster="dgx-h100", nodes=nodes, plan={"auto": False, "sequence": 1024, "global_batch": 64} | plan
    )


def played(model: str = "llama-2-7b", nodes: int = 1, **plan: Any) -> Summary:
    return summarise(simulate(job(model, nodes, **plan)))


@pytest.mark.parametrize(
    ("model", "kernels", "lora", "trained"),
    [
        ("llama-2-7b", "torch", QV, 4_194_304),  # llama-recipes' log of PEFT: 4,194,304 || all params: 6,742,609,920
        ("llama-2-7b", "torch", {"rank": 64, "targets": "all-linear"}, 159_907_840),  # QLoRA's 7B models
        ("llama-2-70b", "megatron", ATTENTION, 44_564_480),  # 80 · 16 · (8192 + 10240 + 2 · 8192)
        ("llama-2-70b", "torch", ATTENTION, 80 * 16 * (2 * 8192 + 2 * (8192 + 1024) + 2 * 8192)),
        ("llama-2-7b", "megatron", {"rank": 8, "targets": ["gate_proj", "up_proj"]}, 32 * 8 * 2 * (4096 + 11008)),
        ("gpt3-175b", "megatron", {"rank": 4, "targets": "linear_qkv"}, 96 * 4 * (12288 + 3 * 12288)),
    ],
    ids=str,
)
def test_adapters_have_the_published_number_of_parameters(model: str, kernels: str, lora: dict[str, Any], trained: int) -> None:
    described, plan = load_model(model)[0], Plan(kernels=kernels, lora=lora)
    assert trained_parameters(described, plan) == trained
    asked = job(model, kernels=kernels, lora=lora, sequence=1024)
    costs = parts(asked.model, asked.resolve())
    every = [costs.embedding, *map(costs.layer, range(described.layers)), costs.head]
    assert sum(part.parameters for part in every) == trained
    assert sum(part.frozen for part in every) == described.parameters


def test_all_parameters_of_llama_recipes() -> None:
    assert load_model("llama-2-7b")[0].parameters + 4_194_304 == 6_742_609_920


@pytest.mark.parametrize("tp", [2, 4])
def test_tp_ranks_share_adapters(tp: int) -> None:
    whole, cut = (parts(each.model, each.resolve()) for each in (job(lora=ATTENTION), job(lora=ATTENTION, tp=tp)))
    assert cut.layer(1).parameters * tp == whole.layer(1).parameters
    assert cut.layer(1).model_flops == whole.layer(1).model_flops


def test_only_adapters_have_gradients_and_states() -> None:
    summary = played(lora=QV)
    assert summary.worst.kinds["gradient"] == 2 * 4_194_304
    assert summary.worst.kinds["optimizer"] == 12 * 4_194_304
    assert summary.worst.kinds["parameter"] == 2 * 6_742_609_920
    assert summary.volume["dp"].bytes == 2 * 4_194_304 * (1 + 1 / 8)  # in the switch: all once, and a rank's eighth of the sum


def test_zero3_gathers_frozen_weights_and_reduces_none() -> None:
    """Per microbatch: all weights forward, all but the embedding backward, adapters' gradients."""
    model, trained = load_model("llama-2-7b")[0], 4_194_304
    summary = played(lora=QV, data_parallel="zero3")
    forward, backward = model.parameters + trained, model.parameters + trained - model.embedding_parameters
    each = 2 * (forward + backward + trained)
    assert summary.volume["dp"].bytes == pytest.approx(8 * each * 7 / 8)
    assert summary.worst.kinds["parameter"] == 2 * (model.parameters + trained) / 8


def test_qlora_holds_half_a_byte_and_pays_for_dequantisation() -> None:
    """Blocks of 64 numbers have a scale: of 32 bits, or of 8 bits of which 256 share one of 32 (arXiv:2305.14314): 0.127 bits a
    parameter in place of 0.5.
    """
    double, single = (Lora(rank=8, targets=("qkv",), weights="nf4", double_quantization=each) for each in (True, False))
    assert double.bytes_per_weight == pytest.approx(0.5 + 0.127 / 8, rel=1e-3)
    assert single.bytes_per_weight == pytest.approx(0.5 + 0.5 / 8)
    plain, quantised = (played(kernels="torch", lora=QV | {"weights": weights}) for weights in ("same", "nf4"))
    model = load_model("llama-2-7b")[0]
    layers = sum(matrix.parameters for matrix in model.matrices(0)) * model.layers
    saved = plain.worst.kinds["parameter"] - quantised.worst.kinds["parameter"]
    assert saved == pytest.approx(layers * (2 - 0.515869140625))
    bytes_moved = 2 * layers * (2 + 0.515869140625)  # forward and backward, but the first layer's queries and keys …
    seconds = quantised.step_seconds - plain.step_seconds
    assert seconds == pytest.approx(8 * bytes_moved / 3.35e12, rel=0.25)  # at some 90 % of the memory's bandwidth


def test_frozen_weights_in_fp8_alone() -> None:
    fp8 = {"fp8": {"scaling": "delayed"}, "tp": 4, "sequence_parallel": True}
    held = {
        key: played("llama-2-70b", lora=ATTENTION | lora, **fp8).worst.kinds["parameter"]
        for key, lora in {
            "same": {},
            "kept": {"weights": "fp8"},
            "made": {"weights": "fp8", "fp8_transposes": "made"},
        }.items()
    }
    model = load_model("llama-2-70b")[0]
    matrices = sum(matrix.parameters for matrix in model.matrices(0)) * model.layers / 4
    assert held["same"] - held["kept"] == pytest.approx(2 * matrices)  # 16 bits and two copies, or two copies
    assert held["kept"] - held["made"] == pytest.approx(matrices)


def test_a_checkpoint_has_the_adapters_alone_and_a_restart_reads_all() -> None:
    size = checkpoint_size(job(lora=QV))
    assert size.total == 4_194_304 * 14
    assert size.read.sum() == pytest.approx(8 * (4_194_304 * 14 + 2 * 6_738_415_616))
    frozen = checkpoint_size(job(freeze={"layers": 8}))
    model = load_model("llama-2-7b")[0]
    still = model.embedding_parameters + 8 * model.layer_parameters(0)
    assert frozen.total == pytest.approx(14 * (model.parameters - still) + 2 * still)


@pytest.mark.parametrize(
    "plan",
    [
        {"lora": ATTENTION},
        {"lora": ATTENTION, "data_parallel": "zero3"},
        {"lora": ATTENTION, "data_parallel": "zero3", "deepspeed": {}},
        {"lora": ATTENTION, "tp": 2, "sequence_parallel": True, "pp": 2, "data_parallel": "zero1"},
        {"lora": ATTENTION | {"all_to_all": True}, "tp": 4, "sequence_parallel": True, "overlap_tp": "pieces"},
        {"lora": ATTENTION, "pp": 4, "schedule": "zb-h1"},
        {"lora": ATTENTION, "recompute": "full", "cp": 2},
        {"lora": QV | {"weights": "nf4"}, "kernels": "compiled", "data_parallel": "zero3"},
        {"freeze": {"layers": 3}, "pp": 2, "schedule": "interleaved", "chunks": 2},
        {"freeze": {"layers": 4, "embedding": False}, "data_parallel": "zero2"},
        {"freeze": {"layers": 2}, "recompute": "full", "data_parallel": "zero3", "kernels": "torch"},
    ],
    ids=str,
)
def test_folding_changes_nothing_and_less_is_trained_in_less_time(plan: dict[str, Any]) -> None:
    size = {"global_batch": 32, "sequence": 4096}  # where no launch of a small kernel is waited for
    asked = job(**size, **plan)
    folded, unfolded = (summarise(simulate(asked, fold=fold)) for fold in (True, False))
    assert folded.ideal_seconds == unfolded.ideal_seconds
    whole = summarise(simulate(job(**size, **{field: value for field, value in plan.items() if field not in ("lora", "freeze")})))
    if plan.get("lora", {}).get("weights") != "nf4":
        assert folded.step_seconds < whole.step_seconds
    assert sum(stage.peak for stage in folded.memory) < sum(stage.peak for stage in whole.memory)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"lora": {"rank": 6, "targets": "attention"}, "tp": 4}, "lora.rank=6 must be a multiple of tp=4"),
        (
            {"lora": {"rank": 8, "targets": ["q_prj"]}},
            "'q_prj' is no matrix of a layer that may have an adapter; did you mean 'q_proj'?",
        ),
        ({"lora": QV, "tp": 2, "kernels": "torch"}, "adapters are cut over tp ranks with kernels=megatron only"),
        ({"lora": QV | {"weights": "nf4"}, "tp": 2}, "lora.weights=nf4 with tp=2"),
        ({"lora": QV | {"weights": "fp8"}}, "lora.weights=fp8 needs fp8 by Transformer Engine"),
        ({"lora": QV | {"double_quantization": False}}, "lora.double_quantization=false needs lora.weights=nf4"),
        ({"lora": QV | {"all_to_all": True}}, "lora.all_to_all=true needs tp above 1"),
        ({"lora": QV, "data_parallel": "dataparallel"}, "lora is not simulated with data_parallel=dataparallel"),
        ({"lora": QV, "freeze": {"layers": 32}}, "lora: nothing of the model is left to train"),
        ({"freeze": {"layers": 20}, "pp": 2}, "the first pipeline stage (embedding and 16 layers) has nothing to train"),
        ({"freeze": {"layers": 33}}, "freeze.layers=33 exceeds the 32 layers of llama-2-7b"),
        ({"lora": QV, "recompute": "operators", "kernels": "torch"}, "lora is not simulated with recompute=operators"),
    ],
    ids=str,
)
def test_what_contradicts_is_one_line(plan: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        job(**plan).resolve()
    assert said in str(error.value)


@pytest.mark.parametrize(("more", "what"), [({"tp": 2}, "tp=2"), ({"lora": {"dora": True}}, "lora.dora=true")])
def test_adapters_of_experts_are_whole_and_plain(more: dict[str, Any], what: str) -> None:
    lora = {"rank": 16, "targets": "mlp"} | more.get("lora", {})
    with pytest.raises(UserError, match=f"adapters of experts, which mixtral-8x7b has, are not simulated with {what}: take"):
        job("mixtral-8x7b", nodes=2, **more | {"lora": lora, "kernels": "megatron"}).resolve()


def test_layers_have_something_to_adapt() -> None:
    without = SIZES | {"mixer": "none"}
    asked = read_job(None, model=without, cluster="dgx-h100", plan={"auto": False, "lora": QV})
    with pytest.raises(UserError, match="lora.targets: layers of small decoder have none of these matrices: take all-linear"):
        asked.resolve()


def test_adapters_of_experts_are_spread_as_experts_are() -> None:
    """Mixtral with rank 16: 32 layers of 8 experts, each with gate and up (one matrix) and down; dp ranks with the same experts
    reduce them.
    """
    lora = {"rank": 16, "targets": "mlp"}
    each = 16 * (4096 + 2 * 14336) + 16 * (14336 + 4096)
    assert trained_parameters(load_model("mixtral-8x7b")[0], Plan(lora=lora)) == 32 * 8 * each
    whole, spread = (played("mixtral-8x7b", nodes=2, lora=lora, algorithm="ring", ep=ep) for ep in (1, 8))
    assert whole.worst.kinds["gradient"] == 2 * 32 * 8 * each
    assert spread.worst.kinds["gradient"] == 2 * 32 * each
    assert whole.volume["dp"].bytes == pytest.approx(2 * 32 * 8 * each * 2 * 15 / 16)
    assert sum(spread.volume[axis].bytes for axis in spread.volume if axis != "ep") == pytest.approx(2 * 32 * each * 2 * 1 / 2)
    assert played("mixtral-8x7b", lora=ATTENTION, ep=8).worst.kinds["optimizer"] == 12 * 32 * 16 * (4096 + 6144 + 2 * 4096)


def test_pefts_own_file_is_read(tmp_path: Path) -> None:
    """As PEFT 0.17 writes it, shortened."""
    file, said = (
        tmp_path / "adapter_config.json",
        {
            "base_model_name_or_path": "meta-llama/Llama-2-7b-hf",
            "bias": "none",
            "layers_to_transform": None,
            "lora_alpha": 32,
            "lora_dropout": 0.1,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": 8,
            "rank_pattern": {},
            "target_modules": ["v_proj", "q_proj"],
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": False,
        },
    )
    file.write_text(json.dumps(said))
    asked = job(kernels="torch", lora=str(file))
    assert asked.plan.lora == Lora(rank=8, alpha=32, dropout=0.1, targets=("q_proj", "v_proj"))
    assert trained_parameters(asked.model, asked.plan) == 4_194_304
    file.write_text(json.dumps(said | {"use_dora": True}))
    scaled = job(kernels="torch", lora=str(file))
    assert scaled.plan.lora == Lora(rank=8, alpha=32, dropout=0.1, targets=("q_proj", "v_proj"), dora=True)
    assert trained_parameters(scaled.model, scaled.plan) == 4_194_304 + 32 * 2 * 4096
    for key, value in (
        ("peft_type", "IA3"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 4}),
    ):
        file.write_text(json.dumps(said | {key: value}))
        with pytest.raises(UserError, match=f"adapter_config.json: {key}=.* is not simulated"):
            job(lora=str(file))


@pytest.mark.parametrize(("dora", "percent"), [(False, 0.83), (True, 0.84)])
def test_parameters_of_dora_are_the_paper_s(dora: bool, percent: float) -> None:
    """Table 1 of arXiv:2402.09353: LLaMA 7B, rank 32, five matrices of each layer."""
    targets = ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"]
    asked = job(kernels="torch", lora={"rank": 32, "targets": targets, "dora": dora})
    trained = trained_parameters(asked.model, asked.plan)
    assert round(100 * trained / (asked.model.parameters + trained), 2) == percent  # as PEFT prints it
    work = parts(asked.model, asked.resolve())
    assert sum(work.layer(layer).parameters for layer in range(asked.model.layers)) == trained


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"kernels": "megatron", "tp": 2}, "tp=2"),
        ({"kernels": "compiled"}, "kernels=compiled"),
        ({"kernels": "torch", "lora.weights": "nf4"}, "lora.weights=nf4"),
        ({"kernels": "megatron", "fp8": {}}, "fp8"),
        ({"kernels": "megatron", "cp": 2}, "cp=2"),
    ],
)
def test_what_dora_is_not_simulated_with(more: dict[str, Any], what: str) -> None:
    lora = {"rank": 8, "targets": ["q_proj"], "dora": True} | {key[5:]: more[key] for key in more if key.startswith("lora.")}
    with pytest.raises(UserError, match=f"lora.dora=true is not simulated with {what}"):
        simulate(job(lora=lora, **{key: value for key, value in more.items() if not key.startswith("lora.")}))


def test_advice_asks_what_one_gpu_would_hold() -> None:
    """141 GB of frozen weights with adapters, not sixteen bytes for each of 70 billion parameters."""
    questions = dict(advise(job("llama-3.1-70b", lora=ATTENTION), predict).questions)
    said, gigabytes = questions["fits one GPU"].split()[:2]
    assert said == "no:"
    assert 141 < float(gigabytes) < 170


def test_sharded_parameters_on_cpus_are_not_simulated_with_adapters() -> None:
    here = {"lora": QV, "data_parallel": "zero3", "kernels": "megatron"}
    with pytest.raises(UserError, match=r"is not simulated with offload\.parameters"):
        job(**here, offload={"optimizer": "cpu", "parameters": "cpu"}).resolve()
    assert job(**here, offload={"optimizer": "cpu"}).resolve().offload.optimizer == "cpu"


@pytest.mark.parametrize("fields", [{"lora": QV}, {"freeze": {"layers": 1}}], ids=["adapters", "frozen"])
def test_a_layer_of_which_gradients_are_spared_runs_forward_whole(fields: dict[str, Any]) -> None:
    """Only adapters add FLOPs: of rank r on a matrix of m × n, r·(m + n)/(m·n) of its own."""
    ours, trained = (parts(asked.model, asked.resolve()).layer(0) for asked in (job(**fields), job()))
    assert ours.model_flops < trained.model_flops
    assert trained.forward_flops <= ours.forward_flops < 1.002 * trained.forward_flops
