"""Orders: of passes in PyTorch's CSV, whole and damaged; of the transfers of collective algorithms."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sim.analysis.collective_rounds import collective_rounds
from sim.collectives import NotApplicable
from sim.engine.stepped import stepped
from sim.grid import Grid
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.pricing.shipped import profile_for
from sim.pricing.transfers.wiring import endpoints, schedule
from sim.program import Cohort, Collective, Op, Program
from strategies.schedules import schedules
from strategies.schedules.schedule_csv import read_schedule
from strategies.schedules.table import cells
from tests.results.questions import one_of, question
from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster
from topologies.reading import UserError

WHERE: list[tuple[str, int, dict[str, Any]]] = [  # clusters, nodes, and what they have otherwise
    ("pcie-l40s", 1, {}),
    ("dgx-h100", 1, {}),
    ("dgx-h100", 2, {"fabric.sharp": 3, "node.gpus": 4, "node.nics": 4}),
    ("aws-p4d", 3, {"node.gpus": 1, "node.nics": 1}),
]
OTHER_HALF = {"reduce": "{}+broadcast/flat", "reduce_scatter": "{}+all_gather/ring", "broadcast": "reduce/flat+{}"}
OTHER_HALF |= {"all_gather": "reduce_scatter/ring+{}"}
DAMAGE = ["none", "none", "left out", "twice", "swapped", "unknown", "communication", "other stage", "empty row", "paired"]


@question
def csv(draw: random.Random) -> Any:
    """An order of passes in a file, as it should be or not."""
    ranks = draw.choice([2, 3, 4])
    table = cells(one_of(draw, schedules), ranks, draw.choice([ranks, 2 * ranks]), None)[0]
    rows = [[cell for cell in row if cell.strip()] for row in table]
    damage, row = draw.choice(DAMAGE), draw.choice(rows)
    first, second = draw.randrange(len(row)), draw.randrange(len(row))
    match damage:
        case "left out":
            del row[first]
        case "twice":
            row.insert(first, row[second])
        case "swapped":
            row[first], row[second] = row[second], row[first]
        case "unknown":
            row[first] = row[first].replace("F", "X")
        case "communication":
            row[first:first] = ["0SEND_F0", "1UNSHARD", ""]
        case "other stage":
            row[first] = draw.choice("012345") + row[first][1:]
        case "empty row":
            rows.append([])
        case "paired":
            row[first : first + 2] = [f"({';'.join(row[first : first + 2])})OVERLAP_F_B"]
    with TemporaryDirectory() as folder:
        path = Path(folder, "order.csv")
        path.write_text("\n".join(map(",".join, rows)))
        try:
            read = read_schedule(str(path))
        except UserError as error:
            return {"damage": damage, "refused": str(error).replace(folder, "")}
        orders = [
            [f"{kind}{microbatch} {chunk} {beside}" for kind, microbatch, chunk, beside in order] for order in read.order.rows
        ]
        notes = [note.replace(folder, "") for note in read.notes]
    return {"damage": damage, "placement": read.placement, "orders": [" ".join(order) for order in orders], "notes": notes}


@question
def algorithm(name: str) -> Any:
    """The rounds of a collective algorithm in a node and across nodes, and its seconds when all of them are played; what members
    have after each round.
    """
    played = {f"{cluster} {nodes}": _played(name, load_cluster(cluster, nodes, changes)) for cluster, nodes, changes in WHERE}
    return played | {
        f"{ranks} ranks": _shown(OTHER_HALF.get(name.partition("/")[0], "{}").format(name), ranks) for ranks in (2, 5, 8)
    }


def _shown(name: str, ranks: int) -> Any:
    try:
        rounds = collective_rounds(name, ranks)
    except UserError as error:
        return str(error)
    return rounds.to_dict() | {"each": [dataclasses.asdict(each) for each in rounds.rounds]}


def _played(name: str, cluster: Cluster) -> Any:
    operation, _, way = name.partition("/")
    grid, size = Grid.of(dp=cluster.gpus), 3e6
    work = Collective(operation, size, "dp", "test", way)
    program = Program(grid, [Cohort({}, [Op("s", work)])])
    topology, prices = cluster.topology(), Prices(profile_for(cluster.node.gpu.name), cluster.node.gpu)
    try:
        fluid = OpCosts(program, topology, prices).collective(work, 0)
        rounds = schedule(topology, grid, fluid.traffic)
    except NotApplicable as error:
        return str(error)
    phases = [
        {
            "source": phase.source,
            "to": phase.destination,
            "channel": phase.channel,
            "amounts": phase.amounts,
            "times": phase.times,
        }
        | {"first": phase.chunk(0), "last": phase.chunk(phase.times - 1), "reduce": phase.reduce}
        for phase in rounds.phases
    ]
    played = stepped(rounds, endpoints(topology, grid, fluid.traffic), size, topology, prices.profile)
    return {"chunks": rounds.chunks, "pieces": rounds.pieces, "phases": phases, "fluid": fluid.alone, "played": played}
