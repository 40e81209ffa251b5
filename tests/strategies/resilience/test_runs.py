"""Jobs over days: equal to a step's own answer without failures, Llama 3's 54 days within what other clusters say."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import shardyard
from shardyard import UserError, predict, read_job
from sim.runs.replications import Estimate, replicate
from sim.runs.spec import Saving
from strategies.resilience.initialization import published
from strategies.resilience.run_spec import NEVER, prepare
from strategies.resilience.runs import alternatives, best_interval, run
from strategies.resilience.settings import RunSettings, read_run
from topologies.costs import cost, rates
from topologies.reading import load_yaml
from topologies.reliability import load_reliability

EXAMPLES = Path(__file__).parents[3] / "examples"
JOB = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "nodes": 16, "plan": {"data_parallel": "zero1", "sequence": 4096}}


def call(*words: str) -> dict:
    result = CliRunner().invoke(shardyard.main, words)
    assert result.exit_code == 0, result.output
    answer: dict = json.loads(result.output)
    return answer


def test_without_failures_days_and_dollars_are_those_of_the_step_to_the_bit() -> None:
    job = read_job(JOB, run={"failures": "none", "initialization": "0 s"})
    assert job.run is not None
    summary, money = predict(job), rates(job.cluster.node.gpu)
    prepared = prepare(job, job.run, tokens=1e12)
    assert prepared.spec.savings == (
        Saving("storage", NEVER, prepared.costs.snapshot, prepared.costs.write, prepared.costs.read),
    )
    answer = run(prepared, money, count=1)
    alone = cost(money, summary.gpus, summary.step_seconds, summary.tokens_per_second * summary.step_seconds, 1e12)
    assert answer.days.mean == alone.seconds / 86400
    assert answer.usd is not None
    assert answer.usd.mean == pytest.approx(alone.usd, rel=1e-15)
    assert answer.cost(money).joules == pytest.approx(alone.joules, rel=1e-12)
    assert (answer.goodput.mean, answer.ettr.mean, answer.finished) == (1.0, 1.0, 1.0)


def llama(failures: object) -> object:
    checkpoint = {"storage": "tectonic"}
    job = read_job(EXAMPLES / "hybrids/llama-3.1-405b.yaml", run={"failures": failures, "checkpoint": checkpoint})
    assert job.run is not None
    return prepare(job, job.run, days=54)


def test_llama_3_from_other_clusters() -> None:
    """419 unexpected interruptions in 54 days on 16,384 H100, and more than 90 % of effective training time (arXiv 2407.21783,
    section 3.3.4): inside what rates of five other clusters make of 80 % of the runs.
    """
    outcomes = replicate(llama("published").spec, 0, 60)  # type: ignore[attr-defined]
    failures = Estimate.of([float(sum(outcome.failures.values())) for outcome in outcomes])
    effective = Estimate.of([outcome.ettr for outcome in outcomes])
    assert failures.low < 419 < failures.high
    assert effective.low < 0.9 < effective.high
    assert failures.high < 10 * failures.low  # it says something


def test_llama_3_from_its_own_rates() -> None:
    """Its table of causes gives back its number of interruptions; one every 3.1 hours."""
    prepared = llama("llama-3")
    assert prepared.mtbf == pytest.approx(54 * 86400 / 419, rel=1e-3)  # type: ignore[attr-defined]
    outcomes = replicate(prepared.spec, 0, 20)  # type: ignore[attr-defined]
    assert np.mean([sum(outcome.failures.values()) for outcome in outcomes]) == pytest.approx(419, abs=3 * np.sqrt(419 / 20))
    gpu = np.mean([(outcome.failures["gpu"] + outcome.failures["hbm"]) / sum(outcome.failures.values()) for outcome in outcomes])
    assert gpu == pytest.approx(0.64, abs=0.02)  # 268 of 419


def test_the_published_rate_is_the_geometric_mean_of_five_clusters() -> None:
    days = [1 / load_reliability(name, "").mtbf(1, 8) for name in ("rsc-1", "rsc-2", "byterobust", "opt-175b", "bloom-176b")]
    together = load_reliability("published", "")
    assert 1 / together.mtbf(1, 8) == pytest.approx(float(np.exp(np.log(days).mean())), rel=2e-3)
    assert together.rate_spread == pytest.approx(float(np.log(days).std(ddof=1)), abs=1e-3)


def test_larger_nodes_fail_more() -> None:
    """As many failures for as many GPUs, however many of them are a node; software of the job fails as often."""
    published = load_reliability("published", "")
    assert published.mtbf(9, 72) == pytest.approx(published.mtbf(81, 8))
    own = load_reliability({"parts": {"node": {"mtbf": "100 days"}, "job": {"mtbf": "3 days", "unit": "job"}}}, "")
    assert own.mtbf(9, 72) == own.mtbf(9, 8)


def test_failures_of_meta_are_as_published() -> None:
    """MTTF of 7.9 h with 1,024 GPUs on RSC-1, projected to 1.8 h on 16,384 (arXiv 2410.21680); r_f alone gives 28.8 and 1.8 h."""
    assert load_reliability("rsc-1", "").mtbf(2048, 8) / 3600 == pytest.approx(1.8, abs=0.05)


def test_start_up_is_what_mlperf_submissions_took() -> None:
    fit, rows = published(), load_yaml(EXAMPLES.parent / "strategies/resilience/initialization.yaml")["seconds"]
    assert fit.submissions == sum(len(values) for values in rows.values()) > 100
    assert fit.most == 11_616
    inside = [
        abs(np.log(value / fit.seconds(int(gpus)))) < 1.2816 * fit.spread for gpus, values in rows.items() for value in values
    ]
    assert 0.7 < np.mean(inside) < 0.95  # 80 % of them
    assert 300 < fit.seconds(16_384) < 1200  # Meta: 5 to 20 minutes (arXiv 2410.21680)


def test_intervals_follow_rule_time_or_steps() -> None:
    def steps(**checkpoint: object) -> list[int]:
        return [saving.steps for saving in prepare(read_job(JOB), read_run({"checkpoint": checkpoint}, "run"), 1).spec.savings]

    step = predict(read_job(JOB)).step_seconds
    assert steps(interval="30 min") == [round(1800 / step)]
    assert steps(interval=200) == steps(interval="200 steps") == [200]
    assert steps(interval="1 ms") == [1]  # after every step
    prepared = prepare(read_job(JOB), RunSettings(), 1)
    expected = max(prepared.costs.write, np.sqrt(2 * prepared.costs.snapshot * prepared.mtbf)) / step
    assert steps(interval="young") == [round(expected)]
    with pytest.raises(UserError, match="storage_interval: policy=asynchronous saves to one place"):
        steps(storage_interval=200)
    first, second = steps(policy="multi_tier", interval=100, storage_interval=250)
    assert (first, second) == (100, 300)  # storage at every third save


def test_the_best_interval_is_near_the_rules() -> None:
    settings = read_run({"failures": "rsc-1", "checkpoint": {"policy": "synchronous"}, "initialization": "5 min"}, "run")
    prepared = prepare(read_job(JOB, {"nodes": 128}), settings, days=200)
    tried = dict(best_interval(prepared, seed=3))
    present = tried[prepared.spec.savings[0].steps]
    assert present == pytest.approx(max(tried.values()), abs=5e-4)
    assert max(tried.values()) - min(tried.values()) > 1e-3


def test_without_failures_no_interval_is_the_best() -> None:
    """Every save then only costs time: nothing is tried."""
    prepared = prepare(read_job(JOB, {"nodes": 128}), read_run({"failures": "none"}, "run"), days=2)
    assert prepared.spec.savings
    assert not prepared.spec.components
    assert best_interval(prepared) == []


def test_changes_are_compared_under_the_same_failures() -> None:
    """Waiting for two days for each repair: a spare node helps most, and no change is worth more than it can bring."""
    settings = read_run({"failures": "rsc-1", "pool": 0, "repair": {"automatic": "2 days"}, "initialization": "5 min"}, "run")
    prepared = prepare(read_job(JOB), settings, days=100)
    changes = alternatives(prepared, 100, None, seed=1)
    assert changes[0].change in ("one spare node more", "recovery=elastic")
    assert changes == sorted(changes, key=lambda change: -change.gain)
    assert all(change.gain == change.goodput - change.base for change in changes)


def test_elastic_jobs_keep_what_every_replica_has() -> None:
    ddp = prepare(read_job(JOB, {"plan.data_parallel": "ddp", "plan.tp": 8}), read_run({"recovery": "elastic"}, "run"), 1).spec
    sharded = prepare(read_job(JOB), read_run({"recovery": "elastic"}, "run"), 1).spec
    assert ddp.elastic is not None
    assert sharded.elastic is not None
    assert (ddp.elastic.rollback, sharded.elastic.rollback) == (False, True)
    assert ddp.elastic.paces[0].progress == 15 / 16
    assert (ddp.elastic.nodes, len(ddp.elastic.paces)) == (1.0, 8)


def test_the_command_says_the_same_whatever_the_workers() -> None:
    words = ("run", str(EXAMPLES / "run-llama-3.1-405b.yaml"), "--days", "20", "--replications", "6", "--no-advice", "--json")
    one, two = (call(*words, "--workers", number) for number in ("1", "2"))
    assert one == two
    assert sum(one["ledger"].values()) == pytest.approx(1.0, abs=1e-9)
    assert one["ledger_closes"] < 1e-9
    assert one["runs"] == 6
    assert one["tokens"]["mean"] > 0
    assert call(*words, "--workers", "2", "--seed", "1") != two


def test_one_screen() -> None:
    result = CliRunner().invoke(shardyard.main, ("run", str(EXAMPLES / "run-llama-3.1-405b.yaml"), "--days", "20"))
    assert result.exit_code == 0, result.output
    first = result.output.splitlines()[0]
    assert first.startswith("run-llama-3.1-405b on 128 × dgx-h100 (1,024 GPUs) and 2 spare nodes: ")
    assert "goodput" in first
    assert "WASTED_PROGRESS_FROM_DISRUPTION" in result.output
    assert "best of 9 intervals" in result.output
    assert "note: failures 'rsc-1': not published are causes;" in result.output
    checkpoint = CliRunner().invoke(shardyard.main, ("checkpoint", str(EXAMPLES / "run-llama-3.1-405b.yaml")))
    assert checkpoint.exit_code == 0, checkpoint.output
    assert "checkpoint 5.68 TB, 14.0 bytes per parameter" in checkpoint.output
    assert call("checkpoint", str(EXAMPLES / "run-llama-3.1-405b.yaml"), "--json")["bytes_per_parameter"] == pytest.approx(14)


def test_what_is_assumed_of_free_nodes_is_said_beside_spares_that_are_compared() -> None:
    """With free nodes elsewhere spares are worth nothing, which the note explains."""
    words = ("run", str(EXAMPLES / "run-llama-3.1-405b.yaml"), "--days", "20", "--replications", "2", "--vary")
    free = "note: run.pool: there is always a free node; say how many there are (0: spares alone)"
    always = CliRunner().invoke(shardyard.main, (*words, "run.spares=0,1", "--set", "run.pool=null")).output
    assert f"\n{free}" in always
    assert "note: run.pool" not in CliRunner().invoke(shardyard.main, (*words, "run.spares=0,1", "--set", "run.pool=0")).output
    both = CliRunner().invoke(shardyard.main, (*words, "run.pool=null,0")).output
    assert f"\nnote on run.pool=null: {free.removeprefix('note: ')}" in both


def test_how_unlike_clusters_are_is_said_where_failures_are_those_of_several() -> None:
    """rate_spread is σ of the logarithm: 80 % of a normal distribution are within 1.2816 σ."""
    words = ("run", str(EXAMPLES / "run-llama-3.1-405b.yaml"), "--days", "20", "--replications", "2", "--no-advice")
    output = CliRunner().invoke(shardyard.main, (*words, "--set", "run.failures=published")).output
    (line,) = (line for line in output.splitlines() if line.startswith("failures 'published': "))
    said = re.match(r"failures 'published': one every ([\d.]+) h on 128 nodes \(median; ([\d.]+) h–([\d.]+) days in 80 %", line)
    assert said is not None, line
    middle, low, high = map(float, said.groups())
    assert low == pytest.approx(middle / math.exp(1.2816 * 0.743), rel=0.01)
    assert 24 * high == pytest.approx(middle * math.exp(1.2816 * 0.743), rel=0.01)
    rsc = CliRunner().invoke(shardyard.main, words).output
    assert "failures 'rsc-1': one every 28.8 h on 128 nodes; a start takes" in rsc


MISTAKES = [
    ({"spare": 2}, "unknown field 'spare'; did you mean 'spares'?"),
    ({"failures": "rsc-3"}, "run.failures: unknown failures 'rsc-3'; did you mean 'rsc-"),
    ({"failures": {"parts": {"gpu": {"mtbf": "100"}}}}, "needs a unit"),
    ({"failures": {"parts": {"gpu": {"mtbf": "weibull 3 days"}}}}, "must say shape"),
    ({"failures": {"parts": {"gpu": {"mtbf": "0 days"}}}}, "must be greater than 0"),
    ({"checkpoint": {"policy": "asynchron"}}, "unknown checkpoint policy 'asynchron'; did you mean 'asynchronous'?"),
    ({"checkpoint": {"interval": "often"}}, "must be a time such as '30 min', '200 steps', or one of availability, daly, young"),
    ({"checkpoint": {"interval": 0}}, "must be at least 1 step"),
    ({"checkpoint": {"storage": "superpod"}}, "run.checkpoint.storage: unknown storage 'superpod'; did you mean 'superpod-"),
    ({"checkpoint": {"storage": {"write": "3"}}}, "needs a unit"),
    ({"recovery": "hope"}, "unknown recovery policy 'hope'"),
    ({"spares": -1}, "spares=-1"),
    ({"evaluation": "2 min"}, "evaluation (or evaluation_sequences) and evaluation_steps belong together"),
    ({"reserve": 3}, "reserve=3 needs pool"),
    (3, "run=3: must be fields"),
]


@pytest.mark.parametrize(("section", "message"), MISTAKES)
def test_mistakes_are_one_line(section: object, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_job(JOB, run=section)
    assert message in str(error.value)


def test_options_are_checked() -> None:
    for words, message in (
        (("--days", "3", "--tokens", "1e12"), "--days and --tokens: only one of them"),
        (("--days", "-3"), "--days=-3: must be greater than 0"),
        (("--days", "30000"), "must be at most 10,000"),
        (("--set", "run.spares=x"), "spares='x'"),
        (("--set", "plan.recompute_layers=1", "--days", "1"), "runs out of memory"),
    ):
        result = CliRunner().invoke(shardyard.main, ("run", str(EXAMPLES / "run-llama-3.1-405b.yaml"), *words))
        assert result.exit_code == 2, words
        assert message in result.output, result.output


def test_the_section_is_part_of_the_job() -> None:
    alone, with_run = read_job(JOB), read_job(JOB, run={"spares": 2})
    assert alone.run is None
    assert with_run.run is not None
    assert alone.hash != with_run.hash
    changed = read_job({**JOB, "run": {"spares": 2, "pool": 3}}, {"run.spares": 5, "run.checkpoint.interval": "10 min"})
    assert changed.run is not None
    assert (changed.run.spares, changed.run.pool, changed.run.checkpoint.interval) == (5, 3, "10 min")


def test_inputs_are_compared_under_the_same_failures() -> None:
    """Twice as many failures, other storage, a plan that does not fit: a row each, and the reason of what is refused."""
    words = ("run", str(EXAMPLES / "run-llama-3.1-405b.yaml"), "--days", "20", "--replications", "6", "--workers", "1")
    vary = ("--vary", "run.failures.mtbf_factor=0.5,1", "--vary", "run.checkpoint.storage.write=x0.5,x1")
    half, _, one, base = call(*words, *vary, "--json")
    assert half["failures"]["mean"] > 1.5 * base["failures"]["mean"]
    assert half["changes"] == {"run.failures.mtbf_factor": 0.5, "run.checkpoint.storage.write": "50 GB/s"}
    assert one["failures"] == base["failures"]  # of the same seeds
    assert one["goodput"]["mean"] < base["goodput"]["mean"]
    alone = call(*words, "--no-advice", "--json", "--set", "run.step_interval=false")
    assert base["goodput"] == alone["goodput"]
    text = CliRunner().invoke(shardyard.main, (*words, "--vary", "plan.recompute_layers=1,4"))
    assert text.exit_code == 0
    assert "plan.recompute_layers=1: " in text.output
    assert "runs out of memory" in text.output
    assert CliRunner().invoke(shardyard.main, (*words, "--vary", "plan.recompute_layers=1")).exit_code == 2


def test_figures_are_the_same_bytes(tmp_path: Path) -> None:
    words = ("run", str(EXAMPLES / "run-llama-3.1-405b.yaml"), "--days", "20", "--replications", "4", "--workers", "1")
    for number in range(2):
        for name, more in (("run", ("--no-advice",)), ("spares", ("--vary", "run.spares=0,2"))):
            result = CliRunner().invoke(shardyard.main, (*words, *more, "--plot", str(tmp_path / f"{name}{number}.png")))
            assert result.exit_code == 0, result.output
    for name in ("run", "spares"):
        first, second = ((tmp_path / f"{name}{number}.png").read_bytes() for number in range(2))
        assert first == second
        assert len(first) > 10_000


def test_one_field_of_a_description_changes_and_the_others_stay() -> None:
    job = read_job(JOB, {"run.checkpoint.storage.write": "1 GB/s", "run.failures.mtbf_factor": 2})
    assert job.run is not None
    assert (job.run.checkpoint.storage.write, job.run.checkpoint.storage.node_write) == (1e9, 4e9)
    assert job.run.failures.mtbf(16, 8) == pytest.approx(2 * load_reliability("published", "").mtbf(16, 8))
    own = load_reliability({"based_on": "rsc-1", "parts": {"switch": {"mtbf": "500 days", "unit": "switch", "nodes": 4}}}, "")
    rate = 1 / load_reliability("rsc-1", "").mtbf(16, 8) + 4 / (500 * 86400)
    assert own.mtbf(16, 8) == pytest.approx(1 / rate)


def test_spot_nodes_are_warned() -> None:
    """Two minutes of notice are enough for a save of half a second: nothing is lost; a second is not."""
    lost = []
    for notice in ("2 min", "100 ms"):
        part = {"mtbf": "20 days", "notice": notice}
        prepared = prepare(read_job(JOB), read_run({"failures": {"parts": {"spot": part}}, "initialization": "5 min"}, "run"), 30)
        outcomes = replicate(prepared.spec, 0, 5)
        lost.append(sum(outcome.gpu_seconds["wasted progress"] for outcome in outcomes) / prepared.spec.gpus)
        assert sum(sum(outcome.failures.values()) for outcome in outcomes) > 50
    warned, surprised = lost
    assert warned < 2 * 120 * prepared.summary.step_seconds  # steps under way
    assert surprised > 3 * warned


def test_flushes_that_share_the_nics_slow_training_down() -> None:
    """Eight GB/s of a node's NICs for as long as a flush lasts: what a step then takes longer is waiting at the save."""
    fields = {"storage": {"node_write": "8 GB/s", "node_read": "8 GB/s"}, "interval": 500}
    job = read_job(JOB, {"cluster.node.nic": "25 Gb/s"})
    alone, shared = (
        prepare(job, read_run({"checkpoint": {**fields, "storage": {**fields["storage"], "shares_nics": each}}}, "run"), 1)
        for each in (False, True)
    )
    flush = alone.costs.write
    rate = alone.size.busiest_node / flush
    less = read_job(JOB, {"cluster.node.nic": f"{25 - rate * 8 / 8 / 1e9:.9f} Gb/s"})
    behind = flush * (1 - predict(job).step_seconds / predict(less).step_seconds)
    assert behind > 0.01
    assert shared.spec.savings[0].blocking == pytest.approx(alone.spec.savings[0].blocking + behind, rel=1e-3)


