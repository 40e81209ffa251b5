"""Fits the transports of `sim/pricing/networks` to published sweeps, and writes them with their errors.

`python -m calibration.fit.published_collectives.transports TABLES [NAME …]`. Half of a sweep's sizes is kept out, and other
sweeps over the same transport altogether; a transport that is measured by trees or in the switch has `steps`, by rings `rings`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from calibration.fit.published_collectives.fit import errors, network, ranges, search, series, summary
from calibration.fit.published_collectives.refit import links
from calibration.fit.published_collectives.rows import Row, alternate, sweep_rows
from calibration.fit.published_kernels.refit import tidy
from sim.pricing.prices import Profile
from sim.pricing.shipped import load_profile
from sim.pricing.transfers.protocols import PROTOCOLS
from sim.pricing.transports import FOLDER, NetworkTransport, Steps, load_transport, with_network
from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster
from topologies.documents.writing import write_whole


class Sweep(NamedTuple):
    """What a transport is fitted to. others: sweeps over it that are compared with only."""

    what: str
    profile: str
    cluster: str
    sweep: str
    source: str
    least: float = 0.0  # bytes from which on the sweep is precise enough
    tuner: bool = False
    others: tuple[str, ...] = ()


OFI = (
    "github.com/aws/aws-ofi-nccl, whose tuner chooses algorithms (src/tuner); NCCL is told of 75 us in the network "
    "(src/platform-aws.c)"
)
TRANSPORTS = {
    "efa": Sweep(
        "AWS EFA of p4d and p4de, 100 Gb/s NICs",
        "a100",
        "aws-p4d",
        "S012",
        f"all-reduce of two p4de.24xlarge (github.com/aws-samples/awsome-distributed-training@7217859); {OFI}",
        tuner=True,
        others=("S018",),
    ),
    "efa-v2": Sweep(
        "AWS EFA of p5",
        "h100",
        "aws-p5",
        "S013",
        f"all-reduce of two p5.48xlarge (github.com/aws-samples/awsome-distributed-training@7217859); {OFI}",
        tuner=True,
        others=("S022",),
    ),
    "efa-v4": Sweep(
        "AWS EFA of p6-b200",
        "b200",
        "aws-p6-b200",
        "S078",
        f"all-reduce of four p6-b200 (github.com/stas00/ml-engineering network/README.md@744d01e), 1 MiB and more; {OFI}",
        least=2**20,
        tuner=True,
    ),
    "gib": Sweep(
        "RoCE of Google Cloud's A3 Ultra",
        "h200",
        "gcp-a3-ultra",
        "S037",
        "all-gather of two A3 Ultra (github.com/GoogleCloudPlatform/cluster-toolkit@1047080, dws-flex-start)",
    ),
    "tcpxo": Sweep(
        "GPUDirect-TCPXO of Google Cloud's A3 Mega",
        "h100",
        "gcp-a3-mega",
        "S036",
        "all-gather of two A3 Mega (github.com/GoogleCloudPlatform/cluster-toolkit@1047080, gke-a3-megagpu)",
        others=("S025",),
    ),
    "tcpx": Sweep(
        "GPUDirect-TCPX of Google Cloud's A3 High",
        "h100",
        "gcp-a3-high",
        "S035",
        "all-gather of two A3 High (github.com/GoogleCloudPlatform/cluster-toolkit@1047080, gke-a3-highgpu), 1 to 512 MiB",
    ),
    "slingshot": Sweep(
        "Slingshot-11 with HPE's libfabric (CXI)",
        "h100",
        "alps",
        "S038",
        "all-reduce of two nodes of four GH200 of Alps (github.com/eth-cscs/cscs-docs@80abed1); GH200 are priced as H100",
    ),
}


def fitted(rows: list[Row], spec: Sweep, cluster: Cluster) -> tuple[Profile, bool]:
    """The profile with the prices that fit, and whether they are of rings."""
    rings = rows[0].operation != "all_reduce"
    start = load_profile(spec.profile).model_copy(update={"tuner": spec.tuner})
    numbers, profile_of = network(start, rings, efficiency=True)

    def carried(values: Mapping[str, float]) -> Profile:
        """With a tuner, which takes what is fastest, the other kind of algorithm moves along as where it is used; without one,
        sizes that NCCL runs by rings say nothing of trees.
        """
        if not spec.tuner:
            return profile_of(values)
        prices: tuple[Steps, Steps] = {}, steps_of(profile_of(values), rings)
        steps, own = prices if rings else prices[::-1]
        return with_network(start, NetworkTransport.model_construct(profile=spec.profile, tuner=True, steps=steps, rings=own))

    return carried(search(numbers, carried, series(rows, cluster, start), cluster.topology().kinds)), rings


def steps_of(profile: Profile, rings: bool) -> Steps:
    """Prices between nodes of a profile."""
    if rings:
        return profile.rings
    every = profile.every_protocol()
    return {name: every[name].links["nic"] for name in PROTOCOLS}


def write(name: str, spec: Sweep, tables: Mapping[str, list[Row]]) -> None:
    """Fit a transport; write its file."""
    rows = [row for row in tables[spec.sweep] if row.bytes >= spec.least]
    cluster = load_cluster(spec.cluster, nodes=rows[0].nodes)
    free, kept = alternate(rows)
    profile, rings = fitted(free, spec, cluster)
    steps = links({protocol: steps_of(profile, rings)[protocol] for protocol in PROTOCOLS})
    data: dict[str, Any] = {"what": spec.what, "profile": spec.profile, "source": spec.source}
    data |= {"tuner": True} if spec.tuner else {}
    data |= {"rings" if rings else "steps": steps}
    path = FOLDER / f"{name}.yaml"
    bounds = {what: list(span) for what, span in ranges(rows, cluster).items()}
    path.write_text(yaml.safe_dump(data | {"measured_range": bounds}, sort_keys=False, width=130, allow_unicode=True))
    load_transport.cache_clear()
    shipped = with_network(load_profile(spec.profile), load_transport(name))  # errors of the numbers as they are written
    series_of = f"{rows[0].operation} {rows[0].ranks} on {rows[0].nodes} nodes"
    median, p90 = summary(np.concatenate(list(errors(kept, cluster, shipped).values())))
    found = {series_of: tidy(median), f"{series_of} p90": tidy(p90)}
    for other in spec.others:
        (each,) = errors(tables[other], cluster, shipped).values()
        found[f"another sweep, {other}"] = tidy(summary(each)[0])
    write_whole(
        path,
        yaml.safe_dump(data | {"errors": found, "measured_range": bounds}, sort_keys=False, width=130, allow_unicode=True),
    )


if __name__ == "__main__":
    measured = sweep_rows(Path(sys.argv[1]))
    for transport in sys.argv[2:] or TRANSPORTS:
        write(transport, TRANSPORTS[transport], measured)
