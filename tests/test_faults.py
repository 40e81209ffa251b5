"""Faults from outside: a full disk, signals, a parent that is killed. Nothing is half-written, and nothing stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from click.testing import CliRunner

import shardyard

ROOT = Path(__file__).parents[1]
JOB = """
model: {name: small, hidden: 256, layers: 4, heads: 8, vocabulary: 1024, context: 256}
cluster: dgx-h100
plan: {pp: 2, accumulation: 4, data_parallel: zero1}
"""
SPACE = "plan.tp: [1, 2]\nplan.microbatch: [1, 2]\nplan.recompute: [none, full]\nplan.data_parallel: [ddp, zero1]\n"
SERVERS = ROOT / "examples/servers/parameter-server.yaml"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job and a space in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


WRITING = [
    "topology dgx-h100 --draw topology.svg",
    "topology dgx-h100 --draw topology.png",
    "schedule 1f1b --pp 8 --microbatches 64 --csv schedule.csv",
    "export job.yaml --to megatron --output megatron.sh",
    "simulate job.yaml --report report",
    "collective all_reduce --cluster dgx-h100 --sizes 1MiB:2MiB --plot plot.png",
    "collective all_reduce --cluster dgx-h100 --sizes 1MiB:2MiB --by-ranks ranks.svg",
    "whatif job.yaml --vary plan.accumulation=4,8 --workers 1 --plot curve.png",
    "sensitivity job.yaml --plot tornado.svg",
    "validate --published --source megatron-ci-2025 --csv rows.csv",
    f"server {SERVERS} --servers 2 --plot servers.png",
    f"server {SERVERS} --servers 2 --report servers",
]


@pytest.mark.parametrize("command", WRITING)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    command: str, here: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    with full_disk(300):
        result = CliRunner().invoke(shardyard.main, command.split())
    assert result.exit_code == 2
    assert [line for line in result.stderr.splitlines() if line.startswith("error: ")] == [result.stderr.splitlines()[-1]]
    assert "cannot be written: File too large" in result.stderr
    assert "wrote" not in result.output
    assert names(here) == ["job.yaml", "space.yaml"]


def python(code: str, *arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Code in a process and a process group of its own; returns when nobody holds its output open."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=seconds,
    )


INTERRUPTED = """
import signal, sys, shardyard
module, number = sys.argv[1], int(sys.argv[2])

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:  # as in the callback of a weak reference, which Python drops with a traceback
                print("dropped", file=sys.stderr)

sys.meta_path.insert(0, Finder())
sys.argv = ["shardyard", "simulate", "--model", "gpt2-1.5b", "--cluster", "dgx-h100"]
shardyard.command_line()
"""


@pytest.mark.parametrize("module", ["click", "reports.commands", "topologies.documents.errors"])
def test_ctrl_c_while_the_command_line_is_imported_ends_it_without_a_word(module: str) -> None:
    result = python(INTERRUPTED, module, str(int(signal.SIGINT)))
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "interrupted by SIGTERM\n")],
)
def test_a_signal_while_a_command_imports_is_heard_when_that_is_over(number: int, code: int, line: str) -> None:
    result = python(INTERRUPTED, "strategies.job", str(int(number)))
    assert (result.returncode, result.stdout, result.stderr) == (code, "", line)


LOST = """
import signal, sys, time, weakref
from pydantic import Field
from reports.commands._signals import ended_cleanly
from topologies.reading import Config

def now():
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.raise_signal(signal.SIGTERM)
    return True

class Asked(type(Config)):
    def __getattribute__(cls, name):
        if name == "__dict__" and sys._getframe(1).f_code.co_name == "create_schema_validator":  # that is, by code in Rust
            now()
        return super().__getattribute__(name)

class Built(Config, metaclass=Asked):
    field: int = 0

class Written(Config):
    field: int = Field(0, exclude_if=lambda _: now())

class Gone:
    pass

def forget(gone):
    weakref.finalize(gone, now)

for moment in (Built, Written().model_dump_json, lambda: forget(Gone())):
    try:
        with ended_cleanly():
            moment()
            time.sleep(5)
    except KeyboardInterrupt as error:
        print(error)
