"""The front door: answers, mistakes, exit codes, and nothing heavy imported before it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import shardyard

ROOT = Path(__file__).parents[1]
JOB = str(ROOT / "examples/llama-3.1-70b.yaml")
SETTINGS = str(ROOT / "tests/data/frameworks/ds_config.json")
CONFIG = str(ROOT / "tests/data/models/mistral-7b-v0.1.json")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(shardyard.main, list(arguments))


def test_public_names_are_complete_and_sorted() -> None:
    assert shardyard.__all__ == sorted(shardyard.__all__)
    assert all(getattr(shardyard, name) for name in shardyard.__all__)
    assert dir(shardyard) == shardyard.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        shardyard.nothing  # noqa: B018


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, shardyard\ntry: shardyard.main(['--help'])\nexcept SystemExit: pass\nprint(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert not {"torch", "numpy", "pandas", "matplotlib", "scipy", "simpy"} & set(loaded)


def test_simulate_imports_only_what_it_needs() -> None:
    code = (
        f"import sys, shardyard\ntry: shardyard.main(['simulate', {JOB!r}])\nexcept SystemExit: pass\nprint(*sorted(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    unneeded = """
        torch pandas matplotlib scipy jinja2 tomllib subprocess multiprocessing asyncio statistics calibration.devices
        strategies.memory_by_layer strategies.planner.effects_cost strategies.planner.fixes reports.page sim.runs.spec
        strategies.resilience.settings strategies.resilience.recovery
    """.split()
    assert not set(unneeded) & set(loaded)


def test_a_process_simulates_without_threads_of_its_own_and_ends_without_looking_for_cycles() -> None:
    """numpy's threads, and the last collection of what the process was: a sixth of the command's time."""
    code = (
        f"import gc, os, sys, shardyard\nsys.argv[1:] = ['simulate', {JOB!r}]\ntry: shardyard.command_line()\n"
        "except SystemExit: pass\n"
        "collected = sum(each['collections'] for each in gc.get_stats()[2:])\n"
        "print(len(os.listdir('/proc/self/task')), gc.get_freeze_count() > 0, collected)"
    )
    usual = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}  # who sets it is obeyed
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=usual)
    assert run.stdout.splitlines()[-1] == "1 True 0"


def test_simulate_prints_the_answer_first() -> None:
    result = call("simulate", JOB)
    assert result.exit_code == 0
    first = result.output.splitlines()[0]
    assert first.startswith("llama-3.1-70b on 8 × dgx-h100 (64 GPUs), 128 sequences of 8,192 tokens:")
    assert "s per step" in first
    assert "fits" in first
    assert len(result.output.splitlines()) <= 40


KEYS = """
    job gpus step_seconds tokens_per_second tokens_per_second_per_gpu model_flops_per_gpu mfu hfu flops_rule peak_dtype
    gpu_hours_per_step breakdown bubble exposed volume links memory memory_capacity memory_peak memory_over memory_worst_stage
    fits events profile notes offloaded interval training uneven ideal_seconds variability