def test_data_that_come_too_slowly_are_waited_for() -> None:
    """Four sequences of each of 128 ranks in a step: 2 s each by two workers take 4 s, and so does reading 512 of them, 2 GB
    each, at 256 GB/s; what a step hides of it is not waited for.
    """
    step = predict(read_job(JOB)).step_seconds

    def stall(**fields: object) -> float:
        checkpoint = {"storage": {"read": "256 GB/s", "latency": "0 s"}}
        given = {"failures": "none", "input": {"sample": "0 s", **fields}, "checkpoint": checkpoint}
        return prepare(read_job(JOB), read_run(given, "run"), days=1).spec.stall

    assert stall(sample="2 s", workers=2, prefetch=False) == pytest.approx(4.0)
    assert stall(sample="2 s", workers=2) == pytest.approx(4.0 - step)
    assert stall(bytes="2 GB") == pytest.approx(4.0 - step)
    assert stall(sample="10 ms", bytes="32 kB") == 0.0
    settings = read_run({"failures": "none", "initialization": "0 s", "input": {"sample": "2 s", "workers": 2}}, "run")
    prepared = prepare(read_job(JOB), settings, tokens=1e11)
    answer = run(prepared, rates(read_job(JOB).cluster.node.gpu), count=1)
    assert answer.goodput.mean == pytest.approx(step / 4.0, rel=1e-3)
    assert answer.shares["data loading"] == pytest.approx(1 - step / 4.0, rel=1e-3)