"""


def test_a_signal_is_heard_after_what_would_lose_it() -> None:
    """The building of a schema, the writing of JSON, the callback of a weak reference."""
    result = python(LOST)
    assert (result.returncode, result.stdout, result.stderr) == (0, "15\n15\n15\n", "")


@pytest.mark.parametrize("where", ["click.Command.make_context", "strategies.planner.search.search.Search._decide"])
def test_a_signal_is_one_line_wherever_it_is_heard(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While options are read; in a search for the plan that a job does not give."""

    def ended(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(where, ended)
    monkeypatch.setattr("strategies.planner.auto_plan._CHOSEN", {})  # another test may have asked for the same plan
    result = CliRunner().invoke(shardyard.main, "simulate --model gpt2-1.5b --cluster dgx-h100".split())
    assert (result.exit_code, result.stdout, result.stderr) == (143, "", "interrupted by SIGTERM\n")


WORKING = """
import os, signal, time
from strategies.planner.search.workers.executors import engine
if __name__ == "__main__":
    try:
        with engine(workers=2) as runs:
            tasks = [runs.submit(time.sleep, 300) for _ in range(3)]
            time.sleep(0.5)
            os.{call}
            tasks[0].result()
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_workers_end_with_a_parent_that_is_killed() -> None:
    """They hold its output open: this returns when they are gone."""
    result = python(WORKING.format(call="kill(os.getpid(), signal.SIGKILL)"))
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGKILL, "", "")


def test_ctrl_c_reaches_every_process_and_ends_workers_at_once_and_silently() -> None:
    result = python(WORKING.format(call="killpg(0, signal.SIGINT)"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "interrupted\n", "")


NO_SCHEDULER = """
from strategies.planner.search.workers.executors import engine
try:
    with engine(dask="nonsense::://"):
        pass
except ValueError as error:
    print(error)
"""


def test_what_is_no_address_of_dask_is_one_line() -> None:
    """A client that never reached a scheduler waits for it when it is deleted."""
    pytest.importorskip("distributed")
    result = python(NO_SCHEDULER)
    assert (result.stdout, result.stderr) == ("--dask nonsense::://: no scheduler answers (ValueError)\n", "")


@pytest.mark.parametrize(("number", "code", "how"), [(signal.SIGINT, 130, ""), (signal.SIGTERM, 143, " by SIGTERM")])
def test_a_plan_that_is_ended_says_what_it_found_and_keeps_it(
    number: int, code: int, how: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strategies.planner.search.results import Results

    add = Results.add

    def before_the_fourth(self: Results, row: dict[str, object]) -> None:
        if len(self.rows) == 3:
            signal.raise_signal(number)
        add(self, row)

    monkeypatch.setattr(Results, "add", before_the_fourth)
    command = "plan job.yaml --space space.yaml --top 9 --workers 1 --results r.jsonl --json"
    result = CliRunner().invoke(shardyard.main, command.split())
    assert result.exit_code == code
    assert result.stderr.splitlines()[-1] == (
        f"interrupted{how}: simulations are kept in r.jsonl; the same command goes on from there"
    )
    answer = json.loads(result.stdout)
    assert (answer["interrupted"], answer["proven"], len(answer["rows"])) == ("interrupted", 0, 3)
    assert len((here / "r.jsonl").read_text().splitlines()) == 3


ANSWERS = [
    "simulate job.yaml --json --report report",
    "plan job.yaml --space space.yaml --top 3 --workers WORKERS --results rows.jsonl --json",
    "plan job.yaml --space space.yaml --front --workers WORKERS --results rows.csv",
    "whatif job.yaml --vary plan.accumulation=4,8 --vary nodes=1,2 --workers WORKERS --json",
    "advise job.yaml --json",
    "topology dgx-h100 --nodes 2 --draw topology.svg --json",
    "collective all_reduce --cluster dgx-h100 --sizes 1MiB:2MiB --json",
    f"server {SERVERS} --servers 2 --json",
    "export job.yaml --to deepspeed --json",
]
ANSWERING = """
import os, sys
from click.testing import CliRunner
import shardyard
workers, *commands = sys.argv[1:]
os.chdir(workers)
sys.argv = ["shardyard"]
for number, command in enumerate(commands):
    result = CliRunner().invoke(shardyard.main, command.replace("WORKERS", workers[-1]).split())
    open(f"answer {number}", "w").write(f"{result.exit_code} {result.stdout}")
"""


def test_the_same_inputs_give_the_same_bytes_whatever_the_workers_and_the_hash_seed(here: Path) -> None:
    """Answers on stdout, tables, figures, traces and pages; how long something took is told on stderr."""
    for workers in ("1", "2"):
        (here / workers).mkdir()
        for name in ("job.yaml", "space.yaml"):
            shutil.copy(here / name, here / workers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONHASHSEED", workers)
            result = python(ANSWERING, str(here / workers), *ANSWERS, seconds=300)
        assert (result.returncode, result.stderr) == (0, "")
    assert names(here / "1") == names(here / "2")
    for name in names(here / "1"):
        first, second = here / "1" / name, here / "2" / name
        assert first.is_dir() or first.read_bytes() == second.read_bytes(), name
    answers = [(here / "1" / f"answer {number}").read_text() for number in range(len(ANSWERS))]
    assert all(answer[0] in "02" and len(answer) > 200 for answer in answers)
