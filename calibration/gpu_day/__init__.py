"""Everything that a real GPU can tell, in order of value, in one folder: `make gpu`.

Each stage is a command of its own with a time limit, so that a crash of one costs only that one. What is done is not done again:
the same call goes on where it was, also with what a stage itself had kept (samples of a calibration). A folder is at work for one
call at a time: a stage that has outlived its call, as when that was killed, still counts.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calibration.gpu_day.stages import Stage
from topologies.documents.writing import write_whole
from topologies.reading import UserError, load_text, parse_document

STATE, LOCK = "state.json", "lock"
ROOT = Path(__file__).parents[__name__.count(".") + 1]  # where this package is imported from
START = "import shardyard; shardyard.command_line()"
LEAST = 5.0  # seconds that a stage is worth starting for
ONCE = 2 / 3  # part of a calibration's time at most, after which it measures nothing a second time
TAIL = 3  # lines of a failure that are told
Hear = Callable[[str], None]


@dataclass(frozen=True)
class Done:
    """How a stage ended. ended: "done", "failed: why", "out of time"."""

    name: str
    ended: str
    seconds: float
    command: tuple[str, ...]


def run(stages: Sequence[Stage], folder: Path, seconds: float, hear: Hear) -> list[Done]:
    """Run what is not done yet, for at most so long; how every stage ended that was begun in this or an earlier call. A stage
    whose command differs from the one that was done is done anew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder) as lock:
        return _run(stages, folder, seconds, hear, lock)


@contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """Hold the folder, and let stages hold it with what is yielded. Raises UserError where somebody does."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder}: another call, or a stage that one has left behind, is still at work in it") from None
        yield file.fileno()


def _run(stages: Sequence[Stage], folder: Path, seconds: float, hear: Hear, lock: int) -> list[Done]:
    done = read_state(folder)
    until = time.monotonic() + seconds
    for stage in stages:
        before = done.get(stage.name)
        if before is not None and before.ended == "done" and before.command == stage.command:
            hear(f"{stage.name}: done before")
            continue
        if missing := [file for file in stage.needs if not (folder / file).exists()]:
            hear(f"{stage.name}: left out, for want of {', '.join(missing)}")
            continue
        left = until - time.monotonic()
        if left < LEAST:
            hear(f"{stage.name}: no time left")
            continue
        done[stage.name] = _ended(stage, folder, min(stage.seconds, left), lock)
        hear(f"{stage.name}: {done[stage.name].ended} ({done[stage.name].seconds:.0f} s)")
        write_whole(folder / STATE, json.dumps([asdict(each) for each in done.values()], indent=1) + "\n")
    return [done[stage.name] for stage in stages if stage.name in done]


def read_state(folder: Path) -> dict[str, Done]:
    """How stages ended in earlier calls. Raises UserError for a file that is none of this."""
    path = folder / STATE
    if not path.exists():
        return {}
    try:
        read = [Done(**(entry | {"command": tuple(entry["command"])})) for entry in parse_document(load_text(path), path)]
    except (TypeError, KeyError):
        raise UserError(f"{path}: is not a list of stages, as `make gpu` writes it: delete it to begin anew") from None
    return {each.name: each for each in read}


def _ended(stage: Stage, folder: Path, seconds: float, lock: int) -> Done:
    """Run one stage; what it prints goes to a file of its name, and as long as it runs the folder is locked."""
    log = folder / "logs" / f"{stage.slug}.txt"
    log.parent.mkdir(exist_ok=True)
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        once = ["--minutes", f"{min(stage.once, ONCE * seconds) / 60:.3g}"] if stage.once else []
        command = [sys.executable, "-c", START, *stage.command, *once]
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, stdout=out, stderr=subprocess.STDOUT, pass_fds=(lock,)
        )
        try:
            code = process.wait(timeout=seconds)
            ended = "done" if code == 0 else f"failed: {_last(log)}"
        except subprocess.TimeoutExpired:
            ended = "out of time"
        finally:
            if process.poll() is None:
                process.terminate()  # it ends its ranks, and keeps what it has
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    return Done(stage.name, ended, time.monotonic() - start, stage.command)


def _last(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-TAIL:]) or "it printed nothing"


def report(folder: Path, facts: Mapping[str, Any], done: Sequence[Done]) -> str:
    """The folder in Markdown: the machine, each stage, and every prediction beside its measurement."""
    lines = ["# Measured on this machine", "", *(f"* {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| stage | ended | seconds |", "|---|---|--:|"]
    lines += [f"| {each.name} | {each.ended} | {each.seconds:.0f} |" for each in done]
    rows = list(_compared(folder, done))
    if rows:
        lines += ["", "| stage | job | what | predicted | measured | error |", "|---|---|---|--:|--:|--:|", *rows]
    return "\n".join(lines) + "\n"


def _compared(folder: Path, done: Sequence[Done]) -> list[str]:
    result = []
    for each in done:
        if "--output" not in each.command or each.command[0] != "validate":
            continue  # one that failed has the jobs that came before
        path = folder / each.command[each.command.index("--output") + 1]
        for job in parse_document(load_text(path), path) if path.exists() else []:
            for row in job["rows"]:
                if row["what"] != "volume" or row["measured"] or row["predicted"]:
                    what = f"{row['what']} {row['of']}".strip()
                    numbers = f"{row['predicted']:.4g} | {row['measured']:.4g} | {row['error']:+.1%}"
                    result.append(f"| {each.name} | {job['job']} | {what} | {numbers} |")
    return result
