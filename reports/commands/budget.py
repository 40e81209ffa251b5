"""`shardyard budget`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from reports.commands._common import AS_JSON, check_positive, engine_options, job_options, show
from reports.terminal import echo, throttled


@click.command("budget", epilog="Example: shardyard budget --cluster dgx-h100 --gpus 128 --days 30")
@job_options
@click.option("--gpus", type=click.IntRange(1), help="GPUs, instead of --nodes.")
@click.option("--days", type=float, help="How long they are there. [default: 30]")
@click.option("--dollars", type=float, help="What may be spent, instead of --days.")
@click.option("--price", type=float, help="Dollars per GPU-hour; by default a listed price, named with its date.")
@click.option("--ratio", type=float, help="Tokens per parameter that are enough. [default: 20, Chinchilla]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random failures.")
@engine_options
@AS_JSON
def command(
    gpus: int | None,
    days: float | None,
    dollars: float | None,
    price: float | None,
    ratio: float | None,
    seed: int,
    workers: int | None,
    dask: str | None,
    ray: str | None,
    as_json: bool,
    overrides: tuple[str, ...],
    **given: Any,
) -> None:
    """The largest model that GPUs train on enough tokens in some days, at its best plan, failures included; or --model's tokens.

    The exit code is 2 when no model is trained on enough tokens.
    """
    from reports.tables.budget import as_data, overview
    from strategies.models.model import model_names
    from strategies.planner.search.workers.executors import engine
    from strategies.planner.spending.budget import RATIO, budget
    from strategies.read_job import stated_job
    from topologies.costs import mean_rates

    check_positive(days=days, dollars=dollars, ratio=ratio, price=price)
    model = given.pop("model")
    changes = [*overrides, *_nodes(gpus, given, overrides)]

    def read(name: str) -> Any:
        return stated_job(None, changes, model=name, **given)

    cluster = read(model or "gpt2-1.5b").cluster
    money = mean_rates(cluster, price)
    length = _days(days, dollars, cluster.gpus, money.usd)
    tell = throttled(lambda text: echo(text, err=True))
    with engine(workers, dask, ray) as runs:

        def ways(way: Callable[..., Any], each: Sequence[Any]) -> Iterator[Any]:
            for task in [runs.submit(way, candidate) for candidate in each]:
                yield task.result()

        names = [model] if model else model_names()
        models = budget(names, read, length, ratio or RATIO, price, ways, runs.map, seed, tell)
    if as_json:
        echo(json.dumps([as_data(each) for each in models], indent=2))
    else:
        show(overview(models, cluster, length, ratio or RATIO, money, given["cluster"]))
    if not any(each.enough for each in models) and not model:
        sys.exit(2)


def _nodes(gpus: int | None, given: dict[str, Any], overrides: tuple[str, ...]) -> list[str]:
    """So many GPUs as nodes of the cluster."""
    from strategies.read_job import stated_job
    from topologies.reading import UserError

    if gpus is None:
        return []
    if given.get("nodes") is not None:
        raise UserError("--gpus and --nodes: only one of them says how many there are")
    each = stated_job(None, overrides, model="gpt2-1.5b", **given).cluster.gpus_per_node
    if gpus % each:
        raise UserError(f"--gpus {gpus}: must be a multiple of the {each} GPUs of a node")
    return [f"nodes={gpus // each}"]


def _days(days: float | None, dollars: float | None, gpus: int, usd: float | None) -> float:
    from topologies.reading import UserError

    if dollars is None:
        return days or 30.0
    if days is not None:
        raise UserError("--days and --dollars: only one of them is the budget")
    if not usd:
        raise UserError("--dollars: needs the price of a GPU-hour: --price")
    return dollars / (usd * gpus * 24)
