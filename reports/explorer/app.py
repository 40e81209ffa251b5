"""The server of the page: static files that come with the package, and answers about the job as JSON."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from threading import Lock
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from reports.explorer import answers
from reports.explorer.form import form
from reports.explorer.guard import Guard
from reports.explorer.search import LONGEST, search
from reports.explorer.session import Session
from topologies.documents.syntaxes import MalformedError, parse_json
from topologies.reading import UserError

STATIC = Path(__file__).parent / "static"
NAMES = frozenset(path.name for path in STATIC.iterdir())
Body = dict[str, Any]


def application(session: Session, port: int) -> ASGIApp:
    """The page of a job, served at 127.0.0.1 and localhost."""
    pages = Pages(session)
    routes = [
        Route("/", pages.index),
        Route("/static/{name}", pages.static),
        *(Route(f"/api/{name}", pages.api(function), methods=["POST"]) for name, function in pages.functions.items()),
        Route("/api/search", pages.search, methods=["POST"]),
    ]
    hosts = frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost"))
    return Guard(Starlette(routes=routes), hosts)


class Pages:
    """What is answered where. One question at a time is worked on: the simulator uses one core, and remembers prices."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.working = Lock()
        self.functions: dict[str, Callable[[Body], Any]] = {
            "form": self._form,
            "answer": self._answer,
            "interval": self._interval,
            "timeline": self._timeline,
            "curve": self._curve,
            "days": self._days,
        }

    async def index(self, _: Request) -> Response:
        """The page."""
        return FileResponse(STATIC / "index.html")

    async def static(self, request: Request) -> Response:
        """A file that comes with the package, by its name."""
        name = request.path_params["name"]
        return FileResponse(STATIC / name) if name in NAMES else Response(status_code=404)

    def api(self, function: Callable[[Body], Any]) -> Callable[[Request], Any]:
        """An endpoint that answers with JSON: 200, or 422 and {"error": one line}."""

        async def endpoint(request: Request) -> Response:
            try:
                body = _body(await request.body())
                data = await run_in_threadpool(self._one_at_a_time, function, body)
            except UserError as error:
                return _json({"error": str(error)}, 422)
            return _json(data)

        return endpoint

    def _one_at_a_time(self, function: Callable[[Body], Any], body: Body) -> Any:
        with self.working:
            return function(body)

    async def search(self, request: Request) -> Response:
        """A line of JSON for each step of a search; it ends with the request."""
        try:
            body = _body(await request.body())
            changes, _ = answers.asked(_changes(body))
            seconds, every = _number(body, "seconds", LONGEST), body.get("every") is True
        except UserError as error:
            return _json({"error": str(error)}, 422)
        steps = search(self.session, changes, seconds, every)

        async def lines() -> AsyncIterator[str]:
            try:
                while (step := await run_in_threadpool(next, steps, None)) is not None:
                    yield answers.text_of(step) + "\n"
            finally:
                steps.close()  # type: ignore[attr-defined]

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    def _form(self, body: Body) -> Any:
        job = self.session.job()
        return {"name": job.name, "sections": form(job)}

    def _answer(self, body: Body) -> Any:
        changes, own = answers.asked(_changes(body))
        job = self.session.job(changes)
        return answers.answer(job, own) | {"take": answers.taken_away(self.session, changes, job)}

    def _interval(self, body: Body) -> Any:
        changes, own = answers.asked(_changes(body))
        return answers.interval(self.session.job(changes), own)

    def _timeline(self, body: Body) -> Any:
        changes, _ = answers.asked(_changes(body))
        window = body.get("window")
        if window is not None:
            if not isinstance(window, list) or len(window) != 2:
                raise UserError("window: must be two moments in seconds")
            window = (_finite(window[0], "window"), _finite(window[1], "window"))
        lane = body.get("lane")
        if lane is not None and (not isinstance(lane, int) or isinstance(lane, bool)):
            raise UserError("lane: must be a number of a row")
        return answers.timeline(self.session.job(changes), window, lane)

    def _curve(self, body: Body) -> Any:
        changes, _ = answers.asked(_changes(body))
        field, values = body.get("field"), body.get("values")
        if not isinstance(field, str) or not isinstance(values, list) or len(values) > answers.VALUES:
            raise UserError(f"curve: needs a field and at most {answers.VALUES} values")
        return answers.curve(answers.varied(self.session, changes, field, values))

    def _days(self, body: Body) -> Any:
        changes, own = answers.asked(_changes(body))
        return answers.days(self.session.job(changes), own)


def _body(raw: bytes) -> Body:
    """A JSON object. Raises UserError."""
    try:
        data = parse_json(raw.decode())
    except (MalformedError, UnicodeDecodeError) as error:
        raise UserError(f"request: {error}") from None
    if not isinstance(data, dict):
        raise UserError("request: must be an object")
    return data


def _changes(body: Body) -> list[str]:
    changes = body.get("changes", [])
    if not isinstance(changes, list) or not all(isinstance(text, str) for text in changes):
        raise UserError('changes: must be texts such as "plan.tp=4"')
    return changes


def _number(body: Body, name: str, most: float) -> float:
    return min(most, max(1.0, _finite(body.get(name, most), name)))


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{name}: must be a number")
    return float(value)


def _json(data: Any, status: int = 200) -> Response:
    return Response(answers.text_of(data), status, media_type="application/json")
