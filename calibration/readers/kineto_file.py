"""What readers of the PyTorch profiler's traces (Kineto) share: events one by one, times that can be, texts kept once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from calibration.readers.stream import members
from topologies.reading import UserError, shown

TEXTS = 64 * 2**20  # letters of texts that are kept of a trace, each once: a thousand events name the same ranks
LAST = 1e16  # microseconds: a time of a day is 2e15 of them after 1970
LONGEST = 1e10  # microseconds of one kernel or step, some three hours


class Scan:
    """What is kept of a trace; `own`: its distributedInfo. A subclass says in `add` which events are."""

    texts_are: ClassVar[str]  # for the error when they are too long

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own: Mapping[str, Any] = {}
        self._texts: dict[str, str] = {}
        self._letters = 0

    def add(self, number: int, event: Any) -> None:
        """Keep what is wanted of an event."""
        raise NotImplementedError

    def beside(self, key: str, value: Any) -> None:
        """Keep what is wanted of the fields beside the events."""

    def read(self) -> Self:
        """Go through the file. Raises UserError."""
        is_trace, number = False, 0
        for key, value in members(self.path, "traceEvents"):
            if key == "traceEvents":
                is_trace |= isinstance(value, list)
                self.add(number, value)
                number += 1
            elif key == "distributedInfo" and isinstance(value, Mapping):
                self.own = value
            else:
                self.beside(key, value)
        if not is_trace:
            raise UserError(f"{self.path}: not a trace of the PyTorch profiler: no list 'traceEvents'")
        return self

    def microseconds(self, number: int, event: Mapping[str, Any], field: str, most: float) -> float:
        """A time of event `number`. Raises UserError."""
        value = event.get(field, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise UserError(f"{self.path}: event {number}: {field}={shown(value)}: must be microseconds from 0 to {most:g}")
        return float(value)

    def once(self, text: str) -> str:
        """A text, kept once. Raises UserError when all together are too long."""
        if text not in self._texts:
            self._letters += len(text)
            if self._letters > TEXTS:
                raise UserError(f"{self.path}: {self.texts_are} are longer than {TEXTS // 2**20} MiB")
        return self._texts.setdefault(text, text)
