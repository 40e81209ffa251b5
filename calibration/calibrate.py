"""`shardyard calibrate`: measure the machine, or read what others measured, fit its prices, and write a profile.

Samples go to a journal beside the profile as they come: an interrupted run goes on where it was. Under torchrun every rank runs
this; rank 0 alone keeps the journal, fits and writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibration.fit.machine import kernels as fit_kernels
from calibration.fit.machine.links import fit_links, transports
from calibration.fit.machine.profile import Fit, Fitted
from calibration.fit.published_collectives.rows import Row
from calibration.launch.place import Device, RankError, available_cores, crowded, find_device, is_root, under_launcher
from calibration.launch.ranks import launch
from calibration.machine import catalogue_cluster, catalogue_gpu, describe, known_gpu, own_cluster
from calibration.measure.layer_check import Check, checks
from calibration.samples import Head, Journal, Merged, Sample, merge, read_journal
from sim.pricing.prices import Profile, Provenance
from sim.pricing.profile_file import described, signed, verified, yaml_text
from sim.pricing.shipped import load_profile, profile_for
from topologies.cluster import Cluster, inline_cluster, load_cluster
from topologies.reading import UserError, build, nearest, parse_yaml
from topologies.writing import check_writable, write_whole

PARTS = ("gemm", "attention", "memory", "optimizer", "launch", "copy", "collective", "overlap", "wrapping", "footprint", "layer")
NEEDED = "--parts: gemm and memory are needed to describe this machine; or give --cluster"
CPU = "cpu-gloo"  # the profile that a machine without GPUs starts from


@dataclass(frozen=True)
class Request:
    """What is asked. cluster: whose hardware the prices are relative to; a CPU without one is described by its best rates.

    profile: where prices come from that are not measured. largest: bytes of a collective, 0: as the memory allows.
    """

    output: Path
    quick: bool = False
    ranks: int = 0
    parts: tuple[str, ...] = PARTS
    cluster: str | None = None
    profile: str | None = None
    samples: Path | None = None
    largest: float = 0.0
    collective: str = ""  # of logs that do not say

    @property
    def journal(self) -> Path:
        """The file of samples."""
        return self.samples or self.output.with_suffix(".samples.jsonl")


@dataclass
class Result:
    """What was made: the fit, how a real layer compares, and the files that were written."""

    fitted: Fitted
    cluster: Cluster
    layers: list[Check]
    files: list[Path]
    copies: dict[str, float]  # "pinned to device" -> bytes per second


Hear = Callable[[dict[str, Any]], None]


def check(request: Request) -> None:
    """Refuse what cannot work before anything is measured. Raises UserError."""
    unknown = sorted(set(request.parts) - set(PARTS))
    if unknown:
        raise UserError(f"--parts {','.join(request.parts)}: unknown part '{unknown[0]}'{nearest(unknown[0], PARTS)}")
    if request.output.suffix not in (".yaml", ".yml"):
        raise UserError(f"--output {request.output}: a profile is a .yaml file")
    check_writable("--output", request.output)
    if not request.parts:
        raise UserError("--parts: needs at least one")
    if request.ranks < 0:
        raise UserError(f"--ranks {request.ranks}: must be at least 1")
    if request.profile:
        load_profile(request.profile)
    if request.cluster:
        load_cluster(request.cluster)


def _enough(request: Request, device: Device, ranks: int) -> None:
    """Refuse what could be measured and not be fitted to."""
    lone = [part for part in ("collective", "overlap") if part in request.parts]
    if ranks == 1 and set(request.parts) <= {"collective", "overlap"}:
        raise UserError(f"--parts {','.join(lone)}: needs at least 2 ranks, and there is 1")
    if device == "cpu" and not request.cluster and not {"gemm", "memory"} <= set(request.parts):
        raise UserError(NEEDED)
    if device == "cuda" and request.cluster and not load_cluster(request.cluster).node.gpu.sms:
        raise UserError(f"--cluster {request.cluster}: has no GPUs, and torch finds some here: CUDA_VISIBLE_DEVICES= hides them")
    if device == "cpu" and request.cluster and load_cluster(request.cluster).node.gpu.sms:
        raise UserError(f"--cluster {request.cluster}: has GPUs, and torch finds none on this machine")


def ranks_of(request: Request, device: Device) -> int:
    """As many as asked, or the launcher started, or one per GPU or core."""
    import os

    if under_launcher():
        world = os.environ["WORLD_SIZE"]
        if not world.isdecimal():
            raise UserError(f"environment: WORLD_SIZE={world!r}: must be a whole number")
        if request.ranks not in (0, int(world)):
            raise UserError(f"--ranks {request.ranks}: the launcher started WORLD_SIZE={world}")
        return int(world)
    if device == "cpu":
        return request.ranks or len(available_cores())
    import torch

    if request.ranks > torch.cuda.device_count():
        raise UserError(f"--ranks {request.ranks}: this machine has {torch.cuda.device_count()} GPUs, and a GPU takes one rank")
    return request.ranks or torch.cuda.device_count()


def measure(request: Request, hear: Hear) -> tuple[dict[str, Any], list[Sample]] | None:
    """The journal's head and all samples; None on ranks other than 0. hear: what the session tells. Raises UserError, and
    KeyboardInterrupt when the user does; samples are kept.
    """
    check(request)
    device = find_device()
    ranks = ranks_of(request, device)
    _enough(request, device, ranks)
    from calibration.measure.session import measure as session

    arguments: tuple[Any, ...] = (request.quick, request.parts)
    if not is_root():
        launch(session, ranks, *arguments, [], request.largest, device=device)
        return None
    head = describe(device, ranks) | {"quick": request.quick, "cores": len(available_cores())}
    journal = Journal(request.journal, head)

    def keep(message: dict[str, Any]) -> None:
        if "sample" in message:
            journal.add(Sample.model_validate(message["sample"]))
        hear(message)

    if why := crowded(ranks, device):
        hear({"note": why})
    with _kept(journal):
        launch(session, ranks, *arguments, sorted(journal.done(), key=repr), request.largest, device=device, hear=keep)
    return journal.head, journal.samples


@contextlib.contextmanager
def _kept(journal: Journal) -> Iterator[None]:
    """Say where the samples are when a run ends early."""
    try:
        yield
    except RankError as error:
        raise UserError(f"{error}; {len(journal.samples)} samples are kept in {journal.path}: run again to go on") from None


def fit(request: Request, head: dict[str, Any], samples: Sequence[Sample]) -> Result:
    """Fit and write the profile, and for a CPU without `cluster` the description of the machine. Raises UserError."""
    merged = merge(samples)
    if not merged:
        raise UserError(f"{request.journal}: no samples to fit to")
    name = request.output.stem
    files = []
    cluster, text = _hardware(request, head, merged, name)
    base = load_profile(request.profile) if request.profile else _base(head, cluster)
    fitted = Fit(base, cluster, head, merged).all(name)
    fitted.profile = _write(request.output, fitted.profile)
    files.append(request.output)
    if text:
        beside = request.output.with_suffix(".cluster.yaml")
        write_whole(beside, text)
        files.append(beside)
    copies = {
        f"{sample.case['from']} to {sample.case['to']}": float(sample.case["bytes"]) / sample.value
        for sample in merged
        if sample.part == "copy"
    }
    return Result(fitted, cluster, checks(merged, fitted.profile, cluster), files, copies)


def _base(head: dict[str, Any], cluster: Cluster) -> Profile:
    return load_profile(CPU) if head["device"] == "cpu" else profile_for(cluster.node.gpu.name)


def _write(path: Path, profile: Profile) -> Profile:
    """Written, and as it is read back: what the file says is what counts."""
    text = yaml_text(signed(described(profile)))
    again = build(Profile, verified(parse_yaml(text, path), path), str(path))
    write_whole(path, text)
    return again


def _hardware(request: Request, head: dict[str, Any], merged: Sequence[Merged], name: str) -> tuple[Cluster, str]:
    """The cluster that prices are relative to; and its file's text where it is described by what was measured."""
    per_node = max(
        (int(sample.case["ranks"]) for sample in merged if sample.part == "collective" and sample.case["nodes"] == 1), default=1
    )
    if request.cluster:
        cluster = load_cluster(request.cluster)
        if bool(cluster.node.gpu.sms) != (head["device"] == "cuda"):
            there = "of GPUs" if head["device"] == "cuda" else "of a CPU"
            raise UserError(
                f"{request.journal}: samples are {there} ({head['machine']}), and cluster {cluster.name} is another "
                f"sort of machine ({cluster.node.gpu.name})"
            )
        return cluster, ""
    if head["device"] == "cuda":
        return catalogue_cluster(catalogue_gpu(str(head["machine"]).split(",")[0]), per_node), ""
    products = [sample for sample in merged if sample.part == "gemm"]
    moved = [sample for sample in merged if sample.part == "memory"]
    if not products or not moved:
        raise UserError(NEEDED)
    batch, m, n, k = fit_kernels.columns(products, "batch", "m", "n", "k")
    peak = float((2 * batch * m * n * k / [sample.value for sample in products]).max())
    bandwidth = float((fit_kernels.columns(moved, "bytes")[0] / [sample.value for sample in moved]).max())
    sent = [float(sample.case["bytes"]) / sample.value for sample in merged if sample.part == "collective"]
    processes = min(int(head["ranks"]), int(head["cores"]))
    memory = float(head.get("memory", 0)) or 2**33
    data = own_cluster(name, processes, 1.05 * peak, 1.05 * bandwidth, memory, 2 * max(sent, default=1e9))
    return inline_cluster(data, name), yaml_text(data)


