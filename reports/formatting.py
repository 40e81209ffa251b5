"""Numbers as people read them, the same on every table, figure and page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor, log10
from typing import TYPE_CHECKING, Any

from sim.analysis.breakdown import COMPONENTS
from sim.analysis.stage_memory import StageMemory
from sim.analysis.summary import Interval, Summary
from topologies.costs import Cost, Rates, cost
from topologies.documents.units import show

if TYPE_CHECKING:
    from rich.text import Text

    from strategies.job import Job as PlayedJob

Job = Mapping[str, Any]
"""What was simulated, as plain data: "model", "cluster", "plan" (field -> value), "command", "version", "hash", and anything else
that should stand under the provenance. Every key may be missing. "tokens" (of the whole training) and "rates" of
`topologies.costs` add the cost of the training; "gpus_per_node" tells how far tensor parallelism may go; "profile" says more than
the profile's name."""

TOKENS = 1e12  # that a price is told for when nobody says how long the training is
PRICED = {
    "gemm": "matrix products",
    "memory": "kernels bound by memory",
    "optimizer": "optimizer's kernels",
    "launch": "kernel launches",
    "slowdown": "slowdown by communication",
    "nvlink": "NVLink",
    "pcie": "PCIe",
    "nic": "NICs",
    "leaf": "links from leaf switches",
    "spine": "links of the spine",
    "collective start": "start of a collective",
    "host": "links between sockets",
    "loopback": "memory between processes",
}
"""Names of prices and kinds of links that say more than their own."""
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
KINDS = ("parameter", "gradient", "optimizer", "activation", "temporary", "buffer", "overhead")


def digits(value: float, count: int = 3) -> str:
    """`value` with `count` significant digits and no exponent: 41.2, 0.00123, 1,230."""
    if not value:
        return "0"
    before = floor(log10(abs(float(f"{value:.{count - 1}e}")))) + 1
    return f"{round(value, count - before):,.{max(0, count - before)}f}"


def seconds(value: float) -> str:
    """`1.23 s`, `456 ms`, `7.8 µs`."""
    return f"{digits(value)} s" if value >= 1000 else show(value, "s", 3, zeros=True)


def span(value: float) -> str:
    """`29 h`: what may take days; as `seconds` up to two minutes."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * length:
            return f"{digits(value / length)} {unit}"
    return seconds(value)


def count(value: float) -> str:
    """`213 k`, `1.5 M`."""
    return _apart(show(value, "", 3, zeros=True))


def _apart(text: str) -> str:
    return f"{text[:-1]} {text[-1]}" if text[-1].isalpha() else text


def size(value: float) -> str:
    """`61.2 GB`, where GB = 1e9 bytes."""
    return show(value, "B", 3, zeros=True)


def gigabytes(value: float) -> str:
    """The number of GB = 1e9 bytes, without its unit: `61.2`."""
    return digits(value / 1e9) if value else "0"


def percent(fraction: float) -> str:
    """`41.2 %`."""
    return f"{100 * fraction:.1f} %"


def signed(fraction: float, places: int = 1) -> str:
    """`+4.1 %`, `−4.1 %`."""
    return f"{100 * fraction:+.{places}f} %".replace("-", "−")


def plural(number: int, thing: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def spread(interval: Interval) -> str:
    """`1.76 s–2.02 s`."""
    return f"{seconds(interval.low)}–{seconds(interval.high)}"


def notes_of(job: PlayedJob) -> list[Text]:
    """What was assumed or ignored of a job, a line each."""
    from rich.text import Text

    return [Text(f"note: {note}", "yellow") for note in job.notes]


def tie_rule() -> str:
    """What the mark ≈ beside a plan means."""
    from strategies.planner.uncertainty import ORDERED, TIE

    return (
        f"≈ a tie with ★: less than {100 * TIE:.0f} % apart, where {100 * ORDERED:.0f} % of published pairs of plans came out in "
        "the predicted order"
    )


def step_of(sequences: int, tokens: int) -> str:
    """What a step trains on: `64 sequences of 8,192 tokens`, or samples that are no sequences."""
    return plural(sequences, "sample") if tokens == 1 else f"{plural(sequences, 'sequence')} of {tokens:,} tokens"


def unit_of(job: Job) -> str:
    """What is counted of a job: tokens, or samples that are no sequences."""
    return counted(job.get("plan", {}).get("sequence"))


def unit_of_job(job: PlayedJob) -> str:
    """The same of a job that was read."""
    return counted(job.plan.sequence_of(job.model))


def counted(sequence: int | None) -> str:
    """What a sample of so many tokens consists of: of one, it is counted itself."""
    return "samples" if sequence == 1 else "tokens"


def dollars(value: float) -> str:
    """`$1.06 M`."""
    return f"${count(value)}"


def tokens_text(value: float, unit: str = "tokens") -> str:
    """`15 T tokens`; a round power of ten as `10¹² tokens`."""
    if value <= 0:
        return f"0 {unit}"
    power = round(log10(value))
    round_power = value == 10.0**power and power > 3
    return f"10{str(power).translate(_RAISED)} {unit}" if round_power else f"{_apart(show(value, '', 3))} {unit}"


def bar(fraction: float, width: int) -> str:
    """A bar of up to `width` characters, in eighths."""
    eighths = round(8 * width * min(max(fraction, 0.0), 1.0))
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def held(stage: StageMemory) -> dict[str, float]:
    """Bytes by kind of KINDS when the stage's peak is reached; they add up to its peak."""
    return {kind: stage.overhead if kind == "overhead" else stage.kinds.get(kind, 0.0) for kind in KINDS}


