"""What a command prints to be pasted gives, pasted, the answer that it was printed beside, to the bit."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

import shardyard
from reports.figures import Drawing
from shardyard import read_job
from strategies.frameworks.export import export
from strategies.plan.plan import Plan
from strategies.predict import played, predict
from strategies.resilience.run_spec import prepare
from strategies.resilience.runs import changes_of
from strategies.resilience.settings import RunSettings

# A plan full of what the best plan does not have: it has to be unset when that is pasted.
PLAN = {
    "tp": 2,
    "sequence_parallel": True,
    "pp": 2,
    "schedule": "interleaved",
    "chunks": 2,
    "data_parallel": "zero3",
    "shard": 2,
    "offload": {"optimizer": "cpu", "parameters": "cpu"},
    "recompute": "full",
    "recompute_method": "block",
    "recompute_layers": 1,
    "accumulation": 4,
    "sequence": 1024,
    "bucket": "10 MB",
    "dropout": False,
}
EXACT = ("step_seconds", "memory", "volume")  # equal to the bit
SPACE = {
    "plan.tp": [1, 2],
    "plan.pp": [1, 2],
    "plan.data_parallel": [{"plan.data_parallel": "zero1", "plan.shard": None}],
    "plan.bucket": ["10 MB", "33.3 MB"],
    "plan.offload": [None, {"optimizer": "cpu"}],
    "plan.recompute": ["none", "full"],
}


def call(*words: str) -> Any:
    result = CliRunner().invoke(shardyard.main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def simulated(words: Sequence[str]) -> dict[str, Any]:
    """The answer of `simulate` with these words."""
    answer: dict[str, Any] = json.loads(call("simulate", *words, "--json").stdout)
    return answer


def pasted(text: str) -> list[str]:
    """The words behind the last "as arguments: " of a text."""
    return shlex.split(re.findall(r"[Aa]s arguments: (.*)", text)[-1])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("job") / "job.yaml"
    cluster = {"based_on": "dgx-a100", "node": {"gpus": 4, "nics": 4}}
    model = {
        "name": "small",
        "hidden": 256,
        "layers": 4,
        "heads": 8,
        "vocabulary": 512,
        "context": 1024,
        "dropout": True,
        "tied": False,
    }
    file.write_text(json.dumps({"model": model, "cluster": cluster, "nodes": 2, "plan": PLAN}))
    return str(file)


@pytest.mark.parametrize("more", [(), ("--vary", "nodes=2,4")])
def test_arguments_of_a_search(job: str, tmp_path: Path, more: tuple[str, ...]) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(json.dumps(SPACE))
    options = ("plan", job, "--space", str(space), *more)
    answer = json.loads(call(*options, "--json").stdout)
    words = pasted(call(*options).output)
    assert words == shlex.split(answer["arguments"])
    assert {"plan.accumulation=null", "plan.shard=null"} <= set(words)  # the best is neither in copies nor of another batch
    assert simulated([job, *words])["step_seconds"] == answer["best"]["step"]


def test_arguments_of_advice(job: str) -> None:
    """Of every candidate, and those on the screen are the best one's."""
    answer = json.loads(call("advise", job, "--json").stdout)["candidates"]
    assert len(answer) > 8
    for candidate in answer:
        again = simulated([job, *shlex.split(candidate["arguments"])])
        assert [again[key] for key in EXACT] == [candidate[key] for key in EXACT], candidate["name"]
    assert pasted(call("advise", job).output) == shlex.split(answer[0]["arguments"])


def test_a_step_of_many_microbatches_has_one_answer(job: str) -> None:
    """Searches play a few of them, `simulate` all: what draws of GPUs add is told from the same few."""
    words = (
        "--set",
        "plan.global_batch=512",
        "--set",
        "plan.schedule=1f1b",
        "--set",
        "plan.chunks=null",
        "--set",
        "plan.accumulation=null",
    )
    asked = read_job(job, words[1::2])
    assert played(asked).periods
    summary = predict(asked)
    assert simulated([job, *words])["step_seconds"] == summary.step_seconds
    assert simulated([job, *words, "--total"])["memory"] == list(summary.to_dict()["memory"])
    (compared,) = json.loads(call("compare", job, *words, "--total", "--json").stdout)
    assert compared["step_seconds"] == summary.step_seconds


