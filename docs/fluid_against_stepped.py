"""How far the fluid price of a collective is from its stepped play, by algorithm: the table of docs/accuracy.md.

`python docs/fluid_against_stepped.py`, a quarter of a minute. DGX H100 by its shipped profile, protocol Simple where an algorithm
has a choice. What the fluid form adds and no round of a schedule has (`fill`, the copy of a rank's own piece, measured tables) is
taken out of the profile first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sim.collectives import NotApplicable, algorithms
from sim.engine.stepped import stepped
from sim.grid import Grid
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices, Profile
from sim.pricing.shipped import profile_for
from sim.pricing.transfers.protocols import LinkPrice
from sim.pricing.transfers.wiring import endpoints, schedule
from sim.program import Cohort, Collective, Op, Program
from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster

SHOWN = 0.01
SIZES = {"1 KiB": 2.0**10, "1 MiB": 2.0**20, "64 MiB": 2.0**26, "1 GiB": 2.0**30}
PLACES = {  # (nodes, tp): groups along dp of all GPUs, or of one GPU per node with seven siblings
    "1 node": [(1, 1)],
    "1 GPU of each of 2 to 16 nodes": [(2, 8), (4, 8), (16, 8)],
    "all GPUs of 2 to 4 nodes": [(2, 1), (3, 1), (4, 1)],
}


def without_fill(profile: Profile) -> Profile:
    """`profile` without what belongs to no round of a schedule."""

    def filled(links: Mapping[str, LinkPrice]) -> dict[str, LinkPrice]:
        return {kind: link.model_copy(update={"fill": 0.0}) for kind, link in links.items()}

    protocols = {name: price.model_copy(update={"links": filled(price.links)}) for name, price in profile.protocols.items()}
    changes = {"links": filled(profile.links), "protocols": protocols, "copy_rate": float("inf"), "tables": (), "wire": {}}
    return profile.model_copy(update=changes)


def difference(name: str, size: float, grid: Grid, cluster: Cluster, prices: Prices) -> float:
    """Fluid over stepped seconds, minus 1. Raises NotApplicable."""
    operation, algorithm = name.split("/")
    work = Collective(operation, size, "dp", name, f"{algorithm}/simple")
    topology = cluster.topology()
    program = Program(grid, [Cohort({}, [Op("dp", work)])], 1, 1, "bf16", 1, 1)
    fluid = OpCosts(program, topology, prices).collective(work, 0)
    plan = schedule(topology, grid, fluid.traffic)
    groups = endpoints(topology, grid, fluid.traffic)
    return fluid.alone / stepped(plan, groups, size, topology, prices.profile, protocol=fluid.protocol) - 1


def differences(name: str, cases: list[tuple[int, int]], cluster: Cluster, prices: Prices) -> dict[str, list[float]]:
    """By size, the difference for each number of nodes that the algorithm works on."""
    result: dict[str, list[float]] = {size: [] for size in SIZES}
    for nodes, tp in cases:
        several, grid = cluster.model_copy(update={"nodes": nodes}), Grid.of(tp=tp, dp=8 * nodes // tp)
        with suppress(NotApplicable):
            for size, number in SIZES.items():
                result[size].append(difference(name, number, grid, several, prices))
    return result


def main() -> None:
    """Print a row for each algorithm that differs anywhere by more than SHOWN, then the names of the others."""
    cluster = load_cluster("dgx-h100")
    prices = Prices(without_fill(profile_for(cluster.node.gpu.name)), cluster.node.gpu)
    print(f"| algorithm | group | {' | '.join(SIZES)} |\n|---|---|{'--:|' * len(SIZES)}")
    equal = []
    for name in (name for name in algorithms if not name.startswith(("send", "all_to_allv"))):
        differs = False
        for place, cases in PLACES.items():
            by_size = differences(name, cases, cluster, prices)
            if any(abs(value) > SHOWN for values in by_size.values() for value in values):
                cells = (f"{100 * min(values):+.0f} to {100 * max(values):+.0f} %" for values in by_size.values())
                print(f"| `{name}` | {place} | {' | '.join(cells)} |".replace("-", "−"))
                differs = True
        if not differs:
            equal.append(name)
    print(f"\nWithin {SHOWN:.0%} everywhere: {', '.join(equal)}.")


if __name__ == "__main__":
    main()
