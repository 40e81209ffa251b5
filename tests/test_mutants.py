"""What `make mutants` changes."""

from __future__ import annotations

from pathlib import Path

from tests.mutants import ROOT, Mutant, Reach, equivalent, key_of, mutants_of

SOURCE = '''
LIMIT = 3

def cost(size: int, times: int = 2) -> float:
    """Ψ bytes, 2 times."""
    if size < LIMIT and not times:
        raise ValueError(f"size {size + 1}")
    pairs = zip("a", "b", strict=True)
    return size / 4
'''


def test_expressions_of_functions_change_and_texts_assertions_and_constants_outside_do_not(tmp_path: Path) -> None:
    (tmp_path / "cost.py").write_text(SOURCE)
    mutants = list(mutants_of(tmp_path, "cost.py"))
    assert [(mutant.line, mutant.before, mutant.after) for mutant in mutants] == [
        (6, "size < LIMIT and (not times)", "(False)"),
        (6, "size < LIMIT and (not times)", "(size < LIMIT or not times)"),
        (6, "size < LIMIT", "(size <= LIMIT)"),
        (6, "not times", "(times)"),
        (9, "size / 4", "(size * 4)"),
        (9, "4", "(8)"),
    ]
    source = SOURCE.encode()
    assert [source[mutant.start : mutant.end].decode() for mutant in mutants[:3]] == [
        "size < LIMIT and not times",
        "size < LIMIT and not times",
        "size < LIMIT",
    ]


def test_a_mutant_meets_the_nearest_and_quickest_tests_that_there_is_time_for() -> None:
    """90 s: the test of the file's name first, then of its folder, then others; one that takes too long is left out."""
    seconds = {"tests/sim/test_network.py::a": 60.0, "tests/sim/test_run.py::b": 50.0, "tests/sim/test_run.py::c": 20.0}
    seconds |= {"tests/test_laws.py::d": 5.0, "tests/test_laws.py::e": 6.0}
    mutant = Mutant("sim/engine/network.py", 3, 0, 1, "1", "(2)")
    reached = Reach({mutant.path: {3: [*seconds, "tests/test_laws.py::skipped"]}}, seconds)
    names = ["network.py::a", "run.py::c", "laws.py::d"]
    assert [test.rpartition("test_")[2] for test in reached.of(mutant)] == names
    alone = Reach({mutant.path: {3: ["slow"]}}, {"slow": 500.0})
    assert alone.of(mutant) == ["slow"]
    assert reached.of(Mutant("sim/engine/network.py", 4, 0, 1, "1", "(2)")) == []


def test_mutants_that_are_said_to_change_nothing_are_there_and_have_a_reason() -> None:
    known = equivalent()
    lines = {path: (ROOT / path).read_text().splitlines() for path, *_ in known}
    there = {key_of(each, lines[path]) for path in lines for each in mutants_of(ROOT, path)}
    assert not known.keys() - there
    assert all(len(why.split()) >= 5 for why in known.values())