def test_more_failures_than_can_be_played_are_refused() -> None:
    """A node that fails every second: one line, not a day of playing."""
    job = read_job(JOB, run={"failures": {"parts": {"node": {"mtbf": "1 s"}}}})
    assert job.run is not None
    with pytest.raises(UserError, match="run.failures: one every 62.5 ms in up to 54 days: more than 1,000,000"):
        prepare(job, job.run, days=54)


def test_from_python() -> None:
    job = read_job(EXAMPLES / "run-llama-3.1-405b.yaml", {"run.spares": 1})
    answer = shardyard.run_days(job, days=20, count=5)
    assert answer.days.mean == pytest.approx(20.0)
    assert 0.9 < answer.goodput.low <= answer.goodput.mean < 1
    assert answer == shardyard.run_days(job, days=20, count=5)
    with pytest.raises(UserError, match="days or tokens"):
        shardyard.run_days(job)


def test_storage_that_is_too_slow_for_the_interval_is_said() -> None:
    """5.68 TB at 10 GB/s take 9.47 minutes, 4.42 more than the 5.04 minutes of 19 steps and the 0.6 s of a save."""
    words = ("run", str(EXAMPLES / "run-llama-3.1-405b.yaml"), "--days", "5", "--replications", "1", "--no-advice", "--ideal")
    changes = ("--set", "run.checkpoint.storage.write=10 GB/s", "--set", "run.checkpoint.interval=5 min")
    assert "waits 4.42 min for the save before it" in CliRunner().invoke(shardyard.main, (*words, *changes)).output
    assert "waits" not in CliRunner().invoke(shardyard.main, words).output


