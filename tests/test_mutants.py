"""What `make mutants` changes."""

from __future__ import annotations

from pathlib import Path

from tests.mutants import ROOT, Mutant, Reach, equivalent, key_of, mutants_of, near

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


def test_a_mutant_meets_the_quickest_kept_answers_that_there_is_time_for() -> None:
    seconds = {"answers::a": 60.0, "answers::b": 50.0, "answers::c": 20.0, "answers::d": 5.0}
    mutant = Mutant("sim/engine/network.py", 3, 0, 1, "1", "(2)")
    reached, alone = Reach(), Reach()
    for test, usual in seconds.items():
        reached.add(test, usual, [(mutant.path, 2, 5)])
    reached.add("answers::around", 1.0, [(mutant.path, 1, 9)])
    assert reached.of(mutant) == ["answers::d", "answers::c"]
    alone.add("slow", 500.0, [(mutant.path, 3, 3)])
    assert alone.of(mutant) == ["slow"]
    assert reached.of(Mutant("sim/engine/network.py", 10, 0, 1, "1", "(2)")) == []


def test_a_mutant_meets_its_namesake_then_tests_that_import_it_then_those_of_its_folder() -> None:
    tests = near(Mutant("sim/engine/network.py", 3, 0, 1, "1", "(2)"))
    places = [
        tests.index(f"tests/sim/{name}.py") for name in ("engine/test_network", "engine/test_servers", "engine/test_unequal")
    ]
    assert places[0] == 0
    assert places == sorted(places)
    assert "tests/strategies/models/test_model.py" not in tests


def test_a_mutant_meets_tests_elsewhere_that_name_its_function_last() -> None:
    path = "strategies/read_job.py"
    lines = (ROOT / path).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.startswith("def _variability("))
    tests = near(Mutant(path, line + 1, 0, 1, "1", "(2)"))
    assert "tests/sim/replay/test_waiting.py" in tests
    assert tests.index("tests/sim/replay/test_waiting.py") > tests.index("tests/strategies/test_job.py")  # in its folder


def test_mutants_that_are_said_to_change_nothing_are_there_and_have_a_reason() -> None:
    known = equivalent()
    lines = {path: (ROOT / path).read_text().splitlines() for path, *_ in known}
    there = {key_of(each, lines[path]) for path in lines for each in mutants_of(ROOT, path)}
    assert not known.keys() - there
    assert all(len(why.split()) >= 5 for why in known.values())
