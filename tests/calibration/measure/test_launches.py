"""What the host takes to launch kernels from modules in Python and from autograd."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from calibration.measure.launches import PASSES, Layer, counted, launches


def test_a_backward_pass_launches_faster_than_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels take 0.4 to 0.7 of a forward pass's, on a busy machine, too; a sum of gradients next to nothing."""
    monkeypatch.setattr("calibration.measure.launches.PASSES", PASSES // 2)
    each = launches()
    assert 0.3 < each["backward"] / each["forward"] < 1
    assert each["addition"] < each["backward"]
    assert 0.1 < each["operator"] / each["forward"] < 1


def test_its_layer_has_the_kernels_of_megatron() -> None:
    """Two norms, six products, softmax, dropout, a copy of its result, gelu, and two residuals with a bias."""
    layer, x = Layer(), torch.zeros(4, 1, 8)
    assert counted(lambda: layer(x)) == 16
    assert len(list(layer.parameters())) == 10


def test_the_command_prints_them() -> None:
    printed = subprocess.run([sys.executable, "-m", "calibration.measure.launches"], capture_output=True, text=True, check=True)
    assert printed.stdout.startswith(f"CPU time of a launch with torch {torch.__version__}: forward ")
