"""How a job goes on after a failure: a policy is one file of this folder, found by being there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.runs.spec import RunSpec
from topologies.registry import Registry

Recovery = Callable[[RunSpec, Any], RunSpec]  # (run, job) → the run with this policy

recoveries: Registry[Recovery] = Registry("recovery policy", package="strategies.resilience.recovery")
