"""Worker processes of this machine that end with the process that started them, however that ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor


class Processes(ProcessPoolExecutor):
    """A pool of processes. Ctrl-C is heard by the parent alone, which ends them; when it is killed, they end by themselves."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, initializer=_end_with_parent)

    def end(self) -> None:
        """End at once, with what is under way."""
        workers = list((self._processes or {}).values())
        self.shutdown(wait=False, cancel_futures=True)
        for process in workers:
            process.terminate()


def _end_with_parent() -> None:
    """In a worker: of a parent that is gone, the pipe to it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_wait, daemon=True).start()


def _wait() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
