"""Where the GPU-seconds of a run went: every second of every GPU that was held has one cause, and they add up.

Causes that are no progress are badput, in the vocabulary of Google's ML goodput measurement
(github.com/AI-Hypercomputer/ml-goodput-measurement, badput types); what that list does not have keeps its own name.
"""

from __future__ import annotations

PRODUCTIVE = "productive"
INITIALIZATION = "initialization"
RESTORE = "checkpoint restore"
SAVE = "checkpoint save"
EVALUATION = "evaluation"
REDUCTION = "losses and metrics"
LOADING = "data loading"
WASTED = "wasted progress"
DETECTION = "detection"
DIAGNOSIS = "diagnosis"
REPLACEMENT = "waiting for nodes"
SLOW = "slow steps"
REDUCED = "missing replicas"
SPARES = "idle spares"

CAUSES = (
    *(PRODUCTIVE, WASTED, SAVE, RESTORE, INITIALIZATION, LOADING, DETECTION, DIAGNOSIS, REPLACEMENT),
    *(SLOW, REDUCED, EVALUATION, REDUCTION, SPARES),
)
BADPUT = {  # Google's badput types
    WASTED: "WASTED_PROGRESS_FROM_DISRUPTION",
    SAVE: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    RESTORE: "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    INITIALIZATION: "TPU_INITIALIZATION",
    LOADING: "DATA_LOADING_SYNC",
    DETECTION: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    DIAGNOSIS: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    REPLACEMENT: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    EVALUATION: "CUSTOM_BADPUT_EVENTS",
    REDUCTION: "CUSTOM_BADPUT_EVENTS",
    SLOW: "OTHER",
    REDUCED: "OTHER",
    SPARES: "OTHER",
}


class Ledger:
    """GPU-seconds by cause. `gpus`: of the job, without spares; `spares`: GPUs that are held for it and idle."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.entries = dict.fromkeys(CAUSES, 0.0)
        self.spares = 0
        self._since = 0.0

    def add(self, cause: str, seconds: float) -> None:
        """All GPUs of the job spent so long on `cause`."""
        self.entries[cause] += seconds * self.gpus

    def move(self, source: str, cause: str, seconds: float) -> None:
        """What counted as `source` has turned out to be `cause`."""
        self.entries[source] -= seconds * self.gpus
        self.entries[cause] += seconds * self.gpus

    def hold(self, now: float, spares: int) -> None:
        """From now on so many spare GPUs are held."""
        self.entries[SPARES] += (now - self._since) * self.spares
        self._since, self.spares = now, spares

    @property
    def total(self) -> float:
        """GPU-seconds of all causes."""
        return sum(self.entries.values())