@pytest.mark.parametrize(
    ("text", "seconds"), [("4 hours", 14400), ("1 hour", 3600), ("90 minutes", 5400), ("2 weeks", 1209600), ("1 year", 31557600)]
)
def test_times_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert read_run({"heartbeat": text}, "run").heartbeat == seconds


def test_replicas_that_are_left_take_the_batch_of_the_lost_ones() -> None:
    """16 replicas, a node each: 32 microbatches of each become 35 where 15 are left, and 64 where half are."""
    fields = {**JOB, "plan": {**JOB["plan"], "tp": 8, "global_batch": 512}}  # type: ignore[dict-item]
    job = read_job(fields)
    kept = prepare(job, read_run({"recovery": "elastic-keep"}, "run"), 1).spec
    shrunk = prepare(job, read_run({"recovery": "elastic"}, "run"), 1).spec
    assert kept.elastic is not None
    assert shrunk.elastic is not None
    assert all(pace.progress == 1.0 for pace in kept.elastic.paces)
    more = predict(
        read_job(fields, {"plan.global_batch": 16 * 35})
    ).step_seconds  # the other replicas' microbatches, 16 of them there
    assert kept.elastic.paces[0].step == pytest.approx(more, rel=2e-3)
    half = predict(read_job(fields, {"plan.global_batch": 1024})).step_seconds
    assert kept.elastic.paces[-1].step == pytest.approx(half, rel=1e-9)
    for one, other in zip(kept.elastic.paces, shrunk.elastic.paces, strict=True):
        assert (
            one.progress / one.step <= other.progress / other.step * 1.1
        )  # what gradient sums cost is shared by more microbatches
        assert one.progress / one.step >= other.progress / other.step * 0.9
    assert (kept.elastic.nodes, kept.elastic.rollback) == (shrunk.elastic.nodes, shrunk.elastic.rollback)


