"""How often parts of a cluster fail, as published of real clusters (`ls topologies/failures`) or as a user says.

Rates are mean times between failures (`mtbf`) of one unit: of a node with all its parts, of a leaf switch, or of the whole job.
What nobody has published is not made up: a file that says `unknown` lists it, and the answer repeats it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from topologies.catalogue import Catalogue
from topologies.documents.durations import Duration, Spread, Times
from topologies.reading import Config

DAY = 86400.0


class Part(Config):
    """Something that fails: a GPU, its memory, a NIC, a switch, a host, software."""

    mtbf: Times  # time to failure of one unit: '100 days' is exponential, or say 'weibull 100 days shape 0.7'
    unit: Literal["node", "switch", "job"] = "node"  # of what mtbf is the mean time
    nodes: int = Field(default=1, ge=1, le=10_000)  # nodes that one unit takes with it: those behind a leaf switch
    replace: float = Field(default=1.0, ge=0, le=1)  # probability that nodes have to be replaced; else processes start again
    hang: float = Field(default=0.0, ge=0, le=1)  # probability that ranks hang until a timeout tells
    slow: float = Field(default=0.0, ge=1.001, le=100)  # instead of failing, steps take so many times as long …
    lasts: Times = Spread(mean=0.0)  # … for this time
    notice: Duration = Field(default=0.0)  # warning before a spot node is taken away

    @model_validator(mode="after")
    def _consistent(self) -> Part:
        if self.mtbf.mean <= 0:
            raise ValueError("mtbf=0: must be greater than 0; leave out what never fails")
        if bool(self.slow) != bool(self.lasts.mean):
            raise ValueError("slow and lasts belong together: give both, or none")
        return self

    @property
    def life(self) -> Spread:
        """Time to failure; exponential where only its mean is said."""
        return self.mtbf if self.mtbf.kind != "constant" else Spread(mean=self.mtbf.mean, kind="exponential")


class Reliability(Config):
    """A cluster's failures. rate_spread: sigma of the logarithm of the factor by which clusters of this kind differ from it; bad,
    bad_factor: part of the nodes whose parts fail so many times as often.
    """

    name: str = "failures"  # what answers call it
    parts: dict[str, Part] = Field(default_factory=dict, max_length=50)  # what fails, each by a name of its own
    rate_spread: float = Field(default=0.0, ge=0, le=3)  # sigma of ln(factor) between clusters of this kind
    bad: float = Field(default=0.0, ge=0, le=1)  # part of the nodes that fail more often
    bad_factor: float = Field(default=1.0, ge=1, le=1000)  # how many times as often
    node_gpus: int = Field(default=0, ge=1, le=1024)  # GPUs of the nodes that rates are of; larger nodes fail more; 0: whatever
    mtbf_factor: float = Field(default=1.0, gt=0, le=1e6)  # all of it is so many times as rare
    unknown: tuple[str, ...] = ()  # what is not published
    source: str = ""  # where the numbers come from

    def life(self, part: Part, gpus: int) -> Spread:
        """Time to failure of one unit of a part, with nodes of so many GPUs."""
        larger = gpus / self.node_gpus if self.node_gpus and part.unit == "node" else 1.0
        return part.life.model_copy(update={"mean": part.life.mean * self.mtbf_factor / larger})

    def rate(self, nodes: int, gpus: int, slow: bool = True) -> float:
        """Failures per second of so many nodes of so many GPUs; slow: with parts that only become slow."""
        parts = [part for part in self.parts.values() if slow or not part.slow]
        rate = sum(_units(part, nodes) / self.life(part, gpus).mean for part in parts)
        return rate * (1 + self.bad * (self.bad_factor - 1))

    def mtbf(self, nodes: int, gpus: int) -> float:
        """Mean seconds between failures that stop a job; infinite without any."""
        rate = self.rate(nodes, gpus, slow=False)
        return 1 / rate if rate else float("inf")


def _units(part: Part, nodes: int) -> int:
    return {"node": nodes, "switch": -(-nodes // part.nodes), "job": 1}[part.unit]


_CATALOGUE = Catalogue(Reliability, Path(__file__).parent / "failures", "failures", merged=("parts",))


def reliability_names() -> list[str]:
    """Names in the catalogue, sorted."""
    return _CATALOGUE.names()


def load_reliability(given: object, where: str) -> Reliability:
    """Failures by their name in the catalogue, by a path, or by fields. Raises UserError."""
    return _CATALOGUE.load(given, where)
