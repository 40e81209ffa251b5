"""The section `run` of a job: what happens over days. Every field has a default with its source, or says that it is assumed."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from strategies.resilience.checkpointing import policies
from strategies.resilience.intervals import intervals
from strategies.resilience.loop_settings import InputSettings, Reduction
from strategies.resilience.recovery import recoveries
from topologies.cluster import Cluster
from topologies.documents.durations import Duration, Spread, Times
from topologies.documents.units import Bytes, duration
from topologies.reading import Config, UserError, build, shown
from topologies.reliability import Reliability, load_reliability
from topologies.storage import Storage, load_storage

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

    policy: str = Field(
        default="asynchronous", description="where to save and what waits for it: a name in strategies/resilience/checkpointing"
    )
    interval: Annotated[int | str, BeforeValidator(_interval)] = Field(
        default="daly", description="training between saves: a rule (daly, young, availability), a time, or a number of steps"
    )
    storage_interval: Annotated[int | str, BeforeValidator(_interval)] = Field(
        default="daly", description="the same of storage, where a policy saves to a quicker place first"
    )
    storage: Annotated[SerializeAsAny[Storage] | None, BeforeValidator(_storage)] = Field(
        default=None, description=f"shared storage, by name or by its fields; by default the cluster's, or {STORAGE}"
    )
    overhead: Duration = Field(
        default=0.5,
        description="that GPUs wait for each save besides copies; asynchronous ones took 0.34 to 0.59 s of 7B on 1,488"
        " and 405B on 8,960 GPUs, copies included (ByteCheckpoint, arXiv 2407.20143, table 8)",
    )
    parallel: bool = Field(default=True, description="every rank writes a part of what it shares with others")
    parallel_load: bool = Field(
        default=False,
        description="on a restart storage is read once, and replicas have the rest from each other; otherwise each reads all",
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

    automatic: Times = Field(default=Spread(mean=86400.0, kind="exponential"), description="until a node is back; assumed: a day")
    manual: Times = Field(default=Spread(mean=0.0), description="how much longer it takes where a person is needed as well")
    escalates: float = Field(default=0.0, ge=0, le=1, description="probability that a person is needed")
    cures: float = Field(default=1.0, ge=0, le=1, description="probability that a bad node is none any more")
    cures_manually: float = Field(default=1.0, ge=0, le=1, description="the same where a person was needed")
    technicians: int | None = Field(default=None, ge=1, description="repairs at the same time; by default any number")


class RunSettings(Config):
    """A run over days."""

    failures: Annotated[SerializeAsAny[Reliability], BeforeValidator(_reliability)] = Field(
        default_factory=lambda: load_reliability(FAILURES, "run.failures"),
        description="what fails how often, by name (`shardyard list failures`) or by parts of your own",
    )
    checkpoint: CheckpointSettings = Field(default=CheckpointSettings(), description="when and where checkpoints are saved")
    recovery: str = Field(default="restart", description="how the job goes on after a failure: restart, elastic, elastic-keep")
    spares: int = Field(default=0, ge=0, le=10_000, description="nodes held ready, which join at once; they cost, and are idle")
    pool: int | None = Field(
        default=None,
        ge=0,
        le=100_000,
        description="free nodes beside the spares; by default there is always one",
    )
    reserve: int = Field(default=0, ge=0, le=100_000, description="nodes that others have to leave first")
    allocation: Duration = Field(default=180.0, description="until a free node has joined; 3 min as AIReSim's host selection")
    preemption: Duration = Field(default=1200.0, description="until a node of the reserve is free; 20 min as AIReSim's")
    repair: RepairSettings = Field(default=RepairSettings(), description="how nodes that were replaced are repaired")
    heartbeat: Duration = Field(
        default=30.0, description="until a crash is noticed; 10 to 30 s with inspection (ByteRobust, arXiv 2509.16293)"
    )
    timeout: Duration = Field(default=600.0, description="until a hang is noticed: PyTorch's default for NCCL")
    diagnosis: Times = Field(
        default=Spread(mean=300.0), description="which node it is; less than 10 min on average (arXiv 2402.15627)"
    )
    misdiagnosis: float = Field(default=0.0, ge=0, le=1, description="probability that the wrong node is replaced first; unknown")
    initialization: Times | None = Field(
        default=None, description="from nothing to the first step; by default as MLPerf submissions on so many GPUs"
    )
    restart: Times | None = Field(default=None, description="the same where every node stayed; by default as initialization")
    input: InputSettings | None = Field(default=None, description="how data come; by default they are always there")
    loss: Reduction | None = Field(default=None, description="losses summed over replicas; by default none are")
    metrics: Reduction | None = Field(
        default=None, description="other numbers summed over replicas: norms, accuracies that are logged"
    )
    buffers: Bytes = Field(
        default=0.0, ge=0, description="of a rank, which DDP's first rank broadcasts before each step (broadcast_buffers)"
    )
    evaluation: Duration = Field(default=0.0, description="how long each evaluation takes")
    evaluation_sequences: int = Field(
        default=0, ge=0, le=10**9, description="instead of evaluation, sequences of each: forward passes by the same plan"
    )
    evaluation_steps: int = Field(default=0, ge=0, le=10**9, description="between evaluations; 0: none")
    idle_failures: bool = Field(default=True, description="parts fail also while the job restarts")
    step_interval: bool = Field(
        default=True, description="each run has steps of its own, from the step's 80 % interval; false: all as predicted"
    )

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
