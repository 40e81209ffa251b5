"""Profiles of nccl-tests logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibration.from_logs import from_logs
from calibration.request import Request
from sim.pricing.shipped import load_profile
from tests.calibration.conftest import call
from topologies.reading import UserError


def test_nccl_log_makes_a_profile(tmp_path: Path) -> None:
    log = Path(__file__).parents[1] / "data" / "nccl" / "all_reduce_2x8.log"
    result = from_logs(Request(tmp_path / "p.yaml", cluster="dgx-h100"), [log])
    profile = load_profile(tmp_path / "p.yaml")
    assert profile.provenance["links"].source == log.name
    assert profile.provenance["gemm"] == load_profile("h100").provenance["gemm"]
    assert profile.links["nic"] != load_profile("h100").links["nic"]
    assert len(result.fitted.points["links"]) == 8
    assert not any("was measured on" in note for note in result.fitted.notes)


def test_a_log_of_another_machine_is_said(tmp_path: Path) -> None:
    log = Path(__file__).parents[1] / "data" / "nccl" / "all_reduce_2x8.log"
    notes = from_logs(Request(tmp_path / "p.yaml", cluster="dgx-a100"), [log]).fitted.notes
    assert notes[0].endswith("was measured on NVIDIA H100 80GB HBM3 (h100-sxm), and cluster dgx-a100 has a100-sxm-80gb")
    with pytest.raises(UserError, match=r"--ranks 7: .* is of 16 ranks"):
        from_logs(Request(tmp_path / "p.yaml", cluster="dgx-h100", ranks=7), [log])


def test_a_log_that_does_not_name_its_collective_is_told_which(tmp_path: Path) -> None:
    known = (Path(__file__).parents[1] / "data" / "nccl" / "all_reduce_2x8.log").read_text().splitlines()
    nameless = tmp_path / "nccl.log"
    nameless.write_text("\n".join(line for line in known if "Collective test starting" not in line))
    ask = ("calibrate", "--output", str(tmp_path / "p.yaml"), "--cluster", "dgx-h100")
    assert "say which, as --collective all_reduce" in call(*ask, "--from", str(nameless)).output
    assert call(*ask, "--from", str(nameless), "--collective", "all_reduce").exit_code == 0
    assert "did you mean 'all_reduce'?" in call(*ask, "--from", str(nameless), "--collective", "al_reduce").output
    named = str(Path(__file__).parents[1] / "data" / "nccl" / "all_reduce_2x8.log")
    assert "is of all_reduce" in call(*ask, "--from", named, "--collective", "AllGather").output
    assert "--collective: says what logs are of" in call(*ask, "--collective", "all_reduce").output
