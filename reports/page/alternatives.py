"""Parts of the page besides the step itself: how it scales, on what else it could run, what limits it, how to run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reports.figures.efficiency import Scaling, Size, efficiency
from reports.formatting import (
    PRICED,
    count,
    digits,
    dollars,
    percent,
    plural,
    rates_text,
    seconds,
    signed,
    size,
    tokens_text,
    unit_of_job,
)
from reports.page.page import Launch, Picture, Section, Sheet
from topologies.reading import UserError

if TYPE_CHECKING:
    from sim.timeline import Timeline
    from strategies.job import Job
    from strategies.planner.search.workers.executors import Engine
    from strategies.planner.whatif import Case, Read


def scaling(read: Read, job: Job, engine: Engine, total: float, price: float | None) -> Section:
    """Weak and strong scaling around the job's number of GPUs, with what `total` tokens cost; what is refused is said."""
    from strategies.planner import whatif

    axis, cases, sentences = whatif.sizes(job), dict[str, list[Any]](), []
    for weak in (True, False):
        try:
            cases[_kind(job, weak)] = whatif.scaling(read, axis, weak)
        except UserError as error:
            sentences.append(f"Weak scaling is left out: {error}.")
    answer = whatif.ask(read, [(changes, name, {}) for name, inputs in cases.items() for changes in inputs], engine, total, price)
    sentences += [f"Not possible: {why}." for why in _refusals((plural(case.changes["nodes"], "node"), case) for case in answer)]
    lines = {name: [case for case in answer if case.plan == name and case.summary] for name in cases}
    lines = {name: line for name, line in lines.items() if line}
    if sum(len(line) > 1 for line in lines.values()) == 0:
        return Section("Scaling", text=(*sentences, "No other number of GPUs is possible with this plan."))
    inside = {"node": 1, "leaf": getattr(job.cluster.fabric, "leaf_nodes", 0), "pod": getattr(job.cluster.fabric, "pod_nodes", 0)}
    boundaries = {name: nodes * job.cluster.node.gpus for name, nodes in inside.items() if nodes}
    unit = unit_of_job(job)
    data = Scaling({name: [_size(case) for case in line] for name, line in lines.items()}, boundaries, unit)
    if not any(size.fits for line in data.lines.values() for size in line):
        sentences.append("None of these fits in memory; efficiency is relative to the fewest GPUs.")
    alt = f"{unit.capitalize()} per second of one GPU against the number of GPUs, weak and strong scaling"
    table = _answers("scaling", [(name, case) for name, line in lines.items() for case in line], total, unit, data.shares)
    return Section("Scaling", (Picture("efficiency", alt, efficiency, data),), tuple(sentences), table=table)


def _kind(job: Job, weak: bool) -> str:
    batch = job.resolve().global_batch
    return "weak: the global batch grows" if weak else f"strong: global batch {batch:,}"


def _size(case: Case) -> Size:
    assert case.summary is not None
    return Size(case.summary.gpus, case.summary.tokens_per_second_per_gpu, case.summary.fits)


def _refusals(cases: Iterable[tuple[str, Case]]) -> list[str]:
    """Each reason once, with what it is about; without the name of the job's file."""
    reasons: dict[str, dict[str, None]] = {}
    for name, case in cases:
        if case.refused:
            reasons.setdefault(case.refused.rpartition("yaml: ")[2], {})[name] = None
    return [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]


def _answers(
    first: str, rows: Sequence[tuple[str, Case]], total: float, unit: str, efficiency: Mapping[str, Sequence[float]] | None = None
) -> Sheet:
    """A row per case that was not refused: its name, GPUs, step, rates, memory, and what `total` tokens take."""
    days = f"days for {tokens_text(total, unit)}"
    columns = [first, "GPUs", "step", f"{unit}/s", f"{unit}/s/GPU", "MFU", "peak memory", days, "cost"]
    lines, places = [], Counter[str]()
    for name, case in rows:
        summary, whole = case.summary, case.training
        if summary is None or whole is None:
            continue
        over = "" if summary.fits else " ✗"
        line = [
            name.partition(":")[0],
            f"{summary.gpus:,}",
            seconds(summary.step_seconds),
            count(summary.tokens_per_second),
            count(summary.tokens_per_second_per_gpu),
            percent(summary.mfu),
            size(summary.worst.peak) + over,
            digits(whole.seconds / 86400),
            "–" if whole.usd is None else dollars(whole.usd),
        ]
        if efficiency is not None:
            line.append(percent(efficiency[name][places[name]]))
            places[name] += 1
        lines.append(line)
    return Sheet([*columns, *(["efficiency"] if efficiency is not None else [])], lines)


