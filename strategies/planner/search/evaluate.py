"""A job simulated as a row of a table, and what else than the job the row depends on."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from sim.analysis.summary import Summary
from strategies.job import Job
from strategies.planner.search.results import Row
from strategies.predict import predict, profile_of
from topologies.reading import UserError

ROOMS = ("topologies", "sim", "strategies")  # whose code simulates


def evaluate(job: Job) -> Row:
    """Simulate a job: its row without what was changed. Runs on workers."""
    same = {"hash": job.hash, "version": version_of(job)}
    try:
        summary = predict(job)
    except UserError as error:
        return same | {"step": None, "error": str(error)}
    return same | row_of(summary)


def row_of(summary: Summary) -> Row:
    """What a row has of a simulated step."""
    return {
        "step": summary.step_seconds,
        "gpus": summary.gpus,
        "tokens_per_second": summary.tokens_per_second,
        "tokens_per_second_per_gpu": summary.tokens_per_second_per_gpu,
        "mfu": summary.mfu,
        "memory": summary.worst.peak,
        "fits": summary.fits,
        "bubble": summary.bubble,
        "exposed": summary.exposed,
        "events": summary.events,
        "error": None,
    }


def version_of(job: Job) -> str:
    """Twelve hexadecimal digits that change with the contents of the job's profile and with the code of the simulation."""
    return hashlib.sha256((profile_of(job).model_dump_json() + _code()).encode()).hexdigest()[:12]


@lru_cache(maxsize=1)
def _code() -> str:
    """A digest of every file of code."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[3]
    for file in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
