"""No bound exceeds what is simulated, whatever the plan: at every stage of tightening, of the step and of memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.analysis.summary import Summary, summarise
from sim.engine.player import run
from sim.pricing.prices import Prices
from strategies.data_parallel import hooks
from strategies.frameworks import kernel_set
from strategies.job import Job
from strategies.lowering.lower import lower
from strategies.plan.framework_options import all_options
from strategies.plan.plan import Plan
from strategies.planner.bounds.every_plan import SLACK, bounds
from strategies.planner.bounds.layer_cost_table import inside, kinds_of
from strategies.planner.bounds.longest_path import longest_path
from strategies.planner.bounds.single_plan import Refiner
from strategies.planner.search.candidates import candidates
from strategies.planner.search.site import ANOMALY
from strategies.planner.search.space import Axis, Space
from strategies.read_job import read_job
from strategies.schedules import schedules
from topologies.reading import UserError

PLAN: dict[str, Any] = {  # field -> values that are drawn; None: as the plan has it
    "tp": st.sampled_from([1, 2, 4, 8]),
    "pp": st.sampled_from([1, 2, 4]),
    "sequence_parallel": st.booleans(),
    "cp": st.sampled_from([1, 1, 2]),
    "cp_method": st.sampled_from(["ring", "ulysses", "all_gather"]),
    "ep": st.sampled_from([1, 1, 2]),
    "schedule": st.sampled_from(list(schedules)),
    "data_parallel": st.sampled_from(list(hooks)),
    "microbatch": st.integers(1, 2),
    "accumulation": st.integers(1, 6),
    "local_steps": st.just(2),
    "recompute": st.sampled_from(["none", "selective", "full"]),
    "overlap": st.booleans(),
    "overlap_p2p": st.booleans(),
    "bucket": st.sampled_from([None, "10 kB", "100 kB", "25 MB"]),
    "optimizer": st.sampled_from(["adam", "sgd"]),
    "precision": st.sampled_from(["bf16", "fp32"]),
    "gradients": st.sampled_from(["same", "fp32"]),
    "shard": st.sampled_from([None, None, 2, 4]),
    "reshard": st.booleans(),
    "gradient_sync": st.sampled_from([None, "every", "last"]),
    "reshard_after_backward": st.sampled_from([None, True]),
    "order": st.sampled_from(["tp-cp-ep-dp-pp", "dp-tp-pp-cp-ep", "pp-tp-cp-ep-dp", "tp-cp-ep-pp-dp"]),
}
RARE: dict[str, Any] = {  # the same, of which a plan has a few
    "kernels": st.sampled_from(["torch", "compiled", "apex"]),
    "timers": st.just(True),
    "clip_gradients": st.just(False),
    "blocking_launches": st.just(True),
    "accumulation_fusion": st.booleans(),
    "joined_products": st.booleans(),
    "complex_rotary": st.just(True),
    "repeated_keys": st.just(True),
    "sync_norm": st.just(True),
    "offload_activations": st.integers(1, 3),
    "attention": st.sampled_from(["materialised", "flash2", "sdpa"]),
    "overlap_tp": st.sampled_from(["none", "pieces", "weight_gradient"]),
    "expert_tp": st.just(1),
    "imbalance": st.just(1.5),
    "token_dispatcher": st.sampled_from(["allgather", "deepep", "hybridep"]),
    "dispatcher_sms": st.sampled_from([0, 32]),
    "expert_spread": st.sampled_from([0.0, 0.3]),
    "capacity_factor": st.just(1.25),
    "pad_to_capacity": st.just(True),
    "first_stage_layers": st.just(1),
    "set_to_none": st.booleans(),
    "gradient_as_bucket_view": st.booleans(),
    "broadcast_buffers": st.booleans(),
    "dropout": st.just(True),
    "early_stop": st.booleans(),
    "packing": st.sampled_from([{"lengths": [4]}, {"lengths": [2, 3, 30]}]),
    "lora": st.sampled_from([{"rank": 8, "targets": "attention"}, {"rank": 8, "targets": ["q_proj"], "weights": "nf4"}]),
    "freeze": st.sampled_from([{"layers": 1}, {"layers": 1, "embedding": False}, {"layers": 0, "head": True}]),
    "outside_optimizer": st.sampled_from([["head"], ["embedding"]]),
    "flat_parameters": st.just(True),
    "root_unit": st.just(True),
    "keep_last_unit": st.just(True),
    "fused_optimizer": st.booleans(),
    "last_stage_layers": st.just(1),
    "embedding_as_layer": st.just(True),
    "loss_as_layer": st.just(True),
    "loss": st.sampled_from(["fused", "torch", "operators"]),
    "unpad": st.just(True),
    "loss_metrics": st.just(2),
    "scatter_gather": st.sampled_from(["deepspeed", "deepspeed_forward", "megatron"]),
    "recompute_modules": st.sampled_from([["layernorm"], ["mlp", "core_attn"], ["moe"], ["moe_act", "shared_experts"]]),
    "expandable_segments": st.just(True),
    "master_weights": st.just(False),
    "exp_avg_dtype": st.just("bf16"),
    "exp_avg_sq_dtype": st.just("bf16"),
    "deterministic": st.just(True),
    "persistent_norm": st.just(True),
    "fp16_lm_cross_entropy": st.just(True),
    "timed_parts": st.just(True),
    "check_gradients": st.just(False),
    "average_in_collective": st.just(True),
    "pad_buckets_for_high_nccl_busbw": st.just(True),
    "overlap_param_gather": st.just(True),
    "cuda_graph": st.just(True),
    "router_fusion": st.just(True),
    "layers_per_stage": st.sampled_from([(0, 6), (6, 0), (4, 2)]),
    "sequence": st.just(16),
    "ep_nodes": st.just(2),
    "routed_nodes": st.sampled_from([1, 2]),
    "recompute_method": st.sampled_from(["block", "uniform", "every"]),
    "fp8": st.fixed_dictionaries(
        {"scaling": st.sampled_from(["delayed", "tensorwise"]), "gather": st.booleans()},
        optional={
            "dispatch": st.just(True),
            "activation_func_input_store": st.just(True),
            "attention_output": st.just("e5m6"),
        },
    ),
    "recompute_layers": st.integers(1, 2),
    "microbatches_per_replica": st.sampled_from([(1, 2), (4, 1), (2, 1, 1, 3)]),
    "uneven_batch": st.sampled_from(["drop_last", "join"]),
    "algorithm": st.sampled_from(["ring", "auto/simple"]),
    "powersgd": st.fixed_dictionaries({"matrix_approximation_rank": st.integers(1, 2), "warm_start": st.booleans()}),
    "offload": st.sampled_from(
        [
            {"optimizer": "cpu", "tile": 1000},
            {"optimizer": "nvme"},
            {"parameters": "cpu"},
            {"optimizer": "cpu", "parameters": "cpu"},
            {"optimizer": "nvme", "parameters": "nvme", "tile": 5000},
        ]
    ),
    "deepspeed": st.fixed_dictionaries(
        {"reduce_bucket_size": st.sampled_from([5_000, 50_000, 10**9])},
        optional={
            "use_multi_rank_bucket_allreduce": st.booleans(),
            "stage3_prefetch_bucket_size": st.sampled_from([0, 10_000]),
            "stage3_max_live_parameters": st.just(10_000),
            "stage3_param_persistence_threshold": st.sampled_from([0, 100_000]),
            "stage3_max_reuse_distance": st.sampled_from([0, 40_000]),
            "zero_quantized_weights": st.booleans(),
            "zero_quantized_gradients": st.booleans(),
            "version": st.sampled_from(["0.3.13", "0.5", "0.6"]),
            "zero_hpz_partition_size": st.sampled_from([2, 4]),
            "cpu_checkpointing": st.just(True),
            "partition_activations": st.just(True),
            "tiles": st.sampled_from([1, 3]),
        },
    ),
}
EXPERTS = {"experts": 8, "chosen": 2, "ffn": 64, "shared": 1, "first_dense": 1}
SHAPES = [(8, 1), (4, 2), (8, 2), (2, 4)]
LINKS = {kind: {"efficiency": 0.9, "latency": "2 us"} for kind in ("nvlink", "pcie", "host", "nic", "leaf", "spine", "loopback")}
OVERHEAD = {"context": "1 MB", "communicator": "1 kB", "reserve": 0.05}
OLDER = {"flash2": {"efficiency": 0.5, "block": 1, "backward": 1.0}}
GPU = {
    "name": "toy",
    "sms": 1,
    "peak": {"bf16": "1 TFLOP/s", "fp16": "1 TFLOP/s", "fp32": "1 TFLOP/s", "fp8": "2 TFLOP/s"},
    "memory": "1 PB",
    "memory_bandwidth": "1 TB/s",
}
CPU = {"memory": "1 TB", "memory_bandwidth": "20 GB/s", "disk": "1 TB", "disk_read": "2 GB/s", "disk_write": "1 GB/s"}


@st.composite
def jobs(draw: Any, offloaded: bool = False) -> dict[str, Any]:
    """Any plan, most of which keep to the rules."""
    plan = draw(st.fixed_dictionaries(PLAN))
    for name in draw(st.lists(st.sampled_from(sorted(RARE)), max_size=3, unique=True)):
        plan[name] = draw(RARE[name])
    if offloaded:
        plan |= {"data_parallel": draw(st.sampled_from(["zero1", "zero2", "zero3"])), "ep": 1, "offload": draw(RARE["offload"])}
    plan |= {"recompute": "full", "recompute_layers": plan.get("recompute_layers", 1)} if "recompute_method" in plan else {}
    plan |= {"recompute": "full"} if "early_stop" in plan else {}
    plan |= {"pp": 1, "schedule": "1f1b", "recompute": "none"} if "offload_activations" in plan else {}
    plan |= {"recompute": "selective"} if "recompute_modules" in plan else {}
    plan |= {"overlap": False, "overlap_p2p": False, "overlap_tp": "none"} if "blocking_launches" in plan else {}
    hook = plan["data_parallel"]
    if "deepspeed" in plan and hook == "zero3":
        plan |= {"pp": 1, "schedule": "1f1b", "reshard": True, "shard": None, "ep": 1, "order": "tp-cp-ep-dp-pp"}
    plan["ep"] *= plan["tp"] if "expert_tp" in plan else 1  # whole experts are on all tp ranks
    plan["sequence_parallel"] &= plan["tp"] > 1 and "scatter_gather" not in plan
    plan["reshard"] |= hook != "zero3"
    plan["gradients"] = "fp32" if hook == "ddp_fp16" else plan["gradients"]
    loose = plan.get("kernels") in ("torch", "compiled") and not {"deepspeed", "offload"} & plan.keys()
    unfit = {
        "set_to_none": not loose or hook in ("zero1", "zero2"),
        "gradient_as_bucket_view": not loose or not hooks[hook].of_ddp,
        "broadcast_buffers": not hooks[hook].of_ddp,
        "recompute_layers": "recompute_method" not in plan,
        "local_steps": hook not in ("local_sgd", "diloco"),
        "bucket": "deepspeed" in plan or hook == "dataparallel",
        "overlap": hook == "dataparallel",
        "shard": plan["shard"] is None or not hook.startswith("zero"),
        "powersgd": hook != "ddp_powersgd",
        "ep_nodes": "routed_nodes" not in plan,
        "routed_nodes": "ep_nodes" not in plan,
        "pad_to_capacity": "capacity_factor" not in plan,
        "dispatcher_sms": "token_dispatcher" not in plan or plan["ep"] == 1,
        "flat_parameters": hook != "zero3" or plan.get("kernels") not in ("torch", "compiled") or "deepspeed" in plan,
        "gradient_sync": hook not in ("zero2", "zero3") or {"deepspeed", "offload"} & plan.keys(),
        "reshard_after_backward": (hook, plan["pp"], plan.get("gradient_sync")) != ("zero3", 1, "last")
        or {"deepspeed", "offload"} & plan.keys(),
    }
    fsdp2 = not unfit["flat_parameters"] and plan["pp"] == 1 and not {"flat_parameters", "offload"} & plan.keys()
    unfit |= {"root_unit": not fsdp2, "keep_last_unit": not fsdp2 or not plan.get("reshard", True)}
    own = Plan.model_fields.keys() | type(kernel_set(plan.get("kernels", "megatron")).options).model_fields.keys()
    plan = {name: value for name, value in plan.items() if name in own and not unfit.get(name)}
    shape = draw(st.sampled_from(SHAPES))
    if hook == "dataparallel":
        plan |= {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "sequence_parallel": False}
        shape = (8, 1)
    moe = {"moe", "moe_act"}.intersection(plan.get("recompute_modules", ()))
    experts = (
        EXPERTS
        if moe
        or {"expert_tp", "imbalance", "expert_spread", "token_dispatcher", "capacity_factor", "ep_nodes"} & plan.keys()
        or plan["ep"] > 1
        else None
    )
    model = {"layers": draw(st.integers(4, 9)), "tied": draw(st.booleans()), "gated": draw(st.booleans()), "experts": experts}
    model["layers"] = 6 if "layers_per_stage" in plan else model["layers"]
    return {"plan": plan, "model": model, "shape": shape, "slow": draw(st.booleans())}


def made_of(job: dict[str, Any], toy_job: Any, toy_profile: Any, without: str = "") -> tuple[Job, Prices, Summary]:
    """The job, its prices and its simulation; an example is passed over when the plan breaks a rule."""
    slow = job["slow"]
    profile = toy_profile(
        links=LINKS, launch="1 us", slowdown=1.2 if slow else 1.0, collective_launch="3 us", overhead=OVERHEAD, older=OLDER
    )
    node = {"nvlink": "9 GB/s", "nic": "1 GB/s" if slow else "5 GB/s", "cpu": CPU, "gpu": GPU}
    plan = {name: value for name, value in job["plan"].items() if name != without}
    try:
        example = toy_job(*job["shape"], model=job["model"], node=node, **plan)
        prices = Prices(profile, example.cluster.node.gpu)
        return example, prices, summarise(run(lower(example.model, example.resolve()), example.cluster.topology(), prices))
    except UserError:
        assume(False)
        raise


def every_bound(job: Job, prices) -> tuple[list[float], list[float]]:
    """Bounds of the step, the roughest first, and of memory: of a job as a space of one plan."""
    plans = candidates(job, Space((Axis("plan.tp", ({"plan.tp": job.plan.tp},)),)))
    assert len(plans) == 1
    kinds = kinds_of(plans, prices)
    rough = bounds(plans, kinds, prices)
    finer = Refiner(plans, kinds, rough, prices)
    longest, held = longest_path(job, job.resolve(), prices)
    return [float(rough.step[0]), finer.passes(0), finer.exchange(0), longest], [float(rough.memory[0]), held]


@given(job=jobs())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
)
def test_no_bound_exceeds_the_simulation(toy_job, toy_profile, job) -> None:
    example, prices, answer = made_of(job, toy_job, toy_profile)
    steps, memory = every_bound(example, prices)
    assert max(steps) <= answer.step_seconds
    assert max(memory) <= answer.worst.peak


def test_a_bound_that_is_met_stays_below_by_what_rounding_may_do(toy_job, toy_prices) -> None:
    """One microbatch on one GPU is its passes and its update, which no order of them shortens."""
    job = toy_job(1, optimizer="sgd", clip_gradients=False, check_gradients=False)
    step = summarise(run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())).step_seconds
    rough, passes, *_ = every_bound(job, toy_prices())[0]
    assert [rough, passes] == pytest.approx([step] * 2, rel=2 * SLACK)
    assert max(rough, passes) < step


def parts_of_the_answer(job: Job, prices) -> tuple[list[float], list[float]]:
    """Every bound as a part of the simulated step, and of the simulated peak."""
    answer = summarise(run(lower(job.model, job.resolve()), job.cluster.topology(), prices))
    steps, memory = every_bound(job, prices)
    return [bound / answer.step_seconds for bound in steps], [bound / answer.worst.peak for bound in memory]


MET = pytest.approx(1, abs=3 * SLACK)
PLAIN: dict[str, Any] = {"optimizer": "sgd", "clip_gradients": False, "check_gradients": False, "precision": "fp32"}


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 4), (4, 8)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "interleaved-overlapped", "interleaved-zb"])
def test_where_only_passes_take_time_their_order_is_the_step(toy_job, toy_prices, schedule, ranks, microbatches) -> None:
    """Neighbours' links have no end of bandwidth. With one chunk, filling, one rank's passes and draining are all there is."""
    plan = PLAIN | {"pp": ranks, "accumulation": microbatches, "schedule": schedule}
    job = toy_job(ranks, model={"layers": 8}, node={"nvlink": "1000 PB/s"}, **plan)
    (rough, passes, exchange, longest), (memory, held) = parts_of_the_answer(job, toy_prices())
    assert (passes, longest, held) == (MET, MET, MET)
    assert rough == MET if schedule in ("gpipe", "1f1b") else 0.9 < rough < 1
    assert memory == MET if schedule in ("gpipe", "1f1b", "interleaved") else 0.9 < memory < 1
    assert exchange == 0.0  # nothing is between dp ranks


@pytest.mark.parametrize("layers", [4, 5, 7])
@pytest.mark.parametrize("together", [1, 2, 3])
def test_layers_that_are_recomputed_together_have_the_work_of_all(toy_job, toy_prices, layers, together) -> None:
    """On one GPU the passes are the step, whether the last layers of a stage are fewer or not."""
    plan = PLAIN | {"recompute": "full", "recompute_method": "uniform", "recompute_layers": together}
    (rough, passes, _, longest), (_, held) = parts_of_the_answer(toy_job(1, model={"layers": layers}, **plan), toy_prices())
    assert (rough, passes, longest, held) == (MET, MET, MET, MET)


def test_layers_of_several_kinds_have_each_its_own_work(toy_job, toy_prices) -> None:
    """A dense layer and three with experts, on one GPU."""
    plan = PLAIN | {"accumulation": 2}
    (rough, passes, _, longest), (_, held) = parts_of_the_answer(toy_job(1, model={"experts": EXPERTS}, **plan), toy_prices())
    assert (rough, passes, longest, held) == (MET, MET, MET, MET)


def test_an_update_of_several_passes(toy_job, toy_prices) -> None:
    """fp32 gradients of bf16 parameters: an update, copies to bf16, and gradients set to zero."""
    plan = PLAIN | {"precision": "bf16", "gradients": "fp32"}
    (rough, passes, _, longest), (memory, held) = parts_of_the_answer(toy_job(1, **plan), toy_prices())
    assert (rough, passes, longest, memory, held) == (MET, MET, MET, MET, MET)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("hook", ["zero2", "zero3"])
def test_what_runs_in_turn_takes_its_sum(toy_job, toy_prices, hook, microbatches) -> None:
    """Passes, exchanges and the update follow each other; between nodes the rough bound knows what passes the NICs."""
    plan = PLAIN | {"data_parallel": hook, "overlap": False, "accumulation": microbatches}
    across = parts_of_the_answer(toy_job(1, 8, node={"nic": "10 GB/s"}, **plan), toy_prices())[0]
    assert (across[0], across[2], across[3]) == (MET, MET, MET)
    inside = parts_of_the_answer(toy_job(8, 1, node={"nvlink": "0.1 GB/s"}, **plan), toy_prices())[0]
    assert (inside[2], inside[3]) == (MET, MET)
    assert inside[0] == inside[1] < 0.01  # the passes and the update


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("hook", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_on_a_slow_network_the_exchange_is_the_step(toy_job, toy_prices, hook, overlap, microbatches) -> None:
    """0.1 GB/s: passes take less than 1 % of the step, and the longest path through the program is all of it."""
    plan = PLAIN | {"data_parallel": hook, "overlap": overlap, "accumulation": microbatches}
    for shape, node in (((8, 1), {"nvlink": "0.1 GB/s"}), ((1, 8), {"nic": "0.1 GB/s"})):
        rough, passes, exchange, longest = parts_of_the_answer(toy_job(*shape, node=node, **plan), toy_prices())[0]
        assert longest == MET
        assert 0.996 < exchange < 1
        assert passes < 0.01
        assert rough == (pytest.approx(exchange, rel=1e-5) if shape == (1, 8) else passes)


@given(job=jobs(offloaded=True))
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
)
def test_offloading_does_not_shorten_a_step(toy_job, toy_profile, job) -> None:
    """Hence a search asks what is known of the plan without it (`Site.floor`)."""
    offloaded = made_of(job, toy_job, toy_profile)[2]
    without = made_of(job, toy_job, toy_profile, without="offload")[2]
    assert without.step_seconds * (1 - ANOMALY) <= offloaded.step_seconds


def test_every_field_of_a_plan_is_drawn() -> None:
    options = {name for name, _, _ in all_options()}
    follow = {"dp", "global_batch", "chunks", "framework"}  # from others
    assert PLAN.keys() | RARE.keys() == Plan.model_fields.keys() - follow | options


def test_collectives_inside_layers_are_priced_among_the_ranks_that_meet_there() -> None:
    """Of tp=2, dp=4 and pp=2 on 16 GPUs only the tp pair: what groups beside it send is left out."""
    plan = read_job(model="llama-3.1-8b", cluster="dgx-a100", nodes=2, plan=dict(tp=2, pp=2, dp=4, microbatch=1)).resolve()
    assert plan.grid.world == 16
    grid = inside(plan)
    assert grid.degree("tp") == grid.world == 2
    assert {axis for axis, _ in grid.sizes} == {axis for axis, _ in plan.grid.sizes}
    alone = read_job(model="llama-3.1-8b", cluster="dgx-a100", nodes=2, plan=dict(pp=2, microbatch=1)).resolve()
    assert inside(alone).world == 1
