"""Traces of either sort, read and analysed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calibration.readers.kineto_ops import kineto_files, read_ranks
from calibration.readers.op_trace import read_op_trace
from calibration.stragglers.analysis import Analysis, analyse
from calibration.stragglers.kernels import analyse_kernels
from topologies.reading import UserError


def analysed(paths: Sequence[Path], source: str) -> Analysis:
    """An op-level trace (Parquet or CSV), or profiler traces, one per rank, or their folder. Raises UserError."""
    if len(paths) == 1 and paths[0].suffix in (".parquet", ".csv"):
        return analyse(read_op_trace(paths[0]), source)
    files = kineto_files(tuple(paths))
    for file in files:
        if file.suffix not in (".json", ".gz"):
            if not file.exists():
                raise UserError(f"{file}: cannot be read: No such file or directory")
            rule = "must end in .parquet or .csv (a row per op), or .json or .json.gz (PyTorch's profiler)"
            raise UserError(f"{file}: is no trace: {rule}")
    return analyse_kernels(read_ranks(files), source)
