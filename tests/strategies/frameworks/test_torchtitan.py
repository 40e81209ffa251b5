"""torchtitan's TOML, key by key, against the plans that its documentation describes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from strategies.frameworks.settings import frameworks
from strategies.read_job import read_job
from topologies.reading import UserError

OWN = {"attention": "sdpa", "framework": {"complex_rotary": True, "repeated_keys": True, "keep_last_unit": True}}
EVERYTHING = {"optimizer": "cpu", "parameters": "cpu"}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def reading(**sections: str) -> dict[str, Any]:
        """Sections by name, as lines of TOML; a double underscore stands for a dot."""
        training = "local_batch_size = 4\nseq_len = 2048\n" + sections.pop("training", "")
        lines = [f"[{name.replace('__', '.')}]\n{text}\n" for name, text in ({"training": training} | sections).items()]
        file = tmp_path / "train.toml"
        file.write_text("\n".join(lines))
        return frameworks["torchtitan"].read(file).plan

    return reading


def written(**plan: Any) -> dict[str, Any]:
    """What is written for 2 nodes of 8 GPUs."""
    given = {"global_batch": 64, "sequence": 4096, "kernels": "torch"} | plan
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=2, plan=given)
    return tomllib.loads(frameworks["torchtitan"].write(job).text)


def test_defaults(read: Any) -> None:
    """FSDP over all ranks, bf16 with sums in fp32, every second layer recomputed, AdamW in one kernel, nothing compiled."""
    assert read() == OWN | {
        "microbatch": 4,
        "sequence": 2048,
        "precision": "bf16",
        "gradients": "fp32",
        "sequence_parallel": False,
        "data_parallel": "zero3",
        "reshard": True,
        "recompute": "full",
        "recompute_method": "every",
        "recompute_layers": 2,
        "optimizer": "adam",
        "fused_optimizer": True,
        "kernels": "torch",
    }


def test_types(read: Any) -> None:
    half = read(training='mixed_precision_param = "float16"\nmixed_precision_reduce = "bfloat16"')
    assert (half["precision"], half["gradients"]) == ("fp16", "same")
    full = read(training='mixed_precision_param = "float32"')
    assert (full["precision"], full["gradients"]) == ("fp32", "fp32")


def test_degrees_and_batch(read: Any) -> None:
    tp = read(parallelism="tensor_parallel_degree = 2\ncontext_parallel_degree = 1", training="global_batch_size = 128")
    assert (tp["tp"], tp["cp"], tp["sequence_parallel"], tp["overlap_tp"], tp["global_batch"]) == (2, 1, True, "none", 128)
    asynchronous = read(parallelism="tensor_parallel_degree = 2\nenable_async_tensor_parallel = true")
    assert (asynchronous["overlap_tp"], asynchronous["kernels"]) == ("pieces", "compiled")
    assert not {"overlap_tp", "global_batch"} & read(training="global_batch_size = -1").keys()


def test_experts_are_not_cut_by_default(read: Any) -> None:
    """torchtitan's ParallelDims: partial dp and all tp ranks are ep ranks by expert_tensor_parallel_degree 1, the default."""
    degrees = "tensor_parallel_degree = 2\nexpert_parallel_degree = 4\n"
    assert [read(parallelism=degrees)[name] for name in ("ep", "expert_tp", "token_dispatcher")] == [4, 1, "alltoall"]
    cut = read(parallelism=degrees + 'expert_tensor_parallel_degree = 2\nexpert_parallel_comm_backend = "deepep"')
    assert [cut[name] for name in ("expert_tp", "token_dispatcher")] == [2, "deepep"]
    assert "expert_tp" not in read(parallelism="tensor_parallel_degree = 2") | read(parallelism="expert_parallel_degree = 4")
    plan = {"tp": 2, "sequence_parallel": True, "ep": 4, "overlap_tp": "none"}
    for expert_tp in (1, 2):
        job = read_job(model="mixtral-8x7b", cluster="dgx-h100", nodes=2, plan=plan | {"expert_tp": expert_tp, "sequence": 4096})
        text = frameworks["torchtitan"].write(job).text
        assert tomllib.loads(text)["parallelism"]["expert_tensor_parallel_degree"] == expert_tp


