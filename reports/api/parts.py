"""`collective`, `topology`, `schedule`, `teach`, `ranks`, `loop`, `server` and `straggler` as functions: parts of training by
themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.api.jobs import Asked, job_of, stated
from reports.api.result import Result
from topologies.reading import UserError

if TYPE_CHECKING:
    from strategies.lowering.parameter_servers import Answer


def collective(
    operation: str,
    cluster: str = "dgx-h100",
    *,
    nodes: int | None = None,
    ranks: int | None = None,
    profile: str | None = None,
    algorithm: str = "auto",
    sizes: str = "1KiB:1GiB",
    measured: str | None = None,
) -> Result:
    """Time, algbw and busbw of a collective by size, with the algorithm and protocol that a job takes; `detail` has the others,
    and a log of nccl-tests beside them (`measured`). Raises UserError.
    """
    from calibration.bench import bench

    data, notes = bench(operation, cluster, nodes, ranks, profile, algorithm, sizes, measured)
    rows = tuple(data.to_dict()["rows"])
    return Result(f"{operation} on {data.where}; {'; '.join(notes)}", rows, ("bytes", "chosen", "seconds", "busbw"), detail=data)


def topology(cluster: str, nodes: int | None = None, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a cluster consists of and how it is wired: its links, their bytes per second in one direction and seconds of latency.
    changes: {"node.nic": "400 Gb/s"}. `figures.topology(job.cluster)` draws one. Raises UserError.
    """
    from reports.tables.topology import as_data
    from topologies.cluster_files import load_cluster

    return as_data(load_cluster(cluster, nodes, changes))


def schedule(name: str, *, pp: int | None = None, microbatches: int | None = None, chunks: int | None = None) -> list[list[str]]:
    """The order in which each rank of a pipeline runs its passes: a list of cells for each. Raises UserError."""
    from strategies.schedules.table import cells

    return cells(name, pp, microbatches, chunks)[0]


def teach(
    *names: str, pp: int = 4, microbatches: int = 8, chunks: int | None = None, backward: float = 2.0, ranks: int = 4
) -> Result:
    """Pipeline schedules beside each other: forward passes last 1, backward passes `backward`, no network; or all-reduces of
    `ranks` ranks, such as all_reduce/ring, round by round. Raises UserError.
    """
    from strategies.schedules import schedules
    from strategies.schedules.unit_play import unit_play

    if any("/" in name for name in names):
        from sim.analysis.collective_rounds import collective_rounds

        played = [collective_rounds(name, ranks) for name in names]
        keys = ("name", "ranks", "rounds", "sent", "received", "together")
        return Result(
            f"{len(played)} all-reduces of {ranks} ranks", tuple(each.to_dict() for each in played), keys, detail=played
        )
    chosen = [schedules.named(name) for name in names]
    plays = [unit_play(name, pp, microbatches, chunks if schedules[name].chunks is None else None, backward) for name in chosen]
    fields = ("name", "ranks", "microbatches", "chunks", "length", "bubble", "gaps", "overhead")
    rows = tuple(
        {key: getattr(play, key) for key in fields} | {"held": [play.held(rank) for rank in range(pp)]} for play in plays
    )
    return Result(f"{len(rows)} schedules of {pp} ranks and {microbatches} microbatches", rows, fields, detail=plays)


def ranks(nodes: int = 1, gpus: int = 8, gpus_per_process: int = 1) -> Result:
    """Which process has which rank, local rank and GPUs. Raises UserError."""
    from topologies.ranks import rank_table

    rows = tuple(row._asdict() for row in rank_table(nodes, gpus, gpus_per_process))
    return Result(f"world size {len(rows)}", rows, ("rank", "node", "local_rank", "gpus"))


def loop(job: Asked) -> dict[str, Any]:
    """The training loop at its seven cut points: what each costs of a step, hidden and exposed. Raises UserError."""
    from reports.tables.loop import as_data
    from strategies.resilience.run_spec import prepare
    from strategies.resilience.settings import RunSettings

    asked = job_of(job)
    return as_data(prepare(asked, asked.run or RunSettings(), days=1.0))


def server(
    job: Asked, *, servers: int = 1, staleness: str = "sync", steps: int = 100, jitter: float = 0.1, seed: int = 0
) -> Answer:
    """Training with parameter servers for many steps, by the plan's fields as they were said. Raises UserError."""
    from strategies.lowering.parameter_servers import parameter_servers
    from strategies.predict import prices_of

    asked = stated(job_of(job))
    return parameter_servers(asked, prices_of(asked), servers, staleness, steps, jitter, seed)


def straggler(*traces: str | Path) -> dict[str, Any]:
    """What stragglers cost a job, and which, by replaying its trace: Parquet or CSV, or profiler traces. Raises UserError."""
    from calibration.stragglers.reading import analysed
    from reports.tables.stragglers import as_data

    paths: Sequence[Path] = [Path(trace) for trace in traces]
    if not paths:
        raise UserError("straggler: name a trace")
    return as_data(analysed(paths, str(paths[0])), str(paths[0]))
