"""`shardyard buy`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reports.commands._common import AS_JSON, engine_options, figure_option, job_options, progress, show, tokens_of
from reports.terminal import echo

if TYPE_CHECKING:
    from strategies.planner.spending.purchase import Offer

OFFER = re.compile(r"(?:(\d{1,7})\s*[x×*]\s*)?(.+?)(?:@\$?([\d.]+))?")
COUNTED = re.compile(r"(\d{1,7})[\s_-]*(.*)")  # nodes of a cluster without what joins them


@click.command("buy", epilog="Example: shardyard buy 16xdgx-h100 vs 32xdgx-a100@1.8 --model llama-3.1-8b")
@click.argument("offers", nargs=-1, required=True, metavar="[N×]CLUSTER[@DOLLARS] vs …")
@click.option("--job", metavar="JOB.yaml", help="Job with the model, sequence and batch; its cluster is not used.")
@job_options
@click.option("--tokens", callback=lambda _, __, text: _count(text), help="Tokens of the training, such as 15T. [default: 10¹²]")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random failures, the same for all offers."
)
@figure_option("--plot", "Draw days and cost of each offer (PNG or SVG).")
@engine_options
@AS_JSON
def command(
    offers: tuple[str, ...],
    job: str | None,
    tokens: float | None,
    seed: int,
    plot: str | None,
    workers: int | None,
    dask: str | None,
    ray: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Which cluster to buy: 16xdgx-h100 vs 32xdgx-a100@1.8, each at its own best plan: step, goodput, days, cost, crossover.

    N nodes of a cluster, with the dollars of a GPU-hour (by default a listed price). All train on the same tokens by the same
    global batch and meet the same failures. The exit code is 2 when none can train the model.
    """
    from reports.formatting import TOKENS
    from reports.tables.buy import as_data, overview
    from strategies.planner.search.workers.executors import engine
    from strategies.planner.spending.purchase import buy, crossovers, same_batch

    asked = _offers(offers, job, overrides, given)
    stated = asked[0].job
    said = bool(job or overrides) and _says_batch(stated)
    asked, total = same_batch(asked, said), tokens_of(tokens) or TOKENS
    with engine(workers, dask, ray) as runs, progress() as tell:
        bought = buy(asked, total, runs, seed, tell)
        tell("looking for sizes that are as quick")
        changes = list(crossovers(bought, total, runs))
    if as_json:
        echo(json.dumps(as_data(bought, changes), indent=2))
    else:
        show(overview(bought, changes, total))
    if plot is not None:
        from reports.figures.offers import offers as draw

        echo(f"wrote {draw((bought, total), Path(plot))}", err=as_json)
    if not any(each.fits for each in bought):
        sys.exit(2)


def _count(text: str | None) -> float | None:
    from reports.commands._common import quantity
    from topologies.documents.units import count

    return quantity("--tokens", text, count)


def _says_batch(job: Any) -> bool:
    """Whether the job says how many sequences a step has."""
    return not any(remark.startswith("global_batch: ") for remark in job.remarks)


def _offers(texts: tuple[str, ...], job: str | None, overrides: tuple[str, ...], given: dict[str, Any]) -> list[Offer]:
    """The job on each cluster. Raises UserError."""
    from strategies.planner.spending.purchase import Offer
    from strategies.read_job import stated_job
    from topologies.reading import UserError

    if given.get("cluster") or given.get("nodes"):
        raise UserError("--cluster, --nodes: the offers say them: shardyard buy 16xdgx-h100 vs 32xdgx-a100")
    result: list[Offer] = []
    for text in (text for text in texts if text.lower() not in ("vs", "vs.", "or")):
        match = OFFER.fullmatch(text)
        if match is None or (match[1] and not int(match[1])):
            raise UserError(f"{text}: expected [N×]CLUSTER[@DOLLARS], such as 16xdgx-h100@2.5")
        if not match[1]:
            _check_counted(text, match[2])
        place = {"cluster": match[2], "nodes": int(match[1] or 1)}
        asked = stated_job(job, overrides, **given | place)
        price = _dollars(text, match[3])
        name = asked.cluster.described + (f" at ${price:.2f}/h" if price is not None else "")
        if any(other.name == name for other in result):
            raise UserError(f"{text}: is there twice")
        result.append(Offer(name, asked, price, match[2]))
    if len(result) < 2:
        raise UserError("buy: name at least two offers: shardyard buy 16xdgx-h100 vs 32xdgx-a100 --model llama-3.1-8b")
    return result


def _check_counted(text: str, cluster: str) -> None:
    """Refuse a number of nodes without its ×: 8dgx-h100, or 8 by itself."""
    from topologies.cluster_files import cluster_names
    from topologies.reading import UserError

    counted = COUNTED.fullmatch(cluster)
    if counted is not None and (not counted[2] or counted[2] in cluster_names()):
        raise UserError(f"{text}: {counted[1]} nodes are written with an x, in one word: {counted[1]}x{counted[2] or 'dgx-h100'}")


def _dollars(text: str, price: str | None) -> float | None:
    from topologies.reading import UserError

    if price is None:
        return None
    try:
        value = float(price)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise UserError(f"{text}: {price} must be dollars of a GPU-hour, greater than 0")
    return value
