"""What is counted of a step's communication."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from calibration.execute.measured.counting import Counting, copies_counted, threads_counted  # noqa: E402


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


def test_a_thread_with_the_mode_of_its_caller_counts_once(tmp_path: Path) -> None:
    """On GPUs backward passes, and hooks of DDP with them, run in threads of autograd, which have it; gloo's have not."""
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        counting = Counting()

        def of_autograd() -> None:
            with counting:
                dist.all_reduce(torch.zeros(4))

        def of_gloo() -> None:
            dist.all_reduce(torch.zeros(8))

        with counting, threads_counted(counting):
            dist.all_reduce(torch.zeros(2))
            for work in (of_autograd, of_gloo):
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
        assert [moved.bytes for moved in counting.moved] == [8.0, 16.0, 32.0]
    finally:
        dist.destroy_process_group()
