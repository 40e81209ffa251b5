"""Training with parameter servers carried out: what is asked, what is refused, what comes out. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from calibration.devices import class_of
from calibration.execute import device_of
from calibration.execute.limits import ready
from calibration.launch.place import need_torch
from calibration.launch.ranks import launch
from strategies.job import Job
from strategies.lowering.parameter_servers import bound_of
from topologies.reading import UserError


@dataclass(frozen=True)
class Served:
    """Seconds, bytes. ages: how many updates a gradient's parameters were behind."""

    name: str
    workers: int
    servers: int
    bound: int | None  # 0: synchronous, None: unbounded
    steps: int
    seconds: float  # of all steps
    sent_by_worker: float  # in one of its steps
    sent_by_server: float  # while every worker makes a step
    mean_age: float
    most_age: int
    compared: dict[str, Any]  # with one process that replays the order of the gradients

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return asdict(self)


def serve(job: Job, servers: int, staleness: str, steps: int) -> Served | None:
    """Train `steps` steps of every worker; None on ranks other than 0 under a launcher. Raises UserError."""
    job, bound = ready(job), bound_of(staleness)
    ranks, device = job.cluster.gpus, device_of(job)
    for refusal in reasons(job, servers, staleness, class_of(device).any_source):
        raise UserError(refusal)

    need_torch()
    from calibration.execute.parameter_server import work

    answers: Sequence[dict[str, Any]] = launch(work, ranks, job, servers, bound, steps, device=device)
    if not answers:
        return None
    first, workers = answers[0], ranks - servers
    ages = [age for rank in answers for age in rank["ages"]]
    compared = {name: first[name] for name in ("loss", "update", "losses", "tolerance")}
    for what in ("loss", "update"):
        if not compared[what] <= compared["tolerance"]:
            rule = f"at most {compared['tolerance']:g} is rounding"
            raise UserError(f"{job.name}: executed, but the {what} differs by {compared[what]:.2g} from one process; {rule}")
    return Served(
        job.name,
        workers,
        servers,
        bound,
        steps,
        max(rank["seconds"] for rank in answers),
        first["sent"],
        answers[-1]["sent"],
        sum(ages) / len(ages),
        max(ages),
        compared,
    )


def reasons(job: Job, servers: int, staleness: str, any_source: bool = True) -> Iterator[str]:
    """What workers and servers do not do. any_source: whether the backend receives from whichever rank sends first."""
    plan, ranks = job.plan, job.cluster.gpus
    for axis, degree in (("tp", plan.tp), ("pp", plan.pp)):
        if degree > 1:
            yield f"{job.where}: {axis}={degree}: a worker of parameter servers is one process with the whole model"
    if plan.packing is not None:
        yield f"{job.where}: packing: workers of parameter servers train on whole sequences"
    if plan.data_parallel != "ddp":
        yield f"{job.where}: data_parallel={plan.data_parallel}: parameter servers are in its place"
    if not 0 < servers < ranks:
        yield f"--servers {servers}: of {ranks} processes at least 1 and at most {ranks - 1}, so that workers are left"
    if not any_source and bound_of(staleness) != 0:
        yield f"--staleness {staleness}: NCCL cannot receive from whichever rank comes first; only sync runs on GPUs"