def test_what_makes_a_job_fit() -> None:
    given = ["--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--set", "plan.accumulation=2", "--set", "model.layers=26"]
    first = call("simulate", *given).output.splitlines()[0]
    hints = first.split("; fits with ")[1].split("; ")[0].split(", or ")
    assert len(hints) >= 2
    batch = first.split(": ")[0].split("), ")[1]
    for hint in hints:
        line = call("simulate", *given, *shlex.split(hint)).output.splitlines()[0]
        assert ", fits: " in line
        assert batch in line  # the global batch is kept


def test_layers_of_more_even_stages() -> None:
    sets = ("plan.pp=2", "plan.dp=4", "plan.global_batch=32", "plan.first_stage_layers=40", "plan.data_parallel=zero1")
    given = ["--model", "gpt2-1.5b", "--cluster", "dgx-a100", *(word for change in sets for word in ("--set", change))]
    fitted = re.search(r"with (--set .*) the step takes ([\d.]+ m?s)", call("simulate", *given).output)
    assert fitted is not None
    assert f": {fitted[2]} per step" in call("simulate", *given, *shlex.split(fitted[1])).output


def test_rows_of_a_what_if(job: str) -> None:
    """Strong scaling keeps the batch, which is in no row: a line says what all rows have."""
    options = ("whatif", job, "--vary", "nodes=4,8", "--strong")
    answer = json.loads(call(*options, "--json").stdout)[1:]
    text = call(*options).output
    everywhere = shlex.split(re.findall(r"every row also has (.*)", text)[0])
    for case, nodes in zip(answer, (4, 8), strict=True):
        assert f"\nnodes={nodes} " in text
        for words in (["--set", f"nodes={nodes}", *everywhere], shlex.split(case["arguments"])):
            again = simulated([job, *words])
            assert [again[key] for key in EXACT] == [case["summary"][key] for key in EXACT]


def test_rows_of_a_what_if_that_vary_a_plan_that_was_found() -> None:
    """A field that rows vary is in their inputs, not in what all of them have."""
    given = ("--model", "gpt2-1.5b", "--cluster", "dgx-a100", "--set", "plan.sequence=1024")
    options = ("whatif", *given, "--vary", "plan.microbatch=1,2")
    answer = json.loads(call(*options, "--json").stdout)[1:]
    (line,) = re.findall(r"every row also has (.*)", call(*options).output)
    assert "microbatch" not in line
    for case, size in zip(answer, (1, 2), strict=True):
        again = simulated([*given, "--set", f"plan.microbatch={size}", *shlex.split(line)])
        assert [again[key] for key in EXACT] == [case["summary"][key] for key in EXACT]


def test_the_best_plan_of_a_page(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drawing, "__call__", lambda self, data, path, legend=True: Image.new("1", (1, 1)).save(path))
    without = [word for part in ("scaling", "clusters", "sensitivity", "published") for word in ("--without", part)]
    call("report", job, "--output", str(tmp_path), "--search", *without, "--workers", "1")
    (line,) = re.findall(r"<p>(The best of .*?)</p>", (tmp_path / "report.html").read_text())
    answer = simulated([job, *pasted(line.replace("&#39;", "'"))])
    rate = re.search(r", ([\d.]+) k tokens/s/GPU", line)
    assert rate is not None
    assert answer["tokens_per_second_per_gpu"] == pytest.approx(1000 * float(rate[1]), rel=0.005)
    assert answer["tokens_per_second_per_gpu"] > simulated([job])["tokens_per_second_per_gpu"]