def clusters(read: Read, job: Job, engine: Engine, total: float, price: float | None) -> Section:
    """The same plan on as many GPUs of the other clusters of the catalogue, the cheapest that fits first."""
    from strategies.planner import whatif
    from topologies.cluster_files import cluster_names, load_cluster

    title = "The same plan on other clusters"
    if job.profile is not None:
        return Section(title, text=(f"Left out: profile {job.profile} was asked for, which is of one kind of machine.",))
    places = [(name, load_cluster(name)) for name in cluster_names()]
    inputs = [
        {"cluster": name, "nodes": job.cluster.gpus // place.node.gpus}
        for name, place in places
        if name != job.cluster.name and place.node.nics and job.cluster.gpus % place.node.gpus == 0
    ]
    answer = whatif.ask(read, [({}, "", {}), *((changes, "", {}) for changes in inputs)], engine, total, price)
    named = [(f"{case.changes.get('cluster', job.cluster.name)}", case) for case in answer]
    named.sort(key=lambda pair: _cheapest(pair[1]))
    of = tokens_text(total, unit_of_job(job))
    sentences = [f"On {job.cluster.gpus:,} GPUs of each; cost by list prices, of {of}; ✗ does not fit in memory."]
    sentences += [f"Not possible: {why}." for why in _refusals(named)]
    gpus = {name: place.node.gpu.name for name, place in places} | {job.cluster.name: job.cluster.node.gpu.name}
    rates = {gpus[name]: case.training.rates for name, case in named if case.training}
    prices = [f"{gpu} {rates_text(each, power=False)}" for gpu, each in rates.items() if each.usd is not None]
    sentences += [f"Prices: {'; '.join(prices)}."] if prices else []
    if unlisted := [gpu for gpu, each in rates.items() if each.usd is None]:
        sentences.append(f"No price is listed of {', '.join(unlisted)}: --price gives one.")
    return Section(title, text=tuple(sentences), table=_answers("cluster", named, total, unit_of_job(job)))


def _cheapest(case: Case) -> tuple[bool, float, float]:
    """What fits first, by money, what has no price after that by time."""
    if case.summary is None or case.training is None:
        return True, 0.0, 0.0
    usd = case.training.usd
    return not case.summary.fits, float("inf") if usd is None else usd, case.training.seconds


def limits(job: Job, step: float, by: float = 0.1) -> Section:
    """What each price does to the job's step, of `step` seconds, when it is `by` lower and higher, and what halving it saves."""
    from reports.figures.tornado import tornado
    from strategies.planner.sensitivity import PRICES, Play, PriceSwing

    play = Play.of(job, expected=True)
    swings = play.swings({price.name: 1 + by for price in PRICES if price.name not in ("kernels", "clock")})
    if not swings:
        return Section("What limits the step", text=("No price moves it.",))
    alt = f"The step with each price {percent(by)} lower and higher"
    scale = step / play.seconds  # a long step is played as two short ones, whose sum is not quite its own
    swings = [PriceSwing(swing.name, swing.factor, swing.low * scale, swing.high * scale) for swing in swings]
    picture = Picture("tornado", alt, tornado, (job.name, step, swings))
    faster = sorted(((scale * after, what) for what, after in play.faster(2.0)), key=lambda pair: pair[0])
    rows = [[PRICED.get(what, what), seconds(after), signed(after / step - 1)] for after, what in faster if after < 0.9995 * step]
    sentences = (
        f"Each price alone, divided and multiplied by {1 + by:g}; and what becomes of the step when it is halved.",
        "A faster link helps until the next one on the way limits. For the figure, collectives stay as they are chosen now "
        "(how wrong may a price be?), for the table they are chosen anew, as shardyard whatif does.",
    )
    return Section("What limits the step", (picture,), sentences, table=Sheet(("twice as fast", "step", "change"), rows))


def collectives(timeline: Timeline) -> Section | None:
    """Bandwidth against size of what the job communicates most; None where it communicates nothing."""
    from reports.figures.busbw import busbw
    from sim.analysis.collective_sweep import of_step

    sweeps = of_step(timeline, [4.0**power for power in range(5, 17)])  # 1 KiB to 4 GiB
    pictures = [
        Picture(f"busbw_{number}", f"Time and bandwidth of {data.operation} of {data.where} against size", busbw, data)
        for number, data in enumerate(sweeps)
    ]
    text = "What the job communicates most, among its own groups, on links that nothing else uses."
    return Section("Collectives", tuple(pictures), (text,)) if pictures else None


def launches(job: Job) -> tuple[Launch, ...]:
    """How each framework that can express the plan runs it."""
    from strategies.frameworks.export import export
    from strategies.frameworks.settings import frameworks

    result = []
    for name in sorted(frameworks):
        try:
            written = export(name, job)
        except UserError as error:
            result.append(Launch(name, "", "", str(error).removeprefix(f"{name} ")))
            continue
        result.append(Launch(name, written.file, written.text, written.launch.replace("FILE", written.file), written.unexpressed))
    return tuple(result)
