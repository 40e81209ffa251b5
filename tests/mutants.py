"""Mutation testing: small wrong changes of sim/ and strategies/, and whether a test notices (`make mutants`).

A mutant is one changed expression: + for −, < for ≤, a doubled constant, a condition that is never true. The kept answers (KEPT)
run once, traced, which says which of them call a function. Each of a random sample of mutants meets, until a test fails or its
CPU seconds are spent: the test file of its namesake, the quickest kept answers that call its function (SECONDS of them), the test
files that import its module, those of its folder and those that name its function. A mutant that passes survives: a test is
missing, or it means nothing. (Of what is cached in a process only the first test counts as one that calls it: the whole suite may
kill a survivor.) Time is CPU time, so that a busy machine changes no judgement: a test that takes LOOPS seconds of it waits
forever, which kills; what waits longer without computing is unclear and not counted. Works in copies of the checkout under
out/mutants. Exit code 1 when less than 90 % are killed. tests/data/equivalent_mutants.yaml lists mutants that change no answer,
each with the reason: they are not drawn.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from signal import ITIMER_PROF, SIGKILL, setitimer
from time import monotonic, process_time
from types import CodeType, FrameType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "mutants"
MUTATED = ("sim", "strategies")
ROOMS = (*MUTATED, "topologies", "reports")  # of tests that may notice
EQUIVALENT = ROOT / "tests" / "data" / "equivalent_mutants.yaml"
WANTED = 0.9  # part of the mutants that tests must kill
KEPT = "tests/results", "tests/test_answers.py", "tests/test_programs.py", "tests/test_refusals.py"
SECONDS = 40.0  # of kept answers, by their usual time, that a mutant meets
LOOPS = 60.0  # of CPU that no test takes without a mutant
FORKS = get_context("forkserver")
LIBRARIES = "numpy pandas pydantic pytest hypothesis simpy scipy.optimize matplotlib yaml _pytest.fixtures".split()
UNCLEAR = -SIGKILL

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """`before` at a place of a file, and what stands there instead."""

    path: str
    line: int
    start: int  # bytes from the beginning of the file
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  →  {self.after}"


def equivalent() -> dict[tuple[str, str, str, str], str]:
    """Why a mutant (its file, the text of its line, before, after) changes no answer."""
    rows = yaml.safe_load(EQUIVALENT.read_text()) or []
    return {(row["file"], row["line"], row["before"], row["after"]): row["why"] for row in rows}


def key_of(mutant: Mutant, lines: Sequence[str]) -> tuple[str, str, str, str]:
    """See `equivalent`. lines: of the mutant's file."""
    return mutant.path, lines[mutant.line - 1].strip(), mutant.before, mutant.after


def mutants_of(root: Path, path: str) -> Iterator[Mutant]:
    """Every mutant of a file."""
    source = (root / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, changed in _changes(ast.parse(source)):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        yield Mutant(path, node.lineno, start, end, ast.unparse(node), f"({ast.unparse(changed)})")


def _changes(node: ast.AST, inside: bool = False) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Expressions that functions compute, each with what a mutant has instead; messages and assertions are left alone."""
    for name, value in ast.iter_fields(node):
        if name in ("decorator_list", "annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Raise | ast.Assert | ast.arguments):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":  # an assertion of `zip`
                continue
            within = inside or isinstance(child, ast.FunctionDef)
            if within and isinstance(child, ast.If | ast.IfExp):
                yield child.test, ast.Constant(False)
            changed = _changed(child) if within else None
            if changed is not None and isinstance(child, ast.expr):
                yield child, changed
            yield from _changes(child, within)


def _changed(node: ast.AST) -> ast.expr | None:
    match node:
        case ast.BinOp(left, operator, right) if type(operator) in SWAPPED and not isinstance(left, ast.JoinedStr):
            return ast.BinOp(left, SWAPPED[type(operator)](), right)  # type: ignore[arg-type]
        case ast.Compare(left, [first, *more], comparators) if type(first) in SWAPPED:
            return ast.Compare(left, [SWAPPED[type(first)](), *more], comparators)  # type: ignore[list-item]
        case ast.BoolOp(operator, values):
            return ast.BoolOp(SWAPPED[type(operator)](), values)  # type: ignore[arg-type]
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            return ast.Constant(2 * value if value else 1)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
    return None


def copy_of_checkout(folder: Path) -> Path:
    """The files that git knows, as they are now."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


class Watch:
    """A pytest plugin: which functions of the checkout a test calls, and its CPU time; it ends tests that loop, and long runs."""

    def __init__(self, budget: float, record: Path | None) -> None:
        """budget: CPU seconds of all tests. record: a file for what each test calls, JSON; None: not traced."""
        self._budget, self._record = budget, record
        self._called = set[CodeType]()
        self.tests: dict[str, tuple[float, list[tuple[str, int, int]]]] = {}

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        self._called.add(frame.f_code)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None]:
        """Run one test, its fixtures included."""
        if process_time() > self._budget:
            pytest.exit("no time left", returncode=0)
        setitimer(ITIMER_PROF, LOOPS if self._record is None else 0)
        self._called.clear()
        start = process_time()
        if self._record:
            sys.settrace(self._trace)
        yield
        sys.settrace(None)
        self.tests[item.nodeid] = process_time() - start, list(_places(self._called))

    def pytest_sessionfinish(self) -> None:
        """Write what was recorded."""
        setitimer(ITIMER_PROF, 0)
        if self._record:
            self._record.write_text(json.dumps(self.tests))


