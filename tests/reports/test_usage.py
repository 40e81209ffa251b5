"""Wrong words on the command line: one line and exit code 2."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import shardyard
from reports.commands import FOLDER
from topologies.documents.extras import ExtraMissingError


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("simulate --nodes x", "--nodes: 'x' is not a valid integer"),
        ("plan --headroom 2", "--headroom: 2.0 is not in the range 0<=x<1"),
        ("whatif --vary plan.tpp=1,2", "--vary plan.tpp=1,2: unknown field 'plan.tpp'; did you mean 'plan.tp'?"),
        ("export --to foo", "--to: 'foo' is not one of 'accelerate', 'deepspeed', 'megatron', 'torchtitan'"),
        ("simulate --nodse 3", "no option --nodse; did you mean '--nodes'?"),
        ("simulate --bogus", "no option --bogus (`shardyard simulate --help` lists all)"),
        ("--bogus", "no option --bogus (`shardyard --help` lists all)"),
        ("collective", "OPERATION: is missing (`shardyard collective --help` lists all)"),
        ("calibrate", "--output: is missing (`shardyard calibrate --help` lists all)"),
        ("schedule --pp", "--pp: requires an argument"),
        ("simulate --json=3", "--json: does not take a value"),
        ("simulate a.yaml b.yaml", "got unexpected extra argument (b.yaml) (`shardyard simulate --help` lists all)"),
    ],
)
def test_wrong_words_are_one_line(words: str, line: str) -> None:
    result = CliRunner().invoke(shardyard.main, words.split(), prog_name="shardyard")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {line}\n")


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("[!_]*.py")))
def test_help_ends_with_an_example_that_can_be_pasted(name: str) -> None:
    """On one line, with options that are there; and it says in whole words what each option is."""
    text = CliRunner().invoke(shardyard.main, [name, "--help"], prog_name="shardyard").output
    (example,) = re.findall(r"^  Example: (.*)$", text, re.MULTILINE)
    words = shlex.split(example)
    assert words[:2] == ["shardyard", name]
    command = shardyard.main.get_command(click.Context(shardyard.main), name)
    command.make_context(name, words[2:]).close()
    hanging = [
        option.help for option in command.params if re.match(r"(Of|Whose|Or|The same) ", getattr(option, "help", None) or "")
    ]
    assert not hanging


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("export --to deepspeed --model llama-2-7b --cluster dgx-a100", "--output none/x.json"),
        ("execute examples/demo.yaml", "--output none/x.json"),
        ("calibrate --cluster cpu-gloo", "--output none/x.yaml"),
        ("validate --published", "--csv none/x.csv"),
        ("schedule 1f1b", "--csv none/x.csv"),
        ("compare", "--plot none/x.png"),
    ],
)
def test_a_file_in_a_folder_that_is_missing_is_refused_before_any_work(words: str, option: str) -> None:
    result = CliRunner().invoke(shardyard.main, [*words.split(), *option.split()], prog_name="shardyard")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {option}: its folder does not exist\n")


def test_nothing_said_is_help() -> None:
    result = CliRunner().invoke(shardyard.main, [], prog_name="shardyard")
    assert result.output.startswith("Usage: shardyard [OPTIONS] COMMAND")


def test_tables_without_pandas_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    job = shardyard.read_job(model="gpt2-1.5b", cluster="dgx-h100", plan={"auto": False, "sequence": 1024, "global_batch": 8})
    tables = shardyard.whatif(job, {"plan.microbatch": [1]}), shardyard.simulate(job)
    monkeypatch.setitem(sys.modules, "pandas", None)
    for each in tables:
        with pytest.raises(ExtraMissingError, match=r"^pandas is not installed, .*pip install 'shardyard\[pandas\]'`$"):
            each.frame()


def test_a_plan_that_is_said_in_part_and_does_not_fit_is_told_of_the_search() -> None:
    """Where only --set says some of the plan; the search keeps that and finds what fits."""
    words = ["simulate", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--nodes", "2", "--set", "plan.tp=2"]
    line = "plan: what --set does not say has its default; --plan auto beside it searches the rest\n"
    small = CliRunner().invoke(shardyard.main, words)
    assert small.exit_code == 2
    assert line in small.stdout
    found = CliRunner().invoke(shardyard.main, [*words, "--plan", "auto"])
    assert found.exit_code == 0
    assert line not in found.stdout
    assert "TP2 + " in found.stdout


def test_a_what_if_of_a_job_that_does_not_fit_is_told_of_the_search() -> None:
    words = ["whatif", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--set", "plan.overlap=true", "--workers", "1"]
    words += ["--vary", "cluster.node.nic=x2"]
    assert "✗" in (small := CliRunner().invoke(shardyard.main, words).stdout)
    assert "--plan auto beside it searches the rest" in small
    assert "searches the rest" not in CliRunner().invoke(shardyard.main, [*words, "--plan", "auto"]).stdout


def test_a_job_in_the_place_of_a_cluster_is_called_one(tmp_path: Path) -> None:
    (path := tmp_path / "job.yaml").write_text("model: llama-3.1-8b\ncluster: dgx-h100\n")
    answer = CliRunner().invoke(shardyard.main, ["simulate", "--model", "gpt2-1.5b", "--cluster", str(path)])
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert answer.stderr == f"error: {path}: is a job, as it has a model, and no cluster: give it before all options\n"


def test_a_plan_may_be_its_fields() -> None:
    words = ["simulate", "--model", "gpt2-1.5b", "--cluster", "dgx-a100", "--json"]
    inline = CliRunner().invoke(shardyard.main, [*words, "--plan", "{data_parallel: zero1, microbatch: 2}"])
    fields = CliRunner().invoke(shardyard.main, [*words, "--set", "plan.data_parallel=zero1", "--set", "plan.microbatch=2"])
    assert json.loads(inline.stdout)["step_seconds"] == json.loads(fields.stdout)["step_seconds"]
    assert "--plan: the value is not valid YAML" in CliRunner().invoke(shardyard.main, [*words, "--plan", "{tp: 2"]).output
