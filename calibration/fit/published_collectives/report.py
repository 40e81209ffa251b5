"""How well the prices of collectives predict published sweeps: `python -m calibration.fit.published_collectives.report TABLES`,
or of the machines of some profiles: `report TABLES a100 h100`.

Of each sweep, half of the sizes is fitted to and half is predicted: on one node the three protocols over the links inside, on
several nodes the links between them with the profile's prices inside. "as shipped" is the profile's prediction of the whole
sweep with nothing fitted. Sweeps that say nothing of the protocols are listed with the reason. `--shipped` leaves the fits out,
which take minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibration.fit.published_collectives.fit import Array, errors, inside, network, search, series, summary
from calibration.fit.published_collectives.refit import CLUSTERS, MOST, fitted
from calibration.fit.published_collectives.rows import (
    EXCLUDED,
    ONE_THREAD,
    UNNAMED,
    Row,
    alternate,
    node_rows,
    sweep_rows,
    vtrain_rows,
)
from sim.collectives import offered
from sim.pricing.prices import Profile
from sim.pricing.shipped import load_profile, profile_for
from sim.pricing.transports import carried
from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster

LEAST = 8  # sizes of a sweep that is fitted to
MACHINES: dict[str, tuple[str, str, dict[str, Any]]] = {  # sweeps -> profile, cluster, what its nodes have instead
    "S001 S004 S005 S006 S071 S072 S081 S083 S085 S088 S102 S103 S104": ("a100", "dgx-a100", {}),
    "S032 S048 S051 S074": ("a100", "azure-ndv4", {}),
    "S012 S018": ("a100", "aws-p4d", {}),
    "S073": ("a100", "dgx-a100", {}),
    "S084": ("a100", "dgx-a100", {"nics": 4, "gpus": 4}),
    "S007 S008 S009 S010 S089 S090 S091 S093 S028 S052 S070": ("h100", "dgx-h100", {}),
    "S013 S014 S022": ("h100", "aws-p5", {}),
    "S025 S036": ("h100", "gcp-a3-mega", {}),
    "S035": ("h100", "gcp-a3-high", {}),
    "S076": ("h200", "hgx-h200", {}),
    "S037": ("h200", "gcp-a3-ultra", {}),
    "S038": ("h100", "alps", {}),
    "S040": ("h100", "alps", {"gpus": 1, "nics": 1, "wiring": "bare", "nvlink": 0.0}),
    "S077 S024 S027": ("b200", "hgx-b200", {}),
    "S078": ("b200", "aws-p6-b200", {}),
    "S069": ("b200", "gb200-nvl72", {}),
    "S049": ("mi300x", "mi300x", {}),
}
UNFITTED = {"gb200": "gb200-nvl72"}  # tables of two GPUs of a rack, priced as a B200's
PROFILES = sorted({profile for profile, _, _ in MACHINES.values()} | {*CLUSTERS, *UNFITTED})


class Errors(NamedTuple):
    """Relative errors of a sweep on a cluster."""

    cluster: str
    nodes: int
    operation: str
    off: Array


class Line(NamedTuple):
    """One sweep: (median, 90th percentile) of held-out errors, or nan, and of the profile as it is shipped."""

    name: str
    what: str
    sizes: int
    heldout: tuple[float, float]
    shipped: tuple[float, float]
    errors: Errors  # of the profile as it is shipped


def lines(tables: Path, fits: bool = True, profiles: Collection[str] = PROFILES) -> Iterator[Line]:
    """The report, sweep by sweep. fits: with errors of what is kept out of fits to the sweep; profiles: of others nothing."""
    rows = sweep_rows(tables)
    for names, (profile, cluster, other) in MACHINES.items():
        if profile not in profiles:
            continue
        place = load_cluster(cluster)
        place = place.model_copy(update={"node": place.node.model_copy(update=other)})
        for name in names.split():
            if name in rows and offered(rows[name][0].operation):
                yield _line(name, rows[name], carried(load_profile(profile), place.fabric.transport), place, fits)
    for ranks in (2, 4, 8) if "a100" in profiles else ():
        chosen = [row for row in vtrain_rows(tables) if row.ranks == ranks]
        yield _line(chosen[0].name, chosen, load_profile("a100"), load_cluster("dgx-a100"), fits)


def _line(name: str, rows: Sequence[Row], profile: Profile, cluster: Cluster, fits: bool) -> Line:
    first = rows[0]
    cluster = cluster.model_copy(update={"nodes": first.nodes})
    held = (float("nan"), float("nan"))
    if fits and len({row.bytes for row in rows}) >= LEAST:
        free, kept = alternate(rows)
        kinds = ("nvlink",)
        way = inside(profile, kinds) if first.nodes == 1 else network(profile, first.operation != "all_reduce")
        held = summary(_all(kept, cluster, fitted(*way, series(free, cluster, profile), cluster)))
    what = f"{first.nodes} × {cluster.name}, {first.operation} of {first.ranks}"
    off = _all(rows, cluster, profile)
    machine = cluster.name + ", network not described" * (name in UNNAMED) + ", one thread for all GPUs" * (name in ONE_THREAD)
    own = Errors(machine, first.nodes, first.operation, off)
    return Line(name, what, len({row.bytes for row in rows}), held, summary(off), own)


def _all(rows: Sequence[Row], cluster: Cluster, profile: Profile) -> Any:
    return np.concatenate(list(errors(rows, cluster, profile).values()))


def tables_of_a_node(tables: Path, profiles: Collection[str] = PROFILES) -> Iterator[Errors]:
    """Of the tables that prices inside a node are fitted to, by operation: of the sizes that are kept out. Of another machine's,
    which nothing is fitted to, of all. profiles: see `lines`.
    """
    for name, cluster in (CLUSTERS | UNFITTED).items():
        if name not in profiles:
            continue
        rows = [row for row in node_rows(tables, name) if row.ranks <= MOST.get(name, row.ranks)]
        kept = rows if name in UNFITTED else alternate(rows)[1]
        place = load_cluster(cluster)
        for operation in dict.fromkeys(row.operation for row in kept):
            own = [row for row in kept if row.operation == operation]
            machine = cluster + f", {own[0].ranks} ranks" * (name in UNFITTED)
            yield Errors(machine, 1, operation, _all(own, place, profile_for(place.node.gpu.name)))


def by_machine(every: Iterable[Errors]) -> Iterator[tuple[str, int, float, float, float]]:
    """(machine and operation, sizes, median and 90th percentile of absolute errors, mean error) of sweeps together."""
    groups: dict[str, list[Array]] = {}
    for each in every:
        where = "one node" if each.nodes == 1 else "between nodes"
        groups.setdefault(f"{each.cluster}, {where} | {each.operation}", []).append(each.off)
    for what, parts in sorted(groups.items()):
        off = np.concatenate(parts)
        yield what, len(off), *summary(off), float(off.mean())


def logs_of_a_node(tables: Path, profiles: Collection[str] = PROFILES) -> Iterator[tuple[str, str, Sequence[Sequence[Row]]]]:
    """(machine, operation, logs among equally many of its GPUs) where several were published, each by size."""
    sweeps, of = sweep_rows(tables), dict[tuple[str, str, int], list[list[Row]]]()
    logs = [
        (cluster, sweeps[name])
        for names, (profile, cluster, _) in MACHINES.items()
        for name in names.split()
        if profile in profiles and name in sweeps and name not in ONE_THREAD and sweeps[name][0].nodes == 1
    ]
    logs += [(cluster, node_rows(tables, name)) for name, cluster in CLUSTERS.items() if name in profiles]
    logs += [(CLUSTERS["a100"], vtrain_rows(tables))] if "a100" in profiles else []
    for cluster, rows in logs:
        for operation, ranks in dict.fromkeys((row.operation, row.ranks) for row in rows):
            own = sorted((row for row in rows if (row.operation, row.ranks) == (operation, ranks)), key=lambda row: row.bytes)
            of.setdefault((cluster, operation, ranks), []).append(own)
    yield from ((cluster, operation, several) for (cluster, operation, _), several in of.items() if len(several) > 1)


def by_others(logs: Sequence[Sequence[Row]]) -> Array:
    """Relative errors of what the other logs took in the median at a size, on lines in logarithms between their sizes; of sizes
    that one of the others spans.
    """
    every = [np.log([[row.bytes for row in log], [row.seconds for row in log]]) for log in logs]
    result = []
    for number, (sizes, seconds) in enumerate(every):
        others = [np.interp(sizes, log[0], log[1], left=np.nan, right=np.nan) for at, log in enumerate(every) if at != number]
        known = ~np.isnan(others).all(axis=0)
        result.append(np.expm1(np.nanmedian(np.array(others)[:, known], axis=0) - seconds[known]))
    return np.concatenate(result)


def across(tables: Path) -> tuple[float, float]:
    """Errors on 4 A100 of prices fitted to 2 and 8 of them (vTrain's traces)."""
    rows, profile, cluster = vtrain_rows(tables), load_profile("a100"), load_cluster("dgx-a100")
    free = inside(profile, ("nvlink",))
    ends = series([row for row in rows if row.ranks != 4], cluster, profile)
    fitted_profile = free[1](search(*free, ends, cluster.topology().kinds))
    return summary(_all([row for row in rows if row.ranks == 4], cluster, fitted_profile))


def main(tables: Path, fits: bool = True, profiles: Collection[str] = PROFILES) -> None:
    """Print the report as a table in Markdown. profiles: see `lines`."""
    print("| sweep | what | sizes | held out: median | p90 | as shipped: median | p90 |\n|---|---|--:|--:|--:|--:|--:|")
    every = list(lines(tables, fits, profiles))
    for line in every:
        figures = " | ".join("" if value != value else f"{100 * value:.1f} %" for value in (*line.heldout, *line.shipped))
        print(f"| {line.name} | {line.what} | {line.sizes} | {figures} |")
    print("\n| machine | operation | sizes | median | p90 | mean |\n|---|---|--:|--:|--:|--:|")
    for what, sizes, *shares in by_machine([*(line.errors for line in every), *tables_of_a_node(tables, profiles)]):
        print(f"| {what} | {sizes} |", " | ".join(f"{100 * share:.1f} %" for share in shares), "|")
    print("\n| machine, one node | operation | sizes | by other logs: median | p90 |\n|---|---|--:|--:|--:|")
    several: dict[tuple[str, str], list[Array]] = {}
    for cluster, operation, logs in logs_of_a_node(tables, profiles):
        several.setdefault((cluster, operation), []).append(by_others(logs))
    for (cluster, operation), parts in several.items():
        off = np.concatenate(parts)
        print(f"| {cluster} | {operation} | {len(off)} |", " | ".join(f"{100 * share:.1f} %" for share in summary(off)), "|")
    if fits and "a100" in profiles:
        print("\nvTrain's A100, 4 GPUs predicted from 2 and 8: median {:.1%}, 90th percentile {:.1%}".format(*across(tables)))
    print("\nNot used:", "; ".join(f"{sweep} ({why})" for sweep, why in EXCLUDED.items()))


if __name__ == "__main__":
    asked = [word for word in sys.argv[1:] if word != "--shipped"]
    if not asked or not (Path(asked[0]) / "nccl" / "sweep_rows.csv").is_file() or not set(asked[1:]) <= set(PROFILES):
        sys.exit(
            "python -m calibration.fit.published_collectives.report [--shipped] TABLES [PROFILE…]: a folder that has "
            f"nccl/sweep_rows.csv, and of {', '.join(PROFILES)}"
        )
    main(Path(asked[0]), "--shipped" not in sys.argv, asked[1:] or PROFILES)
