"""Sensors of a device while it works; nvidia-smi is stood in for by a script that prints what the real one does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from calibration.devices.monitor import CpuMonitor, NvidiaMonitor, parsed, summary

LINE = "1755, 1980, 689.31, 700.00, 71, 0x0000000000000004"


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An nvidia-smi that is found first."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def sampled(monitor: NvidiaMonitor, enough: int) -> NvidiaMonitor:
    """After so many samples."""
    with monitor:
        until = time.monotonic() + 20
        while len(monitor.moments) < enough and time.monotonic() < until:
            time.sleep(0.01)
    return monitor


def test_what_the_driver_says_of_a_gpu_at_its_power_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; echo "{LINE}"; echo "{LINE}"; exec sleep 60')
    monitor = sampled(NvidiaMonitor("GPU-8e7d"), 2)
    assert monitor._process is not None
    assert monitor._process.wait(timeout=50) < 0  # it is ended by a signal, and not waited for
    assert monitor.since(60) == {
        "clock": 1755.0,
        "highest": 1980.0,
        "power": 689.31,
        "limit": 700.0,
        "temperature": 71.0,
        "reasons": "power limit",
    }
    asked = (tmp_path / "asked").read_text()
    assert "--id=GPU-8e7d" in asked
    assert "--loop-ms=200" in asked


def test_older_drivers_have_another_name_for_the_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = f'case "$*" in *events*) echo "Field is not a valid field to query."; exit 2;; esac; echo "{LINE}"; exec sleep 60'
    smi(tmp_path, monkeypatch, old)
    assert sampled(NvidiaMonitor("0"), 1).since(60)["clock"] == 1755.0


def test_without_a_driver_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with NvidiaMonitor("0") as monitor:
        pass
    assert monitor.since(60) == {}


def test_values_that_a_board_does_not_have_are_zero() -> None:
    moment = parsed("300, 1980, [N/A], [Not Supported], 31, 0x0000000000000001", 5.0)
    assert moment is not None
    assert (moment.power, moment.limit, moment.reasons) == (0.0, 0.0, ())  # idle is no reason
    assert parsed("clocks.sm [MHz], a header", 0.0) is None
    assert parsed("1, 2, three, 4, 5, 0x0", 0.0) is None


def test_medians_the_hottest_and_every_reason() -> None:
    lines = (LINE, "1500, 1980, 700.00, 700.00, 85, 0x0000000000000020", "1600, 1980, 695.00, 700.00, 80, 0x0")
    said = summary([moment for number, line in enumerate(lines) if (moment := parsed(line, float(number)))])
    assert (said["clock"], said["temperature"], said["reasons"]) == (1600.0, 85.0, "power limit, thermal limit")


def test_the_clock_of_cores() -> None:
    with CpuMonitor() as monitor:
        time.sleep(0.5)
    assert all(100 < moment.clock < 10_000 for moment in monitor.moments)
