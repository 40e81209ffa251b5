"""Wrong words on the command line: one line and exit code 2."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

import shardyard
from topologies.documents.extras import ExtraMissingError


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("simulate --nodes x", "--nodes: 'x' is not a valid integer"),
        ("plan --headroom 2", "--headroom: 2.0 is not in the range 0<=x<1"),
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


def test_nothing_said_is_help() -> None:
    result = CliRunner().invoke(shardyard.main, [], prog_name="shardyard")
    assert result.output.startswith("Usage: shardyard [OPTIONS] COMMAND")


def test_tables_without_pandas_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    job = shardyard.read_job(model="gpt2-1.5b", cluster="dgx-h100", plan={"sequence": 1024, "global_batch": 8})
    tables = shardyard.whatif(job, {"plan.microbatch": [1]}), shardyard.simulate(job)
    monkeypatch.setitem(sys.modules, "pandas", None)
    for each in tables:
        with pytest.raises(ExtraMissingError, match=r"^pandas is not installed, .*pip install 'shardyard\[pandas\]'`$"):
            each.frame()
