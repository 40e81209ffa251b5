"""Adafactor: of the second moment a number per row and per column."""

from __future__ import annotations

from strategies.optimizers import Optimizer, optimizers


@optimizers("adafactor")
def adafactor() -> Optimizer:
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) without momentum: states of a row and a column of each matrix, which
    are left out (1/1,000 of the parameters). PyTorch runs it operator by operator (torch/optim/_adafactor.py): norms of
    parameter, rows and columns, their product, its root, the update and its norm.
    """
    operators = (
        ("parameter norm", 1),
        ("decay", 2),
        ("row norms", 1),
        ("column norms", 1),
        ("second moment", 1),
        ("second moment scale", 2),
        ("clamp", 2),
        ("root", 2),
        ("product", 3),
        ("update norm", 1),
        ("update", 3),
    )
    return Optimizer(states=0, operators=operators, fused=False, whole_tensors=True)