def stages(summary: Summary) -> list[StageMemory]:
    """One entry per stage, in order: the rank of it that holds most, relative to its GPU."""
    most: dict[int, StageMemory] = {}
    for entry in summary.memory:
        if entry.stage not in most or filled(entry, summary) > filled(most[entry.stage], summary):
            most[entry.stage] = entry
    return [most[stage] for stage in sorted(most)]


def filled(entry: StageMemory, summary: Summary) -> float:
    """The part of a rank's GPU that is full at its peak."""
    return entry.peak / (entry.capacity or summary.memory_capacity)


def components(breakdowns: Iterable[Mapping[str, float]]) -> list[str]:
    """The components that take any time in any of `breakdowns`, in their order; effects last."""
    every = list(breakdowns)
    names = dict.fromkeys((*COMPONENTS, *(name for parts in every for name in parts)))
    return [name for name in names if any(parts.get(name) for parts in every)]


def tokens_per_step(summary: Summary) -> float:
    """Tokens of the whole job in one step."""
    return summary.tokens_per_second * summary.step_seconds


def gpu_hours(summary: Summary, tokens: float) -> float:
    """GPU-hours that `tokens` tokens take."""
    return summary.gpu_hours_per_step * tokens / tokens_per_step(summary)


def training_cost(summary: Summary, job: Job) -> Cost:
    """What the training of job["tokens"] (TOKENS when not given) takes, by job["rates"]."""
    return cost(job["rates"], summary.gpus, summary.step_seconds, tokens_per_step(summary), float(job.get("tokens") or TOKENS))


def training(summary: Summary, job: Job) -> list[tuple[str, str]]:
    """(label, value) of GPU-hours, days, cost and energy of the training of job["tokens"]; without, GPU-hours of a billion tokens
    and what TOKENS cost. Money and energy by job["rates"], where they are.
    """
    asked, rates, unit = job.get("tokens"), job.get("rates"), unit_of(job)
    whole = None if rates is None else training_cost(summary, job)
    price = "no price is listed" if whole is None or whole.usd is None else f"{dollars(whole.usd)} at ${whole.rates.usd:.2f}/h"
    if not asked:
        result = [(f"GPU-hours per 10⁹ {unit}", digits(gpu_hours(summary, 1e9)))]
        priced = whole is not None and whole.usd is not None
        return [*result, (f"cost of {tokens_text(TOKENS, unit)}", price)] if priced else result
    of = tokens_text(float(asked), unit)
    result = [(f"GPU-hours for {of}", digits(gpu_hours(summary, float(asked))))]
    if whole is None:
        return result
    energy = f"≤ {count(whole.joules / 3600)}Wh"
    return [*result, ("days", digits(whole.seconds / 86400)), ("cost", price), ("energy", energy)]


def rates_text(rates: Rates, power: bool = True) -> str:
    """The price of a GPU-hour and the power of a GPU, with where they come from."""
    price = "no price" if rates.usd is None else f"${rates.usd:.2f} per GPU-hour"
    text = f"{price} ({rates.usd_source})"
    return f"{text}; {rates.watts:,g} W per GPU ({rates.watts_source})" if power else text


def provenance(summary: Summary, job: Job) -> str:
    """Where the numbers come from, on one line."""
    parts = [f"shardyard {job.get('version', '?')}", f"profile {job.get('profile') or summary.profile}"]
    parts += [f"{key} {job[key]}" for key in ("hash", "seed") if job.get(key) is not None]
    if job.get("rates"):
        parts.append(rates_text(job["rates"], power=bool(job.get("tokens"))))
    return " · ".join([*parts, f"{summary.events} events", *([f"`{job['command']}`"] if job.get("command") else [])])