""".split()


def test_json_has_stable_keys_and_says_the_same() -> None:
    answer = json.loads(call("simulate", JOB, "--json").output)
    assert set(answer) == set(KEYS)
    assert sum(answer["breakdown"].values()) == pytest.approx(answer["step_seconds"])
    assert answer["job"]["parameters"] == 70_553_706_496  # huggingface.co/meta-llama/Llama-3.1-70B: 70.6 B
    assert call("simulate", JOB, "--json").output == call("simulate", JOB, "--json").output


def test_out_of_memory_is_an_answer_with_exit_code_2() -> None:
    result = call("simulate", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--set", "plan.data_parallel=ddp")
    assert result.exit_code == 2
    assert "out of memory on stage 0 by" in result.output
    assert "fits with --set plan.data_parallel=zero" in result.output
    assert "error:" not in result.output


MISTAKES = [
    (("simulate",), "field 'model' is required"),
    (("simulate", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
    (("simulate", JOB, "--nodes", "3", "--set", "plan.tp=3"), "tp=3 does not divide 64 attention heads"),
    (("simulate", JOB, "--set", "plan.dp=5"), "tp·pp·dp = 8·2·5 = 80 ≠ 64 GPUs"),
    (("simulate", JOB, "--set", "plan.microbach=3"), "unknown field 'microbach'; did you mean 'microbatch'?"),
    (("simulate", JOB, "--set", "plam.tp=3"), "unknown field 'plam'; did you mean 'plan'?"),
    (("simulate", JOB, "--set", "plan.tp"), "expected FIELD=VALUE"),
    (("simulate", JOB, "--model", "lama-3.1-8b"), "did you mean 'llama-3.1-8b'?"),
    (("simulate", JOB, "--cluster", "dgx-h10"), "did you mean 'dgx-h100'?"),
    (("simulate", JOB, "--profile", "h10"), "unknown profile 'h10'"),
    (("simulate", JOB, "--set", "cluster.node.nic=400"), "needs a unit"),
    (("simulate", JOB, "--set", "plan.precision=fp8"), "precision='fp8'"),
    (("simulate", JOB, "--nodes", "0"), "nodes=0"),
    (("simulate", JOB, "--set", "plan=3"), "plan=3: expected fields, the name of a file, or auto"),
    (("simulate", JOB, "--set", "plan.tp=true"), "tp=True: must not be true or false"),
    (("simulate", JOB, "--set", "plan.tp=two"), "plan: tp='two': must be a whole number"),
    (("simulate", JOB, "--set", "plan.tp=4,plan.pp=2"), "names 2 fields: --set plan.tp=4 --set plan.pp=2"),
    (("simulate", JOB, "--set", "plan.fp8=true"), "fp8=True: must be fields in braces: {scaling: …, gather: …, dispatch: …, …}"),
    (("simulate", JOB, "--set", "plan.offload=cpu"), "offload='cpu': must be fields in braces: {optimizer: …, parameters: …, "),
    (("simulate", JOB, "--set", "plan.layers_per_stage=16"), "layers_per_stage=16: must be a list, such as [16]"),
    (("simulate", JOB, "--set", "cluster.node.nic=400,0 Gb/s"), "not a quantity"),
    (("simulate", JOB, "--set", "cluster.node.nic=400 mb/s"), "not a quantity"),
    (("simulate", JOB, "--nodes", "99999999"), "more than 1,048,576 GPUs"),
    (("simulate", JOB, "--set", "plan.global_batch=1000000000000"), "too many to play"),
    (("simulate", JOB, "--set", "name=[1]"), "name=[1]: must be a text"),
    (("simulate", CONFIG), f"is a model and no job: give it as --model {CONFIG}"),
    (("advise", "--model", SETTINGS, "--cluster", "dgx-h100"), f"give it as --from-deepspeed {SETTINGS}, beside --model"),
    (("simulate", JOB, "--model", "vicuna"), "or give a path to a config.json (`shardyard list models`)"),
    (("simulate", JOB, "--tokens", "15X"), "--tokens 15X: is no number such as 15e12, 15T or 300B"),
    (("simulate", JOB, "--set", "plan.sequence=8k"), "sequence='8k': may be powers of 1000 or of 1024: write the whole number"),
    (("simulate", JOB, "--report", "README.md"), "must name a folder"),
    (
        ("simulate", JOB, "--cluster", "dgx-1v", "--set", "plan.precision=bf16"),
        "precision='bf16' is not possible: v100-sxm2-32gb",
    ),
    (("simulate", JOB, "--set", "tensor_parallel=4"), "unknown field 'tensor_parallel'; here it is 'plan.tp'"),
    (("simulate", JOB, "--set", "nic=25 GB/s"), "unknown field 'nic'; here it is 'cluster.node.nic'"),
    (("simulate", "--model", "llama-3.1-8b"), "field 'cluster' is required: in a job file, or as --cluster"),
    (("simulate", JOB, "--set", "plan.global_batch=102"), "102 is not a multiple of dp·microbatch = 4·1; 100 and 104 are"),
    (("list", "modles"), "did you mean 'models'?"),
    (("explain", "mfuu"), "did you mean 'mfu'?"),
    (("whatif", JOB, "--vary", "nodes=8,16", "--also", "plan.tp=" + "1," * 6000), "more than 10,000 letters"),
    (("simulate", JOB, "--set", "plan.tp=? [a, b]\n: c"), "the value is not valid YAML: a list as a key; keys are texts"),
    (("ranks", "--nodes", "10000000000000000000000"), "a table of more than 262,144 GPUs is not made"),
    (("compare", JOB, "nowhere.yaml"), "nowhere.yaml: cannot be read"),
    (("ranks", "--nodes", "2", "--gpus", "4", "--gpus-per-process", "3"), "3"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda x: " ".join(x)[-40:] if isinstance(x, tuple) else x[:30])
def test_mistakes_are_one_line_on_stderr_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_tokens_may_have_a_prefix() -> None:
    long, short = (call("simulate", JOB, "--tokens", tokens).output.splitlines()[:7] for tokens in ("15e12", "15T"))
    assert long == short
    assert "GPU-hours for 15 T tokens" in "\n".join(short)


def test_set_reaches_every_part_of_the_job() -> None:
    job = shardyard.read_job(JOB, ["plan.tp=4", "model.layers=8", "cluster.node.nic=200 Gb/s", "nodes=4", "profile=generic"])
    assert (job.plan.tp, job.model.layers, job.cluster.node.nic, job.cluster.nodes, job.profile) == (4, 8, 25e9, 4, "generic")
    assert shardyard.read_job(JOB, {"cluster.nodes": 16}).cluster.nodes == 16


def test_a_job_may_be_given_as_its_fields() -> None:
    fields = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "plan": {"tp": 2}}
    assert shardyard.read_job(fields).hash == shardyard.read_job(**fields).hash
    with pytest.raises(shardyard.UserError, match="job: unknown field 'plam'; did you mean 'plan'?"):
        shardyard.read_job({"plam": {}})


def test_a_field_given_twice_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: llama-3.1-8b\ncluster: dgx-h100\nplan: {tp: 2}\nplan: {tp: 4}\n")
    with pytest.raises(shardyard.UserError, match="at line 4: field 'plan' is given twice"):
        shardyard.read_job(tmp_path / "job.yaml")


def test_hash_changes_with_any_input_and_with_nothing_else() -> None:
    job = shardyard.read_job(JOB)
    assert job.hash == shardyard.read_job(JOB).hash
    others = [shardyard.read_job(JOB, [change]).hash for change in ("plan.tp=4", "model.layers=8", "nodes=4", "profile=generic")]
    assert len({job.hash, *others}) == 5


def test_files_named_in_a_job_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((ROOT / "tests/data/models/mistral-7b-v0.1.json").read_text())
    (tmp_path / "plan.yaml").write_text("{tp: 2, sequence: 4096}")
    (tmp_path / "job.yaml").write_text("model: config.json\ncluster: dgx-a100\nplan: plan.yaml\n")
    job = shardyard.read_job(tmp_path / "job.yaml")
    assert job.model.parameters == 7_241_732_096  # huggingface.co/mistralai/Mistral-7B-v0.1
    assert job.plan.tp == 2
    (tmp_path / "plan.yaml").write_text("{tp: 64}")
    with pytest.raises(shardyard.UserError, match=r"plan\.yaml: tp·pp = 64·1 = 64 does not divide 8 GPUs"):
        shardyard.read_job(tmp_path / "job.yaml").resolve()


def test_compare_shows_only_what_differs() -> None:
    result = call("compare", JOB, "--also", "plan.tp=4,plan.pp=4")
    assert result.exit_code == 0
    assert "tp" in result.output
    assert "sequence_parallel" not in result.output
    rows = json.loads(call("compare", JOB, "--also", "plan.pp=4", "--json").output)
    assert [row["job"]["plan"]["pp"] for row in rows] == [2, 4]


def test_list_and_explain() -> None:
    assert "llama-3.1-405b" in call("list", "models").output.split()
    assert "dgx-h100" in call("list").output
    for name in call("list", "metrics").output.split("\n"):
        if name:
            assert call("explain", name).exit_code == 0
    assert "2Ψ" in call("explain", "volume").output
    for name, words in (
        ("plan.tp", "tensor parallel degree"),
        ("1f1b", "arXiv:2104.04473"),
        ("zero3", "3Ψ"),
        ("all_reduce/ring", "2(n−1)/n"),
    ):
        assert words in call("explain", name).output


def test_ranks() -> None:
    output = call("ranks", "--nodes", "2", "--gpus", "4", "--gpus-per-process", "2").output
    assert "world size 4" in output
    assert "3     1     1           2, 3" in output


def test_report_leaves_files_a_person_can_open(tmp_path: Path) -> None:
    result = call("simulate", JOB, "--report", str(tmp_path / "report"))
    assert result.exit_code == 0
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"report.html", "gantt.png", "breakdown.png", "memory.png", "timeline.csv", "summary.json", "trace.json.gz"} <= names


def test_documented_examples_run() -> None:
    import doctest

    from topologies.documents import units

    assert doctest.testmod(shardyard).failed == 0
    assert doctest.testmod(units).failed == 0


def test_a_mistyped_command_is_answered_with_the_nearest() -> None:
    result = call("simulat")
    assert result.exit_code == 2
    assert "unknown command 'simulat'; did you mean 'simulate'?" in result.output


def test_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    from reports import terminal

    now = iter((0.0, 9.0, 11.0, 11.0, 12.0, 22.0, 22.0))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    lines: list[str] = []
    tell = terminal.throttled(lines.append)
    for text in "abcd":
        tell(text)
    assert lines == ["b", "d"]


def test_a_bar_is_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from reports import terminal

    monkeypatch.setattr(terminal.throttled, "__defaults__", (-1.0,))
    for quiet in (False, True):
        with terminal.progress_bar(quiet) as bar:
            task = bar.add_task("starting", total=None)
            bar.update(task, total=3)
            bar.update(task, advance=1, description="kernels gemm")
    assert capsys.readouterr().err.splitlines() == ["starting, 0 of 3", "kernels gemm, 1 of 3"]


def test_unknown_fields_of_a_job_in_python() -> None:
    with pytest.raises(shardyard.UserError, match="unknown field 'clusters'; did you mean 'cluster'"):
        shardyard.read_job(model="llama-3.1-8b", clusters="dgx-h100")
