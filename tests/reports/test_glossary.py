"""A word is explained by what it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reports import catalogues
from reports.glossary import explain, terms
from strategies.frameworks.deepspeed.options import DeepSpeed
from strategies.plan.options import Fp8, Offload, PowerSGD
from strategies.plan.plan import Plan
from strategies.resilience.loop_settings import InputSettings, Reduction
from strategies.resilience.settings import CheckpointSettings, RepairSettings, RunSettings
from topologies.reading import UserError

GROUPS = {"powersgd": PowerSGD, "offload": Offload, "deepspeed": DeepSpeed, "fp8": Fp8}


@pytest.mark.parametrize(
    "field", [*Plan.model_fields, *(f"{group}.{name}" for group, kind in GROUPS.items() for name in kind.model_fields)]
)
def test_a_field_of_a_plan_is_explained_as_itself(field: str) -> None:
    """plan.optimizer is not plan.offload.optimizer."""
    assert explain(f"plan.{field}").splitlines()[0] == f"plan.{field}"


def test_a_field_of_a_group_is_known_by_its_own_name() -> None:
    assert explain("stage3_prefetch_bucket_size").startswith("plan.deepspeed.stage3_prefetch_bucket_size\n")


def test_an_effect_is_explained_with_its_source() -> None:
    assert "lognormal" in explain("jitter")
    assert "arXiv:2208.11035" in explain("speed")


@pytest.mark.parametrize(
    "field",
    [
        *(name for name in RunSettings.model_fields),
        *(f"checkpoint.{name}" for name in CheckpointSettings.model_fields),
        *(f"repair.{name}" for name in RepairSettings.model_fields),
        *(f"input.{name}" for name in InputSettings.model_fields),
        *(f"loss.{name}" for name in Reduction.model_fields),
    ],
)
def test_a_field_of_a_run_is_explained_with_its_default(field: str) -> None:
    first, meaning, default = explain(f"run.{field}").splitlines()
    assert first == f"run.{field}"
    assert len(meaning) > 15
    assert default.startswith("  default   ")


def test_defaults_of_a_run_have_units() -> None:
    assert explain("heartbeat").endswith("default   30.0 s")
    assert explain("run.repair.automatic").endswith("default   exponential 24.0 h")


COURSE = """
node; process; rank; local rank; world size; group; root; master; NCCL; gloo; MPI; backend; all-reduce; allreduce;
all_gather; reduce-scatter; broadcast; reduce; gather; scatter; all-to-all; send; recv; isend; barrier; ReduceOp; ZeRO;
ZeRO-1; ZeRO-3; FSDP; DDP; DataParallel; DP; TP; PP; CP; EP; SP; HSDP; DeepSpeed; Megatron-LM; SISD; SIMD; SPMD; MPMD;
staleness; parameter server; checkpoint; activation checkpointing; gradient accumulation; microbatch; mini-batch;
global batch; chunks; bubble; 1F1B; GPipe; PipeDream; zero bubble; virtual stage; warm-up; bucket; overlap; MFU; HFU;
FLOPs; busbw; algbw; NVLink; NVSwitch; PCIe; InfiniBand; NIC; RoCE; SHARP; NVLS; rail; leaf; spine; fat tree; torus;
dragonfly; bf16; fp16; mixed precision; loss scaling; ZeRO-Offload; ZeRO++; Adam; SGD; optimizer states; activations;
vertical scaling; horizontal scaling; weak scaling; strong scaling; straggler; goodput; ETTR; MTBF; failover; elastic;
spare; heartbeat; SyncBatchNorm; buffers; env://; torchrun; collective; point-to-point; sequence parallelism;
ring attention; Ulysses; mixture of experts; model parallelism; naive model parallelism; pipeline parallelism;
tensor parallelism; data parallelism; hybrid parallelism; Chinchilla; RPC; Ψ; MISD; rank map; batch size; sum or mean;
learning rate; BERT-large; GPT-2; Turing-NLG; GPT-3; 16 bytes per parameter; vendor launchers; mpirun; AdamW; LARS; latency;
bandwidth; alpha-beta; bisection bandwidth; oversubscription; NUMA; Accelerate; throttling; headroom; Young/Daly; MASTER_ADDR;
WORLD_SIZE; hybrid sharding; reshard_after_forward; no_sync; gradient compression; nccl-tests; FlashAttention; tokens per second;
RDMA; HBM; tensor core; roofline; compute-bound; CUDA graph; kernel fusion; DeepEP; GQA; RoPE; RMSNorm; SwiGLU; embedding; router;
top-k; sequence packing; gradient checkpointing; selective recomputation; gradient clipping; fp4; mxfp8; prefetch; epoch; loss;
Amdahl's law; efficiency; steady state; halving-doubling; Xid; Kineto; Chakra; Perfetto; DTensor; JAX; Slurm;
asynchronous checkpoint; UCX; EFA; PXN; Trainium; Hopper; Blackwell; MLP; softmax; Mamba; context length; hidden size; vocab_size;
num_workers; GPU hours; energy; TFLOPS; interleaved 1F1B; RLHF; ANOVA; Transformer Engine; torch.compile; max-min fairness
"""


@pytest.mark.parametrize("word", [word.strip() for word in COURSE.split(";")])
def test_words_of_the_course_are_known(word: str) -> None:
    assert "\n  " in explain(word)


def test_words_in_italics_on_the_pages_of_the_course_are_known() -> None:
    """As the course's first page says; captions of pictures, and what its tables call their rows, are none."""
    captions = {"to one and back", "italics"}
    for page in (Path(__file__).parents[2] / "docs" / "course").glob("*.md"):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for word in set(re.findall(r"(?<!\*)\*([^*\n]{2,40})\*(?!\*)", text)) - captions:
            assert "\n  " in explain(word), (page.name, word)


