"""Answers of 124 random jobs, some with an effect, are kept: a change of the simulation is noticed within seconds.

A prediction that changes is meant to, or is a bug. `python tests/test_answers.py` writes tests/data/answers.json anew, for a
change that means to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from shardyard import read_job, simulate, summarise
from tests.random_jobs import random_job

KEPT = Path(__file__).parent / "data" / "answers.json"
ANSWERS: dict[str, dict[str, Any]] = json.loads(KEPT.read_text())


def answer(name: str) -> dict[str, Any]:
    """Seconds of a step, bytes that a rank sends, bytes of the fullest rank, and a hash of all numbers of the summary and of when
    ops start and end, to nine digits: libraries and CPUs may round the last ones otherwise.
    """
    number, _, effect = name.partition(" ")
    timeline = simulate(read_job(None, {}, **random_job(int(number)), effects=[effect] if effect else []))
    summary = summarise(timeline)
    numbers = [*_numbers(summary.to_dict()), *map(float, timeline.start), *map(float, timeline.end)]
    digits = " ".join(f"{value:.9g}" for value in numbers)
    return {
        "step": summary.step_seconds,
        "sent": sum(volume.bytes for volume in summary.volume.values()),
        "peak": summary.worst.peak,
        "all": hashlib.sha256(digits.encode()).hexdigest()[:16],
    }


def _numbers(value: Any) -> Iterator[float]:
    match value:
        case dict():
            for each in value.values():
                yield from _numbers(each)
        case list() | tuple():
            for each in value:
                yield from _numbers(each)
        case bool() | int() | float():
            yield float(value)


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_those_that_are_kept(name: str) -> None:
    expected = ANSWERS[name]
    assert answer(name) == expected | {key: pytest.approx(expected[key], rel=1e-9) for key in ("step", "sent", "peak")}


if __name__ == "__main__":
    argparse.ArgumentParser(description=f"Write {KEPT.name} anew.").parse_args()
    KEPT.write_text(json.dumps({name: answer(name) for name in ANSWERS}, indent=0) + "\n")
