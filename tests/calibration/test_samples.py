"""Journals of samples: resumed, cut off, of another machine; how visits are merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calibration.samples import Journal, Sample, between_rounds, merge, read_journal
from topologies.reading import UserError

HEAD = {"device": "cpu", "ranks": 2, "machine": "m", "versions": "v", "quick": True, "cores": 2}


def sample(value: float, visit: int = 0, foreign: float = 0.0) -> Sample:
    case: dict[str, str | float] = {"batch": 1.0, "m": 1.0, "n": 1.0, "k": 1.0, "dtype": "fp32"}
    return Sample(part="gemm", case=case, value=value, round=visit, foreign=foreign)


def test_journal_goes_on_after_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    first = Journal(path, HEAD)
    first.add(sample(1.0))
    with path.open("a") as file:
        file.write('{"part": "gem')
    second = Journal(path, HEAD)
    assert second.done() == {(0, sample(1.0).key)}
    second.add(sample(2.0, visit=1))
    assert [sample.value for sample in read_journal(path)[1]] == [1.0, 2.0]


def test_a_full_disk_keeps_what_is_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "s.jsonl", HEAD)
    journal.add(sample(1.0))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(UserError, match=r"s\.jsonl: cannot be written: No space left on device; 1 samples are kept"):
            journal.add(sample(2.0, visit=1))
    assert [sample.value for sample in Journal(tmp_path / "s.jsonl", HEAD).samples] == [1.0]


def test_a_journal_without_samples_is_begun_anew(tmp_path: Path) -> None:
    Journal(tmp_path / "s.jsonl", HEAD)
    Journal(tmp_path / "s.jsonl", HEAD | {"ranks": 4})
    assert read_journal(tmp_path / "s.jsonl")[0]["ranks"] == 4
    with pytest.raises(UserError, match="/dev/null: cannot be written: is no regular file"):
        Journal(Path("/dev/null"), HEAD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"ranks": 2', '"ranks": 4'), "ranks=4 of its samples, but 2 now"),
        (lambda text: text.replace('"value":1.0', '"value":-1.0'), r"line 2: value=-1.0"),
        (lambda text: text.replace('{"part"', '"part"'), "line 2: not JSON"),
        (lambda text: "NCCL log\n" + text, "line 1: not JSON"),
        (lambda text: text.replace('"format": 1', '"format": 9'), "line 1: format=9"),
    ],
)
def test_journal_of_another_machine_or_edited_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    Journal(path, HEAD).add(sample(1.0))
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=rf"s\.jsonl: {message}"):
        Journal(path, HEAD)


def test_disturbed_visits_count_only_where_there_are_no_others() -> None:
    calm = merge([sample(1.0), sample(9.0, 1, foreign=0.5), sample(1.2, 2)])
    assert (calm[0].value, calm[0].visits, calm[0].disturbed) == (pytest.approx(1.1), 3, 1)
    assert calm[0].spread == pytest.approx(0.2 / 1.1)
    assert merge([sample(9.0, foreign=0.5), sample(3.0, 1, foreign=0.2)])[0].value == 3.0


def test_a_machine_that_changes_its_speed_between_rounds() -> None:
    """Two cases take 10 % longer in the second round, a third was visited once; other parts do not count."""

    def sample(size: float, value: float, number: int, part: str = "layer") -> Sample:
        return Sample(part=part, case={"hidden": size}, value=value, round=number)

    steady = [sample(1.0, 2.0, 0), sample(1.0, 2.0, 1), sample(2.0, 5.0, 0)]
    assert between_rounds(steady, "layer") == 0.0
    assert between_rounds(steady[:1], "layer") == 0.0
    slower = [sample(1.0, 2.0, 0), sample(1.0, 2.2, 1), sample(2.0, 4.0, 0), sample(2.0, 4.4, 1), sample(3.0, 9.0, 1)]
    assert between_rounds(slower, "layer") == pytest.approx(0.1)
    assert between_rounds([*steady, *(sample(1.0, 9.0, number, "gemm") for number in (0, 1))], "layer") == 0.0
