"""Offers are compared at their own best plans, with one batch, and where the winner changes follows from their costs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import shardyard

MODEL = ("--model", "gpt2-1.5b", "--tokens", "1e11", "--workers", "1")


def call(*words: str) -> Result:
    result = CliRunner().invoke(shardyard.main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(call("buy", "1xdgx-h100@4", "vs", "1xdgx-a100@2", *MODEL, "--json").stdout)
    return data


def test_each_offer_has_its_best_plan_and_arguments_that_give_it(answer: dict[str, Any]) -> None:
    for offer in answer["offers"]:
        words = shlex.split(offer["arguments"])
        simulated = json.loads(call("simulate", "--model", "gpt2-1.5b", *words, "--json").stdout)
        assert simulated["step_seconds"] == offer["summary"]["step_seconds"]
        assert simulated["job"]["plan"]["global_batch"] == 32
        found = json.loads(call("simulate", "--model", "gpt2-1.5b", *words[:4], "--json").stdout)
        assert found["step_seconds"] == offer["summary"]["step_seconds"]  # which is what a job without a plan has


def test_cost_is_hours_times_price_and_crosses_where_both_are_equal(answer: dict[str, Any]) -> None:
    first, second = (offer["training"] for offer in answer["offers"])
    for training, price in ((first, 4), (second, 2)):
        assert training["usd"] == pytest.approx(training["gpu_hours"] * price)
    for change in answer["crossovers"]:
        mine, other = (first, second) if change["offer"].startswith("1 × dgx-h100") else (second, first)
        assert change["price"] * mine["gpu_hours"] == pytest.approx(other["usd"])


def test_the_slower_offer_is_as_quick_with_the_nodes_that_are_told(answer: dict[str, Any]) -> None:
    quick, slow = (offer["training"]["days"] for offer in answer["offers"])
    assert quick < slow
    (change,) = (each for each in answer["crossovers"] if each["offer"].startswith("1 × dgx-a100"))
    assert 2 < slow / quick < 4
    assert change["nodes"] == 4  # 3 nodes do not share 32 sequences evenly
    assert change["days"] <= quick


def test_all_offers_train_with_one_batch() -> None:
    data = json.loads(call("buy", "1xdgx-a100", "vs", "2xdgx-a100", *MODEL, "--json").stdout)
    batches = {round(offer["summary"]["tokens_per_second"] * offer["summary"]["step_seconds"]) for offer in data["offers"]}
    assert batches == {64 * 1024}


def test_screen_and_figure(tmp_path: Path) -> None:
    picture = tmp_path / "offers.svg"
    text = call("buy", "1xdgx-h100@4", "1xdgx-a100@2", *MODEL, "--plot", str(picture)).output
    assert re.search(
        r"1 × dgx-h100 at \$4.00/h is the quickest, [\d.]+ days \([\d.]+ % less than 1 × dgx-a100 at \$2.00/h\)", text
    )
    assert "1 × dgx-h100 at $4.00/h" in picture.read_text()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("dgx-h100",), "at least two offers"),
        (("2xdgx-h100", "vs", "2xdgx-h10"), "did you mean 'dgx-h100'?"),
        (("2xdgx-h100", "2xdgx-h100"), "is there twice"),
        (("8dgx-h100", "2xdgx-a100"), "8dgx-h100: 8 nodes are written with an x, in one word: 8xdgx-h100"),
        (("8", "dgx-h100", "2xdgx-a100"), "8: 8 nodes are written with an x, in one word: 8xdgx-h100"),
        (("2xdgx-h100", "2xdgx-a100@0"), "greater than 0"),
        (("2xdgx-h100", "2xdgx-a100", "--nodes", "4"), "the offers say them"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], reason: str) -> None:
    result = call("buy", *words, *MODEL)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_what_cannot_train_the_model_is_said() -> None:
    result = call("buy", "1xcpu-gloo", "1xcpu-gloo@1", *MODEL)
    assert result.exit_code == 2
    assert "none of the offers can train it" in result.output
