"""Which questions reach most of the code for their time: greedily, by branches that few of those chosen before reach."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stderr
from heapq import heappop, heappush
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time

from coverage import Coverage

from tests.results.questions import answer, kinds, named

ROOT = Path(__file__).parents[2]
LONGEST = 1.2  # seconds of a question
BUDGET = 40.0  # seconds of all that are kept
WORTH = (1.0, 0.25, 0.1)  # of a branch that none, one, two of those chosen before reach
FIXED = 0.03  # seconds that any question costs
HASHED = "brief", "brief_run", "digest"  # kinds whose questions stay as they are
LEAST = 12.0  # worth of a question per second

Branch = tuple[str, int, int]


def chosen(count: int, asked: Iterable[str]) -> list[str]:
    """Of `count` questions of each kind, those to keep, in order: all that have names, and those asked so far of HASHED."""
    reached: dict[str, tuple[set[Branch], float]] = {}
    with_names = named()
    drawn = kinds().keys() - {name.partition(" ")[0] for name in with_names} - set(HASHED)
    for kind in sorted(drawn):
        for number in range(count):
            name = f"{kind} {number}"
            measured = _measured(name)
            if measured is not None:
                reached[name] = measured
        print(kind, sum(name.startswith(f"{kind} ") for name in reached), file=sys.stderr, flush=True)
    times, total, kept = Counter[Branch](), 0.0, list[str]()
    waiting = [(-float("inf"), name) for name in reached]  # a question is worth no more than it was before others were chosen
    while waiting:
        _, name = heappop(waiting)
        branches, seconds = reached[name]
        worth = sum(WORTH[times[branch]] for branch in branches if times[branch] < len(WORTH)) / (seconds + FIXED)
        if waiting and worth < -waiting[0][0]:
            heappush(waiting, (-worth, name))
        elif worth >= LEAST and total + seconds <= BUDGET:
            total += seconds
            times.update(branches)
            kept.append(name)
    print(f"{len(kept)} questions, {total:.0f} s with coverage, {len(times)} branches", file=sys.stderr)
    kept.sort(key=lambda name: (name.split()[0], int(name.split()[1])))
    same = (name for name in asked if name.split()[0] in HASHED)
    return [*kept, *with_names, *same]


def _measured(name: str) -> tuple[set[Branch], float] | None:
    """Branches that a question reaches in a process of its own, and seconds; None: it takes too long, or fails."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_measure, args=(name, sender))
    process.start()
    sender.close()
    try:
        result: tuple[set[Branch], float] | None = receiver.recv()
    except EOFError:
        result = None
    process.join()
    return result


def _measure(name: str, sender: Connection) -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, 3 * LONGEST)  # which ends the process
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    coverage = Coverage(data_file=None, branch=True, source=[str(ROOT / "sim"), str(ROOT / "strategies")], messages=False)
    with redirect_stderr(None):
        coverage.start()
        began = process_time()
        try:
            given = answer(name)
        except Exception as error:  # of the question, or of the code: said, and left out
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            return
        seconds = process_time() - began
        coverage.stop()
    if "refused" in given and name.split()[0] != "settings" and len(given) == 1:
        return
    data = coverage.get_data()
    sender.send(({(file, *arc) for file in data.measured_files() for arc in data.arcs(file) or ()}, seconds))
