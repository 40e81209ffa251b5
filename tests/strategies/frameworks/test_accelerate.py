"""accelerate's YAML, key by key, against the plans that its documentation describes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from sim.analysis.volume import volumes
from sim.engine.player import run
from strategies.frameworks.settings import ReadSettings, frameworks
from strategies.lowering.lower import lower
from strategies.read_job import read_job
from topologies.reading import UserError

CPU = {"optimizer": "cpu", "parameters": "cpu"}
FSDP2 = {"data_parallel": "zero3", "reshard": True, "gradient_sync": "last", "reshard_after_backward": True}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def reading(**config: Any) -> ReadSettings:
        file = tmp_path / "accelerate.yaml"
        file.write_text(yaml.safe_dump({"mixed_precision": "bf16"} | config))
        return frameworks["accelerate"].read(file)

    return reading


def written(**plan: Any) -> dict[str, Any]:
    """What is written for 2 nodes of 8 GPUs."""
    job = read_job(
        model="llama-3.1-8b", cluster="dgx-h100", nodes=2, plan={"auto": False, "global_batch": 64, "sequence": 4096} | plan
    )
    result: dict[str, Any] = yaml.safe_load(frameworks["accelerate"].write(job).text)
    return result


def test_numbers_of_nodes_and_processes(read: Any) -> None:
    settings = read(num_machines=2, num_processes=16)
    assert (settings.nodes, settings.gpus) == (2, 16)
    assert (read().nodes, read().gpus) == (1, None)


@pytest.mark.parametrize(("said", "precision"), [("bf16", "bf16"), ("fp16", "fp16"), ("no", "fp32")])
def test_precision(read: Any, said: str, precision: str) -> None:
    assert read(mixed_precision=said).plan["precision"] == precision
    assert written(precision=precision, gradients="same")["mixed_precision"] == said


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ddp_reduces_gradients_of_fp32_weights(read: Any, precision: str) -> None:
    """Autocast (accelerate's mixed precision of a model that is not sharded) leaves weights as they are, and their gradients."""
    torch = pytest.importorskip("torch")
    weights = torch.nn.Linear(8, 8)
    with torch.autocast("cpu", dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[precision]):
        weights(torch.ones(2, 8)).sum().backward()
    assert str(weights.weight.grad.dtype) == "torch.float32"
    for kind in ("NO", "MULTI_GPU"):
        assert read(mixed_precision=precision, distributed_type=kind).plan["gradients"] == "fp32"
    assert "gradients" not in read(mixed_precision="no", distributed_type="MULTI_GPU").plan
    assert "gradients" not in read(mixed_precision=precision, distributed_type="FSDP").plan
    stage = {"deepspeed_config": {"zero_stage": 0}}
    plan = read(mixed_precision=precision, distributed_type="DEEPSPEED", **stage).plan
    assert plan.get("gradients") == {"bf16": "fp32", "fp16": None}[precision]


@pytest.mark.parametrize(
    ("strategy", "number", "shard"),
    [
        ("FULL_SHARD", 1, None),
        ("SHARD_GRAD_OP", 2, None),
        ("NO_SHARD", 3, None),
        ("HYBRID_SHARD", 4, 8),
        ("HYBRID_SHARD_ZERO2", 5, 8),
    ],
)
def test_sharding_strategies_of_fsdp_1(read: Any, strategy: str, number: int, shard: int | None) -> None:
    """torch.distributed.fsdp.ShardingStrategy, by name or number; hybrid ones shard within the 8 GPUs of a node. What PyTorch
    releases after a forward pass, and after a backward pass whose gradients accelerate's no_sync keeps, says PyTorch itself.
    """
    by_name, by_number = (
        read(distributed_type="FSDP", num_machines=2, num_processes=16, fsdp_config={"fsdp_sharding_strategy": given}).plan
        for given in (strategy, number)
    )
    assert by_name == by_number
    assert (by_name.get("shard"), by_name["recompute"], "offload" in by_name) == (shard, "none", False)
    runtime = pytest.importorskip("torch.distributed.fsdp._runtime_utils")
    sharding = pytest.importorskip("torch.distributed.fsdp._common_utils")
    flat = pytest.importorskip("torch.distributed.fsdp._flat_param")
    of_module = pytest.importorskip("torch.distributed.fsdp").ShardingStrategy[
        strategy if strategy != "HYBRID_SHARD_ZERO2" else "_HYBRID_SHARD_ZERO2"
    ]
    assert sharding is not None
    handles = pytest.importorskip("torch.distributed.fsdp._init_utils").SHARDING_STRATEGY_MAP[of_module]
    handle = SimpleNamespace(uses_sharded_strategy=strategy != "NO_SHARD", _sharding_strategy=handles)
    if strategy == "NO_SHARD":
        assert by_name["data_parallel"] == "ddp"
        return
    assert (by_name["data_parallel"], by_name["gradient_sync"]) == ("zero3", "last")
    assert by_name["reshard"] == (handles in flat.RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES)
    released = runtime._should_free_in_backward(SimpleNamespace(_sync_gradients=False), handle)
    assert by_name.get("reshard_after_backward", False) == released


def test_fsdp_2_and_what_both_versions_share(read: Any) -> None:
    second = {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_activation_checkpointing": True}
    plan = read(distributed_type="FSDP", fsdp_config=second).plan
    assert (plan["data_parallel"], plan["reshard"], plan["recompute"]) == ("zero3", False, "full")
    # huggingface/accelerate pull request 3762: no_sync is set_requires_gradient_sync(False), and nothing else
    assert (plan["gradient_sync"], plan["reshard_after_backward"]) == ("last", True)
    assert read(distributed_type="FSDP", fsdp_config={"fsdp_version": 2}).plan["reshard"] is True
    for key in ("fsdp_offload_params", "fsdp_cpu_offload"):
        settings = read(distributed_type="FSDP", fsdp_config={key: True})
        assert (settings.plan["offload"], "gradient_sync" in settings.plan) == (CPU, False)
        assert "gradients of every microbatch are reduced" in settings.remarks[0]


def test_deepspeed_s_section(read: Any) -> None:
    """ZeRO-2 by default; parameters are offloaded by ZeRO-3 alone."""
    devices = {"offload_optimizer_device": "cpu", "offload_param_device": "nvme"}
    plan = read(distributed_type="DEEPSPEED", deepspeed_config={"gradient_accumulation_steps": 4} | devices).plan
    assert (plan["deepspeed"], plan["overlap"]) == ({}, False)  # deepspeed/runtime/zero/config.py, overlap_comm_valid
    assert (plan["data_parallel"], plan["accumulation"], plan["offload"]) == ("zero2", 4, {"optimizer": "cpu"})
    third = read(distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": 3} | devices).plan
    assert (third["data_parallel"], third["offload"]) == ("zero3", {"optimizer": "cpu", "parameters": "nvme"})
    plain = read(distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": 1, "offload_optimizer_device": "none"}).plan
    assert plain["data_parallel"] == "zero1"
    assert not {"offload", "accumulation"} & plain.keys()
    assert "deepspeed" not in read(distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": 0}).plan


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_s_stages_send_what_its_engine_sends(read: Any, toy_job: Any, toy_prices: Any, stage: int) -> None:
    """They all-reduce gradients and gather parameters, 2 Ψ + Ψ, as was seen of DeepSpeed 0.19.8 on two ranks."""
    plan = read(distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": stage}).plan
    job = toy_job(8, 1, **plan | {"kernels": "torch"})
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
    sent = volumes(timeline)[0]["dp"][1]
    assert sent == pytest.approx(3 * job.model.parameters * 7 / 8)


def test_megatron_s_section(read: Any) -> None:
    degrees = {
        "tp_degree": 4,
        "pp_degree": 2,
        "num_micro_batches": 8,
        "expert_model_parallel_size": 2,
        "context_parallel_size": 2,
    }
    flags = {"sequence_parallelism": True, "use_distributed_optimizer": True, "recompute_activations": True}
    section = {f"megatron_lm_{name}": value for name, value in (degrees | flags).items()}
    plan = read(distributed_type="MEGATRON_LM", megatron_lm_config=section).plan
    assert {name: plan[name] for name in ("tp", "pp", "accumulation", "ep", "cp")} == dict(tp=4, pp=2, accumulation=8, ep=2, cp=2)
    assert (plan["sequence_parallel"], plan["data_parallel"], plan["recompute"]) == (True, "zero1", "selective")
    assert "kernels" not in plan
    bare = read(distributed_type="MEGATRON_LM", megatron_lm_config={"megatron_lm_recompute_granularity": "full"}).plan
    assert (bare["sequence_parallel"], bare["data_parallel"], bare["recompute"]) == (False, "ddp", "full")


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        ({}, {"data_parallel": "ddp"}),
        ({"tp": 2}, {"data_parallel": "ddp", "tp": 2, "overlap_tp": "none"}),
        ({"tp": 1, "cp": 2}, {"data_parallel": "ddp", "tp": 1, "cp": 2}),
        ({"dp_shard": 8}, FSDP2 | {"dp": 8}),
        ({"dp_shard": 8, "dp_replicate": 1}, FSDP2 | {"dp": 8}),
        ({"dp_shard": 8, "dp_replicate": 2}, FSDP2 | {"dp": 16, "shard": 8}),
        ({"dp_shard": 1, "dp_replicate": 4}, {"data_parallel": "ddp", "dp": 4}),
        ({"sp": 2}, {"data_parallel": "ddp", "cp": 2, "cp_method": "ulysses"}),
        ({"sp": 1, "cp": 2}, {"data_parallel": "ddp", "cp": 2}),
    ],
)
def test_a_mesh_of_devices(read: Any, mesh: dict[str, int], plan: dict[str, Any]) -> None:
    """Sharded dp ranks are FSDP's, replicated ones alone are DDP's, both together HSDP's."""
    read_plan = read(parallelism_config={f"parallelism_config_{axis}_size": size for axis, size in mesh.items()}).plan
    wide = {"gradients": "fp32"} if plan["data_parallel"] == "ddp" else {}
    assert read_plan == plan | wide | {"precision": "bf16", "kernels": "compiled" if plan.get("cp", 1) > 1 else "torch"}


def test_two_ways_to_share_a_sequence_exclude_each_other(read: Any) -> None:
    both = {"parallelism_config_cp_size": 2, "parallelism_config_sp_size": 2}
    with pytest.raises(UserError, match="parallelism_config_cp_size and parallelism_config_sp_size exclude each other"):
        read(parallelism_config=both)


def test_what_is_written_for_fsdp() -> None:
    plan = {"data_parallel": "zero3", "kernels": "torch", "tp": 2, "overlap_tp": "none"}
    config = written(**plan)
    assert (config["distributed_type"], config["num_machines"], config["num_processes"]) == ("FSDP", 2, 16)
    assert "dynamo_config" not in config
    assert config["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": False,
    }
    mesh = {"dp_replicate": 1, "dp_shard": 8, "tp": 2, "cp": 1}
    assert config["parallelism_config"] == {f"parallelism_config_{axis}_size": size for axis, size in mesh.items()}
    hybrid = written(**plan, shard=4, recompute="full", offload=CPU)
    assert hybrid["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    assert hybrid["parallelism_config"]["parallelism_config_dp_shard_size"] == 4
    assert hybrid["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert hybrid["fsdp_config"]["fsdp_offload_params"] is True
    ulysses = written(data_parallel="zero3", kernels="compiled", cp=2, cp_method="ulysses")
    assert ulysses["parallelism_config"]["parallelism_config_sp_size"] == 2
    assert ulysses["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}


def test_what_is_written_for_the_others() -> None:
    deepspeed = written(data_parallel="zero2", kernels="torch", microbatch=2, offload={"optimizer": "cpu"})
    assert deepspeed["distributed_type"] == "DEEPSPEED"
    accumulated = {"zero_stage": 2, "gradient_accumulation_steps": 64 // (16 * 2), "offload_optimizer_device": "cpu"}
    assert deepspeed["deepspeed_config"] == accumulated
    megatron = written(tp=2, pp=2, sequence_parallel=True, data_parallel="zero1", recompute="selective")
    assert (megatron["distributed_type"], "dynamo_config" in megatron) == ("MEGATRON_LM", False)
    values = {
        "tp_degree": 2,
        "pp_degree": 2,
        "num_micro_batches": 64 // 4,
        "expert_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallelism": True,
        "use_distributed_optimizer": True,
        "recompute_granularity": "selective",
    }
    assert megatron["megatron_lm_config"] == {f"megatron_lm_{name}": value for name, value in values.items()}
    ddp = written(data_parallel="ddp", kernels="torch")
    assert ddp["distributed_type"] == "MULTI_GPU"
    assert not {"parallelism_config", "fsdp_config", "deepspeed_config"} & ddp.keys()
