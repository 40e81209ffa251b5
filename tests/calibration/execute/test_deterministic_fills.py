"""What PyTorch itself fills in its deterministic mode (`plan.deterministic`), and what it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

X = torch.randn(64, 64, dtype=torch.bfloat16)
FILLED: dict[str, Callable[[], object]] = {
    "empty": lambda: torch.empty(64, 64),
    "like another": lambda: torch.empty_like(X),
    "cast": lambda: X.float(),
    "copy": lambda: X.t().contiguous(),
    "norm": lambda: functional.layer_norm(X, (64,)),
    "zeros": lambda: torch.zeros(64, 64),
}
NOT: dict[str, Callable[[], object]] = {
    "product": lambda: X @ X,
    "linear": lambda: functional.linear(X, X, X[0]),
    "sum": lambda: X + X,
    "gelu": lambda: functional.gelu(X),
    "softmax": lambda: torch.softmax(X, -1),
    "exponential": X.exp,
    "joined": lambda: torch.cat([X, X]),
}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def fills(operator: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        operator()
    return sum(event.count for event in profiled.key_averages() if event.key == "aten::fill_")


@pytest.mark.parametrize("operator", FILLED.values(), ids=FILLED)
def test_what_torch_empty_makes_is_filled(operator: Callable[[], object]) -> None:
    assert fills(operator) >= 1


@pytest.mark.parametrize("operator", NOT.values(), ids=NOT)
def test_what_structured_operators_make_is_not(operator: Callable[[], object]) -> None:
    assert fills(operator) == 0
