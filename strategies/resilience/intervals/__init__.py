"""How long to train between two checkpoints: a rule is one file of this folder, found by being there."""

from __future__ import annotations

from collections.abc import Callable

from topologies.registry import Registry

Rule = Callable[[float, float, float], float]  # (blocking seconds, MTBF, seconds of a restart) → seconds of training

intervals: Registry[Rule] = Registry("checkpoint interval", package="strategies.resilience.intervals")
