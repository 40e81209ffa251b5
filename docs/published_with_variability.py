"""What it does to every published source's error that the GPUs of a job differ: a table for docs/accuracy.md (some minutes).

python docs/published_with_variability.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from calibration.published import published
from strategies.predict import predict
from topologies.reading import UserError


def main() -> None:
    """One row per source: rows, mean error and bias with GPUs alike, and with GPUs that vary as their profile says."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for row in published():
        try:
            job = row.job()
            summary, measured = predict(job), row.step(job)
        except UserError:
            continue
        if measured:
            errors.setdefault(row.group, []).append((summary.ideal_seconds / measured - 1, summary.step_seconds / measured - 1))
    print("| source | rows | mean error, GPUs alike | bias | mean error, GPUs differ | bias |\n|---|--:|--:|--:|--:|--:|")
    every = [pair for pairs in errors.values() for pair in pairs]
    for name, rows in [*errors.items(), ("all", every)]:
        alike, differ = ([row[place] for row in rows] for place in (0, 1))
        values = fmean(map(abs, alike)), fmean(alike), fmean(map(abs, differ)), fmean(differ)
        print(f"| {name} | {len(rows)} | {' | '.join(f'{100 * value:+.1f} %' for value in values)} |")


if __name__ == "__main__":
    main()
