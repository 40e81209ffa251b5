"""What is counted of a step's communication."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from calibration.execute.measured.counting import Counting, copies_counted  # noqa: E402


def test_what_dataparallel_moves_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies between GPUs are no operations of torch.distributed: parameters, inputs, outputs and gradients."""
    from torch.nn.parallel import comm

    for name in ("broadcast_coalesced", "reduce_add_coalesced", "scatter", "gather"):
        monkeypatch.setattr(comm, name, lambda *arguments: "result")
    with Counting() as counting, copies_counted(counting):
        assert comm.broadcast_coalesced([torch.zeros(10), torch.zeros(2)], [0, 1, 2, 3]) == "result"
        comm.scatter(torch.zeros(8), [0, 1, 2, 3])
        comm.gather([torch.zeros(2)] * 4, 0)
        comm.reduce_add_coalesced([[torch.zeros(12)]] * 4, 0)
    assert [(moved.operation, moved.ranks, moved.bytes) for moved in counting.moved] == [
        ("broadcast", (0, 1, 2, 3), 48.0),
        ("scatter", (0, 1, 2, 3), 32.0),
        ("gather", (0, 1, 2, 3), 32.0),
        ("reduce", (0, 1, 2, 3), 48.0),
    ]
    assert counting.moved[0].sent == 48.0 * 3 / 4
    assert comm.scatter(torch.zeros(1), [0]) == "result"
    assert len(counting.moved) == 4  # outside nothing is counted
