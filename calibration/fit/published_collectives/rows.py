"""Measured collectives as rows, and the published tables of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One collective among `ranks` GPUs on `nodes` nodes: `bytes` is the full buffer S; name: which series it belongs to."""

    name: str
    operation: str
    ranks: int
    nodes: int
    bytes: float
    seconds: float


OPERATIONS = {"alltoall": "all_to_all", "sendrecv": "send"}  # spelt differently in the tables and logs of nccl-tests
EXCLUDED = {  # sweep -> why it says nothing about the protocols' prices
    "S019": "TCP sockets",
    "S020": "one T4 per node: no profile",
    "S021": "one T4 per node: no profile",
    "S033": "TCP over IPoIB",
    "S039": "TCP fallback",
    "S017": "scatter is not fitted",
    "S080": "10 us timer and times that fall as sizes grow",
    "S082": "times that fall as sizes grow by half",
    "S086": "times that fall as sizes grow by half",
    **dict.fromkeys(("S087", "S092", "S096", "S100"), "sends over a network that the source does not describe"),
    "S097": "GPUs in NVLink pairs: no such profile",
    "S094": "GPUs in NVLink pairs: no such profile",
    "S095": "GPUs in NVLink pairs: no such profile",
    "S101": "A40: no profile",
}
# nccl-tests -g 8: one thread launches on all GPUs in turn; other sweeps have a process for each
ONE_THREAD = ("S001", "S004", "S005", "S006", "S071")
LEAST = {  # bytes from which on a sweep is precise enough
    "S078": 2.0**18,  # its rates are rounded to 0.01 GB/s
    **dict.fromkeys(("S081", "S083", "S085", "S089", "S090", "S091"), 2.0**20),  # below, times jump to and fro: 60, 40, 46 us
}
ONE_DOMAIN = ("S069",)  # trays of a rack, whose NVLink makes them one node
UNNAMED = ("S070", "S073", "S084")  # between nodes over a network that the source does not describe


def node_rows(tables: Path, gpu: str) -> list[Row]:
    """Rows of `nvlink_one_node.csv` for the profile's GPU ("h100"); names are the operation and the ranks."""
    import pandas as pd

    table = pd.read_csv(tables / "nccl" / "nvlink_one_node.csv")
    table = table[table.machine.str.contains(f"NVIDIA {gpu.upper()}")]
    operation = table.op.map(lambda op: OPERATIONS.get(op, op))
    return [
        Row(f"{op} {ranks}", op, int(ranks), 1, 2.0 * elements, float(seconds))
        for op, ranks, elements, seconds in zip(operation, table.ranks, table.message_elements, table.time_s, strict=True)
    ]


def vtrain_rows(tables: Path) -> list[Row]:
    """Rows of `all_reduce_a100_one_node.csv`: all-reduce of 2, 4, 8 A100."""
    import pandas as pd

    table = pd.read_csv(tables / "nccl" / "all_reduce_a100_one_node.csv")
    return [
        Row(f"{op} {n}", op, int(n), 1, float(size), float(seconds))
        for op, n, size, seconds in zip(table.op, table.ranks, table.bytes, table.time_s, strict=True)
    ]


def sweep_rows(tables: Path) -> dict[str, list[Row]]:
    """Rows of the published nccl-tests sweeps by sweep, without those flagged; in and out of place are averaged."""
    import pandas as pd

    table = pd.read_csv(tables / "nccl" / "sweep_rows.csv")
    table = table[table.flag.isna()]
    keys = ["sweep_id", "op", "ngpus", "nodes", "size_bytes"]
    mean = table.groupby(keys).time_us.mean().reset_index()
    result: dict[str, list[Row]] = {}
    for sweep, op, n, nodes, size, micro in mean.itertuples(index=False):
        row = Row(sweep, OPERATIONS.get(op, op), int(n), 1 if sweep in ONE_DOMAIN else int(nodes), float(size), 1e-6 * micro)
        if size >= LEAST.get(sweep, 0.0):
            result.setdefault(sweep, []).append(row)
    return result


def alternate(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """(rows to fit, rows kept out): every other size of each series is kept out, but never its ends."""
    fitted: list[Row] = []
    kept: list[Row] = []
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(row.name, []).append(row)
    for chosen in series.values():
        sizes = sorted({row.bytes for row in chosen})
        out = set(sizes[1:-1:2])
        for row in chosen:
            (kept if row.bytes in out else fitted).append(row)
    return fitted, kept
