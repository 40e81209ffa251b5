"""What `make mutants` changes."""

from __future__ import annotations

from pathlib import Path

from tests.mutants import mutants_of

SOURCE = '''
LIMIT = 3

def cost(size: int, times: int = 2) -> float:
    """Ψ bytes, 2 times."""
    if size < LIMIT and not times:
        raise ValueError(f"size {size + 1}")
    return size / 4
'''


def test_expressions_of_functions_change_and_texts_and_constants_outside_do_not(tmp_path: Path) -> None:
    (tmp_path / "cost.py").write_text(SOURCE)
    mutants = list(mutants_of(tmp_path, "cost.py"))
    assert [(mutant.line, mutant.before, mutant.after) for mutant in mutants] == [
        (6, "size < LIMIT and (not times)", "(False)"),
        (6, "size < LIMIT and (not times)", "(size < LIMIT or not times)"),
        (6, "size < LIMIT", "(size <= LIMIT)"),
        (6, "not times", "(times)"),
        (8, "size / 4", "(size * 4)"),
        (8, "4", "(8)"),
    ]
    source = SOURCE.encode()
    assert [source[mutant.start : mutant.end].decode() for mutant in mutants[:3]] == [
        "size < LIMIT and not times",
        "size < LIMIT and not times",
        "size < LIMIT",
    ]