def _places(codes: set[CodeType]) -> Iterator[tuple[str, int, int]]:
    """File, first and last line of each function of MUTATED in the current folder."""
    folder = f"{Path.cwd()}/"
    for code in codes:
        if code.co_filename.startswith(folder) and (path := code.co_filename.removeprefix(folder)).startswith(MUTATED):
            yield path, code.co_firstlineno, max(line or 0 for *_, line in code.co_lines())


def run(folder: Path, tests: Sequence[str], log: Path, budget: float, record: Path | None = None) -> int:
    """Exit status of a pytest run in a copy of the checkout: 0 is all passed, −SIGPROF loops, UNCLEAR waits."""
    running = FORKS.Process(target=_pytest, args=(folder, tests, log, budget, record))
    running.start()
    running.join(10 * budget)
    if running.exitcode is None:
        os.killpg(running.pid or 0, SIGKILL)  # with the processes that tests have started
        running.join()
    return UNCLEAR if running.exitcode is None else running.exitcode


def _pytest(folder: Path, tests: Sequence[str], log: Path, budget: float, record: Path | None) -> None:
    """In a fork of a process that has the libraries, but nothing of the checkout."""
    os.setsid()
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path.insert(0, str(folder))
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    sys.exit(int(pytest.main([*options, *tests], plugins=[Watch(budget, record)])))


