"""What is left of a GPU's clock once it is warm, on a device that stands in for one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from calibration.devices.cpu import CpuDevice
from calibration.devices.monitor import Moment, Monitor
from calibration.launch.place import Place
from calibration.measure import sustained
from calibration.measure.bench import Bench
from calibration.measure.grid import grid

PRESSED = 60.0  # seconds


class Sensors(Monitor):
    """A board that draws its limit, and lowers its clock after a tenth of the time."""

    def _sample(self) -> None:
        self.moments += [
            Moment(at, 1980.0 if at < 6 else 1400.0, 1980.0, 700.0, 700.0, 80.0, ("power limit",)) for at in range(60)
        ]


class Warming(CpuDevice):
    """Products of 1 ms at first and of 1.3 ms later, on a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def times(self, action: Any, count: int, before: Any, batch: int, clock: Any) -> Any:
        """A window of them."""
        self.now += 0.25
        return np.full(count, 1e-3 if self.now < 0.1 * PRESSED else 1.3e-3)

    def monitor(self) -> Monitor:
        """Of the board."""
        return Sensors()


def test_a_clock_that_falls_is_told_with_what_the_sensors_say(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    place, board = Place(0, 1, 0, "cuda", (), print), Warming()
    place.__dict__["compute"] = board
    monkeypatch.setattr(time, "monotonic", lambda: board.now)
    asked = replace(grid("cpu", True), pressed=PRESSED, side=64)
    samples = {sample.case["kind"]: sample.value for sample in sustained.pressed(Bench(place, asked.budget), asked)}
    assert samples == {
        "early": 1e-3,
        "late": 1.3e-3,
        "clock": 1400.0,
        "highest": 1980.0,
        "power": 700.0,
        "limit": 700.0,
        "temperature": 80.0,
        "power limit": 1.0,
    }
