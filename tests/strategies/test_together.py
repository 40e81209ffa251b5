"""Jobs side by side on one cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import shardyard
from shardyard import UserError, read_job, simulate, together
from sim.analysis.summary import summarise
from strategies.job import Job
from topologies.cluster_files import load_cluster

SMALL = {"name": "small", "hidden": 1536, "layers": 8, "heads": 12, "vocabulary": 36000, "context": 1024}
PLANS = (
    {"tp": 4, "pp": 2, "data_parallel": "zero1", "accumulation": 8},
    {"data_parallel": "zero3", "accumulation": 2},
    {"tp": 3, "data_parallel": "zero1", "accumulation": 2},
    {"data_parallel": "local_sgd", "local_steps": 2, "accumulation": 1, "kernels": "torch"},
)


WIDE = SMALL | {"hidden": 12288, "heads": 96}  # kernels take long enough for GPUs not to wait for their hosts


def job(plan: dict, nodes: int = 4, **fields: object) -> Job:
    """By default of GPUs that are alike."""
    fields = {"variability": 0, "model": SMALL, **fields}
    cluster = {"based_on": "dgx-h100", "node": {"gpus": 6, "nics": 6}, "fabric": {"kind": "single", "leaf_nodes": None}}
    return read_job(None, cluster=cluster if plan.get("tp") == 3 else "dgx-h100", nodes=nodes, plan=plan, **fields)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_disjoint_nodes_on_a_fabric_that_does_not_block_are_alone_to_the_bit(plan: dict) -> None:
    timeline = simulate(job(plan))
    usual = timeline.step / timeline.program.steps
    for answer in together([job(plan), job(plan)], steps=2):
        assert answer.steps == (usual, usual)
        assert answer.alone == usual
        assert answer.slowdown == 1
        assert answer.kinds == ()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_jobs_that_share_nothing_take_the_expected_step_that_is_predicted_for_each(plan: dict) -> None:
    """With GPUs that differ by 5 %, as much as the step that `simulate` answers for the job alone."""
    asked = job(plan, variability=0.05)
    expected = summarise(simulate(asked))
    assert expected.variability is not None
    assert expected.variability.seconds > 0
    for answer in together([asked, job(plan)], steps=2)[:1]:
        assert not answer.ideal
        assert answer.alone == expected.step_seconds
        assert answer.steps == (answer.alone, answer.alone)
        assert answer.slowdown == 1


def test_steps_alone_and_beside_others_are_of_the_same_gpus() -> None:
    """A job that computes for long and sends little: it waits for its slowest GPU just as long beside another one, although its
    blocks are cut where they meet the other's traffic, so that it has more places, which by themselves ask for fewer draws. Only
    while gradients of its last microbatch are on the links, which take longer there, nothing is waited for.
    """
    even, odd = (f"nodes {','.join(map(str, range(first, 32, 2)))}" for first in (0, 1))
    plan = {"tp": 4, "data_parallel": "zero1", "accumulation": 32, "order": "dp-tp-cp-ep-pp"}
    other, cluster = job(PLANS[1], nodes=16), oversubscribed(4, nodes=32)
    ideal, expected = (
        together([job(plan, nodes=16, model=WIDE, variability=each), other], [even, odd], cluster, 1)[0] for each in (0, 0.05)
    )
    assert ideal.slowdown > 1
    assert expected.together - ideal.together == pytest.approx(expected.alone - ideal.alone, rel=0.3 / 32)
    assert expected.alone > 1.01 * ideal.alone


def test_a_job_on_gpus_of_one_kind_of_a_mixed_cluster_takes_its_usual_expected_step() -> None:
    mixed = load_cluster("examples/clusters/a100-and-h100.yaml")
    asked = job({"tp": 4, "data_parallel": "zero1", "accumulation": 2}, variability=0.05)
    _, on_h100 = together([asked, asked], ["nodes 0-3", "nodes 4-7"], mixed)
    assert on_h100.alone == summarise(simulate(asked)).step_seconds


def test_jobs_that_were_asked_before_are_together_as_well() -> None:
    jobs = [job(PLANS[0]), job(PLANS[0])]
    assert [each.cluster.groups for each in jobs]  # worked out once, and kept in the cluster
    assert [each.gpus for each in together(jobs, steps=1)] == [32, 32]


def oversubscribed(times: float, nodes: int = 8) -> object:
    return load_cluster("dgx-h100", nodes, {"fabric": {"kind": "fat_tree", "leaf_nodes": 2, "oversubscription": times}})


def test_jobs_that_share_uplinks_slow_each_other_down() -> None:
    """Both jobs have a node below every leaf; an uplink of the rate of one node's NICs is enough for one of them alone."""
    first, second = together([job(PLANS[1])] * 2, ["nodes 0,2,4,6", "nodes 1,3,5,7"], oversubscribed(2))
    assert first.slowdown > 1.05
    assert first.slowdown == pytest.approx(second.slowdown, rel=1e-9)  # they are alike
    assert first.kinds == ("spine",)
    near, _ = together([job(PLANS[1])] * 2, ["nodes 0-3", "nodes 4-7"], oversubscribed(2))
    assert near.slowdown == 1
    blocked, _ = together([job(PLANS[1])] * 2, ["nodes 0,2,4,6", "nodes 1,3,5,7"], oversubscribed(4))
    assert blocked.together > first.together


