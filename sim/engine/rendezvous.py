"""The meeting of a collective's ranks: it starts when the last of them has come."""

from __future__ import annotations

from typing import Generic, TypeVar

M = TypeVar("M")


class Rendezvous(Generic[M]):
    """Gathers the `expected` members of one collective."""

    __slots__ = ("expected", "members")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.members: list[M] = []

    def arrive(self, member: M) -> bool:
        """A member has come; whether it was the last."""
        self.members.append(member)
        return len(self.members) == self.expected
