"""Parts of which only some parameters are trained, operator by operator."""

from __future__ import annotations

from sim.program import Kernel
from strategies.layers.fine_tuning.frozen import lowest
from strategies.layers.operators import Operator

PRODUCT = Kernel("gemm", "up weight", "backward", 1.0, 1.0, shape=(1, 6, 4, 9))
NORM = Kernel("memory", "norm", "backward", 0.0, 1.0)


def test_below_the_first_parameter_nothing_runs_backward_and_recomputation_keeps_what_it_begins_with() -> None:
    """Its first tensor alone, whatever the operators below keep."""
    below = Operator(forward=(NORM,), input_gradient=(NORM,), saved={"input": 2.0, "statistics": 4.0})
    trained = Operator(input_gradient=(NORM,), weight_gradient=(PRODUCT,), shapes=((6, 4),), saved={"up input": 8.0})
    above = Operator(input_gradient=(NORM,), saved={"result": 16.0})
    for keeps_input, saved in ((True, {"input": 2.0}), (False, {})):
        first, second, third = lowest([below, trained, above], keeps_input)
        assert (first.forward, first.backward, first.saved) == ((NORM,), (), saved)
        assert (second.backward, second.saved) == ((PRODUCT,), {"up input": 8.0})
        assert (third.backward, third.saved) == ((NORM,), {"result": 16.0})
    whole, _ = lowest([trained, above], keeps_input=True)
    assert whole.saved == {"up input": 8.0}
