"""Ranks as processes of this machine: started, listened to, ended together; `calibration.launch.ranks` says what for.

Each has a session of its own, so that Ctrl-C reaches the parent alone, and ends with its parent.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from calibration.devices import Kind, class_of
from calibration.launch.place import (
    ALLOCATOR,
    PATIENCE,
    Hear,
    Place,
    RankError,
    available_cores,
    join,
    leave,
    line_of,
    patience,
    prepare,
    uninterrupted,
    waited,
)
from calibration.launch.throttle import throttle
from topologies.reading import UserError

SILENCE = 5.0  # seconds until a rank that is stopped is told
GRACE = 3.0  # seconds for the other ranks to report or end after the first one died
_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out", "recv() timeout")
DEVICE = "eth0"  # of an emulated node
_MESSAGE = "told: "
_ENDED = "ended because another rank had failed"


def run_locally(
    work: Callable[..., Any],
    ranks: int,
    arguments: Sequence[Any],
    device: Kind,
    hear: Hear,
    nodes: Sequence[str],
    speeds: Mapping[int, float],
) -> list[Any]:
    """See `calibration.launch.ranks.launch`."""
    with tempfile.TemporaryDirectory(prefix="shardyard-") as folder:
        return LocalRanks(Path(folder), work, ranks, arguments, device, hear, nodes, speeds).run()


class LocalRanks:
    """Processes of this machine, their files in one folder: task, meeting, and of each rank result and error output."""

    def __init__(
        self,
        folder: Path,
        work: Callable[..., Any],
        ranks: int,
        arguments: Sequence[Any],
        device: Kind,
        hear: Hear,
        nodes: Sequence[str],
        speeds: Mapping[int, float],
    ) -> None:
        self.folder, self.ranks, self.device, self.hear = folder, ranks, device, hear
        self.nodes, self.speeds = nodes, speeds
        (folder / "task").write_bytes(pickle.dumps((work, tuple(arguments))))
        self.processes: list[subprocess.Popen[str]] = []
        self.listeners: list[threading.Thread] = []
        self.messages: list[Any] = []
        self.patience = PATIENCE.get()
        self.stopped: dict[int, float] = {}  # ranks that a signal stopped, and since when
        self.warned: set[int] = set()

    def run(self) -> list[Any]:
        """Start, listen, and collect."""
        try:
            for rank in range(self.ranks):
                self._start(rank)
            while None in (codes := [process.poll() for process in self.processes]):
                self._pass_on()
                self._look_for_stopped()
                if any(codes):
                    self._give_grace()
                    break
                time.sleep(0.02)
        finally:
            with uninterrupted():
                self._end()
        self._pass_on()
        outcomes = [self._outcome(rank) for rank in range(self.ranks)]
        refused = [outcome[1] for outcome in outcomes if outcome[0] == "refused"]
        if refused:
            raise UserError(refused[0])
        failed = [(rank, outcome[1]) for rank, outcome in enumerate(outcomes) if outcome[0] == "error"]
        if failed:  # the cause goes before ranks that died because another one did
            rank, line = min(failed, key=_consequence)
            failure = RankError(f"rank {rank} of {self.ranks} failed: {waited(line, self.patience)}")
            failure.details = (self.folder / f"errors {rank}").read_text(errors="replace")
            raise failure
        return [outcome[1] for outcome in outcomes]

    def _start(self, rank: int) -> None:
        cores = available_cores()
        share = len(cores) // self.ranks if not class_of(self.device).ordered else 0
        mine = cores[rank * share : (rank + 1) * share]
        root = str(Path(__file__).parents[__name__.count(".")])  # where this package is imported from
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        interface = DEVICE if self.nodes else os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        environment = (
            os.environ
            | ALLOCATOR
            | {
                "PYTHONPATH": path,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": str(max(1, share)),
                "GLOO_SOCKET_IFNAME": interface,
                "TORCHINDUCTOR_CACHE_DIR": os.environ.get(
                    "TORCHINDUCTOR_CACHE_DIR", str(self.folder / "inductor")
                ),  # not in /tmp
            }
        )
        speed = str(self.speeds.get(rank, 1.0))
        place = [str(self.folder), self.device, ",".join(map(str, mine)), str(self.patience), speed]
        command = [sys.executable, "-m", "calibration.launch.local", *place]
        if self.nodes:  # it becomes the command: signals reach that
            command = ["ip", "netns", "exec", self.nodes[rank * len(self.nodes) // self.ranks], *command]
        with (self.folder / f"errors {rank}").open("w") as errors:
            # a session of its own: Ctrl-C reaches this process alone, which then ends the ranks
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        self.listeners.append(threading.Thread(target=self._listen, args=(process,), daemon=True))
        self.listeners[-1].start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_MESSAGE):  # libraries may print too
                self.messages.append(json.loads(line[len(_MESSAGE) :]))

    def _pass_on(self) -> None:
        while self.messages:
            self.hear(self.messages.pop(0))

    def _look_for_stopped(self) -> None:
        """The others wait for a rank that a signal stopped (SIGSTOP, a debugger): say so, and end all when it does not go on."""
        now, limit = time.monotonic(), self.patience
        for rank, process in enumerate(self.processes):
            if not _is_stopped(process.pid):
                self.stopped.pop(rank, None)
                continue
            since = now - self.stopped.setdefault(rank, now)
            if since > limit:
                raise RankError(f"rank {rank} of {self.ranks} was stopped by a signal and did not go on for {limit:g} s")
            if since > SILENCE and rank not in self.warned:
                self.warned.add(rank)
                how = f"`kill -CONT {process.pid}` lets it go on; all are ended after {limit:g} s (--timeout)"
                print(f"rank {rank} of {self.ranks} was stopped by a signal: {how}", file=sys.stderr, flush=True)

    def _give_grace(self) -> None:
        until = time.monotonic() + GRACE
        while time.monotonic() < until and any(process.poll() is None for process in self.processes):
            time.sleep(0.02)

    def _end(self) -> None:
        for ask in (signal.SIGTERM, signal.SIGKILL):
            left = [process for process in self.processes if process.poll() is None]
            for process in left:
                process.send_signal(ask)
            until = time.monotonic() + GRACE
            while time.monotonic() < until and any(process.poll() is None for process in left):
                time.sleep(0.02)
        for listener in self.listeners:
            listener.join(timeout=GRACE)
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _outcome(self, rank: int) -> tuple[str, Any]:
        path, code = self.folder / f"result {rank}", self.processes[rank].returncode
        if path.exists():
            outcome: tuple[str, Any] = pickle.loads(path.read_bytes())
            return outcome
        if rank in self.stopped:
            return "error", "stopped by a signal"
        if code == -signal.SIGTERM:
            return "error", _ENDED
        lines = (self.folder / f"errors {rank}").read_text(errors="replace").strip().splitlines()
        if code < 0:
            name = signal.Signals(-code).name
            return "error", f"ended by {name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
        return "error", f"ended with exit code {code}{': ' + lines[-1] if lines else ''}"


def _consequence(ended: tuple[int, str]) -> tuple[bool, bool, bool]:
    """Causes first, then ranks that waited too long, then those that only saw another one go."""
    line = ended[1]
    return any(part in line for part in _PEER), _ENDED in line, waited(line, 0.0) == line


def _is_stopped(process: int) -> bool:
    """Whether a child is stopped; never on systems that do not say."""
    if not hasattr(os, "waitid"):
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _main(folder: Path, device: Kind, cores: str, speed: float) -> None:
    """One local rank."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    rank = int(os.environ["RANK"])

    def tell(message: Any) -> None:
        print(_MESSAGE + json.dumps(message), flush=True)

    place = Place(rank, int(os.environ["WORLD_SIZE"]), rank, device, tuple(int(core) for core in cores.split(",") if core), tell)
    outcome: tuple[str, Any]
    try:
        prepare(place)
        if speed < 1:
            throttle(speed)
        join(place, f"file://{folder / 'meeting'}")
        work, arguments = pickle.loads((folder / "task").read_bytes())
        outcome = "result", work(place, *arguments)
        leave()
    except Exception as error:
        traceback.print_exc()
        outcome = "refused" if isinstance(error, UserError) else "error", line_of(error)
    whole = folder / f"whole {rank}"
    whole.write_bytes(pickle.dumps(outcome))
    whole.rename(folder / f"result {rank}")
    sys.stdout.flush()
    os._exit(outcome[0] != "result")  # other ranks see a closed connection at once; no collective is left to wait for


def _end_with_parent(folder: Path) -> None:
    """The parent closes its end when it is gone, and then cannot clean up either."""
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    with patience(float(sys.argv[4])):
        _main(Path(sys.argv[1]), cast(Kind, sys.argv[2]), sys.argv[3], float(sys.argv[5]))
