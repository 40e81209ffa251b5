"""What goes to a terminal: text in which no name or path can move the cursor, change colours or hide itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# control characters but tab and line feed, marks that turn the direction of text, bytes of a path that are no UTF-8
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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


def progress_bar(quiet: bool) -> Progress:
    """A bar with counts and the time that is left, on stderr, where that is a terminal and not `quiet`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console, text = terminal(stderr=True), TextColumn("{task.description}", markup=False)
    shown = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*shown, console=console, disable=quiet or not console.is_terminal, transient=True)
