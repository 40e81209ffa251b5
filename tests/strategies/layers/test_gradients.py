"""When each gradient of a backward pass is complete: items of the pass that are still to run then, counted by hand."""

from __future__ import annotations

import pytest

from sim.program import Collective, Item, Join, Kernel, Start
from strategies.layers.gradients import CompletedGradient, before, completed
from strategies.layers.model_costs import parts
from strategies.layers.operators import Operator, Shape
from strategies.models.model import Model
from tests.strategies.layers.conftest import GPT, resolved

GATHER = Collective("all_gather", 8.0, "tp", "gather")
OTHER = Collective("reduce_scatter", 8.0, "tp", "reduce")
NORM = Kernel("memory", "norm", "backward", 0.0, 1.0)


def product(label: str, rows: int, columns: int, batch: int = 1) -> Kernel:
    """Of gradients (rows, 9) with inputs (9, columns), `batch` times."""
    return Kernel("gemm", label, "backward", 1.0, 1.0, shape=(batch, rows, columns, 9))


def memory(label: str) -> Kernel:
    return Kernel("memory", label, "backward", 0.0, 1.0)


def left(*items: Item, shapes: tuple[Shape, ...]) -> list[tuple[Shape, int]]:
    """Of one operator whose second half has these items."""
    return [(gradient.shape, gradient.left) for gradient in completed([Operator(weight_gradient=items, shapes=shapes)])]


def test_a_matrix_is_complete_after_its_product_and_what_no_product_makes_at_the_end() -> None:
    items = (product("mlp weight", 6, 4), NORM, NORM)
    assert left(*items, shapes=((6, 4), (7,))) == [((6, 4), 2), ((7,), 0)]


def test_a_function_hands_over_the_gradients_of_a_bias_and_then_of_its_matrix() -> None:
    """After the kernels of both, matrix by matrix; a bias of other rows is another one's."""
    items = (product("mlp weight", 6, 4), memory("mlp weight sum"), memory("mlp bias"), memory("mlp bias sum"), NORM)
    assert left(*items, shapes=((6, 4), (6,))) == [((6,), 1), ((6, 4), 1)]
    again = (product("mlp weight", 5, 4), memory("mlp bias"))
    both = left(*items, *again, shapes=((5, 4), (6, 4), (5,), (6,)))
    assert both == [((6,), 3), ((6, 4), 3), ((5,), 0), ((5, 4), 0)]
    assert left(*items, shapes=((6, 4), (7,))) == [((6, 4), 1), ((7,), 0)]
    elsewhere = (product("mlp weight", 6, 4), memory("up bias"), NORM)
    assert left(*elsewhere, shapes=((6, 4), (6,))) == [((6, 4), 2), ((6,), 0)]
    experts = (product("experts weight", 6, 4, batch=2), memory("experts bias"), NORM)
    assert left(*experts, shapes=((6, 4), (6, 4), (6,), (6,))) == [((6,), 1)] * 2 + [((6, 4), 1)] * 2


def test_only_a_weight_s_product_completes_it() -> None:
    """An input gradient of the same shape does not, nor a kernel that is no product, nor the transposed shape."""
    wrong = (product("mlp", 6, 4), memory("mlp weight"), product("mlp weight", 4, 6))
    assert left(*wrong, product("mlp weight", 6, 4), NORM, shapes=((6, 4),)) == [((6, 4), 1)]
    assert left(*wrong, NORM, shapes=((6, 4),)) == [((6, 4), 0)]


def test_a_kernel_that_adds_the_result_to_what_there_is_completes_it() -> None:
    adds = memory("mlp weight accumulation")
    assert left(product("mlp weight", 6, 4), adds, NORM, NORM, shapes=((6, 4),)) == [((6, 4), 2)]
    assert left(product("mlp weight", 6, 4), adds, adds, shapes=((6, 4),)) == [((6, 4), 0)]
    elsewhere = memory("mlp weights")  # of another label that begins alike
    assert left(product("mlp weight", 6, 4), elsewhere, NORM, shapes=((6, 4),)) == [((6, 4), 2)]


def test_products_of_equal_shapes_complete_one_matrix_each_in_order() -> None:
    items = (product("q weight", 6, 4), NORM, product("k weight", 6, 4), NORM, NORM)
    assert left(*items, shapes=((6, 4), (6, 4))) == [((6, 4), 4), ((6, 4), 2)]


