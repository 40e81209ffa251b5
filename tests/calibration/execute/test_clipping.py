"""Gradients are clipped and unscaled as PyTorch does it, and parameters begin the same however they are cut."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
from calibration.execute import initial  # noqa: E402
from calibration.execute.clipping import SCALE, Clipping, Held  # noqa: E402
from strategies.plan.plan import Plan  # noqa: E402


@pytest.mark.parametrize("size", [0.01, 10.0])
def test_clipping_is_pytorchs(size: float) -> None:
    """torch.nn.utils.clip_grad_norm_ on the same gradients; small ones stay."""
    parameters = [torch.nn.Parameter(torch.zeros(5, 3)), torch.nn.Parameter(torch.zeros(7))]
    for parameter in parameters:
        parameter.grad = size * torch.randn_like(parameter)
    ours = [parameter.grad.clone() for parameter in parameters]
    clipping = Clipping(Plan(precision="fp32"))
    assert clipping(map(Held, ours))
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    assert clipping.norm == pytest.approx(float(norm), rel=1e-6)
    for mine, parameter in zip(ours, parameters, strict=True):
        torch.testing.assert_close(mine, parameter.grad)
    assert (clipping.factor < 1) == (size == 10.0)


def test_without_clipping_nothing_is_changed() -> None:
    gradient = torch.full((4,), 100.0)
    clipping = Clipping(Plan(precision="fp32", clip_gradients=False))
    assert clipping([Held(gradient)])
    assert (clipping.norm, gradient.tolist()) == (None, [100.0] * 4)


def test_the_loss_scale_is_torch_amps() -> None:
    """As torch.amp.GradScaler with its defaults: unscaled; halved by what is not finite, which updates nothing."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([parameter], lr=1.0)
    clipping = Clipping(Plan(precision="fp16", clip_gradients=False))
    scaler.scale(torch.zeros(()))  # makes the scale
    for values in ([1.0, 2.0, 3.0], [1.0, math.inf, 0.0], [0.5, 0.5, 0.5]):
        assert clipping.scale == scaler.get_scale()
        parameter.grad = torch.tensor(values) * clipping.scale
        ours, before = parameter.grad.clone(), parameter.detach().clone()
        updates = clipping([Held(ours)])
        scaler.step(optimizer)
        scaler.update()
        assert updates == bool((parameter.detach() != before).any())
        if updates:
            torch.testing.assert_close(before - parameter.detach(), ours)
    assert clipping.scale == SCALE / 2


def test_a_part_of_a_parameter_begins_as_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "BLOCK", 64)  # four rows of 16
    whole = initial.values("layers.3.attention.query.weight", (30, 16), (0, 0), (30, 16))
    part = initial.values("layers.3.attention.query.weight", (30, 16), (7, 4), (13, 9))
    assert torch.equal(part, whole[7:20, 4:13])
    assert float(whole.std()) == pytest.approx(0.02, rel=0.1)
    other = initial.values("layers.2.attention.query.weight", (30, 16), (0, 0), (30, 16))
    assert not torch.equal(other, whole)
    assert len(whole.unique()) == 30 * 16  # blocks differ
    assert initial.values("layers.3.attention_norm.weight", (16,), (0,), (16,)).tolist() == [1.0] * 16
    assert initial.values("head.norm.bias", (16,), (0,), (16,)).tolist() == [0.0] * 16


def test_a_rank_without_gradients_meets_the_others_where_their_backend_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has no sum of what lies in the host's memory."""
    devices = []

    def all_reduce(tensor: torch.Tensor) -> None:
        devices.append(tensor.device.type)
        raise InterruptedError

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    with pytest.raises(InterruptedError):
        Clipping(Plan(precision="fp32"), torch.device("meta"))([], slots=1)
    assert devices == ["meta"]
