"""Traces of modules, each made once."""

from __future__ import annotations

from functools import lru_cache

from strategies.models.tracing.records import Module, Trace


def trace_of(module: Module, batch: int, precision: str, fused_attention: bool = True) -> Trace:
    """The trace of a microbatch of `batch` samples. Raises UserError where the module cannot be run so."""
    return _trace(module, batch, {"tf32": "fp32"}.get(precision, precision), fused_attention)


@lru_cache(maxsize=64)
def _trace(module: Module, batch: int, precision: str, fused_attention: bool) -> Trace:
    from strategies.models.tracing.recorder import record

    return record(module, batch, precision, fused_attention)
