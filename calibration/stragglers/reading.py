"""Traces of either sort, read and analysed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calibration.readers.kineto_ops import kineto_files, read_ranks
from calibration.readers.op_trace import read_op_trace
from calibration.stragglers.analysis import Analysis, analyse
from calibration.stragglers.kernels import analyse_kernels


def analysed(paths: Sequence[Path], source: str) -> Analysis:
    """An op-level trace (Parquet or CSV), or profiler traces, one per rank, or their folder. Raises UserError."""
    if len(paths) == 1 and paths[0].suffix in (".parquet", ".csv"):
        return analyse(read_op_trace(paths[0]), source)
    return analyse_kernels(read_ranks(kineto_files(tuple(paths))), source)
