"""Rows beside their predictions, and how errors are counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from calibration.published import Row, published
from calibration.published.comparison import Compared, Errors, compare, grouped
from strategies.predict import predict

KINDS = ("jeanzay-v100-2021/0092", "vtrain-2024/0018", "narayanan-2021/0006", "llm-foundry-2023/0143", "megatron-ci-2025/0041")


def row(step: float, predicted: float, low: float, high: float, **more: object) -> Compared:
    return Compared("a/1", "a", "f", "t", "m", gpus=8, step=step, predicted_step=predicted, low=low, high=high, **more)  # type: ignore[arg-type]


def test_errors_are_relative_to_what_was_published() -> None:
    errors = Errors.of([row(2.0, 1.8, 1.7, 1.9), row(1.0, 1.3, 0.9, 1.4), row(1.0, 1.0, 0.9, 1.1)])
    assert errors is not None
    assert errors.mean == pytest.approx((0.1 + 0.3 + 0) / 3)
    assert (errors.median, errors.worst, errors.bias) == pytest.approx((0.1, 0.3, 0.2 / 3))
    assert errors.held == pytest.approx(2 / 3)
    alike = Errors.of([row(2.0, 1.8, 1.7, 1.9, predicted_alike=1.6), row(1.0, 1.3, 0.9, 1.4, predicted_alike=1.2)])
    assert alike is not None
    assert alike.alike == pytest.approx((0.2, 0.0))


def test_rows_without_a_prediction_count_nowhere() -> None:
    unknown = Compared("a/2", "a", "f", "t", "m", step=1.0, reason="fp8 arithmetic")
    assert Errors.of([unknown]) is None
    assert grouped([unknown, row(1, 1, 1, 1)], "source").keys() == {"a"}


def test_a_published_row_is_compared_by_its_own_rules() -> None:
    compared = compare(next(row for row in published(("megatron-ci-2025",)) if row.machine == "A100"))
    assert compared.memory_is == "allocated"
    assert compared.memory_error == pytest.approx(0, abs=0.1)  # torch's own count of bytes
    assert compared.low < compared.predicted_step < compared.high  # type: ignore[operator]
    assert compared.predicted_alike < compared.predicted_step  # type: ignore[operator]
    other = compare(next(row for row in published(("korthikanti-2022",)) if row.measured["mfu"]))
    # the same FLOPs over another time
    assert other.predicted_mfu * other.predicted_step == pytest.approx(other.mfu * other.step, rel=0.01)  # type: ignore[operator]


def test_what_a_step_owes_to_launches_does_not_depend_on_their_width(monkeypatch: pytest.MonkeyPatch) -> None:
    small = next(row for row in published(("vtrain-2024",)) if row.name == "vtrain-2024/0018")
    usual = compare(small)
    monkeypatch.setattr("calibration.published.comparison.LAUNCH", 0.0)
    narrow = compare(small)
    assert (narrow.launch, narrow.spread) == (usual.launch, usual.spread)
    assert usual.launch > 0.1  # type: ignore[operator]
    assert narrow.high < usual.high  # type: ignore[operator]


def test_a_row_that_is_no_job_says_why() -> None:
    assert "not printed" in compare(next(published(("nemo-longseq-2024",)))).reason


def rows() -> Iterator[Row]:
    """Of each kind of plan a small row, and one of them in the order of each schedule that takes long to settle."""
    known = {row.name: row for row in published(tuple(dict.fromkeys(name.split("/")[0] for name in KINDS)))}
    yield from (known[name] for name in KINDS)
    small = known["narayanan-2021/0006"]
    for schedule in ("dualpipe", "dualpipe-v", "zb-v", "gpipe"):
        fields = {name: value for name, value in small.fields["plan"].items() if name != "chunks"}
        yield replace(small, name=schedule, fields={**small.fields, "plan": fields | {"schedule": schedule, "overlap_p2p": True}})


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: row.name)
def test_a_row_is_predicted_as_simulate_predicts_its_job(row: Row) -> None:
    summary, compared = predict(row.job()), compare(row)
    assert not compared.reason
    assert (compared.predicted_step, compared.fits) == (summary.step_seconds, summary.fits)
    if row.source.memory in ("device", "first node"):
        gpus = row.job().cluster.node.gpus if row.source.memory == "first node" else row.gpus
        assert compared.predicted_memory == max(stage.peak + stage.cached for stage in summary.memory if stage.rank < gpus)
