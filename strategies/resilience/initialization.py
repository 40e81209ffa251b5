"""How long it takes to start a job, by the number of its GPUs: a power law through what MLPerf submissions took.

ln seconds = a + b·ln GPUs by least squares; submissions differ from it by a factor whose logarithm has the standard deviation
`spread`: software stacks, file systems and networks differ, and nobody says how. A run draws its factor once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from topologies.reading import load_yaml

_FILE = Path(__file__).parent / "initialization.yaml"


@dataclass(frozen=True)
class Initialization:
    """Seconds for `gpus` GPUs: scale · gpus^power, within a factor of e^spread."""

    scale: float
    power: float
    spread: float
    submissions: int
    most: int  # GPUs of the largest submission

    def seconds(self, gpus: int) -> float:
        """The median for so many GPUs."""
        return self.scale * math.pow(gpus, self.power)


@functools.cache
def published() -> Initialization:
    """The fit through all submissions in initialization.yaml."""
    rows = [(int(gpus), float(value)) for gpus, values in load_yaml(_FILE)["seconds"].items() for value in values]
    x, y = np.log([gpus for gpus, _ in rows]), np.log([value for _, value in rows])
    power, level = np.polyfit(x, y, 1)
    rest = y - level - power * x
    spread = math.sqrt(float((rest**2).sum()) / (len(rows) - 2))
    return Initialization(math.exp(level), float(power), spread, len(rows), max(gpus for gpus, _ in rows))