def test_the_command_that_is_printed_below_an_answer(job: str) -> None:
    """As a process, whose arguments it tells."""

    def run(words: Sequence[str]) -> str:
        command = [sys.executable, "-c", "import shardyard; shardyard.main()", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    text = run(["simulate", job, "--set", "plan.offload={optimizer: cpu}", "--set", "plan.recompute=full"])
    words = shlex.split(text.split("`")[1])
    assert words[0] == "shardyard"
    assert run(words[1:]) == text


FSDP2 = {"gradient_sync": "last", "reshard_after_backward": True}  # what accelerate has it do


@pytest.mark.parametrize(
    ("framework", "plan"),
    [
        ("megatron", {"tp": 2, "sequence_parallel": True, "data_parallel": "zero1", "gradients": "fp32", "global_batch": 32}),
        ("deepspeed", {"data_parallel": "zero3", "deepspeed": {}, "recompute": "full", "global_batch": 32, "overlap": True}),
        (
            "torchtitan",
            {
                "data_parallel": "zero3",
                "kernels": "compiled",
                "gradients": "fp32",
                "attention": "sdpa",
                "complex_rotary": True,
                "repeated_keys": True,
                "global_batch": 32,
            },
        ),
        ("accelerate", FSDP2 | {"data_parallel": "zero3", "kernels": "torch", "global_batch": 32}),
    ],
)
def test_settings_that_are_exported(framework: str, plan: dict[str, Any], tmp_path: Path) -> None:
    """Read again, with what has to be said in the training script, they are the same job."""
    given = {"model": "llama-3.1-8b", "cluster": "dgx-h100"}
    exported = export(framework, read_job(plan=plan | {"sequence": 4096}, **given))
    file = tmp_path / exported.file
    file.write_text(exported.text)
    options = [word for name, value in given.items() for word in (f"--{name}", value)]
    said = re.findall(r"to be said in the training script: (.*)", "\n".join(exported.unexpressed))
    script = [word for part in ", ".join(said).split(", ") if part for word in ("--set", f"plan.{part}")]
    first = simulated(
        [*options, *(f"--set=plan.{name}={json.dumps(value)}" for name, value in {**plan, "sequence": 4096}.items())]
    )
    again = simulated([*options, f"--from-{framework}", str(file), *script])
    assert again["step_seconds"] == first["step_seconds"]


TINY = {"name": "tiny", "hidden": 512, "layers": 8, "heads": 8, "vocabulary": 8192, "context": 512}
RUN = {"failures": "rsc-1", "spares": 1, "checkpoint": {"interval": "1 h"}}
SAID = {"tp": 2, "sequence_parallel": True, "data_parallel": "zero1", "recompute": "full", "accumulation": 2}
PRINTING = [
    ("simulate",),
    ("simulate", "--set", "model.hidden=8192", "--set", "model.layers=40"),  # does not fit
    ("advise",),
    ("plan", "--vary", "plan.tp=1,2", "--vary", "plan.pp=1", "--vary", "plan.microbatch=1", "--workers", "1"),
    ("whatif", "--vary", "nodes=2,4", "--strong", "--workers", "1"),
    ("whatif", "--vary", "nodes=2,x1.5", "--batch", "scale", "--replan", "--workers", "1"),
    ("whatif", "--vary", "plan.global_batch=16,32", "--also", "plan.microbatch=2", "--workers", "1"),
    ("compare", "--also", "plan.microbatch=2"),
    ("run", "--tokens", "1e11", "--replications", "4", "--workers", "1"),
    ("loop",),
    ("checkpoint",),
    ("export", "--to", "megatron"),
]


BOTH = PRINTING[1:4]  # tried with a plan that is said, too


@pytest.mark.parametrize(
    ("words", "said"), [(words, said) for words in PRINTING for said in (False, True) if not said or words in BOTH], ids=str
)
def test_whatever_a_command_prints_to_be_pasted_is_understood(words: tuple[str, ...], said: bool, tmp_path: Path) -> None:
    """Pasted behind the job's own arguments, by `simulate`, which does not refuse them."""
    job = tmp_path / "job.yaml"
    cluster = {"based_on": "dgx-a100", "node": {"gpus": 2, "nics": 2}}
    fields: dict[str, Any] = {"model": TINY, "cluster": cluster, "nodes": 2, "run": RUN}
    job.write_text(json.dumps(fields | ({"plan": SAID} if said else {})))
    own = [word for pair in pairwise(words) if pair[0] == "--set" for word in pair]
    text = "".join((result := call(words[0], str(job), *words[1:])).output + result.stderr)
    printed = re.findall(r"(?:--set (?:'[^']*'|[^\s';,)]+) ?)+", text)
    for arguments in printed:
        answer = call("simulate", str(job), *own, *shlex.split(arguments))
        assert " per step" in answer.output, (arguments, answer.output)
    if words[0] in ("advise", "plan") or (words[0] == "simulate" and not said):
        assert printed


def test_what_a_run_should_change_first_is_that_change() -> None:
    """The fields that are told make the run that was tried."""
    given = {"model": TINY, "cluster": "dgx-a100", "nodes": 2, "plan": {}, "run": RUN}
    job = read_job(**given)
    assert job.run is not None
    told = 0
    for _, settings, changed in changes_of(job.run):
        if changed:
            other = read_job(overrides=changed, **given)
            assert prepare(other, other.run or RunSettings(), tokens=1e9).spec == prepare(job, settings, tokens=1e9).spec, changed
            told += 1
    assert told >= 7


def test_all_fields_of_a_plan_can_be_unset() -> None:
    """So that arguments can say what is to be left out."""
    for name, info in Plan.model_fields.items():
        default = info.get_default(call_default_factory=True)
        text = f"{default!r} B" if name == "bucket" and default is not None else json.dumps(default)
        job = read_job(model="llama-3.1-8b", cluster="dgx-h100", overrides=[f"plan.{name}={text}"])
        assert getattr(job.plan, name) == default or name == "global_batch"


def test_what_to_buy_and_what_a_budget_is_good_for(job: str, tmp_path: Path) -> None:
    """Whole lines, with the model and with clusters as they were asked for, which may be files."""
    cluster = tmp_path / "our cluster.yaml"
    cluster.write_text("name: ours\nbased_on: dgx-h100\nnode: {gpus: 4, nics: 4}\n")
    given = ("--set", "plan.sequence=1024")
    answer = json.loads(
        call("budget", "--model", "gpt2-1.5b", "--cluster", str(cluster), *given, "--workers", "1", "--json").stdout
    )
    words = pasted(call("budget", "--model", "gpt2-1.5b", "--cluster", str(cluster), *given, "--workers", "1").output)
    assert words[:2] == ["--model", "gpt2-1.5b"]
    assert simulated([*words, *given])["step_seconds"] == answer[0]["step_seconds"]
    offers = ("buy", f"2x{cluster}", "vs", "1xdgx-a100@1.8", "--model", "gpt2-1.5b", *given, "--workers", "1")
    bought = json.loads(call(*offers, "--json").stdout)["offers"]
    lines = call(*offers).output.splitlines()
    for each, name in zip(bought, ("2 × ours", "1 × dgx-a100 at $1.80/h"), strict=True):
        (line,) = (line for line in lines if line.startswith(f"{name}: --cluster "))
        words = shlex.split(line.removeprefix(f"{name}: "))
        assert simulated(["--model", "gpt2-1.5b", *words, *given])["step_seconds"] == each["summary"]["step_seconds"]


def test_advice_on_gpus_without_bf16() -> None:
    """`simulate` finds a plan in fp16 there, and so does `advise`; pasted it is the same, as the default is in every command."""
    small = ("--model", "bert-large", "--set", "model.layers=4", "--set", "plan.sequence=128")
    given = (*small, "--cluster", "dgx-1v", "--plan", "auto")
    first = json.loads(call("advise", *given, "--json").stdout)["candidates"][0]
    words = shlex.split(first["arguments"])
    answer = simulated([*given, *words])
    assert answer["step_seconds"] == first["step_seconds"]
    assert answer["peak_dtype"] == "fp16"


def test_advice_keeps_the_precision_that_a_job_says() -> None:
    """A plan that is written down in fp32 is not offered one in bf16, in which it would be the fastest."""
    small = ("--model", "bert-large", "--set", "model.layers=4", "--set", "plan.sequence=128")
    given = (*small, "--cluster", "dgx-a100", "--set", "plan.precision=fp32")
    candidates = json.loads(call("advise", *given, "--json").stdout)["candidates"]
    assert len(candidates) > 3
    assert not any("precision" in each["arguments"] for each in candidates)
