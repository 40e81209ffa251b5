"""What goes to a terminal: text in which no name or path can move the cursor, change colours or hide itself."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# control characters but tab and line feed, marks that turn the direction of text, bytes of a path that are no UTF-8
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

PROGRESS_INTERVAL = 10.0  # seconds between lines of progress where there is no terminal


def printable(text: str) -> str:
    r"""With harmful characters spelt out, `\x1b`."""
    return _HARMFUL.sub(lambda match: repr(match[0])[1:-1], text)


def echo(text: str = "", err: bool = False, nl: bool = True) -> None:
    """A line to stdout or stderr."""
    click.echo(printable(text), err=err, nl=nl)


def terminal(stderr: bool = False) -> Console:
    """Rich's console, whose own colours are all that there is: what is printed is text and no markup."""
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class Terminal(Console):
        def render_str(self, text: str, **options: Any) -> Text:  # before it is measured
            return super().render_str(printable(text), **options)

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                if segment.control or not _HARMFUL.search(segment.text):
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    return Terminal(stderr=stderr, markup=False, emoji=False)


def throttled(tell: Callable[[str], None], every: float = PROGRESS_INTERVAL) -> Callable[[str], None]:
    """`tell`, but no more often than every so many seconds, and not at once."""
    last = time.monotonic()

    def now_and_then(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            tell(text)

    return now_and_then


def progress_bar(quiet: bool) -> Progress:
    """A bar with counts and the time that is left, on stderr; where that is no terminal a line now and then; `quiet`: nothing."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    class Lines(Progress):
        """The bar, which also tells what moves it."""

        tell = staticmethod(throttled(lambda text: echo(text, err=True)))

        def update(self, task_id: Any, **fields: Any) -> None:
            super().update(task_id, **fields)
            task = self.tasks[task_id]
            of = "" if task.total is None else f", {task.completed:.0f} of {task.total:.0f}"
            self.tell(f"{task.description}{of}")

    console, text = terminal(stderr=True), TextColumn("{task.description}", markup=False)
    shown = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    kind = Progress if quiet or console.is_terminal else Lines
    return kind(*shown, console=console, disable=quiet or not console.is_terminal, transient=True)
