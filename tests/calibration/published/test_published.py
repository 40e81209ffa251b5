"""Published measurements: the sources' own counting rules give the sources' own numbers; rows become the jobs that they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from calibration.published import Row, published, sources
from calibration.published.rules import Step, flops_rules
from strategies.job import Job
from strategies.models.model import Model
from strategies.planner.sensitivity import Play
from strategies.predict import simulate
from topologies.reading import UserError


def jobs(*names: str) -> Iterator[tuple[Row, Job]]:
    """Rows that can be jobs."""
    for row in published(names):
        try:
            job = row.job()
            job.resolve()
        except UserError:
            continue
        yield row, job


def gpt(hidden: int, layers: int) -> Model:
    return Model(name="gpt", hidden=hidden, layers=layers, heads=hidden // 128, vocabulary=51200, context=2048)


def test_korthikanti_mfu_and_hfu_follow_from_the_published_times() -> None:
    # arXiv:2205.05198 table 5, "present work": seconds, GPUs, MFU and HFU in % of 312 TFLOP/s
    table = [
        (6144, 48, 4, 1.10, 8, 41.5, 43.7),
        (12288, 96, 64, 13.75, 64, 51.4, 52.8),
        (20480, 105, 280, 37.83, 280, 56.0, 57.0),
        (25600, 128, 512, 71.49, 512, 56.3, 57.0),
    ]
    for hidden, layers, batch, seconds, gpus, mfu, hfu in table:
        step, whole = Step(gpt(hidden, layers), batch, 2048), seconds * gpus * 312e12
        assert 100 * flops_rules["megatron_model"](step) / whole == pytest.approx(mfu, abs=0.3)
        assert 100 * flops_rules["megatron_selective"](step) / whole == pytest.approx(hfu, abs=0.3)


@pytest.mark.parametrize(
    ("source", "within"),
    [("narayanan-2021", 0.001), ("llm-foundry-2023", 0.01), ("bloom-2022", 0.04), ("jeanzay-v100-2021", 0.1)],
)
def test_a_published_rate_is_the_rule_over_the_published_time(source: str, within: float) -> None:
    ratios = sorted(
        row.flops(job) / (row.gpus * row.measured["step"] * row.measured["flops"])
        for row, job in jobs(source)
        if row.measured["step"] and row.measured["flops"]
    )
    assert ratios
    assert ratios[len(ratios) // 2] == pytest.approx(1, abs=within)
    assert ratios[len(ratios) // 10] == pytest.approx(1, abs=3 * within)


def test_mpt_models_have_the_printed_number_of_parameters() -> None:
    # llm-foundry scripts/train/benchmarking/README.md, column NumParams
    printed = {
        ("MPT-7b", 2048): 6658859008,
        ("MPT-70b", 2048): 64862437376,
        ("MPT-1b", 8192): 1328533504,
        ("MPT-125m", 512): 124131840,
    }
    counted = {(row.model, job.resolve().sequence): job.model.parameters for row, job in jobs("llm-foundry-2023")}
    for key, parameters in printed.items():
        if key in counted:  # one is an fp8 row, which is no job
            assert counted[key] == pytest.approx(parameters, rel=2e-4), key


def test_gpt_of_narayanan_have_the_published_size() -> None:
    sizes = {row.model: job.model.parameters / 1e9 for row, job in jobs("narayanan-2021")}
    for name, parameters in sizes.items():
        text = name.removeprefix("GPT ")
        assert parameters == pytest.approx(float(text[:-1]) * (1e3 if text[-1] == "T" else 1), rel=0.03), name


def test_a_row_is_the_job_that_was_measured() -> None:
    row, job = next((row, job) for row, job in jobs("narayanan-2021") if row.model == "GPT 145B")
    plan = job.resolve()
    assert (job.cluster.gpus, plan.tp, plan.pp, plan.dp, plan.chunks, plan.global_batch) == (1536, 8, 8, 24, 2, 2304)
    assert (plan.recompute, plan.attention, plan.precision) == ("full", "materialised", "fp16")
    assert row.step(job) == pytest.approx(24.8, abs=0.1)  # 148 TFLOP/s by the paper's formula


def test_every_row_is_a_job_or_says_why_not() -> None:
    names = tuple(name for name in sources() if name not in ("vtrain-2024", "llm-foundry-2023", "bloom-2022"))  # which are above
    reasoned = [(row, _reason(row)) for row in published(names)]
    reasons = {reason for _, reason in reasoned}
    assert "tp·pp·dp = 4·8·1 = 32 ≠ 16 GPUs" in {reason.removeprefix("plan: ") for reason in reasons}
    assert "encoder and decoder" in reasons
    assert sum(not reason for _, reason in reasoned) >= 65
    assert all(row.where for row, _ in reasoned)


def _reason(row: Row) -> str:
    try:
        row.job().resolve()
    except UserError as error:
        return str(error)
    return ""


def test_sources_say_who_counts_how() -> None:
    for name, source in sources().items():
        assert source.url.startswith("https://"), name
        assert source.use == "report", name
        assert source.facts, name
        if source.flops_rule:
            assert source.flops_rule in flops_rules


def test_an_unknown_source_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="^unknown source 'bloom'; did you mean 'bloom-2022'\\?$"):
        list(published(("bloom",)))


def test_two_short_steps_tell_a_long_one() -> None:
    """A small GPT bound by its launches, which a step of one microbatch has fewer of: no gradients are added to others."""
    row = next(row for row in published(("vtrain-2024",)) if row.name == "vtrain-2024/0031")
    assert Play.of(row.job()).seconds == pytest.approx(simulate(row.job()).step, rel=0.01)