@dataclass(frozen=True)
class Reach:
    """Which tests call a function (first and last line) of a file, and how long they take."""

    tests: dict[str, dict[tuple[int, int], set[str]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, test: str, seconds: float, places: Sequence[Sequence[Any]]) -> None:
        """What `Watch` recorded of a test."""
        self.seconds[test] = seconds
        for path, first, last in places:
            self.tests.setdefault(path, {}).setdefault((first, last), set()).add(test)

    def of(self, mutant: Mutant) -> list[str]:
        """Tests that call the innermost function around the mutant, the quickest first, SECONDS of them; one at least."""
        around = [(last - first, first) for first, last in self.tests.get(mutant.path, {}) if first <= mutant.line <= last]
        if not around:
            return []
        length, first = min(around)
        reaching = self.tests[mutant.path][first, first + length]
        total, chosen = 0.0, list[str]()
        for test in sorted(reaching, key=lambda test: (self.seconds[test], test)):
            total += self.seconds[test]
            if chosen and total > SECONDS:
                break
            chosen.append(test)
        return chosen


def near(mutant: Mutant) -> list[str]:
    """Test files: namesakes of the mutant's file, of its room first; those that import its module, those of its folder (or the
    one around it), first where they name the function, those that import from it, those of the same room that name it, and those
    of any room that name the function.
    """
    path, function = Path(mutant.path), function_of(mutant)
    module, folder = ".".join(path.with_suffix("").parts).removesuffix(".__init__"), Path("tests", path).parent
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    named, beside = (rf"(from|import) {re.escape(each)}\b" for each in (module, ".".join(path.parent.parts)))
    ranks: dict[str, int] = {}
    for file in sorted(each for room in ROOMS for each in (ROOT / "tests" / room).rglob("test_*.py")):
        name, text = file.relative_to(ROOT), file.read_text()
        namesake = name.stem == f"test_{path.stem}"
        closeness = [namesake and name.parts[1] == path.parts[0], namesake]
        calls = bool(function) and re.search(rf"\b_*{function}\b", text) is not None
        closeness += [re.search(named, text) is not None, calls and name.parent == folder, name.parent == folder]
        closeness.append(re.search(beside, text) is not None)
        closeness += [name.parts[1] == path.parts[0] and re.search(rf"\b{folder.name}\b", text) is not None, calls]
        if any(closeness):
            ranks[name.as_posix()] = closeness.index(True)
    return sorted(ranks, key=lambda name: (ranks[name], name))


def function_of(mutant: Mutant) -> str:
    """Name of the innermost function around it, without underscores at its ends."""
    functions = [node for node in ast.walk(ast.parse((ROOT / mutant.path).read_bytes())) if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if node.lineno <= mutant.line <= (node.end_lineno or 0)]
    return max(around, key=lambda node: node.lineno).name.strip("_") if around else ""


def reach() -> Reach:
    """Run the kept answers, traced, unless they were run for the same files."""
    files = [path for name in (*MUTATED, *KEPT) for path in sorted((ROOT / name).rglob("*.py")) or [ROOT / name]]
    files += sorted((ROOT / "tests" / "data").glob("*.json*"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    records = {name: OUT / f"{digest}-{Path(name).stem}.json" for name in KEPT}
    missing = [name for name, record in records.items() if not record.exists()]
    if missing:
        print("the kept answers, traced …", flush=True)
        folder = copy_of_checkout(OUT / "traced")
        with ThreadPoolExecutor(2) as pool:
            logs = {name: records[name].with_suffix(".log") for name in missing}
            for status, name in zip(
                pool.map(lambda name: run(folder, [name], logs[name], 3600, records[name]), missing), missing, strict=True
            ):
                if status:
                    records[name].unlink(missing_ok=True)
                    sys.exit(f"{name} fails without a mutant: see {logs[name]}")
    result = Reach()
    for record in records.values():
        for test, (seconds, places) in json.loads(record.read_text()).items():
            result.add(test, seconds, places)
    return result


def judge(mutant: Mutant, reached: Reach, folder: Path, budget: float) -> str:
    """What tests say of a mutant in a copy of the checkout, which is as before afterwards: killed, survives, or unclear."""
    path, arguments = folder / mutant.path, OUT / f"{folder.name}.tests"
    source, (namesake, *others) = path.read_bytes(), near(mutant) or [""]
    arguments.write_text("\n".join(filter(None, (namesake, *reached.of(mutant), *others))))
    try:
        path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
        status = run(folder, [f"@{arguments}"], OUT / f"{folder.name}.log", budget)
    finally:
        path.write_bytes(source)
    return {0: "survives", UNCLEAR: "unclear"}.get(status, "killed")


def everything() -> list[Mutant]:
    """Every mutant of sim/ and strategies/ that may change an answer, by file and place."""
    names = sorted(p.relative_to(ROOT).as_posix() for folder in MUTATED for p in (ROOT / folder).rglob("*.py"))
    known, result = equivalent(), list[Mutant]()
    for name in names:
        lines = (ROOT / name).read_text().splitlines()
        result += [each for each in mutants_of(ROOT, name) if key_of(each, lines) not in known]
    return result


def main() -> int:
    """Draw, run, say which survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="mutants drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=100.0, help="CPU seconds of tests that a mutant meets")
    parser.add_argument("--minutes", type=float, default=60.0, help="no mutant begins later")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="files whose path begins with this, such as sim/engine/player.py")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    FORKS.set_forkserver_preload(LIBRARIES)
    reached = reach()
    everyone = [mutant for mutant in everything() if mutant.path.startswith(options.only)]
    drawn = random.Random(options.seed).sample(everyone, min(options.count, len(everyone)))
    folders: Queue[Path] = Queue()
    for number in range(options.workers):
        folders.put(copy_of_checkout(OUT / f"worker-{os.getpid()}-{number}"))
    until = monotonic() + 60 * options.minutes

    def judged(mutant: Mutant) -> str | None:
        if monotonic() > until:
            return None
        folder = folders.get()
        try:
            how = judge(mutant, reached, folder, options.seconds)
        finally:
            folders.put(folder)
        print(f"{how:8} {mutant}", flush=True)
        return how

    with ThreadPoolExecutor(options.workers) as pool:
        judgements = [(mutant, how) for mutant, how in zip(drawn, pool.map(judged, drawn), strict=True) if how]
    while not folders.empty():
        shutil.rmtree(folders.get())
    killed, clear = (sum(how in which for _, how in judgements) for which in (["killed"], ["killed", "survives"]))
    print(f"\n{killed} of {clear} mutants killed, of {len(everyone)} that there are; these are not:")
    for mutant, how in judgements:
        if how != "killed":
            print(f"{how}: {mutant.path}:{mutant.line}\n{difference(mutant)}")
    return int(not clear or killed < WANTED * clear)


def difference(mutant: Mutant) -> str:
    """The lines of a mutant's expression before and after."""
    source = (ROOT / mutant.path).read_bytes()
    first, last = source.rfind(b"\n", 0, mutant.start) + 1, source.find(b"\n", mutant.end)
    changed = source[first : mutant.start] + mutant.after.encode() + source[mutant.end : last]
    signed = [("-", source[first:last]), ("+", changed)]
    return "\n".join(f"{sign} {line}" for sign, text in signed for line in text.decode().splitlines())


if __name__ == "__main__":
    sys.exit(main())
