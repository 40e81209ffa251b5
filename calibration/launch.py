"""Ranks: started here as local processes, or found in the environment that torchrun and Slurm scripts set.

`launch(work, ranks, *arguments)` runs `work(place, *arguments)` on every rank of a process group and returns what each returns.
Local ranks meet through a file (no port), are pinned to cores of their own while there are enough, and start with an allocator
that keeps its memory. Under torchrun this process is one of the ranks: the standard variables RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT are read and nothing else, and only rank 0 gets the results.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from topologies.reading import UserError

# glibc returns large buffers to the system and faults them in again, which costs 5 to 20 % of a step; these thresholds keep them
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
CONTRACT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
GRACE = 3.0  # seconds for the other ranks to report or end after the first one died
PATIENCE = timedelta(minutes=10)  # of a rank that waits for another

Device = Literal["cpu", "cuda"]
Hear = Callable[[Any], None]
_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out", "recv() timeout")


class RankError(UserError):
    """A rank failed: which, and its error line; `details` is all that it printed."""

    details = ""


@dataclass(frozen=True)
class Place:
    """Where a rank is. cores: those that it is pinned to; empty when it is not. `tell` passes plain data on to `hear`."""

    rank: int
    world: int
    local_rank: int
    device: Device
    cores: tuple[int, ...]
    tell: Hear

    @property
    def backend(self) -> str:
        """Of torch.distributed."""
        return "nccl" if self.device == "cuda" else "gloo"


def under_launcher() -> bool:
    """Whether this process is one of the ranks that torchrun or a script started."""
    return all(name in os.environ for name in CONTRACT)


def is_root() -> bool:
    """Whether this process prints and writes: not one of the other ranks under torchrun."""
    return not under_launcher() or os.environ["RANK"] == "0"


def need_torch() -> None:
    """UserError without torch. Nothing is imported."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("torch is not installed, and this runs the real thing: `pip install torch`")


