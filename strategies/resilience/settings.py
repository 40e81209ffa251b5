"""The section `run` of a job: what happens over days. Every field has a default with its source, or says that it is assumed."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from strategies.resilience.checkpointing import policies
from strategies.resilience.intervals import intervals
from strategies.resilience.recovery import recoveries
from topologies.cluster import Cluster
from topologies.durations import Duration, Spread, Times
from topologies.reading import Config, UserError, build, shown
from topologies.reliability import Reliability, load_reliability
from topologies.storage import Storage, load_storage
from topologies.units import Bytes, duration

__all__ = ["CheckpointSettings", "RepairSettings", "RunSettings", "read_run"]


FAILURES, STORAGE = "published", "superpod-better"  # of which nothing else is said


def _reliability(given: object) -> object:
    return load_reliability(given, "run.failures")


def _storage(given: object) -> object:
    return None if given is None else load_storage(given, "run.checkpoint.storage")


def _interval(given: object) -> object:
    """`daly`, `30 min`, `200 steps` or 200."""
    if isinstance(given, str) and given not in intervals:
        words = given.split()
        if len(words) == 2 and words[1] in ("step", "steps"):
            return int(words[0])
        try:
            duration(given)
        except ValueError:
            raise ValueError(f"must be a time such as '30 min', '200 steps', or one of {', '.join(intervals)}") from None
    return given


class CheckpointSettings(Config):
    """When and where checkpoints are saved."""

    policy: str = "asynchronous"  # a name in strategies/resilience/checkpointing
    interval: Annotated[int | str, BeforeValidator(_interval)] = "daly"  # a rule, a time, or a number of steps
    storage_interval: Annotated[int | str, BeforeValidator(_interval)] = "daly"  # of storage, where a quicker place comes first
    storage: Annotated[SerializeAsAny[Storage] | None, BeforeValidator(_storage)] = None  # absent: the cluster's, or STORAGE
    overhead: Duration = (
        0.5  # that GPUs wait for each save besides copies: 0.34 to 0.59 s of asynchronous saves of 7B on 1,488 and
    )
    # 405B on 8,960 GPUs, copies included (ByteCheckpoint, arXiv 2407.20143, table 8)
    parallel: bool = True  # every rank writes a part of what it shares with others
    parallel_load: bool = (
        False  # storage is read once, and replicas have the rest from each other; false: each reads all it needs
    )

    @property
    def shared(self) -> Storage:
        """Where checkpoints go."""
        return self.storage or load_storage(STORAGE, "run.checkpoint.storage")

    @field_validator("policy")
    @classmethod
    def _policy(cls, name: str) -> str:
        policies[name]
        return name

    @field_validator("interval", "storage_interval")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1 step")
        if isinstance(value, str) and value not in intervals and duration(value) <= 0:
            raise ValueError("must be longer than 0 s")
        return value


class RepairSettings(Config):
    """Of nodes that were replaced; it matters where spares and pool are limited."""

    automatic: Times = Spread(mean=86400.0, kind="exponential")  # assumed: a day
    manual: Times = Spread(mean=0.0)  # where a person is needed as well
    escalates: float = Field(default=0.0, ge=0, le=1)  # probability of that
    cures: float = Field(default=1.0, ge=0, le=1)  # probability that a bad node is none any more
    cures_manually: float = Field(default=1.0, ge=0, le=1)
    technicians: int | None = Field(default=None, ge=1)  # absent: any number of repairs at the same time


class InputSettings(Config):
    """How sequences come: workers of each replica prepare them (torch's DataLoader), from bytes that are read from storage."""

    sample: Duration  # of a worker for one sequence
    workers: int = Field(default=1, ge=1, le=1024)  # of each dp rank; the ranks beside it share what they bring
    bytes: Bytes = Field(default=0.0, ge=0)  # read for one sequence, from run.checkpoint.storage
    prefetch: bool = True  # the next batch is prepared beside a step: only what takes longer than it is waited for
    copy_bytes: Bytes = Field(default=0.0, gt=0)  # of a sequence to each GPU; absent: tokens and labels of 8 B each
    pinned: bool = True  # copied from pinned memory (non_blocking) beside the microbatch before; false: each is waited for


class Reduction(Config):
    """Numbers that are summed over all replicas after every so many steps: losses, metrics."""

    steps: int = Field(default=1, ge=1, le=10**9)
    values: int = Field(default=1, ge=1, le=10**9)  # of 4 B
    wait: bool = True  # the host reads them (`.item()`), and launches nothing until they are there


class RunSettings(Config):
    """A run over days."""

    failures: Annotated[SerializeAsAny[Reliability], BeforeValidator(_reliability)] = Field(
        default_factory=lambda: load_reliability(FAILURES, "run.failures")
    )
    checkpoint: CheckpointSettings = CheckpointSettings()
    recovery: str = "restart"  # a name in strategies/resilience/recovery
    spares: int = Field(default=0, ge=0, le=10_000)  # nodes held ready beside the job
    pool: int | None = Field(default=None, ge=0, le=100_000)  # free nodes elsewhere; absent: always one
    reserve: int = Field(default=0, ge=0, le=100_000)  # nodes that others have to leave first
    allocation: Duration = 180.0  # until a free node has joined; 3 min as AIReSim's host selection
    preemption: Duration = 1200.0  # until a node of the reserve is free; 20 min as there
    repair: RepairSettings = RepairSettings()
    heartbeat: Duration = 30.0  # until a crash is noticed; 10 to 30 s with inspection (ByteRobust, arXiv 2509.16293)
    timeout: Duration = 600.0  # until a hang is: PyTorch's default for NCCL
    diagnosis: Times = Spread(mean=300.0)  # which node it is; with detection less than 10 min on average (arXiv 2402.15627)
    misdiagnosis: float = Field(default=0.0, ge=0, le=1)  # probability that the wrong node is replaced first; unknown
    initialization: Times | None = None  # from nothing to the first step; absent: as MLPerf submissions on so many GPUs
    restart: Times | None = None  # where every node stayed; absent: as initialization
    input: InputSettings | None = None  # absent: data are always there
    loss: Reduction | None = None  # absent: no loss is summed over replicas
    metrics: Reduction | None = None  # grad norms, accuracies … that are logged
    buffers: Bytes = Field(default=0.0, ge=0)  # of a rank, which DDP's first rank broadcasts before each step (broadcast_buffers)
    evaluation: Duration = 0.0  # of each evaluation, or …
    evaluation_sequences: int = Field(default=0, ge=0, le=10**9)  # … sequences of each: forward passes by the same plan
    evaluation_steps: int = Field(default=0, ge=0, le=10**9)  # between evaluations; 0: none
    idle_failures: bool = True  # parts fail also while the job restarts
    step_interval: bool = True  # each run has steps of its own, from the step's 80 % interval; false: all as predicted

    @model_validator(mode="after")
    def _consistent(self) -> RunSettings:
        if self.evaluation and self.evaluation_sequences:
            raise ValueError("evaluation and evaluation_sequences: only one of them says how long an evaluation is")
        if bool(self.evaluation or self.evaluation_sequences) != bool(self.evaluation_steps):
            raise ValueError("evaluation (or evaluation_sequences) and evaluation_steps belong together: give both, or none")
        if self.reserve and self.pool is None:
            raise ValueError(f"reserve={self.reserve} needs pool: without it there is always a free node")
        return self

    @field_validator("recovery")
    @classmethod
    def _recovery(cls, name: str) -> str:
        recoveries[name]
        return name

    def on(self, cluster: Cluster) -> RunSettings:
        """The same with the storage of the cluster, where the job says none."""
        if self.checkpoint.storage is not None:
            return self
        checkpoint = self.checkpoint.model_copy(update={"storage": cluster.storage or self.checkpoint.shared})
        return self.model_copy(update={"checkpoint": checkpoint})


def complete(given: dict[str, Any], cluster: Cluster) -> dict[str, Any]:
    """The section with names of catalogues as descriptions based on them, so that single fields can be changed."""
    checkpoint = dict(given.get("checkpoint") or {})
    storage, failures = checkpoint.get("storage", cluster.storage or STORAGE), given.get("failures", FAILURES)
    checkpoint["storage"] = storage if isinstance(storage, dict) else {"based_on": storage}
    return {**given, "checkpoint": checkpoint, "failures": {"based_on": failures} if isinstance(failures, str) else failures}


def read_run(given: object, where: str) -> RunSettings:
    """The section of a job file; None: all defaults. Raises UserError."""
    if given is None:
        return RunSettings()
    if isinstance(given, RunSettings):
        return given
    if not isinstance(given, dict):
        raise UserError(f"{where}={shown(given)}: must be fields, such as {{spares: 2}}")
    return build(RunSettings, given, where)
