"""What the parts of a fit share: the samples, what the profile changes, and where its numbers come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calibration.fit.machine.provenance import measured_here
from calibration.fit.machine.tables import Point
from calibration.samples import Merged
from sim.pricing.prices import Profile
from topologies.cluster import Cluster


@dataclass
class Fitted:
    """A profile, the measurements it was made of beside its prices, and what a reader must know."""

    profile: Profile
    points: dict[str, list[Point]] = field(default_factory=dict)  # by part
    alone: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # series -> (bytes, seconds) back to back
    notes: list[str] = field(default_factory=list)


class Parts:
    """Of a profile that is built from `base`."""

    def __init__(self, base: Profile, cluster: Cluster, head: Mapping[str, Any], merged: Sequence[Merged]) -> None:
        self.cluster, self.gpu, self.head, self.merged = cluster, cluster.node.gpu, head, merged
        self.change: dict[str, Any] = {}
        self.provenance = dict(base.provenance)
        self.base = base
        self.result = Fitted(base)

    def of(self, part: str) -> list[Merged]:
        """Cases of a part."""
        return [sample for sample in self.merged if sample.part == part]

    def value(self, part: str, **case: Any) -> float | None:
        """The one value of a case; None when it was not measured."""
        values = [sample.value for sample in self.of(part) if case.items() <= sample.case.items()]
        return values[0] if values else None

    def note(
        self,
        part: str,
        grid: str,
        rule: str,
        points: Sequence[Point] = (),
        ranges: Mapping[str, Any] | None = None,
        more: Mapping[str, float] | None = None,
        transports: tuple[str, ...] = (),
    ) -> None:
        """Where the numbers of `part` come from."""
        self.provenance[part] = measured_here(self.head, grid, rule, points, ranges or {}, more or {}, transports)
        if points:
            self.result.points[part] = [*self.result.points.get(part, []), *points]