def test_buckets_of_ddp(read: Any) -> None:
    """apply_ddp in torchtitan/models/llama3/infra/parallelize.py: replicate(model, device_mesh=dp_mesh, bucket_cap_mb=100)."""
    assert read(parallelism="data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 8")["bucket"] == "100 MiB"


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 8", {"data_parallel": "ddp", "dp": 8}),
        ("data_parallel_shard_degree = 8", {"data_parallel": "zero3", "dp": 8, "reshard": True}),
        (
            "data_parallel_shard_degree = 8\ndata_parallel_replicate_degree = 2",
            {"data_parallel": "zero3", "dp": 16, "shard": 8, "reshard": True},
        ),
        ('fsdp_reshard_after_forward = "never"', {"data_parallel": "zero3", "reshard": False}),
        ('fsdp_reshard_after_forward = "always"', {"data_parallel": "zero3", "reshard": True}),
        ("pipeline_parallel_degree = 2", {"data_parallel": "zero3", "reshard": False}),  # by default not with a pipeline
        ('pipeline_parallel_degree = 2\nfsdp_reshard_after_forward = "always"', {"data_parallel": "zero3", "reshard": True}),
    ],
)
def test_sharding(read: Any, text: str, plan: dict[str, Any]) -> None:
    settings = read(parallelism=text)
    assert {name: settings[name] for name in ("data_parallel", "dp", "shard", "reshard") if name in settings} == plan
    # norm and head stay, unless all are said to be released
    assert settings["framework"].get("keep_last_unit", False) == (plan.get("reshard", False) and "always" not in text)


def test_what_is_left_to_shard_beside_copies_must_be_said(read: Any) -> None:
    with pytest.raises(UserError, match="data_parallel_shard_degree=-1: give its value beside a replicate degree"):
        read(parallelism="data_parallel_replicate_degree = 2")


def test_pipelines_cut_the_local_batch(read: Any) -> None:
    """4 sequences in microbatches of 2 are 2 of them; of one by default, unless a global batch says how many."""
    two = read(
        parallelism='pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 2\npipeline_parallel_schedule = "GPipe"'
    )
    assert (two["schedule"], two["microbatch"], two["accumulation"]) == ("gpipe", 2, 2)
    settings = read(parallelism="pipeline_parallel_degree = 2", training="global_batch_size = 64")
    assert (settings["schedule"], settings["microbatch"], settings["global_batch"]) == ("1f1b", 1, 64)
    assert "accumulation" not in settings
    with pytest.raises(UserError, match="pipeline_parallel_microbatch_size=3 does not divide local_batch_size=4"):
        read(parallelism="pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3")
    assert "schedule" not in read(parallelism="pipeline_parallel_degree = 1\npipeline_parallel_microbatch_size = 3")


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ('mode = "none"', {"recompute": "none"}),
        ('mode = "full"', {"recompute": "full"}),
        ('mode = "full"\nselective_ac_option = "3"', {"recompute": "full"}),
        ('mode = "selective"\nselective_ac_option = "op"', {"recompute": "operators"}),
        ('selective_ac_option = "3"', {"recompute": "full", "recompute_method": "every", "recompute_layers": 3}),
    ],
)
def test_recomputation(read: Any, text: str, plan: dict[str, Any]) -> None:
    settings = read(activation_checkpoint=text)
    assert {name: value for name, value in settings.items() if name.startswith("recompute")} == plan


@pytest.mark.parametrize("option", ["0", "2.5", "often"])
def test_recomputation_of_no_number_of_layers_is_refused(read: Any, option: str) -> None:
    with pytest.raises(UserError, match=f"selective_ac_option='{option}' must be 'op' or a number"):
        read(activation_checkpoint=f'selective_ac_option = "{option}"')


def test_optimizers(read: Any) -> None:
    for text, fused in (
        ('implementation = "foreach"', False),
        ('implementation = "fused"', True),
        ("fused = false", False),
        ("fused = true", True),
    ):
        assert read(optimizer=text)["fused_optimizer"] is fused
    assert read(training="enable_cpu_offload = true")["offload"] == EVERYTHING


def test_compiled_models(read: Any) -> None:
    assert read(compile="enable = true")["kernels"] == "compiled"
    assert read(training="compile = true")["kernels"] == "compiled"


