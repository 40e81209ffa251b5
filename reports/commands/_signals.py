"""Ctrl-C and signals that ask for an end become a KeyboardInterrupt, at a moment when Python passes it on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)  # asked to end by somebody else than Ctrl-C
AGAIN = 0.01  # seconds
# Whose files lose what is raised in functions that they call. In imports, modules in C print it; Pydantic, building schemas or
# writing JSON, and NumPy, comparing, raise an error of their own for it; of callbacks of weak references Python drops it.
LOSING = (
    "<frozen importlib",
    f"{os.sep}pydantic{os.sep}",
    f"{os.sep}numpy{os.sep}_core{os.sep}_internal.py",
    weakref.__file__,
)


@contextmanager
def ended_cleanly() -> Iterator[None]:
    """Being ended is like Ctrl-C: whatever was started ends too. Signals that somebody handles or ignores (nohup) are left.

    Afterwards there is nothing to be kept, and they end the process.
    """
    from calibration.launch.launcher import under_launcher

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # a rank of a launcher has started nothing, and may be waiting where Python hears of no signal
    asked = () if under_launcher() else ENDING
    # Ctrl-C is at its default where `shardyard.command_line` began
    heard = [number for number in (signal.SIGINT, signal.SIGALRM, *asked) if signal.getsignal(number) == signal.SIG_DFL]
    interrupt = _Interrupt(can_wait=signal.SIGALRM in heard)
    for number in heard:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        if interrupt.can_wait:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


class _Interrupt:
    """Raises KeyboardInterrupt(signal), but not where it would be lost: then it waits until that is over."""

    def __init__(self, can_wait: bool) -> None:
        self.process, self.outside, self.pending, self.can_wait = os.getpid(), _losing(sys._getframe()), 0, can_wait

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Hear a signal, or the alarm that was set because of one."""
        if os.getpid() != self.process:  # a process that was forked since
            os._exit(128 + number)
        if number == signal.SIGALRM:
            number = self.pending
        if not number:  # the alarm of a signal that came again meanwhile
            return
        if self.can_wait and _losing(frame) > self.outside:
            self.pending = number
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
            return
        self.pending = 0
        raise KeyboardInterrupt(number)


def _losing(frame: FrameType | None) -> int:
    """How many frames are of `LOSING`."""
    count = 0
    while frame is not None:
        count += any(part in frame.f_code.co_filename for part in LOSING)
        frame = frame.f_back
    return count
