"""Refits the prices of collectives of the shipped profiles, and writes them with their errors into the profiles' files.

`python -m calibration.fit.published_collectives.refit TABLES h100 a100` fits the links inside a node, the switch and
point-to-point kernels to nccl-tests on one node; with `--network` the links between nodes to a published sweep; with `--rings`
steps of rings between nodes follow from those and from the transport `gib`, the one that a sweep of rings was published of with
all three protocols. H200 has H100's network: the same NICs. It uses the algorithms that are registered when it runs. Half of the
sizes is kept out; the shipped numbers come from that fit, so the errors are theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from calibration.fit.published_collectives.fit import (
    Bounds,
    Free,
    Ranges,
    Series,
    errors,
    inside,
    kernel,
    network,
    ranges,
    search,
    series,
    summary,
)
from calibration.fit.published_collectives.rows import Row, alternate, node_rows, sweep_rows
from calibration.fit.published_kernels.refit import file_of, rewrite, tidy
from sim.collectives import algorithms, offered
from sim.pricing.prices import Profile
from sim.pricing.provenance import is_between_nodes
from sim.pricing.shipped import FOLDER, load_profile
from sim.pricing.transfers.protocols import IN_SWITCH, P2P, SENDS, SIMPLE, SWITCHED, LinkPrice, Shape
from sim.pricing.transports import load_transport
from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster

CLUSTERS = {"a100": "dgx-a100", "h100": "dgx-h100", "h200": "hgx-h200", "b200": "hgx-b200", "l40s": "pcie-l40s"}
LINKS = {"l40s": ("pcie",)}  # kinds between the GPUs of a node, where they are not NVLink alone
MOST = {"l40s": 2}  # ranks of the rows to fit to: eight L40S were measured in one box, whose sockets hardly reach each other
POOLED = {"h100": ("h100", "h200"), "h200": ("h100", "h200")}  # same links, switches and multiprocessors: one set of prices
LARGE = {"h100": "S007", "h200": "S076", "b200": "S069"}  # published sweeps of one node, for buffers beyond the tables' 512 MiB
SENT = {"a100": "S088", "h100": "S093", "h200": "S093"}  # published sends of one GPU of a node to another
UNFITTED = "14 us per step is NCCL's NET figure (Ring, Simple)"
SWEEPS = {  # profile -> published sweep over two nodes, the cluster that it ran on, and what it was
    "a100": ("S074", "azure-ndv4", "all-reduce of two OCI BM.GPU4.8, RoCE (a public nccl-tests log)"),
    "h100": ("S028", "dgx-h100", "all-reduce of two nodes, InfiniBand NDR (github.com/dstackai/dstack nebius.md@511c318)"),
    "b200": ("S027", "hgx-b200", "all-reduce of two nodes, InfiniBand (github.com/dstackai/dstack lambda.md@511c318)"),
}


GRID = "2, 4 and 8 GPUs of a node, 512 B to 512 MiB: all-gather, reduce-scatter, all-reduce, all-to-all"
RULE = (
    "Inside a node: formula of sim/pricing/transfers/protocols.py, by the protocol that NCCL chooses, fitted to every 2nd size; "
    "errors are medians and 90th percentiles on the sizes between, by operation and ranks. H100 and H200 share one fit. In the "
    "switch: all-reduce of 8 GPUs, with a published sweep for more than 512 MiB. Sends: two GPUs (github.com/microsoft/vidur). "
)


RINGS = (
    "rings: a step takes as much longer than LL's of trees as Simple's and LL128's take longer than LL's in an all-gather of two "
    "H200 nodes (sim/pricing/networks/gib.yaml), with that fill and at those shares of the rate; nothing else was published of "
    "rings between nodes"
)


def in_switch(row: Row, name: str) -> bool:
    """Whether NCCL runs these all-reduces in the switch, at least the large ones."""
    return row.operation == "all_reduce" and row.ranks >= SWITCHED and name in ("h100", "h200", "b200")


def fitted(free: Bounds, profile_of: Free, data: Sequence[Series], cluster: Cluster) -> Profile:
    """The profile made of the best free numbers."""
    return profile_of(search(free, profile_of, data, cluster.topology().kinds))


def one_node(rows: Iterable[Row], name: str, profile: Profile, cluster: Cluster) -> Profile:
    """`profile` with prices fitted to rows of one node: rings first, then the kernels that are not rings."""
    kinds = LINKS.get(name, ("nvlink",))
    rows = list(rows)
    rings = [row for row in rows if row.operation not in ("all_to_all", "send")]  # among them small ones that the switch leaves
    profile = fitted(*inside(profile, kinds), series(rings, cluster, profile), cluster)
    switched = [row for row in rows if in_switch(row, name)]
    if switched:
        profile = fitted(*kernel(profile, IN_SWITCH, kinds), _shaped(switched, cluster, profile), cluster)
    able = "all_to_all" in {algorithm.split("/")[0] for algorithm in algorithms} or len(kinds) == 1
    pairs = [row for row in rows if able and row.operation == "all_to_all"]
    profile = fitted(*kernel(profile, P2P, kinds), _shaped(pairs, cluster, profile), cluster) if pairs else profile
    sends = [row for row in rows if row.operation == "send"]
    return fitted(*kernel(profile, SENDS, kinds), series(sends, cluster, profile), cluster) if sends else profile


def _shaped(rows: Sequence[Row], cluster: Cluster, profile: Profile) -> list[Series]:
    """As `series`; where the algorithm is not registered, its demand on the GPUs' ports in closed form."""
    known = offered(rows[0].operation)
    if ("in_switch" if rows[0].operation == "all_reduce" else "direct") in known:
        return series(rows, cluster, profile)
    kinds, port = cluster.topology().kinds, cluster.node.nvlink or cluster.node.pcie
    result = series(rows, cluster, profile) if known else []
    if not known:
        for ranks in sorted({row.ranks for row in rows}):
            chosen = [row for row in rows if row.ranks == ranks]
            size, seconds = (np.array([getattr(row, field) for row in chosen]) for field in ("bytes", "seconds"))
            result.append(Series(rows[0].operation, size, seconds))
            hops = [float(kind == ("nvlink" if cluster.node.nvlink else "pcie")) for kind in kinds]
            load = ((hops.index(1.0), (ranks - 1) / ranks / port),)
            result[-1].shapes["all_to_all/direct"] = Shape(hops, 0.6e-6, (load,), 1 / ranks)
    else:
        for sweep in result:
            hops = [2.0 * (kind == "nvlink") for kind in kinds]
            own = next(iter(sweep.shapes.values())).own
            sweep.shapes["all_reduce/in_switch"] = Shape(hops, 0.6e-6, (((kinds.index("nvlink"), 1 / port),),), own)
    return result


