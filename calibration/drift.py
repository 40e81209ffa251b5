"""How far a machine is from when it was calibrated: anchors of the profile, and what was read of them beside a job.

Neighbours, temperature and clocks change a machine within minutes. A comparison of prediction and measurement tells that apart
from what is wrong with the prediction: the prices are scaled as the anchors have drifted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from calibration.samples import Case, Merged
from sim.pricing.prices import Crowding, Profile

COMPUTE, EXCHANGE = "layer", "all_reduce"
ANCHORS: dict[str, Case] = {
    COMPUTE: {"hidden": 512, "tokens": 256, "layers": 1, "passes": "forward"},
    EXCHANGE: {"operation": "all_reduce", "bytes": 2**24},  # smaller ones scatter more than machines drift
}
PARTS = {COMPUTE: "layer", EXCHANGE: "collective"}
CONTEXTS = {COMPUTE: "alone", EXCHANGE: "step"}


def anchors_of(merged: Sequence[Merged], ranks: int) -> dict[str, float]:
    """Seconds of each anchor that a calibration of so many ranks on one node measured."""
    result: dict[str, float] = {}
    for name, case in ANCHORS.items():
        wanted = case | ({"ranks": ranks, "nodes": 1} if name == EXCHANGE else {})
        found = [sample for sample in merged if sample.part == PARTS[name] and sample.context == CONTEXTS[name]]
        seconds = [sample.value for sample in found if wanted.items() <= sample.case.items()]
        if seconds:
            result[name] = seconds[0]
    return result


def drift(profile: Profile, readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each anchor that both have: seconds read, the mean of the readings, over those of the calibration."""
    return {
        name: mean(reading[name] for reading in readings) / seconds
        for name, seconds in profile.anchors.items()
        if readings and all(name in reading for reading in readings)
    }


def drifted(profile: Profile, by: Mapping[str, float]) -> Profile:
    """The profile with its kernels, and its measured collectives, slower by these factors."""
    compute, exchange = by.get(COMPUTE, 1.0), by.get(EXCHANGE, 1.0)
    memory = profile.memory.fractions
    crowded = {name: profile.crowding.get(name, Crowding()) for name in ("forward", "backward")}
    return profile.model_copy(
        update={
            "crowding": {
                name: Crowding.model_construct(factor=each.factor * compute, rate=each.rate / compute)
                for name, each in crowded.items()
            },
            "launch": profile.launch * compute,
            "optimizer": profile.optimizer / compute,
            "memory": profile.memory.model_copy(update={"fractions": {name: share / compute for name, share in memory.items()}}),
            "tables": tuple(
                table.model_copy(
                    update={
                        "prices": tuple(
                            entry.model_copy(update={"step": entry.step * exchange, "alone": entry.alone * exchange})
                            for entry in table.prices
                        )
                    }
                )
                for table in profile.tables
            ),
        }
    )