def test_a_quiet_neighbour_does_less_than_a_loud_one() -> None:
    place = ["nodes 0,2,4,6", "nodes 1,3,5,7"]
    quiet, loud = ({"data_parallel": "zero1", "accumulation": count} for count in (64, 1))
    beside = [together([job(PLANS[1]), job(other)], place, oversubscribed(4))[0].slowdown for other in (quiet, loud)]
    assert 1 < beside[0] < beside[1]


@pytest.mark.parametrize(
    ("jobs", "on", "message"),
    [
        (1, (), "needs at least two jobs"),
        (2, ("nodes 0-3",), "--on is given 1 times for 2 jobs"),
        (2, ("nodes 0-3", "nodes 3-6"), "GPU 24 belongs to small and to small"),
        (2, ("nodes 0-3", "nodes 4-6"), "--on 'nodes 4-6': 24 GPUs, and small is for 32"),
        (2, ("nodes 0-3", "nodes 4-9"), "--on 'nodes 4-9': node 9: they are numbered 0 to 7"),
        (2, ("nodes 0-3", "racks 1"), "--on 'racks 1': must be on 'all', 'gpu 3', 'gpus 0-7,12' or 'node 2'"),
    ],
)
def test_what_cannot_be_placed_is_refused(jobs: int, on: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        together([job(PLANS[0])] * jobs, on)
    assert message in str(error.value)


def test_jobs_that_the_cluster_has_no_nodes_left_for_are_refused() -> None:
    first = job(PLANS[0])
    with pytest.raises(UserError, match=f"small needs {first.cluster.gpus} GPUs, and 0 of {first.cluster.gpus} are left"):
        together([first, first], cluster=first.cluster)


def test_jobs_that_are_not_played_side_by_side_are_refused() -> None:
    other = read_job(None, model=SMALL, cluster="dgx-a100", nodes=4, plan=PLANS[0])
    for second, message in (
        (other, "small and small describe different clusters"),
        (job(PLANS[0], effects=["gpu 0: speed 0.9"]), "has effects"),
        (job(PLANS[0], profile="a100"), "profile must be one for all jobs, whose links are one network"),
        (job({"data_parallel": "zero1", "offload": {"optimizer": "cpu"}, "accumulation": 1}), "offloads to CPUs"),
        (job({"pp": 4, "schedule": "pipedream", "accumulation": 8}), "asynchronous"),
    ):
        with pytest.raises(UserError, match=message):
            together([job(PLANS[0]), second])


def test_gpus_of_several_kinds_are_shared_too() -> None:
    mixed = load_cluster("examples/clusters/a100-and-h100.yaml")
    plan = {"tp": 4, "data_parallel": "zero1", "accumulation": 2}
    on_a100, on_h100 = together([job(plan)] * 2, ["nodes 0-3", "nodes 4-7"], mixed)
    assert on_a100.slowdown == on_h100.slowdown == 1
    assert on_h100.alone < on_a100.alone


def test_the_command(tmp_path: Path) -> None:
    for name, plan in (("a", PLANS[0]), ("b", PLANS[1])):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"model": SMALL, "cluster": "dgx-h100", "nodes": 4, "plan": plan}))
    files = [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]
    shown = CliRunner().invoke(shardyard.main, ["together", *files])
    assert shown.exit_code == 0, shown.output
    assert "2 jobs on 8 × dgx-h100: none slows another down" in shown.output
    assert "all jobs from the same moment on; expected ones, of GPUs that are not quite alike" in shown.output
    ideal = json.loads(CliRunner().invoke(shardyard.main, ["together", *files, "--ideal", "--json"]).stdout)
    expected = json.loads(CliRunner().invoke(shardyard.main, ["together", *files, "--json"]).stdout)
    for alike, usual in zip(ideal["jobs"], expected["jobs"], strict=True):
        assert (alike["ideal"], usual["ideal"]) == (True, False)
        assert alike["alone"] < usual["alone"]
    (tmp_path / "slim.yaml").write_text("based_on: dgx-h100\nfabric: {kind: fat_tree, leaf_nodes: 2, oversubscription: 8}\n")
    options = [
        "--cluster",
        str(tmp_path / "slim.yaml"),
        "--nodes",
        "8",
        "--on",
        "nodes 0,2,4,6",
        "--on",
        "nodes 1,3,5,7",
        "--json",
    ]
    answer = json.loads(CliRunner().invoke(shardyard.main, ["together", *files, *options]).stdout)
    assert [job["name"] for job in answer["jobs"]] == ["a", "b"]
    assert all(job["slowdown"] >= 1 and job["kinds"] == ["spine"] and len(job["steps"]) >= 3 for job in answer["jobs"])
    wrong = CliRunner().invoke(shardyard.main, ["together", files[0]])
    assert (wrong.exit_code, wrong.output.strip()) == (2, "error: together: needs at least two jobs")