def test_a_batched_product_completes_all_matrices_of_its_shape() -> None:
    items = (product("experts weight", 6, 4, batch=2), NORM)
    assert left(*items, shapes=((6, 4),) * 2 + ((4, 6),)) == [((6, 4), 1)] * 2 + [((4, 6), 0)]


def test_what_is_made_beside_a_collective_is_complete_when_that_has_been_joined() -> None:
    items = (Start(GATHER), product("mlp weight", 6, 4), NORM, Join(GATHER), NORM)
    assert left(*items, shapes=((6, 4),)) == [((6, 4), 1)]
    both = (Start(GATHER), Start(OTHER), product("mlp weight", 6, 4), Join(GATHER), NORM, Join(OTHER), NORM, NORM)
    assert left(*both, shapes=((6, 4),)) == [((6, 4), 2)]
    later = (product("mlp weight", 6, 4), Start(GATHER), NORM, Join(GATHER))
    assert left(*later, shapes=((6, 4),)) == [((6, 4), 3)]
    assert left(Start(GATHER), NORM, Join(GATHER), product("mlp weight", 6, 4), NORM, shapes=((6, 4),)) == [((6, 4), 1)]


def test_items_of_later_operators_are_left_too() -> None:
    """Backward: 2 + 2 items, then 1 + 1. The second halves alone: 2, then 1. A bias and its matrix are complete at once."""
    first = Operator(
        input_gradient=(NORM, product("up", 9, 4)),
        weight_gradient=(product("up weight", 6, 4), memory("up bias")),
        shapes=((6, 4), (6,)),
    )
    second = Operator(input_gradient=(NORM,), weight_gradient=(product("down weight", 4, 6),), shapes=((4, 6),))
    assert completed([first, second]) == (
        CompletedGradient((6,), 2, 1, spread=False, tied=False),
        CompletedGradient((6, 4), 2, 1, spread=False, tied=False),
        CompletedGradient((4, 6), 0, 0, spread=False, tied=False),
    )


def test_where_both_halves_are_interleaved_their_own_order_counts() -> None:
    """The product stands before two items of the whole pass, and before none of the second half."""
    weights = (product("up weight", 6, 4),)
    operator = Operator(
        input_gradient=(NORM, NORM), weight_gradient=weights, both_gradients=(*weights, NORM, NORM), shapes=((6, 4),)
    )
    after = Operator(input_gradient=(NORM,))
    assert completed([operator, after]) == (CompletedGradient((6, 4), 3, 0, spread=False, tied=False),)


def test_tied_matrices_come_first_and_experts_are_spread() -> None:
    head = Operator(weight_gradient=(product("head weight", 8, 4),), tied=((8, 4),), shapes=((4,),))
    routed = Operator(weight_gradient=(product("experts weight", 6, 4),), shapes=((6, 4),), experts=24)
    assert [(gradient.shape, gradient.tied, gradient.spread) for gradient in completed([head, routed])] == [
        ((8, 4), True, False),
        ((4,), False, False),
        ((6, 4), False, True),
    ]


def test_what_follows_a_pass_is_left_as_well() -> None:
    gradients = (CompletedGradient((6, 4), 3, 2, False, False), CompletedGradient((6,), 0, 0, True, True))
    assert before(gradients, 5, 1) == (CompletedGradient((6, 4), 8, 3, False, False), CompletedGradient((6,), 5, 1, True, True))


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_tied_head_with_a_bias_the_matrix_alone_is_the_embedding_s(tied: bool) -> None:
    """BERT's head has a bias per token of the vocabulary, which no embedding has."""
    model = Model(**GPT | {"tied": tied, "head_bias": True})
    head = parts(model, resolved(model)).head
    rows = model.padded_vocabulary
    large = {(gradient.shape, gradient.tied) for gradient in head.gradients if rows in gradient.shape}
    assert large == {((rows, model.hidden), tied), ((rows,), False)}
    alone = parts(without := model.model_copy(update={"head_bias": False}), resolved(without)).head
    assert head.parameters - alone.parameters == rows
    assert alone.parameters == (0 if tied else rows * model.hidden) + 2 * model.hidden  # and the last norm
