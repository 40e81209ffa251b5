"""One order of plans wherever a best one is named, ties included."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import permutations
from typing import Any

from click.testing import CliRunner

import shardyard
from reports.inputs import describe
from reports.page.winner import Entry, winner
from reports.tables.comparison import comparison
from shardyard import read_job
from sim.analysis.summary import Summary
from strategies.planner.ranking import rank
from strategies.planner.search.answer import order
from strategies.predict import predict

ONE_GPU = {"model": "gpt2-1.5b", "cluster": {"based_on": "dgx-a100", "node": {"gpus": 1, "nics": 1}}}
# On one GPU nothing is shared: three plans with one step.
EQUAL = ({"data_parallel": "zero1", "overlap": False}, {"data_parallel": "zero1"}, {"data_parallel": "ddp"})


def entry(name: str, rate: float, fits: bool = True, odd: int = 0, arguments: str = "") -> Entry:
    return Entry(name, (not fits, 1 / rate, odd, 1e9, name), rate, arguments)


def starred(runs: list[tuple[str, Summary, Any]]) -> str:
    """The run that `compare` marks."""
    (table, *_) = comparison(runs).renderables
    return next(str(column.header).removeprefix("★ ") for column in table.columns if str(column.header).startswith("★"))


def test_of_equal_plans_every_answer_names_the_plainest_in_whatever_order_they_come() -> None:
    jobs = {str(plan): read_job(plan=plan | {"auto": False, "global_batch": 4, "sequence": 256}, **ONE_GPU) for plan in EQUAL}
    answers = {name: replace(predict(job), tokens_per_second_per_gpu=1e4) for name, job in jobs.items()}
    plainest = str(EQUAL[-1])
    for names in permutations(jobs):
        runs = [(name, answers[name], describe(jobs[name])) for name in names]
        assert starred(runs) == plainest
        entries = [Entry(name, rank(answers[name], dict(jobs[name].plan), jobs[name].hash), 1e4) for name in names]
        assert min(entries, key=lambda entry: entry.key).name == plainest
        rows = [
            {
                "value": 1.0,
                "fits": True,
                "memory": answers[name].worst.peak,
                "hash": jobs[name].hash,
                "name": name,
                "changes": {f"plan.{field}": value for field, value in jobs[name].plan},
            }
            for name in names
        ]
        assert min(rows, key=order)["name"] == plainest


def test_compare_names_what_advise_finds_best() -> None:
    given = ["--model", "gpt2-1.5b", "--cluster", "dgx-a100", "--set", "model.layers=8"]
    answer = json.loads(CliRunner().invoke(shardyard.main, ["advise", *given, "--json"]).stdout)["candidates"]
    fitting = [candidate for candidate in answer if candidate["fits"]][:4]
    runs = []
    for plan in reversed(fitting):
        changes = {f"plan.{field}": value for field, value in plan["changes"].items()}
        job = read_job(None, changes | {"model.layers": 8}, model="gpt2-1.5b", cluster="dgx-a100", name=plan["name"])
        runs.append((plan["name"], predict(job), describe(job)))
    assert starred(runs) == answer[0]["name"]


def test_the_page_names_one_winner() -> None:
    own, slower, better = entry("own", 1000), entry("slower", 900), entry("better", 1200, arguments="--set plan.tp=2")
    assert winner(own, []) == ""
    assert winner(own, [slower]) == "No other of the 2 plans on this page is better than own."
    said = "The best of the 3 plans on this page that fits: better, 1.20 k tokens/s/GPU, 20.0 % more than own"
    assert winner(own, [slower, better]) == f"{said}. As arguments: --set plan.tp=2"
    near = winner(own, [entry("near", 1050)])
    assert re.search(r"near, 1\.05 k tokens/s/GPU, 5\.0 % more than own, which is a tie: too near to tell", near)
    too_big = entry("own", 1500, fits=False)
    assert winner(too_big, [slower]) == "The best of the 2 plans on this page that fits: slower, 900 tokens/s/GPU."
    assert winner(too_big, [entry("big", 2000, fits=False)]) == "None of the 2 plans on this page fits in memory."
    assert winner(own, [entry("plain", 1000, odd=-1)]).startswith("The best of the 2 plans on this page that fits: plain")
    assert winner(own, [own, own]) == ""  # one plan, however often it was simulated
