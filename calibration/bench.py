"""What nccl-tests would print on a cluster of the catalogue, and how far that is from what it did print."""

from __future__ import annotations

from pathlib import Path

from calibration.readers.nccl_tests import Log, read_nccl_tests
from sim.analysis.collective_sweep import Sweep, sweep, transport
from sim.analysis.notes import of_error
from sim.collectives import OPERATIONS, algorithms, offered
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile, profile_for
from sim.pricing.transfers.protocols import split
from sim.pricing.transports import carried
from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster
from topologies.documents.units import show, size
from topologies.reading import UserError, nearest

MOST = 200  # sizes of one sweep
NAMED = 3  # ignored lines of a log that are shown


def bench(
    operation: str,
    cluster: str,
    nodes: int | None = None,
    ranks: int | None = None,
    profile: str | None = None,
    algorithm: str = "auto",
    sizes: str = "1KiB:1GiB",
    measured: str | None = None,
) -> tuple[Sweep, list[str]]:
    """Prices of `operation` by size and choice, beside a measured log if there is one; and notes. Raises UserError."""
    known = [name for name in OPERATIONS if name != "all_to_allv" and offered(name)]
    if operation not in known:
        raise UserError(f"unknown collective '{operation}'{nearest(operation, known)}")
    _check(operation, algorithm, nodes=nodes, ranks=ranks)
    if measured and operation == "send":
        raise UserError(f"--measured {measured}: nccl-tests' sendrecv sends both ways at once: sends are not compared with it")
    log = read_nccl_tests(Path(measured), operation, ranks or 0) if measured else None
    if log and log.operation != operation:
        raise UserError(f"{measured}: is of {log.operation}, not of {operation}")
    place = load_cluster(cluster, nodes or (log.nodes if log else None))
    count = _pairs(place, ranks) if operation == "send" else ranks or (log.ranks if log else place.gpus)
    named = load_profile(profile) if profile else profile_for(place.node.gpu.name)
    prices = Prices(carried(named, place.fabric.transport), place.node.gpu)
    topology = place.topology()
    table = sweep(topology, prices, operation, count, asked(sizes), algorithm)
    where = f"{place.nodes} × {place.name}, {count} ranks"
    extent, links, caveats = transport(topology, prices, operation, count, asked(sizes), algorithm)
    other = place.node.latency.model_fields_set  # than that of the network that was measured
    links = {f"{kind} of another latency" if kind in other else kind: rate for kind, rate in links.items()}
    links |= {"switches that add": 0.0} if any("collnet" in options[0].algorithm for options in table) else {}
    error = (
        of_error(prices, operation, extent, links, asked(sizes))
        if algorithm == "auto"
        else f"{algorithm} alone: its error is unknown"
    )
    notes = [f"prices: profile {prices.profile.name}; {error}", *place.notes, *place.remarks, *caveats]
    if operation == "all_to_all" and (calling := prices.profile.collective_call):
        notes.append(
            f"small messages: a process that calls one after another waits for its host, {show(calling, 's')} a call by PyTorch, "
            "which is not in these times"
        )
    if log is None:
        return Sweep(operation, where, count, table), notes
    if (log.ranks, log.nodes) != (count, place.nodes):
        raise UserError(f"{measured}: has {log.ranks} ranks on {log.nodes} nodes, asked for are {count} on {place.nodes}")
    rows = [(row.bytes, row.seconds) for row in log.rows]
    best = [options[0].seconds for options in sweep(topology, prices, operation, count, [at for at, _ in rows], algorithm)]
    return Sweep(operation, where, count, table, rows, best), [*notes, *_about(measured or "", log)]


def _pairs(place: Cluster, ranks: int | None) -> int:
    """Ranks of sends: two neighbours in a node, or the GPUs of two nodes, each with its peer, all at once. Raises UserError."""
    count = 2 if place.nodes == 1 else place.gpus
    if place.nodes > 2 or (ranks is not None and ranks != count):
        asked = f"--ranks {ranks}" if place.nodes <= 2 else f"--nodes {place.nodes}"
        raise UserError(f"{asked}: a send is from one GPU of a node to the next, or from all of a node to those of a second one")
    return count


def _check(operation: str, algorithm: str, **numbers: int | None) -> None:
    """Raises UserError for a number below 1, and for an algorithm that the operation does not have."""
    for option, number in numbers.items():
        if number is not None and number < 1:
            raise UserError(f"--{option} {number}: must be at least 1")
    names = [name.split("/")[1] for name in algorithms if name.split("/")[0] == operation]
    known = ["auto", *names, *(f"{operation}/{name}" for name in names)]
    try:
        asked = split(algorithm)[0].split(", ")
    except ValueError as error:
        raise UserError(f"--algorithm {algorithm}: {error}") from None
    for name in asked:
        if name not in known:
            raise UserError(f"--algorithm {algorithm}: '{name}' is no algorithm of {operation}{nearest(name, known)}")


def by_ranks(
    operation: str,
    cluster: str,
    nodes: int | None = None,
    profile: str | None = None,
    algorithm: str = "auto",
    sizes: str = "1KiB:1GiB:1024",
) -> tuple[str, dict[float, dict[str, list[tuple[int, float]]]]]:
    """Where, and for each size in bytes and each algorithm its seconds by number of ranks, in powers of two."""
    if operation == "send":
        raise UserError("--by-ranks: a send has two ranks")
    place = load_cluster(cluster, nodes)
    lines: dict[float, dict[str, list[tuple[int, float]]]] = {}
    count = 2
    while count <= place.gpus:
        used = -(-count // place.node.gpus)
        data, _ = bench(operation, cluster, used, count, profile, algorithm, sizes)
        for options in data.prices:
            best: dict[str, float] = {}
            for point in options:  # the cheapest protocol of each algorithm
                best.setdefault(point.algorithm, point.seconds)
            for name, time in best.items():
                lines.setdefault(options[0].bytes, {}).setdefault(name, []).append((count, time))
        count *= 2
    return f"{operation} on {place.name}", lines


def asked(text: str) -> list[float]:
    """Bytes in "1KiB:1GiB" (doubling) or "1KiB:1GiB:4". Raises UserError."""
    parts = text.split(":")
    try:
        low, high = size(parts[0]), size(parts[1] if len(parts) > 1 else parts[0])
        factor = float(parts[2]) if len(parts) > 2 else 2.0
    except ValueError as error:
        raise UserError(f"--sizes {text}: {error}") from None
    if not 0 < low <= high or factor <= 1 or len(parts) > 3:
        raise UserError(f"--sizes {text}: must be FROM:TO[:FACTOR] with 0 < FROM ≤ TO and FACTOR > 1, such as 1KiB:1GiB:2")
    result = [low]
    while result[-1] * factor <= high * (1 + 1e-9):
        result.append(result[-1] * factor)
        if len(result) > MOST:
            raise UserError(f"--sizes {text}: more than {MOST} sizes")
    return result


def _about(path: str, log: Log) -> list[str]:
    notes = []
    if log.ignored:
        shown = "; ".join(f"line {number}: {line[:60]}" for number, line in log.ignored[:NAMED])
        more = f"; and {len(log.ignored) - NAMED} more" if len(log.ignored) > NAMED else ""
        notes.append(f"{path}: ignored lines: {len(log.ignored)} ({shown}{more})")
    notes += [f"{path}: {log.in_turn}"] if log.in_turn else []
    if log.wrong:
        notes.append(f"{path}: nccl-tests found wrong results in {log.wrong} rows")
    return notes
