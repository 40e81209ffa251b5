"""Bytes that exist only while an operator runs, tensor by tensor: bf16, a sequence of 32 tokens, 64 features in 8 heads."""

from __future__ import annotations

from typing import Any

import pytest

from sim.program import Kernel
from strategies.layers.attention.self_attention import attention
from strategies.layers.operators import column_linear, pointwise, replicated_linear, row_linear
from strategies.layers.rank_shapes import RankShapes
from strategies.models.model import Model
from tests.strategies.layers.conftest import GPT, LLAMA, resolved

TOKENS, HIDDEN, FFN, HEADS, SCORES = 32, 64, 96, 8, 8 * 32**2


def rank(model: dict[str, Any] = GPT, **plan: Any) -> RankShapes:
    built = Model(**model)
    return RankShapes(built, resolved(built, **plan))


def workspaces(model: dict[str, Any], **plan: Any) -> dict[str, float]:
    """Of the operators of attention, by the label of their first kernel."""
    operators = attention(rank(model, **plan))
    labels = [
        next((item.label for item in (*operator.forward, *operator.input_gradient) if isinstance(item, Kernel)), "")
        for operator in operators
    ]
    return {label: operator.temporary for label, operator in zip(labels, operators, strict=True)}


@pytest.mark.parametrize(("tp", "parallel", "inputs"), [(1, False, 1), (2, False, 1), (2, True, 2)])
def test_matrices_cut_by_columns(tp: int, parallel: bool, inputs: int) -> None:
    """The gradient of all tokens' input; with sequence parallelism that input, too."""
    linear = column_linear(rank(tp=tp, sequence_parallel=parallel), "mlp up", FFN, False)
    assert linear.temporary == 2 * TOKENS * HIDDEN * inputs


@pytest.mark.parametrize(("tp", "parallel", "results"), [(1, False, 0), (2, False, 0), (2, True, 1)])
def test_matrices_cut_by_rows(tp: int, parallel: bool, results: int) -> None:
    """The gradient of its part of the input; with sequence parallelism the whole gradient of the result, too."""
    linear = row_linear(rank(tp=tp, sequence_parallel=parallel), "mlp down", FFN, False)
    assert linear.temporary == 2 * TOKENS * (FFN // tp + HIDDEN * results)


def test_matrices_on_every_rank_and_pointwise_functions() -> None:
    """The gradient of the input; what is read and written."""
    assert replicated_linear(rank(), "router", TOKENS, 16).temporary == 2 * TOKENS * HIDDEN
    assert pointwise(rank(), "gate", 100, 50).temporary == 2 * (100 + 50)


def test_fused_attention() -> None:
    """Gradients of queries, keys and values, the result, and the queries' gradient in fp32; 2 heads of keys and values."""
    queries, keys = TOKENS * HIDDEN, TOKENS * 2 * 8
    assert workspaces(LLAMA)["attention"] == 2 * (2 * queries + 2 * keys) + 4 * queries


def test_attention_in_memory() -> None:
    """Scores twice around the softmax and dropout; of each product the gradients of both factors."""
    bytes_of = workspaces(GPT, attention="materialised", dropout=True)
    assert bytes_of["softmax"] == bytes_of["attention dropout"] == 2 * 2 * SCORES
    assert bytes_of["scores"] == bytes_of["context"] == 2 * HEADS * TOKENS * (TOKENS + 8)
