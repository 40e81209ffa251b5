"""What a budget of GPUs and days is good for: the largest model that is trained on enough tokens, at its best plan, failures
included.

Enough is a number of tokens per parameter: 20 by default (Hoffmann et al. 2022, "Chinchilla", arXiv 2203.15556). Models are tried
from the largest down; those that no plan can train in time at `MOST_MFU` of the peak are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sim.runs.replications import Map
from strategies.job import Job
from strategies.planner.advise import Candidate, advise
from strategies.planner.arguments import arguments_of
from strategies.planner.auto_plan import quick_way
from strategies.predict import predict
from strategies.resilience.run_spec import prepare
from strategies.resilience.runs import RunAnswer, run
from strategies.resilience.settings import RunSettings
from topologies.costs import Rates, mean_rates
from topologies.reading import UserError

RATIO = 20.0  # tokens per parameter
MOST_MFU = 0.7  # of the bf16 peak: more than any published training has reached
FLOPS = 6  # per parameter and token, forward and backward (Kaplan et al. 2020)
DEEPEST = 8  # pipeline stages that are tried
RUNS = 20  # over the days


@dataclass(frozen=True)
class Budgeted:
    """A model under the budget. needed: tokens; most: those at `MOST_MFU` without a failure; plan: the best way to train it and
    what it delivers (None: not simulated, or nothing fits, and `refused` says which).
    """

    model: str
    parameters: int
    needed: float
    most: float
    plan: Candidate | None = None
    answer: RunAnswer | None = None
    refused: str = ""
    arguments: str = ""  # what makes the model's job this plan

    @property
    def enough(self) -> bool:
        """Whether it is trained on the tokens that it needs."""
        return self.answer is not None and self.answer.tokens.mean >= self.needed


def budget(
    names: Iterable[str],
    read: Callable[[str], Job],
    days: float,
    ratio: float,
    price: float | None,
    each: Callable[..., Iterable[Candidate | None]],
    runs: Map,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Budgeted]:
    """Models from the largest to the first that is trained on enough tokens. read: the job of a model by its name; each,
    runs: map functions over ways to train, and over runs.
    """
    jobs = sorted(((name, read(name)) for name in names), key=lambda pair: -pair[1].model.parameters)
    result: list[Budgeted] = []
    for name, job in jobs:
        psi = job.model.parameters
        needed, most = ratio * psi, most_tokens(job, days)
        if most < needed and len(jobs) > 1:
            result.append(Budgeted(name, psi, needed, most, refused="not within these days at any speed"))
            continue
        tell(f"{name}: ways to train")
        result.append(_budgeted(name, job, needed, most, days, mean_rates(job.cluster, price), each, runs, seed))
        if result[-1].enough:
            break
    return result


def most_tokens(job: Job, days: float) -> float:
    """Tokens that all GPUs could compute in these days at `MOST_MFU` of their 16-bit peak, with the parameters that each uses."""
    peak = sum(
        group.count * len(group.gpus) * max(group.node.gpu.peak.get(dtype, 0.0) for dtype in ("bf16", "fp16", "fp32"))
        for group in job.cluster.groups
    )
    per_token = job.model.forward_flops(1, 1, False) * FLOPS / 2
    return MOST_MFU * peak * days * 86400 / per_token


def _budgeted(
    name: str,
    job: Job,
    needed: float,
    most: float,
    days: float,
    money: Rates,
    each: Callable[..., Iterable[Candidate | None]],
    runs: Map,
    seed: int,
) -> Budgeted:
    psi = job.model.parameters
    try:
        best = advise(job, predict, each, DEEPEST, more=quick_way(job), shown=1).best
        if best is None:
            return Budgeted(name, psi, needed, most, refused="no usual way to train it fits the GPUs' memory")
        prepared = prepare(best.job, job.run or RunSettings(), days=days, summary=best.summary)
    except UserError as error:
        return Budgeted(name, psi, needed, most, refused=str(error))
    answer = run(prepared, money, seed, RUNS, runs)
    return Budgeted(name, psi, needed, most, best, answer, arguments=arguments_of(job, best.job))


def shown(models: Sequence[Budgeted]) -> Iterator[Budgeted]:
    """Those that say something: all that were simulated, and the smallest of those that are too large."""
    too_large = [each for each in models if each.refused and each.plan is None]
    yield from too_large[-1:]
    yield from (each for each in models if each not in too_large)
