"""Results of many kinds, as they are kept in tests/data/results.jsonl: a change of any of them is noticed, and can be read there.

A result that changes is meant to, or is a bug. For a change that means to, `python tests/results/test_results.py` writes the file
anew; `git diff` shows what changed. `--choose 30` draws 30 questions of every kind anew and keeps those that reach most lines and
branches of sim/ and strategies/ for their time: after a large change of the code, once in a while.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.results.questions import answer, named

KEPT = Path(__file__).parents[1] / "data" / "results.jsonl"


@cache
def kept() -> dict[str, dict[str, Any]]:
    """Answers by question."""
    rows = map(json.loads, KEPT.read_text().splitlines()) if KEPT.exists() else ()
    return {row.pop("question"): row for row in rows}


def _scalars(answer: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in answer.items():
        if isinstance(value, list):
            yield from ((f"{name}[{place}]", each) for place, each in enumerate(value))
        else:
            yield name, value


@pytest.mark.parametrize("question", kept())
def test_results_are_those_that_are_kept(question: str) -> None:
    expected, now = dict(_scalars(kept()[question])), dict(_scalars(answer(question)))
    wrong = {name: (expected.get(name), now.get(name)) for name in expected | now if not _same(expected.get(name), now.get(name))}
    assert not wrong


def test_everything_that_has_a_name_is_asked() -> None:
    """Model types, files of models and settings, algorithms, cases: `python tests/results/test_results.py` asks new ones, too."""
    assert set(named()) <= kept().keys()


def _same(expected: Any, now: Any) -> bool:
    """Of other libraries and CPUs the last digits may differ."""
    return bool(
        expected == now
        or (isinstance(expected, float) and isinstance(now, float | int) and now == pytest.approx(expected, rel=1e-7))
    )


def write(questions: list[str]) -> None:
    """Answer questions, and keep the answers."""
    lines = [json.dumps({"question": question} | answer(question)) for question in questions]
    KEPT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answer the kept questions anew, and new ones of all that has a name.")
    parser.add_argument("--choose", type=int, metavar="COUNT", help="draw so many questions of every kind anew")
    count = parser.parse_args().choose
    if count is None:
        write(list(dict.fromkeys([*kept(), *named()])))
    else:
        from tests.results.choose import chosen

        write(chosen(count, kept()))