def find_device() -> Device:
    """cuda when torch finds a GPU."""
    need_torch()
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def available_cores() -> tuple[int, ...]:
    """Cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def crowded(ranks: int, device: Device) -> str | None:
    """What to say when there are more ranks than cores."""
    cores = len(available_cores())
    if device == "cuda" or ranks <= cores:
        return None
    return (
        f"{ranks} processes share {cores} cores: they take turns, and times are those of a crowded machine, several times "
        "slower, that no price was measured for"
    )


def launch(work: Callable[..., Any], ranks: int, *arguments: Any, device: Device = "cpu", hear: Hear | None = None) -> list[Any]:
    """What `work(place, *arguments)` returned on each rank; empty on ranks other than 0 under torchrun.

    `work` is a function of a module; arguments and results can be pickled. hear: called with what ranks tell. Raises RankError
    with the first dead rank and its error line; on Ctrl-C ends all ranks and passes it on.
    """
    need_torch()
    if under_launcher():
        return _as_rank(work, ranks, arguments, device, hear or (lambda _: None))
    with tempfile.TemporaryDirectory(prefix="shardyard-") as folder:
        return _Local(Path(folder), work, ranks, arguments, device, hear or (lambda _: None)).run()


# -- this process is one of the ranks -----------------------------------------------------------------------------------------


def _as_rank(work: Callable[..., Any], ranks: int, arguments: Sequence[Any], device: Device, hear: Hear) -> list[Any]:
    import torch.distributed as dist

    place = _place_from_environment(device, hear)
    if place.world != ranks:
        raise UserError(f"WORLD_SIZE={place.world} of the launcher ≠ {ranks} ranks of the job")
    _prepare(place)
    try:
        _join(place, "env://")
    except Exception as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(f"rank {place.rank}: cannot meet the others at {address}: {_line(error)}") from None
    try:
        result = work(place, *arguments)
        results: list[Any] = [None] * place.world
        dist.gather_object(result, results if place.rank == 0 else None)
        return results if place.rank == 0 else []
    finally:
        dist.destroy_process_group()


def _place_from_environment(device: Device, tell: Hear) -> Place:
    numbers = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = os.environ[name]
        if not text.isdecimal():
            raise UserError(f"environment: {name}={text!r}: must be a whole number")
        numbers.append(int(text))
    return Place(numbers[0], numbers[1], numbers[2], device, (), tell)


def _prepare(place: Place) -> None:
    """Pin, choose the GPU, and compute with as many threads as there are cores."""
    import torch

    if place.cores:
        os.sched_setaffinity(0, place.cores)
        torch.set_num_threads(len(place.cores))
    if place.device == "cuda":
        if place.local_rank >= torch.cuda.device_count():
            found = torch.cuda.device_count()
            raise UserError(f"rank {place.rank}: needs GPU {place.local_rank} of this machine, and torch finds {found}")
        torch.cuda.set_device(place.local_rank)


def _join(place: Place, meeting: str) -> None:
    import torch
    import torch.distributed as dist

    gpu = torch.device("cuda", place.local_rank) if place.device == "cuda" else None
    dist.init_process_group(
        place.backend, init_method=meeting, rank=place.rank, world_size=place.world, timeout=PATIENCE, device_id=gpu
    )


def _line(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split("\n")[0].split()) or "no message"
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


# -- local processes ----------------------------------------------------------------------------------------------------------


class _Local:
    """Processes of this machine, their files in one folder: task, meeting, and of each rank result and error output."""

    def __init__(
        self, folder: Path, work: Callable[..., Any], ranks: int, arguments: Sequence[Any], device: Device, hear: Hear
    ) -> None:
        self.folder, self.ranks, self.device, self.hear = folder, ranks, device, hear
        (folder / "task").write_bytes(pickle.dumps((work, tuple(arguments))))
        self.processes: list[subprocess.Popen[str]] = []
        self.listeners: list[threading.Thread] = []
        self.told: list[Any] = []

    def run(self) -> list[Any]:
        """Start, listen, and collect."""
        try:
            for rank in range(self.ranks):
                self._start(rank)
            while any(process.poll() is None for process in self.processes):
                self._pass_on()
                if any(process.returncode for process in self.processes):
                    self._give_grace()
                    break
                time.sleep(0.02)
        finally:
            self._end()
        self._pass_on()
        outcomes = [self._outcome(rank) for rank in range(self.ranks)]
        refused = [outcome[1] for outcome in outcomes if outcome[0] == "refused"]
        if refused:
            raise UserError(refused[0])
        failed = [(rank, outcome[1]) for rank, outcome in enumerate(outcomes) if outcome[0] == "error"]
        if failed:  # the cause goes before ranks that died because another one did
            rank, line = min(failed, key=lambda one: (any(part in one[1] for part in _PEER), _ENDED in one[1]))
            failure = RankError(f"rank {rank} of {self.ranks} failed: {line}")
            failure.details = (self.folder / f"errors {rank}").read_text(errors="replace")
            raise failure
        return [outcome[1] for outcome in outcomes]

    def _start(self, rank: int) -> None:
        cores = available_cores()
        share = len(cores) // self.ranks if self.device == "cpu" else 0
        mine = cores[rank * share : (rank + 1) * share]
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | ALLOCATOR | {
            "PYTHONPATH": path, "RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": str(max(1, share)), "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }  # fmt: skip
        command = [sys.executable, "-m", "calibration.launch", str(self.folder), self.device, ",".join(map(str, mine))]
        with (self.folder / f"errors {rank}").open("w") as errors:
            # a session of its own: Ctrl-C reaches this process alone, which then ends the ranks
            process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                                       text=True, start_new_session=True)  # fmt: skip
        self.processes.append(process)
        self.listeners.append(threading.Thread(target=self._listen, args=(process,), daemon=True))
        self.listeners[-1].start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_TOLD):  # libraries may print too
                self.told.append(json.loads(line[len(_TOLD) :]))

    def _pass_on(self) -> None:
        while self.told:
            self.hear(self.told.pop(0))

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
        if code == -signal.SIGTERM:
            return "error", _ENDED
        lines = (self.folder / f"errors {rank}").read_text(errors="replace").strip().splitlines()
        if code < 0:
            name = signal.Signals(-code).name
            return "error", f"ended by {name}" + ("; out of memory?" if code == -signal.SIGKILL else "")
        return "error", f"ended with exit code {code}{': ' + lines[-1] if lines else ''}"


_TOLD = "told: "
_ENDED = "ended because another rank had failed"


def _main(folder: Path, device: Device, cores: str) -> None:
    """One local rank."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = int(os.environ["RANK"])

    def tell(message: Any) -> None:
        print(_TOLD + json.dumps(message), flush=True)

    place = Place(rank, int(os.environ["WORLD_SIZE"]), rank, device, tuple(int(core) for core in cores.split(",") if core), tell)
    outcome: tuple[str, Any]
    try:
        _prepare(place)
        _join(place, f"file://{folder / 'meeting'}")
        work, arguments = pickle.loads((folder / "task").read_bytes())
        outcome = "result", work(place, *arguments)
    except Exception as error:
        traceback.print_exc()
        outcome = "refused" if isinstance(error, UserError) else "error", _line(error)
    whole = folder / f"whole {rank}"
    whole.write_bytes(pickle.dumps(outcome))
    whole.rename(folder / f"result {rank}")
    sys.stdout.flush()
    os._exit(outcome[0] != "result")  # other ranks see a closed connection at once; no collective is left to wait for


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])  # type: ignore[arg-type]
