"""Runs against what is known in closed form: Young, Daly, Meta's expected ETTR, NVIDIA's availability, queues for repair."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sim.runs import ledger
from sim.runs.run import Outcome, Run
from sim.runs.spec import Component, Repair, RunSpec, Saving
from topologies.documents.durations import Spread

HOUR, DAY = 3600.0, 86400.0


def exponential(mean: float) -> Spread:
    return Spread(mean=mean, kind="exponential")


def always(seconds: float) -> Spread:
    return Spread(mean=seconds)


def outcome(seed: int = 0, **fields: object) -> Outcome:
    days = float(fields.pop("days", 10.0))  # type: ignore[arg-type]
    given = {"step": 1.0, "work": days * DAY, "steps": days * DAY, "nodes": 1, "gpus_per_node": 8} | fields
    return Run(RunSpec(**given), np.random.SeedSequence(seed)).outcome()  # type: ignore[arg-type]


def system(mtbf: float, **fields: object) -> Component:
    return Component("system", exponential(mtbf), unit="job", replace=0.0, **fields)  # type: ignore[arg-type]


def daly_total(work: float, mtbf: float, interval: float, save: float, restart: float) -> float:
    """Wall-clock time of `work` seconds (Daly 2006, doi 10.1016/j.future.2004.11.016, equation 13), failures at any time."""
    return mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf) * work / interval


@pytest.mark.parametrize(
    ("mtbf", "interval", "save", "restart"),
    [(6 * HOUR, HOUR, 300.0, 600.0), (HOUR, 600.0, 60.0, 300.0), (900.0, 540.0, 300.0, 600.0), (DAY, 7000.0, 300.0, 600.0)],
)
def test_wall_clock_time_is_dalys(mtbf: float, interval: float, save: float, restart: float) -> None:
    """Also where failures come faster than a restart and a save together (MTBF of 15 min, Daly's figure 5)."""
    work, runs = 2000 * mtbf, 16 if mtbf < HOUR else 6
    fields = {
        "days": work / DAY,
        "components": (system(mtbf),),
        "savings": (Saving("storage", round(interval), blocking=save),),
        "initialization": always(restart),
    }
    mean = float(np.mean([outcome(seed, **fields).seconds for seed in range(runs)]))
    expected = daly_total(work, mtbf, interval, save, restart) + restart  # the first start too takes as long
    assert mean == pytest.approx(expected, rel=0.005)


def test_waste_at_youngs_interval() -> None:
    """Saves and lost work take √(2·save/MTBF) of the time (Young 1974), less what is of second order."""
    mtbf, save = 100 * HOUR, 18.0
    interval = math.sqrt(2 * save * mtbf)
    played = outcome(
        days=4000 * mtbf / DAY,
        step=4.0,
        steps=1000 * mtbf,
        work=4000 * mtbf,
        components=(system(mtbf),),
        savings=(Saving("storage", round(interval / 4), blocking=save),),
    )
    assert played.goodput == pytest.approx(1 - math.sqrt(2 * save / mtbf), abs=4e-4)
    saved, lost = (played.gpu_seconds[cause] for cause in (ledger.SAVE, ledger.WASTED))
    assert saved == pytest.approx(lost, rel=0.05)  # at the optimum both are equal


@pytest.mark.parametrize(
    ("rate", "interval", "restart"), [(1e-3, 300.0, 300.0), (2.34e-3, 1800.0, 300.0), (6.5e-3, 600.0, 300.0)]
)
def test_ettr_is_metas(rate: float, interval: float, restart: float) -> None:
    """E[ETTR] ≈ 1 − N·r·(u + Δt/2) for N nodes with r failures per node-day, restarts of u and checkpoints every Δt that cost
    nothing (arXiv 2410.21680), to first order.
    """
    nodes = 64
    component = Component("node", exponential(DAY / rate), replace=0.0)
    days = 4000 / (nodes * rate)
    played = outcome(
        days=days,
        nodes=nodes,
        step=10.0,
        steps=days * DAY / 10,
        components=(component,),
        idle_failures=False,
        savings=(Saving("storage", round(interval / 10)),),
        initialization=always(restart),
    )
    expected = 1 - nodes * rate * (restart + interval / 2) / DAY
    assert played.ettr == pytest.approx(expected, rel=0.005)


def availability(interval: float, mtbf: float, restart: float, save: float) -> float:
    """Of cycles of `interval`, the save included, with failures every `mtbf` of working time and recoveries of `restart`
    (arXiv 2410.18124): of each the work is kept that is neither a save nor lost.
    """
    work = (interval - save) / interval * (mtbf - interval / 2)
    return work / (mtbf + restart)


def test_availability_is_nvidias() -> None:
    """And its optimum is at save + √(2·(MTBF + restart)·save + save²), to first order of interval / MTBF."""
    mtbf, restart, save = 50 * HOUR, 600.0, 20.0
    interval = save + math.sqrt(2 * (mtbf + restart) * save + save**2)

    def played(between: float) -> Outcome:
        return outcome(
            days=4000 * mtbf / DAY,
            components=(system(mtbf),),
            idle_failures=False,
            savings=(Saving("storage", round(between - save), blocking=save),),
            initialization=always(restart),
        )

    best = played(interval)
    assert best.goodput == pytest.approx(availability(interval, mtbf, restart, save), rel=0.005)
    assert best.goodput > played(interval / 2).goodput
    assert best.goodput > played(interval * 2).goodput


@pytest.mark.parametrize(("technicians", "load"), [(1, 0.5), (3, 2.0)])
def test_repairs_wait_as_in_a_queue(technicians: int, load: float) -> None:
    """Nodes out of an endless pool fail as a Poisson process; each of the technicians repairs one at a time: M/M/c. Mean nodes in
    repair = load + C·load/(c − load), with Erlang's C.
    """
    mtbf = HOUR
    spec = RunSpec(
        step=10.0,
        work=8000 * mtbf,
        steps=800 * mtbf,
        nodes=1,
        gpus_per_node=1,
        spares=0,
        pool=400,
        idle_failures=False,
        components=(Component("node", exponential(mtbf)),),
        savings=(Saving("storage", 1),),
        repair=Repair(exponential(load * mtbf), technicians=technicians),
    )
    means = []
    for seed in range(6):
        run, area = Run(spec, np.random.SeedSequence(seed)), [0.0, 0.0]
        send, back = run.shop.send, run.shop.back

        def count(node: int, act, sign: int, run: Run = run, area: list[float] = area) -> None:  # type: ignore[no-untyped-def]
            area[0] += sign * run.env.now  # nodes · time, by what comes and goes
            area[1] += sign
            act(node)

        run.shop.send = lambda node, send=send, count=count: count(node, send, -1)  # type: ignore[method-assign,misc]
        run.shop.back = lambda node, back=back, count=count: count(node, back, 1)  # type: ignore[method-assign,misc]
        played = run.outcome()
        means.append((area[0] - area[1] * played.seconds) / played.seconds)
    terms = [load**n / math.factorial(n) for n in range(technicians)]
    waits = load**technicians / math.factorial(technicians) * technicians / (technicians - load)
    erlang = waits / (sum(terms) + waits)
    expected = load + erlang * load / (technicians - load)
    error = float(np.std(means, ddof=1) / math.sqrt(len(means)))
    assert float(np.mean(means)) == pytest.approx(expected, abs=max(0.005 * expected, 4 * error))
    assert error < 0.02 * expected
