"""A job that says nothing of its plan has the best of a small space, and says how to ask for the same."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import shardyard
from shardyard import UserError, predict, read_job
from strategies.plan.plan import OPEN
from strategies.planner import auto_plan
from strategies.planner.auto_plan import CHOSEN, OF_THE_BATCH, WITHIN, quick_space
from strategies.planner.search.search import Search
from strategies.planner.search.space import default_space
from strategies.planner.whatif import combinations
from strategies.read_job import stated_job

SMALL = {"name": "small", "hidden": 1024, "layers": 8, "heads": 16, "vocabulary": 32000, "context": 1024}
TWO = {"model": SMALL, "cluster": {"based_on": "dgx-a100", "node": {"gpus": 2, "nics": 2}}, "nodes": 2}
ONE = {"based_on": "dgx-h100", "node": {"gpus": 1, "nics": 1}}
LLAMA = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "nodes": 2}


def call(*words: str) -> Result:
    result = CliRunner().invoke(shardyard.main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def options(**given: Any) -> list[str]:
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def remark(job: Any) -> str:
    (text,) = (text for text in job.notes if text.startswith("plan: auto: "))
    return str(text)


def pasted(text: str) -> list[str]:
    """What the arguments of a remark set."""
    return shlex.split(text.split("as arguments: ")[1])[1::2]


@pytest.mark.parametrize(
    ("given", "plan"),
    [
        (LLAMA, None),
        (LLAMA, "auto"),
        (LLAMA, {"auto": True, "sequence": 4096, "global_batch": 64}),
        (LLAMA, {"sequence": 4096, "global_batch": 64}),
        (TWO, {"global_batch": 16}),
        ({"model": "bert-large", "cluster": "dgx-1v"}, None),  # V100 has no bf16
        ({"model": "llama-3.1-8b", "cluster": ONE}, None),  # fits with offload only
        (TWO, None),
    ],
)
def test_arguments_that_are_told_are_the_plan_that_was_found(given: dict[str, Any], plan: Any) -> None:
    found = read_job(**given, plan=plan)
    again = read_job(overrides=pasted(remark(found)), **given, plan=plan)
    assert again.auto is None
    assert again.hash == found.hash
    assert again.plan == found.plan
    if isinstance(plan, dict) and "sequence" in plan:
        assert (found.plan.sequence, found.plan.global_batch) == (4096, 64)


def test_no_plan_of_the_space_that_keeps_memory_free_is_much_faster() -> None:
    """Every one of them simulated."""
    found, stated = predict(read_job(**TWO)), stated_job(**TWO)
    every = []
    for changes in combinations(quick_space(stated).axes):
        try:
            every.append(predict(stated_job(overrides=changes, **TWO)))
        except UserError:
            continue
    comfortable = [summary.step_seconds for summary in every if summary.fits_with(0.05)]
    assert len(comfortable) > 50
    assert min(comfortable) <= found.step_seconds <= min(comfortable) / (1 - WITHIN)
    assert found.step_seconds < predict(read_job(**TWO, plan={})).step_seconds


def test_the_first_run_of_a_model_that_ddp_has_no_memory_for_fits() -> None:
    assert not predict(read_job(**LLAMA, plan={})).fits
    answer = call("simulate", *options(**LLAMA))
    assert answer.exit_code == 0
    assert re.search(r"fits: [\d.]+ of 84.9 GB", answer.output)
    assert "DDP alone needs at least" in answer.output


@pytest.mark.parametrize("plan", [{"microbatch": 1}, {"kernels": "megatron"}, {"auto": False, "sequence": 1024}], ids=str)
def test_a_plan_that_says_how_a_step_is_carried_out_is_as_it_was_said(plan: dict[str, Any]) -> None:
    """The other fields have their defaults."""
    job = read_job(**LLAMA, plan=plan)
    assert job.auto is None
    assert (job.plan.data_parallel, job.plan.tp, job.plan.microbatch) == ("ddp", 1, 1)
    assert read_job(**LLAMA, plan={}).plan == stated_job(**LLAMA).plan
    assert read_job(overrides=["plan.auto=false"], **LLAMA).plan == stated_job(**LLAMA).plan
    assert read_job(overrides={"plan.auto": True}, **LLAMA, plan={"tp": 2}).plan.tp == 2


def test_a_plan_of_which_only_the_size_of_a_step_is_said_is_found(tmp_path: Path) -> None:
    """Wherever it is said."""
    said = {"sequence": 4096, "global_batch": 64}
    found = read_job(**LLAMA, plan={"auto": True} | said)
    (file := tmp_path / "plan.yaml").write_text("sequence: 4096\nglobal_batch: 64\n")
    overrides = [f"plan.{name}={value}" for name, value in said.items()]
    for job in (read_job(**LLAMA, plan=said), read_job(**LLAMA, plan=str(file)), read_job(overrides=overrides, **LLAMA)):
        assert job.plan == found.plan
        assert job.auto is not None
    assert found.plan.data_parallel != "ddp"


def test_no_search_chooses_a_field_that_leaves_the_choice_open() -> None:
    chosen = {field for axis in default_space(stated_job(**LLAMA)).axes for field in axis.fields}
    assert not OPEN & {*chosen, *CHOSEN, *OF_THE_BATCH}


def test_a_plan_is_found_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_plan, "_CHOSEN", {})
    first = read_job(**TWO)
    monkeypatch.setattr(Search, "run", lambda _: pytest.fail("searched again"))
    assert read_job(**TWO) == first


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"auto": True, "accumulation": 2}, "accumulation contradicts plan: auto, which chooses degrees: say global_batch"),
        ({"auto": True, "dp": 2}, "dp contradicts plan: auto"),
        ({"auto": 3}, "auto=3: must be true or false"),
        ({"auto": True, "tp": 7}, "tp"),
        ("automatic", "automatic"),
    ],
)
def test_mistakes_are_told(plan: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_job(**LLAMA, plan=plan)


def test_what_fits_nowhere_is_told_with_the_plan_that_needs_least() -> None:
    job = read_job(model="gpt2-1.5b", cluster="cpu-gloo")
    assert "as nothing fits and this needs least memory" in remark(job)
    assert not predict(job).fits


def test_nodes_that_are_not_alike() -> None:
    job = read_job(**TWO | {"nodes": [{"count": 1}, {"count": 1, "missing": ["nic 1"]}]})
    assert "the fastest here of 3 that are the best of 84 usual plans on 2 nodes of a100-sxm-80gb that are alike" in remark(job)
    assert predict(job).fits


def test_unlike_gpus_together_train_nearly_as_much_as_each_kind_alone() -> None:
    """Equal shares would have all of them wait for the A100: twice what these train, 0.55 of the sum."""
    kinds = [{"count": 1, "node": "dgx-a100"}, {"count": 1}]

    def rate(*nodes: dict) -> float:
        answer = predict(read_job(model="gpt2-1.5b", cluster="dgx-h100", nodes=list(nodes)))
        assert answer.fits
        return answer.tokens_per_second

    assert rate(*kinds) > 0.75 * sum(map(rate, kinds))


def test_a_what_if_keeps_the_plan_that_was_found() -> None:
    found, rows = read_job(**LLAMA), json.loads(call("whatif", *options(**LLAMA), "--vary", "nodes=1,4", "--json").stdout)
    for row, nodes in zip(rows[1:], (1, 4), strict=True):
        words = shlex.split(row["arguments"])[1::2]
        asked = read_job(overrides=words, **LLAMA)
        assert (asked.cluster.nodes, asked.plan.data_parallel) == (nodes, found.plan.data_parallel)
        assert predict(asked).step_seconds == row["summary"]["step_seconds"]


def test_commands_without_notes_tell_it_beside_their_answer() -> None:
    given = options(model="gpt2-1.5b", cluster="dgx-a100")
    for command in (["checkpoint"], ["loop"], ["export", "--to", "megatron"]):
        result = call(command[0], *given, *command[1:])
        assert result.stderr.startswith("plan: auto: ZeRO-3 (FSDP), microbatch 4, the fastest of "), command


@pytest.mark.parametrize("sequence", [4096, 65536])
def test_plans_that_are_not_simulated_for_a_models_layers_are_none_of_the_usual(sequence: int, tmp_path: Path) -> None:
    """One group of heads, which no tp divides, and states that cp ranks cannot hand on."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 8, "num_heads": 64, "head_dim": 64, "n_groups": 1, "vocab_size": 32000}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]} | sizes))
    result = call("simulate", *options(model=file, cluster="dgx-h100", plan="auto", set=f"plan.sequence={sequence}"), "--json")
    assert result.exit_code == 0, result.output
