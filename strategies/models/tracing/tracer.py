"""Traces of modules, each made once."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from strategies.models.tracing.records import Module, Trace
from topologies.reading import UserError


def trace_of(module: Module, batch: int, precision: str, fused_attention: bool = True, tp: int = 1) -> Trace:
    """The trace of a microbatch of `batch` samples on one of `tp` ranks. Raises UserError where the module cannot be run so."""
    return _trace(module, batch, {"tf32": "fp32"}.get(precision, precision), fused_attention, tp)


@lru_cache(maxsize=64)
def structure_of(module: Module) -> Trace:
    """The trace of one sample, whatever the precision: in bf16, or in fp32 where operators know no other; of two where one alone
    cannot be trained on, as a batch normalisation of single numbers cannot. Raises UserError.
    """
    first: UserError | None = None
    for batch, precision in product((1, 2), ("bf16", "fp32")):
        try:
            return trace_of(module, batch, precision)
        except UserError as error:
            first = first or error
    assert first is not None
    raise first


@lru_cache(maxsize=64)
def _trace(module: Module, batch: int, precision: str, fused_attention: bool, tp: int) -> Trace:
    from strategies.models.tracing.recorder import record

    return record(module, batch, precision, fused_attention, tp)
