"""What a run is made of: numbers only, worked out before from a job; equal specs and seeds give equal runs.

Times are in seconds, rates in failures per second. A step is an optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from topologies.documents.durations import Spread

NOTHING = Spread(mean=0.0)
Unit = Literal["node", "switch", "job"]


@dataclass(frozen=True)
class Component:
    """What fails. `life`: time to failure of one unit, in time that it is exposed.

    nodes: nodes that a unit takes with it; replace: probability that they have to be replaced (otherwise the processes start
    again where they were); hang: probability that ranks hang until a timeout, and nothing else tells; slow: instead of failing, a
    node makes steps take so many times as long, for `lasts`; notice: seconds of warning (spot nodes).
    """

    name: str
    life: Spread
    unit: Unit = "node"
    nodes: int = 1
    replace: float = 1.0
    hang: float = 0.0
    slow: float = 0.0
    lasts: Spread = NOTHING
    notice: float = 0.0


@dataclass(frozen=True)
class Saving:
    """A place where checkpoints go every `steps` steps.

    blocking: the GPUs wait so long; flush: until it is complete there, beside training; restore: to read it back. copies: nodes
    that have the same part: it survives the loss of fewer nodes than that; None: it survives any. A save does not begin before
    the flush of the one before it has ended: what it waits is part of its blocking time.
    """

    name: str
    steps: int
    blocking: float = 0.0
    flush: float = 0.0
    restore: float = 0.0
    copies: int | None = None


@dataclass(frozen=True)
class Repair:
    """Of a node that was replaced. `automatic` first; with probability `escalates` a person is needed as well, for `manual`.

    cures, cures_manually: probability that a bad node is none any more; technicians: nodes repaired at the same time by one each,
    None: any number.
    """

    automatic: Spread = NOTHING
    manual: Spread = NOTHING
    escalates: float = 0.0
    cures: float = 1.0
    cures_manually: float = 1.0
    technicians: int | None = None


@dataclass(frozen=True)
class Pace:
    """How a job trains with fewer replicas: seconds of a step, and the part of a whole step's progress that it makes."""

    step: float
    progress: float


@dataclass(frozen=True)
class Elastic:
    """Training goes on without the replicas that lost a node. paces[i]: with i + 1 replicas fewer; nodes: of a replica;
    reconfigure: seconds that leaving and joining take; rollback: whether states of a lost replica are nowhere else.
    """

    paces: tuple[Pace, ...]
    nodes: float
    reconfigure: float
    rollback: bool


@dataclass(frozen=True)
class RunSpec:
    """A run of `steps` steps that take `work` seconds when nothing happens, or until `deadline` seconds.

    nodes: that the job needs; spares: nodes held ready beside them; pool: nodes that are free elsewhere (None: any number), which
    join after `allocation`; reserve: nodes that others have to leave first, after `preemption`. bad: part of all nodes whose
    parts fail `bad_factor` times as often. rate_spread: sigma of the logarithm of the factor by which failures of this cluster
    are more frequent than the components say, drawn for each run. heartbeat: until a crash is noticed; timeout: until a hang is;
    misdiagnosis: probability that the wrong node is replaced first. idle_failures: whether parts also fail while the job
    restarts. faster, slower: sigma of the logarithm of the factor by which
    all steps of a run are shorter, or longer, than said: prices may be wrong and GPUs differ, the same way in every step.
    """

    step: float
    work: float
    nodes: int
    gpus_per_node: int
    steps: float
    deadline: float = float("inf")
    components: tuple[Component, ...] = ()
    savings: tuple[Saving, ...] = ()
    repair: Repair = Repair()
    spares: int = 0
    pool: int | None = None
    reserve: int = 0
    allocation: float = 0.0
    preemption: float = 0.0
    bad: float = 0.0
    bad_factor: float = 1.0
    rate_spread: float = 0.0
    heartbeat: float = 0.0
    timeout: float = 0.0
    diagnosis: Spread = NOTHING
    misdiagnosis: float = 0.0
    initialization_spread: float = 0.0  # sigma of the logarithm of a factor of both below, drawn for each run
    initialization: Spread = NOTHING  # from nothing to the first step, without reading a checkpoint
    restart: Spread | None = None  # where every node stays; None: as `initialization`
    first_batch: float = 0.0  # seconds until the first data are there after each start
    stall: float = 0.0  # seconds after each step in which training waits for data
    evaluation: float = 0.0
    evaluation_steps: int = 0  # between evaluations; 0: none
    reductions: tuple[
        tuple[int, float], ...
    ] = ()  # steps between sums over all replicas, and seconds that training waits for one
    elastic: Elastic | None = None
    idle_failures: bool = True
    faster: float = 0.0
    slower: float = 0.0

    def with_steps(self, factor: float) -> RunSpec:
        """The same with steps that take so many times as long; 1: to the bit."""
        if factor == 1.0:
            return self
        elastic = self.elastic
        if elastic is not None:
            elastic = replace(elastic, paces=tuple(replace(pace, step=pace.step * factor) for pace in elastic.paces))
        return replace(self, step=self.step * factor, work=self.work * factor, elastic=elastic)

    @property
    def gpus(self) -> int:
        """Of the job, without spares."""
        return self.nodes * self.gpus_per_node
