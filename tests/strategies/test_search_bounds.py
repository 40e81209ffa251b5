"""No bound exceeds what is simulated, whatever the plan: at every stage of tightening, of the step and of memory."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.run import run
from sim.summary import summarise
from strategies.data_parallel import hooks
from strategies.job import Job
from strategies.lower import lower
from strategies.schedules import schedules
from strategies.search.bounds import bounds
from strategies.search.candidates import candidates
from strategies.search.longest import longest_path
from strategies.search.refine import Refiner
from strategies.search.space import Axis, Space
from strategies.search.work import kinds_of
from topologies.reading import UserError

plans = st.fixed_dictionaries({
    "tp": st.sampled_from([1, 2, 4, 8]), "pp": st.sampled_from([1, 2, 4]), "sequence_parallel": st.booleans(),
    "cp": st.sampled_from([1, 1, 2]), "cp_method": st.sampled_from(["ring", "ulysses"]), "ep": st.sampled_from([1, 1, 2]),
    "schedule": st.sampled_from(list(schedules)), "data_parallel": st.sampled_from(list(hooks)),
    "microbatch": st.integers(1, 2), "accumulation": st.integers(1, 6), "local_steps": st.sampled_from([None, None, 2]),
    "recompute": st.sampled_from(["none", "selective", "full"]), "overlap": st.booleans(), "overlap_p2p": st.booleans(),
    "bucket": st.sampled_from(["10 kB", "100 kB", "25 MB"]), "optimizer": st.sampled_from(["adam", "sgd"]),
    "precision": st.sampled_from(["bf16", "fp32"]), "gradients": st.sampled_from(["same", "fp32"]),
    "shard": st.sampled_from([None, None, 2, 4]), "reshard": st.booleans(),
    "order": st.sampled_from(["tp-cp-ep-dp-pp", "dp-tp-pp-cp-ep", "pp-tp-cp-ep-dp", "tp-cp-ep-pp-dp"]),
})  # fmt: skip
EXPERTS = {"experts": 8, "chosen": 2, "ffn": 64, "shared": 1, "first_dense": 1}
models = st.fixed_dictionaries({
    "layers": st.integers(4, 9), "tied": st.booleans(), "gated": st.booleans(), "experts": st.sampled_from([None, None, EXPERTS]),
})  # fmt: skip
shapes = st.sampled_from([(8, 1), (4, 2), (8, 2), (2, 4)])
LINKS = {kind: {"efficiency": 0.9, "latency": "2 us"} for kind in ("nvlink", "pcie", "host", "nic", "leaf", "spine", "loopback")}
OVERHEAD = {"context": "1 MB", "communicator": "1 kB", "reserve": 0.05}


def every_bound(job: Job, prices) -> tuple[list[float], float]:
    """Bounds of the step, the roughest first, and of memory: of a job as a space of one plan."""
    found = candidates(job, Space((Axis("plan.tp", ({"plan.tp": job.plan.tp},)),)))
    assert len(found) == 1
    kinds = kinds_of(found, prices)
    rough = bounds(found, kinds, prices)
    finer = Refiner(found, kinds, rough, prices)
    steps = [float(rough.step[0]), finer.passes(0), finer.exchange(0), longest_path(job, job.resolve(), prices)]
    return steps, float(rough.memory[0])


@given(plan=plans, model=models, shape=shapes, slow=st.booleans())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
)
def test_no_bound_exceeds_the_simulation(toy_job, toy_prices, plan, model, shape, slow) -> None:
    prices = toy_prices(links=LINKS, launch="1 us", slowdown=1.2 if slow else 1.0, collective_launch="3 us", overhead=OVERHEAD)
    try:
        job = toy_job(*shape, model=model, node={"nvlink": "9 GB/s", "nic": "1 GB/s" if slow else "5 GB/s"}, **plan)
        program = lower(job.model, job.resolve())
    except UserError:
        assume(False)
    answer = summarise(run(program, job.cluster.topology(), prices))
    steps, memory = every_bound(job, prices)
    assert max(steps) <= answer.step_seconds
    assert memory <= answer.worst.peak
