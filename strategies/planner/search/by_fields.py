"""What a function makes of very many plans, by the fields that it looks at: called once for each combination of their values.

Most rules look at two to five fields of a plan, a space has 10⁵ combinations of a dozen. Which fields a function looks at is seen
when it is called: as it looks at the same fields in the same order until they differ, its answers are the leaves of a tree whose
branches are values of fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved

Ids = NDArray[np.int64]
T = TypeVar("T")
STATED = "model_fields_set"  # of plans, which fields they state
PLAIN = (
    bool,
    int,
    float,
    str,
    tuple,
    frozenset,
)  # types whose equal values are one; groups of fields differ in what they state, too


class Column:
    """A field of plans: its different values, and the number of each plan's."""

    def __init__(self, values: list[Any], number: Ids) -> None:
        self.values, self.number = values, number
        self._known = {_key(value): place for place, value in enumerate(values)}

    @classmethod
    def alike(cls, value: Any, count: int) -> Column:
        """A value that so many plans have."""
        return cls([value], np.zeros(count, dtype=np.int64))

    def put(self, members: Ids, values: Sequence[Any], which: Ids | int = 0) -> None:
        """Each member has value number `which` of `values` from now on."""
        numbers = np.array([self.number_of(value) for value in values], dtype=np.int64)
        self.number[members] = numbers[which]

    def number_of(self, value: Any) -> int:
        """The number of a value, of a new one, too."""
        number = self._known.setdefault(_key(value), len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number

    def at(self, members: Ids) -> Column:
        """The field of some of the plans."""
        return Column(self.values, self.number[members])


def _key(value: Any) -> tuple[type, Any]:
    """Equal of values that are one."""
    return type(value), value if isinstance(value, PLAIN) else id(value)


class Columns(NamedTuple):
    """Plans that are `plan` but for the fields `varied`. beside: what is not of a plan."""

    plan: Plan
    varied: dict[str, Column]  # with STATED
    beside: dict[str, Column]

    def resolved(self) -> ResolvedPlans:
        """All plans, which have all fields of a `Resolved`."""
        stated = self.varied[STATED]
        of = [self.plan.model_copy(update={name: getattr(self.plan, name) for name in more}) for more in stated.values]
        return ResolvedPlans(of, stated, {name: column for name, column in self.varied.items() if name != STATED})


class ResolvedPlans:
    """Plans, each made when it is first asked for: of 10⁵ some hundreds are. plans: those with the fields that each states."""

    def __init__(self, plans: Sequence[Plan], stated: Column, varied: Mapping[str, Column]) -> None:
        self._plans, self._stated, self._varied = plans, stated, varied
        self._known: dict[int, Resolved] = {}

    def __len__(self) -> int:
        return len(self._stated.number)

    def __getitem__(self, number: int) -> Resolved:
        if number not in self._known:
            fields = {name: column.values[column.number[number]] for name, column in self._varied.items()}
            self._known[number] = Resolved.with_fields(self._plans[self._stated.number[number]], fields)
        return self._known[number]

    def __iter__(self) -> Iterator[Resolved]:
        return map(self.__getitem__, range(len(self)))


class Looked(Mapping[str, Any]):
    """One of the plans, and as a mapping what is beside it. at: columns that were looked at, in order, with a value's number."""

    def __init__(self, columns: Columns, number: int) -> None:
        self.columns, self.number = columns, number
        self.at: dict[int, tuple[Column, int]] = {}

    def look(self, column: Column) -> Any:
        """A value of the plan."""
        value = int(column.number[self.number])
        self.at.setdefault(id(column), (column, value))
        return column.values[value]

    def __getitem__(self, name: str) -> Any:
        return self.look(self.columns.beside[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns.beside)

    def __len__(self) -> int:
        return len(self.columns.beside)

    @property
    def plan(self) -> Resolved:
        """The plan; what it does not have of a `Resolved` cannot be asked for."""
        kind, plan = _watched(), self.columns.plan
        watched = kind.__new__(kind)
        for name, value in (
            ("__dict__", plan.__dict__),
            ("__pydantic_fields_set__", plan.model_fields_set),
            ("__pydantic_extra__", None),
            ("__pydantic_private__", {"looked": self}),
        ):
            object.__setattr__(watched, name, value)
        return watched


@lru_cache(maxsize=1)
def _watched() -> type[Resolved]:
    """The class of plans that know which of their fields are looked at: all when they are copied, compared, hashed or written."""

    class Watched(Resolved):
        def __getattribute__(self, name: str) -> Any:
            looked: Looked = object.__getattribute__(self, "__pydantic_private__")["looked"]
            varied = looked.columns.varied
            if name in (STATED, "__pydantic_fields_set__"):
                return set(looked.look(varied[STATED]))
            if name in varied:
                return looked.look(varied[name])
            if name == "__dict__":
                every = {field: looked.look(column) for field, column in varied.items() if field != STATED}
                return looked.columns.plan.__dict__ | every
            return object.__getattribute__(self, name)

        def __copy__(self) -> Resolved:  # type: ignore[override]
            return Resolved.with_fields(self, {})

        @classmethod
        def with_fields(cls, plan: Plan, fields: dict[str, Any]) -> Resolved:
            return Resolved.with_fields(plan, fields)

    return Watched


class _Branch:
    """column: by which plans are told apart, None: they are not, and have `answer`; −1: nobody has asked yet."""

    __slots__ = ("after", "answer", "column")

    def __init__(self) -> None:
        self.column: Column | None = None
        self.after: dict[int, _Branch] = {}
        self.answer = -1


class ByFields(Generic[T]):
    """Answers of a function to plans. It is asked for members again after values of theirs have changed."""

    def __init__(self, columns: Columns, ask: Callable[[Looked], T]) -> None:
        self._columns, self._ask = columns, ask
        self.answers: list[T] = []
        self._root = _Branch()

    def of(self, members: Ids) -> Ids:
        """Of each member, which of `answers` is its own."""
        result = np.empty(len(members), dtype=np.int64)
        open_branches = [(self._root, np.arange(len(members)))] if len(members) else []
        while open_branches:
            branch, places = open_branches.pop()
            if branch.column is None and branch.answer < 0:
                self._grow(int(members[places[0]]))
            if branch.column is None:
                result[places] = branch.answer
                continue
            numbers = branch.column.number[members[places]]
            present = np.flatnonzero(np.bincount(numbers)).tolist()
            for number in present:
                rest = places if len(present) == 1 else places[numbers == number]
                open_branches.append((branch.after.setdefault(number, _Branch()), rest))
        return result

    def _grow(self, plan: int) -> None:
        """Ask for one plan: the branches that lead to its answer."""
        looked = Looked(self._columns, plan)
        self.answers.append(self._ask(looked))
        branch = self._root
        for column, number in looked.at.values():
            assert branch.column is None or branch.column is column, "a function of plans looks at other fields of equal plans"
            branch.column = column
            branch = branch.after.setdefault(number, _Branch())
        branch.answer = len(self.answers) - 1
