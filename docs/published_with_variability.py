"""What it does to every published source's error that the GPUs of a job differ: a table for docs/accuracy.md (some minutes).

python docs/published_with_variability.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from calibration.published import published
from sim.replay.step import StepReplay
from strategies.planner.variability import GPUS
from strategies.predict import simulate
from topologies.reading import UserError

SAMPLES = 20


def main() -> None:
    """One row per source: rows, mean error and bias with GPUs alike, and with GPUs that vary by GPUS."""
    errors: dict[str, list[tuple[float, float]]] = {}
    draw = np.random.default_rng(0)
    for row in published():
        try:
            job = row.job()
            timeline = simulate(job)
            measured = row.step(job)
        except UserError:
            continue
        if not measured:
            continue
        ideal = timeline.step / timeline.program.steps
        kernels = np.exp(GPUS * draw.standard_normal((timeline.program.grid.world, SAMPLES)))
        try:
            longer = float(StepReplay(timeline).times(kernels).steps.mean()) / timeline.step
        except UserError:  # a steady state
            longer = 1.0
        errors.setdefault(row.group, []).append((ideal / measured - 1, ideal * longer / measured - 1))
    print("| source | rows | mean error | bias | mean error, GPUs differ | bias, GPUs differ |\n|---|--:|--:|--:|--:|--:|")
    every = [pair for pairs in errors.values() for pair in pairs]
    for name, rows in [*errors.items(), ("all", every)]:
        alike, differ = ([row[place] for row in rows] for place in (0, 1))
        values = fmean(map(abs, alike)), fmean(alike), fmean(map(abs, differ)), fmean(differ)
        print(f"| {name} | {len(rows)} | {' | '.join(f'{100 * value:+.1f} %' for value in values)} |")


if __name__ == "__main__":
    main()
