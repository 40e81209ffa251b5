"""Worker processes of this machine that end with the process that started them, however that ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future, ProcessPoolExecutor


class Processes(ProcessPoolExecutor):
    """A pool of processes. Ctrl-C is heard by the parent alone, which ends them; when it is killed, they end by themselves."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, initializer=_end_with_parent)

    def end(self) -> None:
        """End at once, with what is under way."""
        for item in list(self._pending_work_items.values()):  # cancelled ones that the pool's thread would die of
            if item.future.cancelled():
                item.future = Future()
        for process in list((self._processes or {}).values()):
            process.kill()
        # the pool's thread sees them gone and closes its pipes in order; of a pool that is shut down first and not waited for
        # Python 3.11 writes to a closed pipe when it ends (concurrent.futures.process._python_exit)
        self.shutdown()


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
