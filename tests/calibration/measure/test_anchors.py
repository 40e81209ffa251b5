"""What tells how fast a machine is, all through a calibration."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
from calibration.drift import anchors_of
from calibration.launch.ranks import launch
from calibration.samples import Sample, merge
from tests.calibration.conftest import with_small_caches


def test_a_calibration_of_layers_visits_its_anchor_at_once() -> None:
    """A rank alone has nobody to all-reduce with; the layer's own cases are not the anchor's. Its one second is over at once, so
    cases are repeated as little as can be.
    """
    told: list[dict[str, Any]] = []
    launch(with_small_caches, 1, True, ("layer",), [], 0.0, -2, 1.0, hear=told.append)
    samples = [Sample.model_validate(message["sample"]) for message in told if "sample" in message]
    assert [sample.part for sample in samples[:2]] == ["layer", "anchor"]
    assert sum(sample.part == "layer" for sample in samples) == 16
    anchors = anchors_of(merge(samples))
    assert anchors.keys() == {"layer"}
    assert 1e-4 < anchors["layer"] < 1.0
