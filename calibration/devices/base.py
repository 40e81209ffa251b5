"""What a device is asked, whatever its kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from calibration.devices.monitor import Monitor

if TYPE_CHECKING:  # the command line asks this room where it runs, before it needs numpy
    import numpy as np
    from numpy.typing import NDArray

Kind = Literal["cpu", "cuda"]
Action = Callable[[], Any]
Clock = Callable[[], float]


class Memory(ABC):
    """Bytes of tensors. base: held at the mark; peak: at most after it (or after entering); reserved: by the allocator then."""

    base = peak = reserved = 0

    @abstractmethod
    def __enter__(self) -> Self:
        """Begin, with the mark here."""

    @abstractmethod
    def mark(self) -> None:
        """Here begins what is asked for."""

    @abstractmethod
    def __exit__(self, *error: object) -> None:
        """The peak is known."""


class ComputeDevice(ABC):
    """One device of this machine, as one process sees it. index: among those that this process sees."""

    kind: ClassVar[Kind]
    backend: ClassVar[str]  # of torch.distributed
    ordered: ClassVar[bool]  # whether work is queued, so that the host goes on before it is done; a queue takes one rank
    any_source: ClassVar[bool]  # whether its backend receives from whichever rank sends first
    batch_norm: ClassVar[bool]  # whether torch.nn.SyncBatchNorm takes its tensors
    beyond: ClassVar[str]  # what `held` tells
    copies: ClassVar[int]  # of operands, at most, that are taken in turn so that none is in the cache

    def __init__(self, index: int = 0) -> None:
        self.index = index

    @classmethod
    def of_rank(cls, local_rank: int) -> Self:
        """The device of the process with this number on its node."""
        return cls(local_rank)

    # -- which -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def count(self) -> int:
        """How many this process sees."""

    @abstractmethod
    def select(self) -> None:
        """Work of this process goes to this device from now on."""

    @property
    @abstractmethod
    def torch_device(self) -> Any:
        """Where tensors live."""

    @property
    @abstractmethod
    def communicates(self) -> Any:
        """What `init_process_group` is told as `device_id`, None: nothing."""

    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """Plain data about it: name, memory in bytes, versions of its libraries, and what it says of itself."""

    @abstractmethod
    def versions(self) -> str:
        """Of the library of collectives and what it runs on."""

    @abstractmethod
    def precisions(self) -> tuple[str, ...]:
        """Precisions of matrix products that it has, the one of training first."""

    @property
    @abstractmethod
    def flash(self) -> bool:
        """Whether PyTorch's flash attention runs on it, in 16 bits."""

    @abstractmethod
    def use_tf32(self, allowed: bool) -> bool:
        """Whether products of fp32 run in TF32 from now on; whether they did."""

    # -- memory ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def free(self, ranks: int) -> float:
        """Bytes that this process may take when `ranks` processes share the machine."""

    @abstractmethod
    def cache(self) -> float:
        """Bytes of its largest cache: operands are taken from more memory than that."""

    @abstractmethod
    def held(self) -> float:
        """Bytes of this process that are not tensors."""

    @abstractmethod
    def touch(self, size: float) -> None:
        """Have so many bytes mapped before anything is timed, where the first touch of memory is paid by whoever makes it."""

    @abstractmethod
    def give_back(self) -> None:
        """What the allocator keeps for later is anybody's again: the library of collectives has an allocator of its own."""

    @abstractmethod
    def memory(self) -> Memory:
        """Follows what tensors take from entering, before the first one, to leaving."""

    # -- time ------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def synchronise(self) -> None:
        """Wait for everything that was queued."""

    @abstractmethod
    def times(self, action: Action, count: int, before: Action | None, batch: int, clock: Clock) -> NDArray[np.float64]:
        """Seconds of each of `count` stretches of `batch` actions, per action; `before` is run, not timed, ahead of each."""

    @abstractmethod
    def clock(self) -> Clock:
        """Of computations that wait for nobody."""

    @abstractmethod
    def monitor(self) -> Monitor:
        """What samples its clock, power and temperature."""
