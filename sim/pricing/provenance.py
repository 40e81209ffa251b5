"""Where the numbers of a profile come from, and how well they hold."""

from __future__ import annotations

from pydantic import Field

from sim.pricing.kernel_curves import NotNegative, Positive
from topologies.reading import Config


class Provenance(Config):
    """Where the numbers of one part of a profile come from."""

    measured: bool  # on a GPU of this kind; otherwise the numbers follow from `rule`
    machine: str  # what was measured
    versions: str  # software versions as far as the source names them
    date: str  # of the measurement, or of the source's commit
    source: str  # where the measurements are published
    grid: str  # which shapes or sizes were measured
    rule: str = ""  # how the constants follow from the measurements, with every assumption
    fit_error: NotNegative | None = None  # median relative error on the points fitted to
    heldout_error: NotNegative | None = None  # median relative error on points kept out of the fit, of the sizes of training
    errors: dict[str, NotNegative] = Field(default_factory=dict)  # more of them, by what was left out of the fit
    spread: dict[str, tuple[float, float, float]] = Field(default_factory=dict)  # class of shapes held out -> 10th, 50th and 90th
    # percentile of measured over predicted seconds, minus 1: what an error bar needs
    measured_range: dict[str, tuple[float, float]] = Field(default_factory=dict)  # quantity -> lowest and highest value measured.
    # Of links: "ranks" and "bytes" in a node, bytes of "all_reduce 16 on 2 nodes", bytes per second of a kind of link for a GPU
    transports: tuple[str, ...] = ()  # kinds of links between GPUs over which collectives were measured
    beside: dict[str, Positive] = Field(default_factory=dict)  # what was fitted together with the prices and belongs to the
    # benchmark, not to them: bytes that stay in the cache, a pass that was timed too


def is_between_nodes(quantity: str) -> bool:
    """Whether a quantity of `Provenance.measured_range` of links, or a series of their errors, is of what leaves a node."""
    return quantity == "nic" or quantity.endswith(" nodes")
