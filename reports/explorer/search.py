"""A search of plans beside the page: a process of its own, which tells how far it is, and ends when nobody listens any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from reports.explorer.session import Session
from topologies.reading import UserError

LONGEST = 300.0  # seconds
TOP = 8


def search(session: Session, changes: Sequence[str], seconds: float, every: bool) -> Iterator[Mapping[str, Any]]:
    """What a search says: progress, then the best plans or an error. every: of all plans, until the best is proven or the time is
    up; otherwise of the usual ways to train. Ending the iteration ends the search.
    """
    context = get_context("spawn")
    hear, say = context.Pipe(duplex=False)
    arguments = (session, list(changes), min(seconds, LONGEST)) if every else (session, list(changes))
    process = context.Process(target=_tell, args=(say, _all_plans if every else _usual_ways, *arguments))
    process.start()
    say.close()
    try:
        with suppress(EOFError):
            while True:
                yield hear.recv()
    finally:
        process.terminate()
        process.join()


def _tell(say: Connection, search: Callable[..., None], *arguments: Any) -> None:
    try:
        search(say, *arguments)
    except UserError as error:
        say.send({"error": str(error)})


def _usual_ways(say: Connection, session: Session, changes: list[str]) -> None:
    from strategies.planner.advise import Candidate, advise
    from strategies.planner.arguments import differences, settings
    from strategies.planner.ranking import HEADROOM
    from strategies.predict import predict

    job, simulated = session.job(changes), 0

    def one_by_one(function: Callable[[Any], Candidate | None], ways: Iterable[Any]) -> Iterator[Candidate | None]:
        nonlocal simulated
        ways = list(ways)
        for number, way in enumerate(ways):
            say.send({"stage": str(way[0]), "simulated": simulated, "open": len(ways) - number, "best": None})
            yield function(way)
            simulated += 1

    advice = advise(job, predict, one_by_one)
    plans = [
        {
            "name": candidate.name,
            "changes": settings(differences(job, candidate.job)),
            "fits": candidate.comfortable,
            "step": candidate.summary.step_seconds,
            "mfu": candidate.summary.mfu,
            "memory": candidate.summary.worst.peak,
        }
        for candidate in advice.candidates[:TOP]
    ]
    verdict = f"the usual ways, with {100 * HEADROOM:.0f} % of memory kept free"
    say.send({"done": True, "plans": plans, "of": len(advice.candidates), "verdict": verdict})


def _all_plans(say: Connection, session: Session, changes: list[str], seconds: float) -> None:
    from strategies.planner.arguments import settings, stated_otherwise
    from strategies.planner.search.objective import Limits, objective
    from strategies.planner.search.search import Search
    from strategies.planner.search.space import default_space
    from strategies.planner.search.workers.executors import engine

    def read(more: dict[str, Any]) -> Any:
        return session.job([*changes, *settings(more)])

    def tell(state: Any) -> None:
        say.send({"stage": state.stage, "simulated": state.simulated, "open": state.open, "best": state.best})

    own = read({})
    with engine(None, None, None) as runs:
        answer = Search(read, default_space(own), objective("step"), runs, Limits(), seconds=seconds, tell=tell).run()
    plans = [
        {"name": "", "changes": settings(stated_otherwise(own, row["changes"])), "fits": True}
        | {name: row[name] for name in ("step", "mfu", "memory")}
        for row in answer.rows[:TOP]
    ]
    proven = "the first is proven to be the best" if plans else "none fits"
    verdict = f"not proven: {answer.interrupted}" if answer.interrupted else proven
    say.send({"done": True, "plans": plans, "of": answer.combinations, "verdict": verdict})
