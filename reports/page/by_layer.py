"""Memory by layer on the page."""

from __future__ import annotations

from reports.formatting import digits, gigabytes
from reports.page.page import Section, Sheet
from reports.tables.by_layer import columns, number, row
from strategies.memory_by_layer import ByLayer


def section(memory: ByLayer) -> Section:
    """The parts as a table; the textbook's counts in words."""
    text = [
        f"{state.kind}: {number(state.held)} bytes per parameter at the peak"
        + (f", {number(state.textbook)} by the textbook" if state.textbook is not None else "")
        + (f" ({state.why})" if state.why else "")
        for state in memory.states
    ]
    rules = "; ".join(f"{rule.rule}: {gigabytes(rule.bytes)} GB" for rule in memory.activations)
    held = (
        f"Bytes in GB of one part on a rank of stage {memory.stage}, which at its peak holds {digits(memory.microbatches)} × one "
    )
    tunes = any(each.trained < each.parameters for each in memory.parts)
    return Section(
        "Memory by layer",
        text=(f"{held}microbatch's activations.", *text, f"Activations of a microbatch: {rules}.", *memory.differences),
        table=Sheet(tuple(columns(tunes)), [row(each, tunes) for each in memory.parts]),
    )
