"""The house: rooms import downwards only, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("topologies", "sim", "strategies", "calibration", "reports", "shardyard")


def modules() -> dict[str, Path]:
    """Module names of the project, and their files."""
    result = {"shardyard": ROOT / "shardyard.py"}
    for room in ROOMS[:-1]:
        for path in (ROOT / room).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            result[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return result


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the project that a file imports anywhere, for types only and inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name for name in names if name in known)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: set(imported(path, known)) - {name} for name, path in known.items()}


def test_no_module_imports_itself_through_others(graph: dict[str, set[str]]) -> None:
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))
    assert len(order) == len(graph) > 300


def test_rooms_import_downwards_only(graph: dict[str, set[str]]) -> None:
    upward = [
        (name, other)
        for name, others in graph.items()
        for other in others
        if ROOMS.index(other.split(".")[0]) > ROOMS.index(name.split(".")[0])
    ]
    assert upward == []
