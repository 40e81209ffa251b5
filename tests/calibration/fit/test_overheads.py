"""Of a fit, what is neither a kernel nor a collective."""

from __future__ import annotations

import pytest

from calibration.fit.machine.profile import Fit
from sim.pricing.shipped import load_profile
from tests.calibration.conftest import case
from topologies.cluster_files import load_cluster


@pytest.mark.parametrize(
    ("cluster", "profile", "device", "ranks", "expected"),
    [("cpu-gloo", "cpu-gloo", "cpu", 2, 0.031), ("dgx-h100", "h100", "cuda", 2, 0.02), ("dgx-h100", "h100", "cuda", 8, 0.031)],
)
def test_how_far_ranks_come_apart_is_kept_where_there_are_enough(
    cluster: str, profile: str, device: str, ranks: int, expected: float
) -> None:
    """Two GPUs say too little about others of their kind; processes on cores come apart anew all the time."""
    head = {"device": device, "ranks": ranks, "cores": 2, "machine": "a machine", "versions": "torch"}
    fitted = Fit(load_profile(profile), load_cluster(cluster), head, [case("variability", 0.031)]).all("mine").profile
    assert fitted.variability == expected
    assert (fitted.provenance["variability"].measured if "variability" in fitted.provenance else False) == (expected == 0.031)
