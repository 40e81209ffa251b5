"""Time on a grid of 2⁻⁴⁰ s (0.9 ps), so that sums and differences of times are exact.

A float holds multiples of 2⁻⁴⁰ s exactly below 8192 s. Hence the breakdown adds up to the step to the last bit, and the order in
which equal durations are added changes nothing.
"""

from __future__ import annotations

TICKS = 2.0**40  # of a second


def on_grid(seconds: float) -> float:
    """The nearest multiple of 2⁻⁴⁰ s."""
    return round(seconds * TICKS) / TICKS
