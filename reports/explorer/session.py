"""The job that a page began with, and what the page changes of it: texts as `--set` reads them, which are not trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strategies.job import Job
from strategies.models.tracing.builders import is_module_source
from strategies.overrides import parse_changes
from strategies.planner.arguments import settings, stated_otherwise
from strategies.read_job import read_job
from topologies.reading import UserError, is_there, shown

MOST, LONGEST = 200, 2000  # changes, and characters of one


class Session:
    """path, given: the job as a command reads it. folder: the only one whose files the page may name."""

    def __init__(self, path: str | None, given: Mapping[str, Any], folder: Path) -> None:
        self.path, self.given, self.folder = path, dict(given), folder.resolve()
        self.overrides = tuple(self.given.pop("overrides", ()))

    def settled(self) -> Session:
        """The same with a plan that was found (`plan: auto`) said field by field, so that changes are changes of this plan."""
        job = self.job()
        if job.auto is not None:
            self.overrides = (*self.overrides, *settings(stated_otherwise(job, {})))
        return self

    def job(self, changes: Sequence[str] = ()) -> Job:
        """The job with changes. Raises UserError, also for files outside the folder and for modules, which would be run."""
        if len(changes) > MOST or any(len(text) > LONGEST for text in changes):
            raise UserError(f"more than {MOST} changes, or one of more than {LONGEST:,} characters")
        for text in _texts(parse_changes(changes)):
            self.check(text)
        return read_job(self.path, overrides=[*self.overrides, *changes], **self.given)

    def find_plan(self, changes: Sequence[str] = ()) -> None:
        """Where nothing is said of the plan, find it for the job with changes, once; what is changed later is changed of it."""
        if (found := self.job(changes)).auto:
            self.overrides += tuple(settings(stated_otherwise(found, {})))

    def check(self, text: str) -> None:
        """Refuse what names a file outside the folder."""
        if is_module_source(text):
            raise UserError(f"{shown(text)}: a module is run when it is read: name it on the command line")
        for place in (Path(text), self.folder / text):
            if is_there(place) and not place.resolve().is_relative_to(self.folder):
                raise UserError(f"{shown(text)}: is outside {self.folder}; name it on the command line")


def _texts(value: Any) -> Iterator[str]:
    """Every text of nested values, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key == "module":
                raise UserError("module: a module is run when it is read: name it on the command line")
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