def test_a_word_of_several_meanings_has_all_of_them() -> None:
    text = explain("ring")
    assert "ring (wiring)" in text
    assert "ring algorithm" in text


def test_a_word_of_the_field_comes_before_metrics_and_fields_of_its_name() -> None:
    assert explain("rank").startswith("rank\n  Number of a process")
    assert explain("gather").startswith("gather\n  The root gets")
    assert "plan.fp8.gather" in explain("gather")
    assert explain("MFU").count("\n\n") == 0
    metric, field = explain("recompute").split("\n\n")  # a share of the step, and what is said to have it
    assert (metric.splitlines()[-1], field.splitlines()[0]) == ("  JSON key  breakdown.recompute", "plan.recompute")


@pytest.mark.parametrize("field", ["model.kv_heads", "kv_heads", "cluster.node.nic", "nics", "cluster.fabric.oversubscription"])
def test_fields_of_models_and_clusters_are_explained(field: str) -> None:
    assert field.rpartition(".")[2] in explain(field).splitlines()[0]


def test_every_term_says_something_and_no_word_stands_for_two() -> None:
    words = [word.lower() for term, entry in terms().items() for word in (term, *entry["names"])]
    assert sorted(words) == sorted(set(words))
    assert all(entry["text"].endswith(".") for entry in terms().values())


def test_an_unknown_word_is_one_line() -> None:
    with pytest.raises(UserError, match="nothing is known of 'flurb'"):
        explain("flurb")


def test_what_a_term_points_to_is_known() -> None:
    for term, entry in terms().items():
        for word in re.findall(r"explain ([^,;]+)|(?<![-/])\b((?:plan|model|cluster|run)\.[\w.]+)", entry.get("see", "")):
            assert explain("".join(word).strip()), term


@pytest.mark.parametrize(
    ("word", "first"), [("h100-sxm", "h100-sxm (GPU)"), ("DGX H100", "dgx-h100 (cluster)"), ("tectonic", "tectonic (storage)")]
)
def test_what_is_in_a_catalogue_is_explained_from_its_file(word: str, first: str) -> None:
    text = explain(word)
    assert text.splitlines()[0] == first
    assert "  source    " in text


def test_every_name_of_the_catalogues_is_explained() -> None:
    for name in catalogues.names():
        assert f"{name} (" in explain(name), name


def test_a_word_that_is_part_of_names_has_these_and_no_longer_numbers() -> None:
    assert "GPUs: gaudi2, gaudi3" in explain("Gaudi")
    assert "h100-sxm" in explain("H100")
    assert "a100" not in explain("A10")
    assert "h200" not in explain("H20")


def test_no_other_thing_is_offered_for_an_unknown_word() -> None:
    """What is 0.7 alike is another thing: a DPU is no dp; a typing error is nearer."""
    with pytest.raises(UserError, match="did you mean 'bandwidth'"):
        explain("bandwith")
    with pytest.raises(UserError, match="shardyard list"):
        explain("snaps")
