"""Clock, power and temperature of a device while it works, sampled beside it."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import NamedTuple, Self

PERIOD = 0.2  # seconds between samples
# bits of clocks_event_reasons.active (NVML, nvmlClocksEventReasons): what is not mere idleness or a setting
REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "thermal limit",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")
SLOWED = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # the name since driver 535, and before


class Moment(NamedTuple):
    """clock, highest: MHz; power, limit: W; temperature: °C; 0 where it is not known. reasons: why the clock is not higher."""

    time: float
    clock: float
    highest: float = 0.0
    power: float = 0.0
    limit: float = 0.0
    temperature: float = 0.0
    reasons: tuple[str, ...] = ()


class Monitor(ABC):
    """Samples every PERIOD seconds while it is entered; of a machine that does not say there are none."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._end()
        self._thread.join(timeout=5)

    @abstractmethod
    def _sample(self) -> None:
        """Add moments until it is over."""

    def _end(self) -> None:  # noqa: B027  # of most monitors nothing
        """What else is to be ended."""

    def since(self, seconds: float) -> dict[str, float | str]:
        """Medians of the last so many seconds, the hottest temperature, and every reason; empty where nothing is known."""
        return summary([moment for moment in self.moments if moment.time >= time.monotonic() - seconds])


def summary(moments: Sequence[Moment]) -> dict[str, float | str]:
    """Medians, the hottest temperature, and every reason in turn."""
    if not moments:
        return {}
    middle = {name: median(getattr(moment, name) for moment in moments) for name in ("clock", "highest", "power", "limit")}
    reasons = dict.fromkeys(reason for moment in moments for reason in moment.reasons)
    return middle | {"temperature": max(moment.temperature for moment in moments), "reasons": ", ".join(reasons)}


class CpuMonitor(Monitor):
    """The mean clock of all cores, as the kernel says it."""

    def _sample(self) -> None:
        while not self._over.wait(PERIOD):
            with suppress(OSError):
                with open("/proc/cpuinfo", encoding="utf-8") as file:
                    clocks = [float(each) for each in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", file.read(), re.M)]
                if clocks:
                    self.moments.append(Moment(time.monotonic(), sum(clocks) / len(clocks)))


class NvidiaMonitor(Monitor):
    """What nvidia-smi says, which comes with the driver. device: UUID or number."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self._process: subprocess.Popen[str] | None = None

    def _sample(self) -> None:
        for reasons in SLOWED:
            self._process = self._started(reasons)
            if self._process is None or self._read(self._process) or self._over.is_set():
                return

    def _started(self, reasons: str) -> subprocess.Popen[str] | None:
        command = [
            "nvidia-smi",
            f"--id={self.device}",
            f"--query-gpu={','.join((*FIELDS, reasons))}",
            "--format=csv,noheader,nounits",
            f"--loop-ms={round(1e3 * PERIOD)}",
        ]
        try:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return None

    def _read(self, process: subprocess.Popen[str]) -> bool:
        """Whether it said anything that is a sample."""
        assert process.stdout is not None
        said = False
        for line in process.stdout:
            moment = parsed(line, time.monotonic())
            if moment is not None:
                said = True
                self.moments.append(moment)
            if self._over.is_set():
                break
        process.terminate()  # one that was started when all was over already
        process.wait()
        return said

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


def free_memory(device: str) -> float | None:
    """Bytes of a GPU that nobody has taken, as nvidia-smi says; None where it does not. device: UUID or number."""
    command = ["nvidia-smi", f"--id={device}", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return 2.0**20 * float(said)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def parsed(line: str, now: float) -> Moment | None:
    """A line of nvidia-smi; None of one that is no sample. A value that the board does not have is 0."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != len(FIELDS) + 1:
        return None
    values = []
    for part in parts[:-1]:
        try:
            values.append(float(part))
        except ValueError:
            if not part.startswith("["):  # [N/A], [Not Supported]
                return None
            values.append(0.0)
    try:
        active = int(parts[-1], 16)
    except ValueError:
        active = 0
    clock, highest, power, limit, temperature = values
    reasons = tuple(name for bit, name in REASONS.items() if active & bit)
    return Moment(now, clock, highest, power, limit, temperature, reasons)
