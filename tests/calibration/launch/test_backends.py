"""The table of backends and operations in docs/course/collectives.md, as far as a machine without GPUs can try it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibration.launch.place import Place
from calibration.launch.ranks import launch

PAGE = Path(__file__).parents[3] / "docs" / "course" / "collectives.md"
COLUMNS = {"gloo": "gloo, CPU", "mpi": "MPI, CPU", "nccl": "NCCL, GPU"}


def table() -> dict[str, dict[str, str]]:
    """Backend and device -> operation -> mark."""
    lines = PAGE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| operation | gloo, CPU"))
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[start : next(number for number in range(start, len(lines)) if not lines[number])]
    ]
    marks = [
        (operation.strip(), place, mark)
        for row in rows
        for operation in row[0].split(",")
        for place, mark in zip(head[1:], row[1:], strict=True)
    ]
    return {place: {operation: mark for operation, where, mark in marks if where == place} for place in head[1:]}


def tried(place: Place) -> dict[str, list[float] | str]:
    """By operation what this rank has after it, of two ranks that begin with 1, 2 and 3, 4; or the error."""
    import torch
    import torch.distributed as dist

    mine, other = [2.0 * place.rank + 1, 2.0 * place.rank + 2], 1 - place.rank
    result: dict[str, list[float] | str] = {}

    def attempt(name: str, call: Callable[[Any, Any], Any]) -> None:
        x, y = torch.tensor(mine), torch.zeros(4)
        try:
            call(x, y)
            result[name] = [*x.tolist(), *y.tolist()]
        except (RuntimeError, ValueError, NotImplementedError) as error:
            result[name] = str(error)

    def parts(y: Any) -> list[Any]:
        return list(y.split(2))

    attempt("send", lambda x, _: dist.send(x, other) if place.rank == 0 else dist.recv(x, other))
    result["recv"] = result["send"]
    attempt("broadcast", lambda x, _: dist.broadcast(x, 0))
    attempt("all_reduce", lambda x, _: dist.all_reduce(x))
    attempt("reduce", lambda x, _: dist.reduce(x, 0))
    attempt("all_gather", lambda x, y: dist.all_gather(parts(y), x))
    attempt("gather", lambda x, y: dist.gather(x, parts(y) if place.rank == 0 else None))
    attempt("scatter", lambda x, y: dist.scatter(x, [torch.ones(2), torch.ones(2) * 5] if place.rank == 0 else None))
    attempt("reduce_scatter", lambda x, y: dist.reduce_scatter_tensor(y[:1], x))
    attempt("all_to_all", lambda x, y: dist.all_to_all_single(y[:2], x))
    attempt("barrier", lambda x, y: dist.barrier())
    return result


EXPECTED = {  # rank 0, rank 1: two numbers of its own, then what it received
    "send": ([1, 2, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0]),
    "broadcast": ([1, 2, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0]),
    "all_reduce": ([4, 6, 0, 0, 0, 0], [4, 6, 0, 0, 0, 0]),
    "all_gather": ([1, 2, 1, 2, 3, 4], [3, 4, 1, 2, 3, 4]),
    "gather": ([1, 2, 1, 2, 3, 4], [3, 4, 0, 0, 0, 0]),
    "scatter": ([1, 1, 0, 0, 0, 0], [5, 5, 0, 0, 0, 0]),
    "reduce_scatter": ([1, 2, 4, 0, 0, 0], [3, 4, 6, 0, 0, 0]),
    "all_to_all": ([1, 2, 1, 3, 0, 0], [3, 4, 2, 4, 0, 0]),
    "barrier": ([1, 2, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0]),
}


def test_gloo_does_on_cpus_what_the_page_says() -> None:
    pytest.importorskip("torch")
    ranks = launch(tried, 2)
    for operation, mark in table()[COLUMNS["gloo"]].items():
        works = [isinstance(rank[operation], list) for rank in ranks]
        assert works == [mark == "✓"] * 2, (operation, ranks[0][operation])
    for operation, expected in EXPECTED.items():
        assert tuple(rank[operation] for rank in ranks) == expected, operation
    assert ranks[0]["reduce"][:2] == [4, 6]  # what the others have after a reduce is not said


def test_backends_that_this_torch_lacks_are_said() -> None:
    """The wheels of PyPI have gloo on every machine; MPI and UCC are built from source, NCCL is in those for CUDA."""
    torch = pytest.importorskip("torch")
    dist = torch.distributed
    assert dist.is_gloo_available()
    missing = [name for name in ("mpi", "ucc", "nccl") if not dist.is_backend_available(name)]
    text = " ".join(PAGE.read_text().split())
    assert "the wheels of PyPI have neither MPI nor UCC" in text
    assert {"mpi", "ucc"} <= set(missing)
