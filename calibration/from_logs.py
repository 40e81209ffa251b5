"""`shardyard calibrate --from`: a profile of what others measured, from their logs, traces and journals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from calibration.calibrate import fit, write_profile
from calibration.fit.machine.kernels import error
from calibration.fit.machine.links import fit_links, transports
from calibration.fit.machine.parts import Fitted
from calibration.fit.machine.tables import errors
from calibration.fit.published_collectives.fit import ranges
from calibration.fit.published_collectives.rows import Row
from calibration.machine import known_gpu
from calibration.readers.kineto import is_trace, read_traces
from calibration.readers.nccl_tests import operation_named, read_nccl_tests
from calibration.request import Request, Result, check
from calibration.samples import Head, read_journal
from sim.pricing.provenance import Provenance
from sim.pricing.shipped import load_profile, profile_for
from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster
from topologies.reading import UserError, build


def from_logs(request: Request, logs: Sequence[Path]) -> Result:
    """A profile from nccl-tests logs and JSON, profiler traces (one per rank), or journals of this command. Raises UserError."""
    check(request)
    if request.until < inf:
        raise UserError("--minutes: what is in logs has been measured")
    journals = [path for path in logs if path.suffix == ".jsonl"]
    if journals:
        if len(logs) > 1:
            raise UserError(f"--from {journals[0]}: a journal of samples is read alone")
        head, samples, _ = read_journal(journals[0])
        known = {name: head[name] for name in Head.model_fields if name in head}
        head |= build(Head, known, f"{journals[0]}: line 1").model_dump()
        return fit(replace(request, samples=journals[0]), head, samples)
    if not request.cluster:
        raise UserError("--from: needs --cluster, the machine that the logs are of")
    cluster = load_cluster(request.cluster)
    base = load_profile(request.profile) if request.profile else profile_for(cluster.node.gpu.name)
    rows, notes, kinds = read_rows(logs, cluster, request.ranks, request.collective)
    most = max(row.nodes for row in rows)
    profile, points = fit_links(rows, base, cluster.model_copy(update={"nodes": max(most, cluster.nodes)}))
    short = {group: float(f"{value:.3g}") for group, value in errors(points).items()}
    note = Provenance(
        measured=True,
        machine=cluster.name,
        versions="as in the logs",
        date="as in the logs",
        source=", ".join(path.name for path in logs),
        grid=f"{len(rows)} sizes of {', '.join(dict.fromkeys(row.operation for row in rows))} ({', '.join(kinds)})",
        rule="formula of sim/pricing/transfers/protocols.py, fitted to half of the sizes",
        fit_error=error(points, False),
        heldout_error=error(points, True),
        errors=short,
        transports=transports(rows, base, cluster),
        measured_range=dict(ranges(rows, cluster)),
    )
    provenance = base.provenance | {"links": note}
    profile = profile.model_copy(update={"name": request.output.stem, "provenance": provenance, "applies_to": ()})
    fitted = Fitted(write_profile(request.output, profile), {"links": points}, {}, notes)
    return Result(fitted, cluster, [], [request.output], {}, {})


def read_rows(logs: Sequence[Path], cluster: Cluster, ranks: int, collective: str = "") -> tuple[list[Row], list[str], list[str]]:
    """(rows, what a reader must know, which sorts of log there were). Raises UserError for anything else."""
    operation = operation_named(collective) if collective else ""
    traces = [path for path in logs if is_trace(path)]
    rows: list[Row] = []
    notes: list[str] = []
    if traces:
        traced = read_traces(traces, cluster.node.gpus)
        rows, notes = list(traced.rows), [f"traces of {traced.ranks} ranks", *traced.notes]
    others = [path for path in logs if path not in traces]
    for path in others:
        log = read_nccl_tests(path, operation, ranks)
        if log.wrong:
            raise UserError(f"{path}: nccl-tests found wrong results in {log.wrong} rows: nothing is priced by them")
        if ranks not in (0, log.ranks):
            raise UserError(f"--ranks {ranks}: {path} is of {log.ranks} ranks")
        if operation not in ("", log.operation):
            raise UserError(f"--collective {collective}: {path} is of {log.operation}")
        notes += _of_others(path, log.gpus, cluster)
        notes += [f"{path}: {log.in_turn}"] if log.in_turn else []
        rows += log.rows
        notes += [f"{path}: lines that were not understood: {len(log.ignored)}"] if log.ignored else []
    return rows, notes, ["traces of the PyTorch profiler"] * bool(traces) + ["nccl-tests"] * bool(others)


def _of_others(path: Path, gpus: Sequence[str], cluster: Cluster) -> list[str]:
    """A note for GPUs that the catalogue knows and the cluster does not have."""
    asked = cluster.node.gpu.name
    known = {gpu: name for gpu in gpus if (name := known_gpu(gpu)) and name != asked}
    return [f"{path}: was measured on {gpu} ({name}), and cluster {cluster.name} has {asked}" for gpu, name in known.items()]
