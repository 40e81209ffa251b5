"""A time limit that holds wherever a program is: between two lines of Python, or waiting for a result."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN = 0.05  # seconds after which TimeUp is raised again, should something have dropped it: imports and destructors do


class TimeUp(BaseException):
    """The time is over. No Exception, so that nothing on its way takes it for a failure of its own."""


class Deadline:
    """So many seconds from `began` (`time.perf_counter`)."""

    def __init__(self, seconds: float, began: float | None = None) -> None:
        self.at = (time.perf_counter() if began is None else began) + seconds

    @property
    def left(self) -> float:
        """Seconds; not below 0."""
        return max(0.0, self.at - time.perf_counter())

    @property
    def over(self) -> bool:
        """Whether the time is."""
        return time.perf_counter() >= self.at

    @contextmanager
    def cut(self) -> Iterator[None]:
        """TimeUp is raised in the body when the time is over. Outside of the main thread, before it only.

        Whoever heard the alarm before still hears it.
        """
        if self.over:
            raise TimeUp
        if self.at == float("inf") or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
            yield
            return
        before, inside = signal.getsignal(signal.SIGALRM), True

        def hear(number: int, frame: FrameType | None) -> None:
            if inside and self.over:
                raise TimeUp
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGALRM, hear)
        signal.setitimer(signal.ITIMER_REAL, self.left or AGAIN, AGAIN)
        try:
            yield
        finally:
            inside = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if callable(before):  # whose own alarm may have been waiting
                signal.raise_signal(signal.SIGALRM)
