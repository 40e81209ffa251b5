"""What fields of a plan exclude of each other, of a model and of a cluster, by what they are about.

A rule yields reasons: a line with field, value and numbers, without the file's name. The user reads the first; code behind a
reason may rely on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from topologies.reading import UserError


def refuse(where: str, *rules: Iterable[str]) -> None:
    """Raise UserError with the first reason that the rules have, if any; where: the file that it names."""
    for reason in chain(*rules):
        raise UserError(f"{where}: {reason}")
