"""What a plan delivers over the whole training, failures and checkpoints included: the value of a search that asks for goodput.

Runs of all plans meet the same failures as far as they can (`sim.runs.replications`). A run takes at least what its steps alone
take, so that bounds of steps bound it as well.
"""

from __future__ import annotations

import math
from functools import partial

from sim.runs.replications import replicate
from strategies.job import Job
from strategies.planner.search.evaluate import row_of, version_of
from strategies.planner.search.results import Row
from strategies.predict import predict
from strategies.resilience.run_spec import prepare
from strategies.resilience.runs import COMPARED
from strategies.resilience.settings import RunSettings
from topologies.reading import UserError

SEED = 0


def evaluate_run(job: Job, tokens: float) -> Row:
    """Simulate a job's step, and runs of it until `tokens` tokens are trained on. Runs on workers."""
    same = {"hash": job.hash, "version": version_of(job), "run_tokens": tokens}
    try:
        summary = predict(job)
        if not summary.fits:
            return same | row_of(summary)
        prepared = prepare(job, job.run or RunSettings(), tokens=tokens, summary=summary)
    except UserError as error:
        return same | {"step": None, "error": str(error)}
    outcomes = replicate(prepared.spec, SEED, COMPARED)
    done = [min(1.0, outcome.steps / prepared.spec.steps) for outcome in outcomes]  # less where a run was given up
    days = [outcome.seconds / 86400 / part if part else math.inf for outcome, part in zip(outcomes, done, strict=True)]
    hours = [outcome.held / 3600 / part if part else math.inf for outcome, part in zip(outcomes, done, strict=True)]
    return (
        same
        | row_of(summary)
        | {
            "run_days": math.fsum(days) / len(days),
            "run_gpu_hours": math.fsum(hours) / len(hours),
            "goodput": math.fsum(outcome.goodput for outcome in outcomes) / len(outcomes),
            "stretch": math.fsum(days) / len(days) / (prepared.spec.work / 86400),
        }
    )


def evaluation(tokens: float) -> partial[Row]:
    """`evaluate_run` for a training on so many tokens."""
    return partial(evaluate_run, tokens=tokens)
