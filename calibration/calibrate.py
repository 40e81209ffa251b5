"""`shardyard calibrate`: measure the machine, fit its prices, and write a profile.

Samples go to a journal beside the profile as they come: an interrupted run goes on where it was. Under torchrun every rank runs
this; rank 0 alone keeps the journal, fits and writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibration.devices import class_of
from calibration.fit.machine import kernels as fit_kernels
from calibration.fit.machine.kernels import error
from calibration.fit.machine.profile import Fit
from calibration.fit.machine.tables import errors, series_name
from calibration.launch.launcher import is_root, under_launcher
from calibration.launch.place import RankError, available_cores, crowded, find_device
from calibration.launch.ranks import launch
from calibration.machine import catalogue_cluster, catalogue_gpu, describe, own_cluster
from calibration.measure.grid import grid
from calibration.measure.interference import LIMIT
from calibration.measure.layer_check import CHECKED, FITTED, checks
from calibration.request import NEEDED, Request, Result, check, check_parts, ranks_of
from calibration.samples import Journal, Key, Merged, Sample, between_rounds, merge
from sim.pricing.prices import Profile
from sim.pricing.profile_file import described, signed, verified, yaml_text
from sim.pricing.shipped import load_profile, profile_for
from topologies.cluster import Cluster
from topologies.cluster_files import inline_cluster, load_cluster
from topologies.documents.writing import write_whole
from topologies.reading import UserError, build, parse_yaml

UNSTEADY = 0.06  # part by which rounds of the same layers may differ before it is said
POOR, AGAIN = 0.1, 2  # median error of what was kept out, beyond which a part is measured again; so often at most
DISTURBED = 0.1  # of a part's cases that others disturbed in every round, beyond which these are measured again, as often
FITS = {"gemm": "gemm", "attention": "attention", "collective": "links"}  # part -> the fit to it
CPU = "cpu-gloo"  # the profile that a machine without GPUs starts from
Hear = Callable[[dict[str, Any]], None]


def calibrate(request: Request, hear: Hear) -> Result | None:
    """Measure and fit; parts whose prices are off by more than POOR where they were kept out of the fit are measured again, AGAIN
    times at most, and said to be poor if that does not help; on cores before that, but for a quick look, what others disturbed.
    None on ranks other than 0; raises as `measure` does.
    """
    measured = measure(request, hear)
    if measured is None:
        return None
    queued = class_of(measured[0]["device"]).ordered  # of which others take no time
    patient = not (queued or request.quick or under_launcher())
    for extra in range(1, AGAIN + 1):
        disturbed = _disturbed(measured[1]) if patient and not request.over else {}
        if not disturbed:
            break
        said = ", ".join(f"{part} {len(keys)}" for part, keys in disturbed.items())
        hear({"note": f"others used the machine in every round of some cases ({said}): these are measured once more"})
        again = measure(replace(request, parts=tuple(disturbed)), hear, extra, set().union(*disturbed.values()))
        assert again is not None
        measured = again
    result = fit(request, *measured)
    for extra in range(1, AGAIN + 1):
        poor = _poor(result)
        if not poor or under_launcher() or request.over:
            break
        said = ", ".join(f"{part} {error:.0%}" for part, error in poor.items())
        hear({"note": f"kept out of the fit, prices are off by more than {POOR:.0%} ({said}): measured once more"})
        measured = measure(replace(request, parts=tuple(poor)), hear, extra, _poor_cases(result, measured[1], poor))
        assert measured is not None
        result = fit(request, *measured)
    if request.over:
        result.fitted.notes.append("the time was over before every case was measured in every round (--minutes)")
    result.fitted.notes += [
        f"{part}: prices are off by {error:.0%} where they were kept out of the fit: measure again when the machine is quiet"
        + (", or without --quick" if request.quick else "")
        for part, error in _poor(result).items()
    ]
    return result


def _poor(result: Result) -> dict[str, float]:
    """Parts that are fitted by a formula or a table, and the median error of what was kept out, where that is more than POOR."""
    found = {part: error(result.fitted.points.get(fit, []), True) for part, fit in FITS.items()}
    return {part: value for part, value in found.items() if value is not None and value > POOR}


def _poor_cases(result: Result, samples: Sequence[Sample], poor: Collection[str]) -> set[Key]:
    """The cases of these parts; of collectives that have tables those of the tables that are off by more than POOR."""
    by_table = errors(result.fitted.points.get(FITS["collective"], []))
    every = {_table_of(sample) for sample in samples} - {""}
    if not every & by_table.keys():  # a GPU's collectives have a formula
        every = set()
    good = {table for table in every if by_table.get(table, 0.0) <= POOR}
    return {sample.key for sample in samples if sample.part in poor and _table_of(sample) not in good}


def _table_of(sample: Sample) -> str:
    """Empty where it has none."""
    if sample.part != "collective":
        return ""
    return series_name(str(sample.case["operation"]), int(sample.case["ranks"]), int(sample.case["nodes"]))


def _disturbed(samples: Sequence[Sample]) -> dict[str, set[Key]]:
    """By part, the cases that were never measured undisturbed, where they are more than DISTURBED of all."""
    calm, every = {sample.key for sample in samples if sample.foreign <= LIMIT}, dict[str, set[Key]]()
    for sample in samples:
        if sample.part != "anchor":
            every.setdefault(sample.part, set()).add(sample.key)
    left = {part: keys - calm for part, keys in every.items()}
    return {part: keys for part, keys in left.items() if len(keys) > DISTURBED * len(every[part])}


def measure(
    request: Request, hear: Hear, extra: int = 0, only: Collection[Key] | None = None
) -> tuple[dict[str, Any], list[Sample]] | None:
    """The journal's head and all samples; None on ranks other than 0. hear: what the session tells; extra: rounds beyond those
    of the grid; only: cases of these. Raises UserError, and KeyboardInterrupt when the user does; samples are kept.
    """
    check(request)
    device = find_device()
    ranks = ranks_of(request, device)
    if not extra:  # what is measured again is a part of what was allowed
        check_parts(request, device, ranks)
    from calibration.measure.session import measure as session

    arguments: tuple[Any, ...] = (request.quick, request.parts)
    more = request.largest, extra, request.left
    if not is_root():
        launch(session, ranks, *arguments, [], *more, device=device)
        return None
    head = describe(device, ranks) | {"quick": request.quick, "cores": len(available_cores())}
    journal = Journal(request.journal, head)

    def keep(message: dict[str, Any]) -> None:
        if "sample" in message:
            journal.add(Sample.model_validate(message["sample"]))
        hear(message)

    if why := crowded(ranks, device):
        hear({"note": why})
    done = journal.done()
    if only is not None:
        rounds = grid(device, request.quick).rounds + extra
        done |= {(number, key) for _, key in done if key not in only for number in range(rounds)}
    with _kept(journal):
        launch(session, ranks, *arguments, sorted(done, key=repr), *more, device=device, hear=keep)
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
    fitted.profile = write_profile(request.output, fitted.profile)
    changed = between_rounds(samples, "layer")
    if changed > UNSTEADY:
        fitted.notes.append(
            f"whole layers took {changed:.0%} longer in the slowest round than in the fastest: the machine's speed changes, and "
            "predictions may be off by as much"
        )
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
    company = {str(sample.case["kind"]): sample.value for sample in merged if sample.part == "company"}
    shapes = CHECKED if fitted.profile.crowding else FITTED + CHECKED
    return Result(fitted, cluster, checks(merged, fitted.profile, cluster, shapes), files, copies, company)


def _base(head: dict[str, Any], cluster: Cluster) -> Profile:
    return profile_for(cluster.node.gpu.model) if class_of(head["device"]).ordered else load_profile(CPU)


def write_profile(path: Path, profile: Profile) -> Profile:
    """Written, and as it is read back: what the file says is what counts."""
    text = yaml_text(signed(described(profile)))
    again = build(Profile, verified(parse_yaml(text, path), path), str(path))
    write_whole(path, text)
    return again


def _hardware(request: Request, head: dict[str, Any], merged: Sequence[Merged], name: str) -> tuple[Cluster, str]:
    """The cluster that prices are relative to; and its file's text where it is described by what was measured."""
    queued = class_of(head["device"]).ordered
    per_node = max(
        (int(sample.case["ranks"]) for sample in merged if sample.part == "collective" and sample.case["nodes"] == 1), default=1
    )
    if request.cluster:
        cluster = load_cluster(request.cluster)
        if bool(cluster.node.gpu.sms) != queued:
            there = "of GPUs" if queued else "of a CPU"
            raise UserError(
                f"{request.journal}: samples are {there} ({head['machine']}), and cluster {cluster.name} is another "
                f"sort of machine ({cluster.node.gpu.name})"
            )
        return cluster, ""
    if queued:
        memory = float(head.get("facts", {}).get("memory", 0.0))
        return catalogue_cluster(catalogue_gpu(str(head["machine"]).split(",")[0], memory), per_node), ""
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
