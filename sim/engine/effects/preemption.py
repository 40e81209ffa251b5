"""A host whose core other processes take: nothing is launched meanwhile.

What was launched before hides it, some 1,000 kernels (`sim.engine.perturbed_device`); a launch-bound step does not. Linux runs a
competing process of equal priority for some milliseconds at a time (kernel documentation, EEVDF scheduler: base_slice_ns of 3 ms
and more by the number of CPUs).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar, Self

from pydantic import Field, model_validator

from sim.engine.effects import Effect, Time, check_period, effects
from sim.engine.host import Pause


@effects("preempted")
class Preemption(Effect):
    """The launching thread loses its core for `preempted` seconds, at `at` and then again each `every` seconds."""

    component: ClassVar[str] = "preemption"

    preempted: Time = Field(gt=0)  # how long
    at: Time = 0.0  # when it begins
    every: Time | None = Field(None, gt=0)  # from one beginning to the next; absent: once

    @model_validator(mode="after")
    def _rests(self) -> Self:
        check_period(self.preempted, self.every)
        return self

    def pauses(self) -> Iterator[Pause]:
        """One, or one after the other for ever."""
        for number in itertools.count() if self.every is not None else range(1):
            yield self.at + number * (self.every or 0.0), self.preempted
