"""Mutation testing: small wrong changes of sim/ and strategies/, and whether a test notices (`make mutants`).

A mutant is one changed expression: + for −, < for ≤, a doubled constant, a condition that is never true. The kept answers (KEPT)
run once with coverage, which says which of them reach a line. Each of a random sample of mutants meets these, the quickest first,
until one fails or SECONDS of them have passed; then the test files of its own folder and those that import its module, its
namesake first, for NEAR. A mutant that passes survives: a test is missing, or the change means nothing. (Of what is cached in
a process only the first test counts as one that reaches it: the whole suite may kill a survivor.) Works in copies of the checkout
under out/mutants. Exit code 1 when less than 90 % are killed. tests/data/equivalent_mutants.yaml lists mutants that change no
answer, each with the reason: they are not drawn.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from signal import SIGKILL
from time import monotonic
from xml.etree import ElementTree

import yaml
from coverage import CoverageData

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "mutants"
MUTATED = ("sim", "strategies")
EQUIVALENT = ROOT / "tests" / "data" / "equivalent_mutants.yaml"
WANTED = 0.9  # part of the mutants that tests must kill
KEPT = "tests/results", "tests/test_answers.py", "tests/test_programs.py", "tests/test_refusals.py"
SECONDS = 90.0  # of kept answers, by their usual time, that a mutant must pass to survive
NEAR = 180.0  # and of other tests
FORKS = get_context("forkserver")
LIBRARIES = [
    "numpy",
    "pandas",
    "pydantic",
    "pytest",
    "hypothesis",
    "simpy",
    "scipy.optimize",
    "matplotlib",
    "yaml",
    "_pytest.fixtures",
]
SLOWER, START = 5.0, 60.0  # tests that take SLOWER times as long as usual, and START seconds, are taken to wait forever

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


def pytest(folder: Path, *arguments: str, seconds: float | None = None) -> int:
    """Exit status of a pytest run in a copy of the checkout; 0 is all passed. Raises TimeoutError."""
    running = FORKS.Process(target=_pytest, args=(folder, arguments, OUT / f"{folder.name}.log"))
    running.start()
    running.join(seconds)
    if running.exitcode is None:
        os.killpg(running.pid or 0, SIGKILL)  # with the processes that tests have started
        running.join()
        raise TimeoutError
    return running.exitcode


def _pytest(folder: Path, arguments: tuple[str, ...], log: Path) -> None:
    """In a fork of a process that has the libraries, but nothing of the checkout."""
    os.setsid()
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path.insert(0, str(folder))
    import pytest

    sys.exit(int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments])))


@dataclass(frozen=True)
class Reach:
    """Which tests reach each line, and how long they take."""

    tests: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]

    def of(self, mutant: Mutant) -> list[str]:
        """Tests that reach the mutant's line, the quickest first, SECONDS of them; one at least."""
        reaching = {test for test in self.tests.get(mutant.path, {}).get(mutant.line, []) if test in self.seconds}
        total, chosen = 0.0, list[str]()
        for test in sorted(reaching, key=lambda test: (self.seconds[test], test)):
            total += self.seconds[test]
            if chosen and total > SECONDS:
                break
            chosen.append(test)
        return chosen


def near(mutant: Mutant) -> list[str]:
    """Test files: the namesake of the mutant's file, those that import its module, those of its folder, those that name that."""
    path = Path(mutant.path)
    module, folder = ".".join(path.with_suffix("").parts).removesuffix(".__init__"), Path("tests", path).parent
    named = rf"from {re.escape(module)} import|import {re.escape(module)}\b"
    ranks: dict[str, int] = {}
    for room in MUTATED:
        for file in sorted((ROOT / "tests" / room).rglob("test_*.py")):
            name, text = file.relative_to(ROOT), file.read_text()
            closeness = [name.stem == f"test_{path.stem}", re.search(named, text) is not None, name.parent == folder]
            closeness.append(re.search(rf"\b{folder.name}\b", text) is not None)
            if any(closeness):
                ranks[name.as_posix()] = closeness.index(True)
    return sorted(ranks, key=lambda name: (ranks[name], name))


def reach() -> Reach:
    """Run the kept answers with coverage, unless they were run for the same files."""
    files = [path for name in (*MUTATED, *KEPT) for path in sorted((ROOT / name).rglob("*.py")) or [ROOT / name]]
    files += sorted((ROOT / "tests" / "data").glob("*.json*"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    covered, times = OUT / f"{digest}.coverage", OUT / f"{digest}.xml"
    if not covered.exists() or not times.exists():
        print("the kept answers with coverage …", flush=True)
        folder = copy_of_checkout(OUT / "covered")
        cov = [f"--cov={name}" for name in MUTATED]
        if pytest(folder, "-n", "2", *cov, "--cov-context=test", "--cov-report=", f"--junitxml={times}", *KEPT):
            sys.exit(f"they fail without a mutant: see {OUT / 'covered.log'}")
        (folder / ".coverage").replace(covered)
    data = CoverageData(str(covered))
    data.read()
    tests: dict[str, dict[int, list[str]]] = {}
    for measured in data.measured_files():
        lines = data.contexts_by_lineno(measured)
        name = Path(measured).relative_to(OUT / "covered").as_posix()
        tests[name] = {line: [context.partition("|")[0] for context in contexts] for line, contexts in lines.items()}
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(times).iter("testcase"):
        *path, module = case.get("classname", "").split(".")
        seconds["/".join((*path, f"{module}.py")) + "::" + case.get("name", "")] = float(case.get("time", 0))
    return Reach(tests, seconds)


def survives(mutant: Mutant, tests: list[str], reached: Reach, folder: Path) -> bool:
    """Whether `tests`, and those near it, pass with the mutant in a copy of the checkout, which is as before afterwards."""
    path = folder / mutant.path
    source = path.read_bytes()
    arguments = OUT / f"{folder.name}.tests"
    arguments.write_text("\n".join(tests))
    try:
        path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
        if tests and not passes(folder, f"@{arguments}", seconds=START + SLOWER * sum(reached.seconds[test] for test in tests)):
            return False
        others = near(mutant)
        try:
            return not others or pytest(folder, "-x", *others, seconds=NEAR) == 0
        except TimeoutError:  # there are more of them than there is time for
            return True
    finally:
        path.write_bytes(source)


def passes(folder: Path, *arguments: str, seconds: float) -> bool:
    """Whether tests pass, in time: what takes so much longer than usual waits forever."""
    try:
        return pytest(folder, "-x", *arguments, seconds=seconds) == 0
    except TimeoutError:
        return False


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
        folders.put(copy_of_checkout(OUT / f"worker-{number}"))
    until = monotonic() + 60 * options.minutes

    def judged(mutant: Mutant) -> str | None:
        if monotonic() > until:
            return None
        tests, folder = reached.of(mutant), folders.get()
        try:
            lives = survives(mutant, tests, reached, folder)
        finally:
            folders.put(folder)
        how = "survives" if lives else "killed"
        print(f"{how:8} {mutant}  (reached by {len(tests)} kept answers)", flush=True)
        return how

    with ThreadPoolExecutor(options.workers) as pool:
        judgements = [(mutant, how) for mutant, how in zip(drawn, pool.map(judged, drawn), strict=True) if how]
    killed = sum(how == "killed" for _, how in judgements)
    print(f"\n{killed} of {len(judgements)} mutants killed, of {len(everyone)} that there are; these survive:")
    for mutant, how in judgements:
        if how == "survives":
            print(f"  {mutant}")
    return int(not judgements or killed < WANTED * len(judgements))


if __name__ == "__main__":
    sys.exit(main())