def rings(profile: Profile) -> Profile:
    """`profile` with steps of rings between nodes: see RINGS."""
    like, every = load_transport("gib").rings, profile.every_protocol()
    further = every["ll"].links["nic"].latency - like["ll"].latency
    rate = every[SIMPLE].links["nic"].efficiency / like[SIMPLE].efficiency
    steps = {
        name: LinkPrice.model_construct(efficiency=price.efficiency * rate, latency=price.latency + further, fill=price.fill)
        for name, price in like.items()
    }
    return profile.model_copy(update={"rings": steps})


def links(prices: Mapping[str, LinkPrice]) -> dict[str, Any]:
    """As a profile's file spells them."""
    return {
        kind: {"efficiency": tidy(price.efficiency), "latency": tidy(price.latency, "us")}
        | {name: tidy(value, "us") for name, value in (("fill", price.fill), ("overlap", price.overlap)) if value >= 5e-9}
        for kind, price in prices.items()
    }


def write(name: str, profile: Profile, constants: Mapping[str, float], measured: Ranges, between: bool = False) -> None:
    """Put the prices of collectives, their errors and what was measured into the profile's file."""
    data = file_of(name)
    overhead = data.pop("overhead")
    data["links"] = links(profile.links)
    data["collective_launch"] = tidy(profile.collective_launch, "us")
    data["protocols"] = {
        key: {"base": tidy(protocol.base, "us")}
        | ({"widening": tidy(protocol.widening)} if protocol.widening else {})
        | ({"handover": tidy(protocol.handover, "us")} if protocol.handover else {})
        | ({"chunk": tidy(protocol.chunk, "us")} if protocol.chunk else {})
        | ({"copy_rate": f"{protocol.copy_rate / 1e9:.4g} GB/s"} if protocol.copy_rate < inf else {})
        | {"links": links(protocol.links)}
        for key, protocol in profile.protocols.items()
    }
    data["copy_rate"] = f"{profile.copy_rate / 1e9:.4g} GB/s"
    data["overhead"] = overhead
    note = data["provenance"]["links"]
    old = note["rule"]
    note["grid"] = GRID.replace("2, 4 and 8", {"l40s": "2"}.get(name, "2 and 8")) if name in ("h200", "b200", "l40s") else GRID
    fitted_to = f"latencies and protocols: {SWEEPS[name][2]}" if between else UNFITTED
    note["rule"] = RULE + old[old.index("nic:") :].replace(UNFITTED, fitted_to)
    across = {key: error for key, error in note["errors"].items() if " nodes" in key}
    note["errors"] = across | {key: tidy(value) for key, value in constants.items()}
    note["fit_error"], note["heldout_error"] = note["errors"].pop("fit"), note["errors"]["heldout"]
    note["transports"] = [*LINKS.get(name, ("nvlink",)), *(["nic"] if any(" nodes" in key for key in note["errors"]) else [])]
    note["measured_range"] = {what: list(span) for what, span in measured.items()}
    rewrite(name, data)


