"""Reads op-level traces of training jobs, one row per op: Parquet, or CSV with the same columns.

The columns are those of github.com/ByteDance-Seed/StragglerAnalysis; `mb_id` and columns of other names are not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.stragglers.trace import COLUMNS, Trace, checked
from topologies.reading import UserError

ROWS = 5_000_000  # of a trace
BYTES = 2**30  # of its columns, unpacked; and of a CSV
MAY_MISS, NONE = ("mc", "gmc"), -1  # chunks of ops that belong to none
Columns = dict[str, NDArray[Any]]


def read_op_trace(path: Path) -> Trace:
    """The trace in a file that ends in .parquet or .csv. Raises UserError."""
    readers = {".parquet": _parquet, ".csv": _csv}
    if path.suffix not in readers:
        raise UserError(f"{path}: an op-level trace must end in .parquet or .csv")
    try:
        columns, op_types = readers[path.suffix](path)
    except UserError:
        raise
    except (OSError, ValueError) as error:  # of pyarrow and pandas too
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return checked(columns, op_types, str(path))


def _parquet(path: Path) -> tuple[Columns, list[str]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: Parquet needs the package pyarrow: pip install 'shardyard[parquet]'") from None
    schema = pyarrow.parquet.read_schema(path)
    _check_columns(schema.names, path)
    for name in COLUMNS:
        _check_kind(schema.field(name).type, name, path)
    with pyarrow.parquet.ParquetFile(path, read_dictionary=["optype"]) as file:  # a long text that is repeated is read once
        groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
        _check_size(file.metadata.num_rows, sum(group.total_byte_size for group in groups), path)
        table = file.read(columns=list(COLUMNS))
    columns: Columns = {}
    names: list[str] = []
    for name in COLUMNS:
        column = table.column(name).combine_chunks()
        if column.null_count and name in MAY_MISS:
            column = column.fill_null(NONE)
        if column.null_count:
            raise UserError(f"{path}: column {name!r}: {column.null_count} values are missing")
        if name == "optype":
            names, column = [str(value) for value in column.dictionary.to_pylist()], column.indices
        columns[name] = np.from_dlpack(column)  # to_numpy() imports pandas
    return columns, names


def _check_kind(kind: Any, name: str, path: Path) -> None:
    """Whether a column of Parquet has numbers, and "optype" text. Raises UserError."""
    from pyarrow import types

    if name == "optype":
        value = kind.value_type if types.is_dictionary(kind) else kind
        good, rule = types.is_string(value) or types.is_large_string(value), "text"
    else:
        good, rule = types.is_integer(kind) or types.is_floating(kind), "numbers"
    if not good:
        raise UserError(f"{path}: column {name!r}: must hold {rule}, and holds {kind}")


def _csv(path: Path) -> tuple[Columns, list[str]]:
    import pandas

    _check_size(0, path.stat().st_size, path)
    _check_columns([str(name) for name in pandas.read_csv(path, nrows=0).columns], path)
    table = pandas.read_csv(path, usecols=list(COLUMNS), nrows=ROWS + 1, dtype={"optype": "category"})
    _check_size(len(table), 0, path)
    table = table.fillna(dict.fromkeys(MAY_MISS, NONE))
    if (missing := table.isna().sum()).any():
        name = str(missing.idxmax())
        raise UserError(f"{path}: column {name!r}: {missing[name]} values are missing")
    names = [str(value) for value in table["optype"].cat.categories]
    for name in COLUMNS:
        if name != "optype" and len(table) and table[name].dtype.kind not in "iuf":
            raise UserError(f"{path}: column {name!r}: must hold numbers, and holds {table[name].dtype}")
    columns = {name: table[name].to_numpy() for name in COLUMNS if name != "optype"}
    return columns | {"optype": table["optype"].cat.codes.to_numpy()}, names


def _check_columns(names: list[str], path: Path) -> None:
    if missing := [name for name in COLUMNS if name not in names]:
        raise UserError(f"{path}: no column {missing[0]!r}: an op-level trace has {', '.join(COLUMNS)}")


def _check_size(rows: int, size: int, path: Path) -> None:
    if rows > ROWS or size > BYTES:
        raise UserError(f"{path}: more than {ROWS:,} rows or {BYTES // 2**30} GiB: give a trace of fewer steps")
