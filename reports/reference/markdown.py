"""Markdown of tables, and texts that may hold what Markdown reads as marks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_MARKS = re.compile(r"(?<!`)([*_<>\[\]|])(?!`)")


def plain(text: object) -> str:
    """The text on one line, as it is; what stands in backquotes is code."""
    parts = re.split(r"(`[^`]*`)", " ".join(str(text).split()))
    return "".join(part.replace("|", r"\|") if part.startswith("`") else _MARKS.sub(r"\\\1", part) for part in parts)


def code(text: object) -> str:
    """The text as code in a cell of a table; nothing for nothing."""
    return f"`{text}`".replace("|", r"\|") if str(text) else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def sentence(text: str) -> str:
    """With a capital and a full stop, as a paragraph."""
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ":")) else ".") if text else ""