@pytest.mark.parametrize(
    ("sections", "fp8"),
    [
        ({"model": 'converters = ["float8"]'}, {"scaling": "tensorwise", "gather": False}),
        (
            {"model": 'converters = "float8"', "float8": "enable_fsdp_float8_all_gather = true"},
            {"scaling": "tensorwise", "gather": True},
        ),
        (
            {"model": 'converters = ["quantize.linear.float8"]', "quantize__linear__float8": 'recipe_name = "rowwise"'},
            {"scaling": "rowwise", "gather": False},
        ),
        ({"model": 'converters = ["mx"]'}, {"scaling": "mxfp8", "gather": False}),
        ({"model": 'converters = ["other"]', "float8": 'recipe_name = "rowwise"'}, None),
    ],
)
def test_products_in_fp8(read: Any, sections: dict[str, str], fp8: dict[str, Any] | None) -> None:
    assert read(**sections).get("fp8") == fp8


def test_what_is_written() -> None:
    config = written(data_parallel="zero3", tp=2, overlap_tp="none", gradients="fp32", microbatch=2)
    assert config["training"] == {
        "local_batch_size": 2,
        "global_batch_size": 64,
        "seq_len": 4096,
        "mixed_precision_param": "bfloat16",
        "mixed_precision_reduce": "float32",
    }
    assert config["parallelism"] == {
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 8,
        "fsdp_reshard_after_forward": "always",
    }
    assert config["activation_checkpoint"] == {"mode": "none"}
    assert not {"compile", "optimizer", "model"} & config.keys()


def test_what_is_written_of_pipelines_and_copies() -> None:
    """64 sequences over dp 4 in microbatches of 2: 8 of them, which one local batch holds."""
    config = written(data_parallel="ddp", pp=4, schedule="gpipe", microbatch=2, kernels="compiled", precision="fp32")
    assert config["training"]["local_batch_size"] == 2 * 8
    assert config["training"]["mixed_precision_reduce"] == "float32"
    parallel = config["parallelism"]
    assert (parallel["data_parallel_replicate_degree"], parallel["data_parallel_shard_degree"]) == (4, 1)
    assert (parallel["pipeline_parallel_schedule"], parallel["pipeline_parallel_microbatch_size"]) == ("GPipe", 2)
    assert "fsdp_reshard_after_forward" not in parallel
    assert config["compile"] == {"enable": True}


def test_what_is_written_of_the_rest() -> None:
    config = written(
        data_parallel="zero3",
        shard=8,
        reshard=False,
        fused_optimizer=False,
        recompute="full",
        recompute_method="every",
        recompute_layers=3,
    )
    parallel = config["parallelism"]
    assert (parallel["data_parallel_replicate_degree"], parallel["data_parallel_shard_degree"]) == (2, 8)
    assert parallel["fsdp_reshard_after_forward"] == "never"
    assert config["optimizer"] == {"implementation": "foreach"}
    assert config["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "3"}
    assert "enable_cpu_offload" not in config["training"]
    kept = written(data_parallel="zero3", kernels="torch", framework={"keep_last_unit": True})
    assert kept["parallelism"]["fsdp_reshard_after_forward"] == "default"
    assert written(data_parallel="zero3", offload=EVERYTHING)["training"]["enable_cpu_offload"] is True
    assert written(recompute="operators", data_parallel="zero3")["activation_checkpoint"]["selective_ac_option"] == "op"
    overlapping = {"tp": 2, "sequence_parallel": True, "overlap_tp": "pieces", "kernels": "compiled", "data_parallel": "zero3"}
    asynchronous = written(**overlapping)
    assert asynchronous["parallelism"]["enable_async_tensor_parallel"] is True


@pytest.mark.parametrize(
    ("fp8", "section"),
    [
        ({"scaling": "mxfp8"}, {"mx": {"recipe_name": "mxfp8_cublas"}}),
        ({"scaling": "rowwise"}, {"float8": {"recipe_name": "rowwise", "filter_fqns": ["output"]}}),
        (
            {"scaling": "tensorwise", "gather": True},
            {"float8": {"recipe_name": "tensorwise", "filter_fqns": ["output"], "enable_fsdp_float8_all_gather": True}},
        ),
    ],
)
def test_what_is_written_of_fp8(fp8: dict[str, Any], section: dict[str, Any]) -> None:
    given = {"global_batch": 64, "sequence": 4096, "kernels": "compiled", "data_parallel": "zero3", "fp8": fp8}
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=2, plan=given)
    config = tomllib.loads(frameworks["torchtitan"].write(job).text)
    assert config["model"]["converters"] == [f"quantize.linear.{name}" for name in section]
    assert config["quantize"]["linear"] == section