def from_logs(request: Request, logs: Sequence[Path]) -> Result:
    """A profile from nccl-tests logs and JSON, profiler traces (one per rank), or journals of this command. Raises UserError."""
    check(request)
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
    short = {group: float(f"{error:.3g}") for group, error in _errors(points).items()}
    sizes, members = [row.bytes for row in rows], [float(row.ranks) for row in rows]
    note = Provenance(
        measured=True,
        machine=cluster.name,
        versions="as in the logs",
        date="as in the logs",
        source=", ".join(path.name for path in logs),
        grid=f"{len(rows)} sizes of {', '.join(dict.fromkeys(row.operation for row in rows))} ({', '.join(kinds)})",
        rule="formula of sim/pricing/protocols.py, fitted to half of the sizes",
        fit_error=fit_kernels.error(points, False),
        heldout_error=fit_kernels.error(points, True),
        errors=short,
        transports=transports(rows, base, cluster),
        measured_range={"bytes": (min(sizes), max(sizes)), "ranks": (min(members), max(members))},
    )
    provenance = base.provenance | {"links": note}
    profile = profile.model_copy(update={"name": request.output.stem, "provenance": provenance, "applies_to": ()})
    fitted = Fitted(_write(request.output, profile), {"links": points}, {}, notes)
    return Result(fitted, cluster, [], [request.output], {})


def _errors(points: Sequence[Any]) -> dict[str, float]:
    from calibration.fit.machine.tables import errors

    return errors(points)


def read_rows(logs: Sequence[Path], cluster: Cluster, ranks: int, collective: str = "") -> tuple[list[Row], list[str], list[str]]:
    """(rows, what a reader must know, which sorts of log there were). Raises UserError for anything else."""
    from calibration.readers.kineto import is_trace, read_traces
    from calibration.readers.nccl_tests import operation_named, read_nccl_tests

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
        rows += log.rows
        notes += [f"{path}: {len(log.ignored)} lines were not understood"] if log.ignored else []
    return rows, notes, ["traces of the PyTorch profiler"] * bool(traces) + ["nccl-tests"] * bool(others)


def _of_others(path: Path, gpus: Sequence[str], cluster: Cluster) -> list[str]:
    """A note for GPUs that the catalogue knows and the cluster does not have."""
    asked = cluster.node.gpu.name
    known = {gpu: name for gpu in gpus if (name := known_gpu(gpu)) and name != asked}
    return [f"{path}: was measured on {gpu} ({name}), and cluster {cluster.name} has {asked}" for gpu, name in known.items()]
