"""Jobs, models, plans and settings of frameworks that nobody wrote in good faith: one line that names field, value and rule, and
no more memory or time than the file's size. Sizes are refused before anything is built from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibration.bench import bench
from sim.analysis.summary import summarise
from strategies.frameworks.shell import GROWTH, arguments
from strategies.job import Job
from strategies.lowering.lower import lower
from strategies.planner.search.space import parse_axis, read_space
from strategies.read_job import read_job
from strategies.schedules.table import cells
from topologies.documents.errors import LONGEST, UserError
from topologies.ranks import rank_table

SMALL = {"name": "small", "hidden": 512, "layers": 4, "heads": 8, "vocabulary": 1000, "context": 512}
MOE = SMALL | {"experts": {"experts": 8, "chosen": 2, "ffn": 64}}


def refused(*overrides: str, **given: Any) -> str:
    """The one line that a job is refused with."""
    text = mistake(lambda: read_job(None, overrides, **{"model": SMALL, "cluster": "dgx-h100"} | given), play=True)
    assert text
    return text


def mistake(read: Callable[[], Job], play: bool = False) -> str:
    """The one line that a job is refused with; "" when it is not."""
    text = ""
    try:
        job = read()
        plan = job.resolve()
        if play:
            lower(job.model, plan)
    except UserError as error:
        text = str(error)
    assert not text or text.isprintable()
    assert len(text) <= LONGEST + 3
    return text


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ("model.layers=1000000000", "layers=1000000000: input should be less than or equal to 10000"),
        ("model.hidden=1e30", "hidden=1e+30"),
        ("model.heads=1000000000", "heads=1000000000: input should be less than or equal to 4194304"),
        ("model.vocabulary=100000000000000000000", "vocabulary=100000000000000000000: input should be"),
        ("plan.sequence=10000000000", "sequence=10000000000: input should be less than or equal to 1073741824"),
        ("plan.tp=1048577", "tp=1048577: input should be less than or equal to 1048576"),
        ("plan.pp=1000000000", "pp=1000000000"),
        ("plan.chunks=1000000000", "chunks=1000000000"),
        ("plan.loss_metrics=1000000000", "loss_metrics=1000000000: input should be less than or equal to 100"),
        ("plan.local_steps=1000000", "local_steps=1000000: input should be less than or equal to 10000"),
        ("plan.microbatch=1000000000000", "microbatch=1000000000000"),
        ("plan.accumulation=600001", "microbatches·pp = 600001·1 passes in a step are too many to play (at most 600,000)"),
        ("plan.capacity_factor=1e-300", "capacity_factor=1e-300"),
        ("plan.imbalance=1e300", "imbalance=1e+300"),
        ("plan.bucket=10000 PB", "bucket='10000 PB': must be from 1 B to 1e18 B: there is no such hardware"),
        ("plan.layers_per_stage=[1000000000]", "layers_per_stage.0=1000000000"),
        ("plan.deepspeed={reduce_bucket_size: 1e300}", "deepspeed.reduce_bucket_size=1e+300"),
        ("plan={data_parallel: zero3, offload: {optimizer: cpu, tile: 1}}", "a step of more than 500,000 ops of all stages"),
        ("cluster.node.gpus=1000000000", "node.gpus=1000000000: input should be less than or equal to 1024"),
        ("cluster.node.nics=1000000000", "node.nics=1000000000: input should be less than or equal to 1024"),
        ("cluster.node.gpu.sms=1000000000", "node.gpu.sms=1000000000"),
        ("cluster.node.sockets=1000000000", "node.sockets=1000000000"),
        ("cluster.fabric={kind: full, link: 1 GB/s, leaf_nodes: null}", "17,186,422,784 links: more than 16,777,216"),
        (
            "cluster.fabric={kind: dragonfly, routers: 10000000, router_nodes: 1, global_links: 1, leaf_nodes: null}",
            "fabric.link is required by kind='dragonfly'",
        ),
        ("cluster.fabric={kind: fat_tree, leaf_nodes: 10000000000}", "fabric.leaf_nodes=10000000000"),
        ("cluster.fabric={kind: torus, dims: [131072], link: 1 GB/s, leaf_nodes: null}", "more than 128 hops apart"),
        ("cluster.notes=3", "notes=3"),
        ("plan.tp=!!int x", "--set plan.tp=!!int x: the value is not valid YAML: the tag '!!int' is not read"),
        ("plan.tp=2001-13-45", "tp='2001-13-45'"),
        ("plan.tp=" + "9" * 5000, "a number of more than 64 digits"),
        ("plan.tp=[" + "[" * 100_000, "more than 64 mappings and lists"),
        ("a." * 5000 + "b=1", "more than 8 fields inside each other"),
        ("name=" + "x" * 300, "must be at most 200 letters"),
        ("profile=" + "x" * 300 + ".yaml", "must be at most 200 letters"),
        ('cluster="a\\0b.yaml"', "the control character '\\x00'"),
        ("cluster=" + "x" * 300 + ".yaml", "cannot be read"),
        ("model=" + "x" * 300 + ".yaml", "cannot be read"),
        ("model=" + "x" * 300, "unknown model"),
        ("plan=" + "x" * 300, "cannot be read"),
        ("plan.schedule=" + "x" * 300 + ".csv", "cannot be read"),
    ],
    ids=lambda value: value[:40],
)
def test_sizes_and_names_are_refused_before_anything_is_built(change: str, rule: str) -> None:
    nodes = 131_072 if "full" in change or "torus" in change else 1
    assert rule in refused(change, nodes=nodes)


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        (MOE | {"experts": {"experts": 10**6, "chosen": 2, "ffn": 64}}, "experts.experts=1000000"),
        (MOE | {"layers": 100, "experts": {"experts": 6000, "chosen": 2, "ffn": 64}}, "100·6000: more than 500,000 experts"),
        (SMALL | {"layers": [1]}, "layers=[1]"),
        (SMALL | {"name": {}}, "name={}"),
    ],
)
def test_models_are_refused(model: dict[str, Any], rule: str) -> None:
    assert rule in refused(model=model)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, [], {}, "²", None])
def test_values_given_to_the_api_are_checked(value: Any) -> None:
    if value is not None:
        assert "tp=" in refused(plan={"tp": value})
    assert "nodes" in refused(cluster={"based_on": "dgx-h100", "nodes": 1 if value is None else value}, nodes=[]) or value is None


@pytest.mark.parametrize("count", [0, -1, 10**22, 2**18 + 1])
def test_tables_of_ranks_have_a_size(count: int) -> None:
    with pytest.raises(UserError, match="nodes"):
        rank_table(count, 1)
    assert len(rank_table(2**12, 64, 64)) == 2**12


@pytest.mark.parametrize("nodes", [2**20, 10**30])
def test_a_collective_is_of_a_cluster_that_there_can_be(nodes: int) -> None:
    with pytest.raises(UserError, match="more than 1,048,576 GPUs are not simulated"):
        bench("all_gather", "dgx-h100", nodes)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-v", "dualpipe"])
def test_schedules_that_are_written_out_have_a_size(name: str) -> None:
    with pytest.raises(UserError, match="more than 200,000 passes"):
        cells(name, 2, 10**12, None)


def test_a_step_of_thousands_of_years_is_a_mistake() -> None:
    cluster = {"based_on": "dgx-h100", "node": {"gpu": {"based_on": "h100-sxm", "peak": {"bf16": "1 MFLOP/s"}}}}
    job = read_job(model="llama-3.1-405b", cluster=cluster, profile="h100", plan={"sequence": 131072, "accumulation": 1000})
    from strategies.predict import simulate

    with pytest.raises(UserError, match=r"a step of .* s is more than 32 years: a rate of the cluster"):
        summarise(simulate(job))


# -- axes of a search --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("plan.tp=[1, !!int x]", "the tag '!!int'"),
        ("plan.tp=? [a, b]\n: c", "a list as a key"),
        ("plan.tp=" + "9" * 5000, "more than 64 digits"),
        ("plan.tp=" + "1," * 5000, "has 5,000 values, more than 4,096"),
        ("plan.tp={}", "plan.tp"),
    ],
    ids=lambda value: value[:24],
)
def test_axes_are_refused(text: str, rule: str) -> None:
    if text == "plan.tp={}":
        assert parse_axis(text).choices
        return
    with pytest.raises(UserError) as caught:
        parse_axis(text)
    assert rule in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("values", [3, "x", {}, [], None])
def test_an_axis_is_a_list(values: Any) -> None:
    with pytest.raises(UserError, match=r"space\.yaml: plan\.tp=.*: expected a list"):
        read_space({"plan.tp": values}, "space.yaml")


# -- settings of frameworks --------------------------------------------------------------------------------------------------

ODD: list[Any] = [[], {}, [1], {"a": 1}, "x", True, -1, 10**20, 1.5, "1e999", None]
DEEPSPEED = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
FIELDS = {
    "deepspeed": """
        train_micro_batch_size_per_gpu zero_optimization zero_optimization.stage bf16 bf16.enabled
        zero_optimization.reduce_bucket_size zero_optimization.offload_optimizer.device gradient_clipping
        data_types.grad_accum_dtype optimizer.type tensor_parallel.autotp_size
    """.split(),
    "accelerate": """
        distributed_type num_processes num_machines mixed_precision fsdp_config dynamo_config fsdp_config.fsdp_sharding_strategy
        fsdp_config.fsdp_version parallelism_config parallelism_config.parallelism_config_tp_size deepspeed_config
    """.split(),
    "torchtitan": """
        training training.seq_len training.global_batch_size model.converters parallelism parallelism.data_parallel_shard_degree
        parallelism.data_parallel_replicate_degree parallelism.pipeline_parallel_degree
        parallelism.pipeline_parallel_schedule_csv activation_checkpoint.mode activation_checkpoint.selective_ac_option
        quantize.linear
    """.split(),
}
PLAIN: dict[str, dict[str, Any]] = {
    "deepspeed": DEEPSPEED,
    "accelerate": {"distributed_type": "FSDP", "fsdp_config": {}},
    "torchtitan": {"training": {"local_batch_size": 1, "seq_len": 512}, "parallelism": {}},
}


@pytest.mark.parametrize(("framework", "field"), [(name, field) for name, fields in FIELDS.items() for field in fields])
def test_settings_of_any_type_are_read_or_refused(framework: str, field: str, tmp_path: Path) -> None:
    for value in ODD:
        data = json.loads(json.dumps(PLAIN[framework]))
        node, (*path, last) = data, field.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
        (file := tmp_path / "settings.yaml").write_text(json.dumps(data))
        if framework == "torchtitan":
            file.write_text(toml(data))
        given = {f"from_{framework}": str(file)}
        mistake(lambda given=given: read_job(model=SMALL, cluster="dgx-h100", **given))


def toml(data: dict[str, Any]) -> str:
    """Tables in line, which TOML has like JSON but for the colons; none is left out."""

    def inline(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {inline(each)}" for key, each in value.items() if each is not None) + "}"
        return json.dumps(value)

    return "".join(f"{key} = {inline(value)}\n" for key, value in data.items() if value is not None)


SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 1 "


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 0 --num-layers-per-virtual-pipeline-stage 1",
        "--bf16 --fp16 x",
        "--pipeline-model-parallel-size 1000000000 --decoder-first-pipeline-num-layers 1",
        "--vocab-size " + "9" * 4400,
        "--tensor-model-parallel-size $((99999999999999999999*9))",
        "--moe-layer-freq ([0]*99999999999+[1]*2) --num-experts 8",
        "--num-layers 1000000000",
        "--nnodes 1000000000 --nproc_per_node 1000000000",
        "--clip-grad nan",
        "'",
    ],
    ids=lambda flags: flags[:40],
)
def test_flags_of_megatron_are_read_or_refused(flags: str, tmp_path: Path) -> None:
    (file := tmp_path / "pretrain.sh").write_text(f"torchrun pretrain_gpt.py {SIZES} {flags}\n")
    mistake(lambda: read_job(cluster="dgx-h100", from_megatron=str(file)))


def test_variables_of_a_script_that_double_each_other(tmp_path: Path) -> None:
    """500 bytes stood for 6 GB."""
    lines = [
        "A0=xxxxxxxxxx",
        *(f"A{n}=$A{n - 1}$A{n - 1}$A{n - 1}$A{n - 1}$A{n - 1}$A{n - 1}$A{n - 1}$A{n - 1}" for n in range(1, 9)),
    ]
    (file := tmp_path / "bomb.sh").write_text("\n".join(lines) + "\ntorchrun pretrain_gpt.py --tp $A8\n")
    with pytest.raises(UserError, match=f"what its variables stand for is longer than {GROWTH:,} letters"):
        arguments(file)
    (file := tmp_path / "fine.sh").write_text("TP=8\nARGS=$TP\ntorchrun pretrain_gpt.py --tp $ARGS " + "--x $TP " * 10_000 + "\n")
    assert arguments(file)["tp"] == 8


@pytest.mark.parametrize(
    "text", ["\n" * 300_000, " " * 300_000, "${" * 100_000, "${a:-" * 10_000, "$((1*" * 10_000, "export " * 40_000]
)
def test_long_scripts_cost_their_length(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "long.sh").write_text(text)
    assert arguments(file) == {}


@pytest.mark.parametrize("data", [3, "x", None, [1, [2], {"3": 4}, None], [[["--tp"]]]])
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_lists_of_arguments_may_hold_anything(data: Any, suffix: str, tmp_path: Path) -> None:
    (file := tmp_path / f"arguments{suffix}").write_text(json.dumps(data))
    if isinstance(data, list):
        assert isinstance(arguments(file), dict)
    else:
        with pytest.raises(UserError, match="expected a list of arguments"):
            arguments(file)


@pytest.mark.parametrize(
    "field",
    [
        "architectures",
        "model_type",
        "num_hidden_layers",
        "sliding_window",
        "text_config",
        "layer_types",
        "hidden_size",
        "rope_scaling",
        "tie_word_embeddings",
        "attention_dropout",
    ],
)
def test_fields_of_a_config_json_may_be_anything(field: str, tmp_path: Path) -> None:
    plain = json.loads((Path(__file__).parents[2] / "data/models/qwen2-7b.json").read_text())
    for value in ODD:
        (file := tmp_path / "config.json").write_text(json.dumps(plain | {field: value}))
        mistake(lambda file=file: read_job(model=str(file), cluster="dgx-h100", plan={}))
