"""How far a machine is from when it was calibrated: anchors of the profile, and what was read of them while a job was timed.

Neighbours, temperature and clocks change a machine within minutes. Anchors are visited all through a calibration, and between
the blocks of steps of a job: one visit tells no more than how fast the machine was just then. A comparison of prediction and
measurement tells that apart from what is wrong with the prediction: the prices are scaled as the anchors have drifted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from calibration.samples import Merged
from sim.pricing.prices import Crowding, Profile
from sim.pricing.transfers.measured_tables import Wrapping

COMPUTE, EXCHANGE = "layer", "all_reduce"
PARTS = {COMPUTE: "layer", EXCHANGE: "collective"}  # with which a calibration visits them


def anchors_of(merged: Sequence[Merged]) -> dict[str, float]:
    """Seconds of each anchor that a calibration visited."""
    return {str(sample.case["kind"]): sample.value for sample in merged if sample.part == "anchor"}


def drift(profile: Profile, readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each anchor that both have: seconds read, the median of the readings, over those of the calibration."""
    return {
        name: median(reading[name] for reading in readings) / seconds
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
            "wrapping": {
                name: Wrapping.model_construct(fixed=each.fixed * compute, rate=each.rate / compute)
                for name, each in profile.wrapping.items()
            },
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