def test_steps_of_fewer_replicas_are_badput_of_their_own() -> None:
    settings = read_run({"recovery": "elastic-keep", "failures": {"parts": {"node": {"mtbf": "30 days"}}}, "pool": 0}, "run")
    prepared = prepare(read_job(JOB), settings, days=30)
    outcomes = replicate(prepared.spec, 0, 5)
    assert sum(outcome.gpu_seconds["missing replicas"] for outcome in outcomes) > 0
    assert sum(outcome.gpu_seconds["slow steps"] for outcome in outcomes) == 0


def test_a_run_that_never_begins_is_an_answer(tmp_path: Path) -> None:
    """A start of ten days, in a run of one: no token, and figures without a step."""
    job = ("--model", "gpt2-1.5b", "--cluster", "dgx-a100", "--set", "plan.data_parallel=zero1", "--set", "run.failures=rsc-1")
    words = ("run", *job, "--days", "1", "--replications", "2", "--workers", "1")
    more = ("--set", "run.initialization=10 days", "--plot", str(tmp_path / "run.png"), "--report", str(tmp_path / "page"))
    result = CliRunner().invoke(shardyard.main, (*words, *more))
    assert result.exit_code == 0, result.output
    assert "0 tokens in 1.00 days, goodput 0.0 %" in result.output.splitlines()[0]
    assert (tmp_path / "page/report.html").stat().st_size > 10_000
