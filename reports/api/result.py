"""What a function of the API answers: rows that are a pandas table, the best job, and a card in notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strategies.job import Job
from topologies.documents.cards import table_card
from topologies.documents.extras import imported

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """title: the answer in a sentence; rows: plain data, the best first where there is a best; shown: columns of the card; best:
    the job of the first row (None: nothing fits, or nothing is best); arguments: what makes the job that was asked the best one;
    detail: the objects that the rows were made of.
    """

    title: str
    rows: tuple[Row, ...]
    shown: tuple[str, ...]
    best: Job | None = None
    arguments: str = ""
    detail: Any = field(default=None, repr=False, compare=False)

    def frame(self) -> pd.DataFrame:
        """The rows as a table: fields inside fields have names with dots. Raises ExtraMissingError without pandas."""
        table: pd.DataFrame = imported("pandas").DataFrame([dict(_flat(row)) for row in self.rows])
        return table

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def _repr_html_(self) -> str:
        return table_card(self.title, self.rows, self.shown)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, number: int) -> Row:
        return self.rows[number]


def _flat(row: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