def refit_rings(name: str) -> None:
    """Write steps of rings between nodes into the file of the shipped profile `name`, after `refit_network`."""
    data = file_of(name)
    tail = {key: data.pop(key) for key in list(data)[list(data).index("copy_rate") :]}
    note = data["provenance"]["links"]
    note["rule"] = note["rule"].partition(" rings:")[0] + f" {RINGS}."
    data["rings"] = links(rings(load_profile(name)).rings)
    rewrite(name, data | tail)


def larger(rows: Sequence[Row], large: Sequence[Row]) -> Ranges:
    """Bytes of the operation that a sweep of larger buffers is of."""
    return {
        f"{row.operation} {row.ranks}": (min(each.bytes for each in rows), max(each.bytes for each in large)) for row in large
    }


def error_figures(rows: Sequence[Row], cluster: Cluster, profile: Profile) -> dict[str, float]:
    """Median and 90th percentile of the errors by series, and of all; series whose algorithm is not registered are left out."""
    able = [row for row in rows if offered(row.operation)]
    each = errors(able, cluster, profile)
    result = {}
    for key, error in (("heldout", np.concatenate(list(each.values()))), *each.items()):
        result[key], result[f"{key} p90"] = summary(error)
    return result


def refit(tables: Path, name: str) -> None:
    """Fit the prices inside a node of the shipped profile `name`; rewrite its file."""
    profile, cluster = load_profile(name), load_cluster(CLUSTERS[name])
    together = [
        row
        for machine in POOLED.get(name, (name,))
        for row in node_rows(tables, machine)
        if row.ranks <= MOST.get(name, row.ranks)
    ]
    rows = [row for row in node_rows(tables, name) if row.ranks <= MOST.get(name, row.ranks)]
    more = [row for row in sweep_rows(tables)[LARGE[name]] if row.bytes >= 2**30] if name in LARGE else []
    sends = [row._replace(name="send 2") for row in sweep_rows(tables)[SENT[name]]] if name in SENT else []
    free, kept = alternate([*rows, *sends])
    fitted_profile = one_node([*alternate([*together, *sends])[0], *more], name, profile, cluster)
    middle = [row for row in rows if row.ranks == 4 and row.operation != "all_to_all"]
    across = {}
    if middle:
        ends = one_node([row for row in together if row.ranks != 4 and row.operation != "all_to_all"], name, profile, cluster)
        median, p90 = (error_figures(middle, cluster, ends)[key] for key in ("heldout", "heldout p90"))
        across = {"4 ranks from 2 and 8": median, "4 ranks from 2 and 8 p90": p90}
    known = profile.provenance["links"].measured_range
    measured = dict(ranges(rows, cluster)) | dict(larger(rows, more))
    measured |= {key: known[key] for key in known if is_between_nodes(key)}
    write(name, fitted_profile, {"fit": 0.0, "heldout": 0.0}, measured)
    shipped = load_profile(FOLDER / f"{name}.yaml")  # errors of the numbers as they are written
    fit = error_figures(free, cluster, shipped)["heldout"]
    write(name, shipped, {"fit": fit, **error_figures(kept, cluster, shipped), **across}, measured)


def refit_network(tables: Path, name: str) -> None:
    """Fit the prices between nodes of the shipped profile `name` to its sweep; rewrite its file."""
    sweep, where, _ = SWEEPS[name]
    profile, cluster = load_profile(name), load_cluster(where)
    free, kept = alternate(sweep_rows(tables)[sweep])
    rings = free[0].operation != "all_reduce"
    cluster = cluster.model_copy(update={"nodes": free[0].nodes})
    fitted_profile = fitted(*network(profile, rings), series(free, cluster, profile), cluster)
    note = profile.provenance["links"]
    series_of = f"{free[0].operation} {free[0].ranks} on {free[0].nodes} nodes"
    more = {key.replace(sweep, series_of): value for key, value in error_figures(kept, cluster, fitted_profile).items()}
    old = {"fit": note.fit_error or 0.0, **note.errors}
    between = ranges([*free, *kept], cluster)
    measured = note.measured_range | {key: between[key] for key in between if is_between_nodes(key)}
    known = {key: value for key, value in more.items() if key.startswith(series_of)}
    write(name, fitted_profile, old | known, measured, True)


if __name__ == "__main__":
    asked = [name for name in sys.argv[2:] if not name.startswith("--")]
    for profile_name in asked or list(CLUSTERS):
        if "--rings" in sys.argv:
            refit_rings(profile_name)
        elif "--network" not in sys.argv:
            refit(Path(sys.argv[1]), profile_name)
        elif profile_name in SWEEPS:
            refit_network(Path(sys.argv[1]), profile_name)
