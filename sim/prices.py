"""What things cost: a `Profile` of measured constants and the `Prices` that turn a kernel into seconds on a GPU.

Every price is a roofline with an efficiency that depends on shape. Efficiencies are fractions of the GPU's specified peaks, so a
profile measured on one variant serves its siblings (an A100 of 40 GB and one of 80 GB). A profile is data: files of
`calibration/profiles`, made by `calibration/kernel_fit.py` from kernel and collective measurements, never from training steps.

The shape formulas are plain arithmetic that numbers and numpy arrays share, so the fit and the simulation use the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Protocol

from pydantic import Field, model_validator

from sim.program import WRAPPING, Kernel
from sim.protocols import IN_SWITCH, P2P, PROTOCOLS, SIMPLE, LinkPrice, Transport, complete
from sim.tables import CollectiveTable, OperatorTable, Wrapping
from topologies.board import KINDS, UNPRICED
from topologies.reading import Config, UserError, nearest
from topologies.units import Bytes, BytesPerSecond, Seconds

Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]

_PART = {
    "gemm": "gemm",
    "attention_forward": "attention",
    "attention_backward": "attention",
    "memory": "memory",
    "reduction": "memory",
    "optimizer": "memory",
}  # kind of kernel -> part of the profile that prices it
_SHAPE = {"gemm": ("batch", "m", "n", "k"), "attention": ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "causal")}
_WIDTH = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}  # bytes of an operand's element
_SIBLING = {"bf16": "fp16", "fp16": "bf16"}  # tensor cores run both alike


class Hardware(Protocol):
    """What prices need to know of a GPU: specified peaks in FLOP/s by dtype, bytes per second, multiprocessors."""

    @property
    def name(self) -> str: ...

    @property
    def peak(self) -> Mapping[Any, float]: ...

    @property
    def memory_bandwidth(self) -> float: ...

    @property
    def sms(self) -> int: ...

    @property
    def memory(self) -> float: ...


class Provenance(Config):
    """Where the numbers of one part of a profile come from."""

    measured: bool  # on a GPU of this kind; otherwise the numbers follow from `rule`
    machine: str  # what was measured
    versions: str  # software versions as far as the source names them
    date: str  # of the measurement, or of the source's commit
    source: str  # where the measurements are published
    grid: str  # which shapes or sizes were measured
    rule: str = ""  # how the constants follow from the measurements, with every assumption
    fit_error: NotNegative | None = None  # median relative error on the points fitted to
    heldout_error: NotNegative | None = None  # median relative error on points kept out of the fit, of the sizes of training
    errors: dict[str, NotNegative] = Field(default_factory=dict)  # more of them, by what was left out of the fit
    spread: dict[str, tuple[float, float, float]] = Field(default_factory=dict)  # class of shapes held out -> 10th, 50th and 90th
    # percentile of measured over predicted seconds, minus 1: what an error bar needs
    measured_range: dict[str, tuple[float, float]] = Field(default_factory=dict)  # quantity -> lowest and highest value measured


class Tile(Config):
    """A kernel's output tile: `m` × `n` elements per multiprocessor, at `efficiency` of the best tile's rate."""

    m: int = Field(gt=0)
    n: int = Field(gt=0)
    efficiency: Fraction
    resident: int = Field(1, gt=0)  # how many a multiprocessor works on at a time; they share its rate, and end together


class GemmCurve(Config):
    """Matrix products of one dtype: whole tiles on multiprocessors, blended with the time to move the operands; and never faster
    than the board's power limit delivers the energy that they take.
    """

    efficiency: Fraction  # of the specified peak that the best tile sustains
    tiles: tuple[Tile, ...] = Field(min_length=1)
    depth: NotNegative = 0.0  # a tile's start and end cost as much as this many more k
    wave: Annotated[float, Field(ge=0, le=1)] = 1.0  # 1: the last wave of tiles counts as whole; 0: perfectly balanced
    split: Seconds = 2e-6  # extra time of a product whose k is cut in parts, when there are few tiles
    memory: Fraction = 0.8  # of the memory bandwidth when limited by it
    blend: float = Field(4.0, ge=1)  # arithmetic and traffic overlap: (a^p + t^p)^(1/p); large p is the maximum
    fixed: Seconds = 0.0  # start and end of a kernel
    sustained: Fraction = 1.0  # of the specified peak that the power limit sustains, traffic apart
    byte_energy: NotNegative = 0.0  # a byte of traffic takes as much energy as so many FLOPs
    exposed: Annotated[float, Field(ge=0, le=1)] = 0.6  # of the traffic to accumulate into a result that is there already
    aligned: dict[int, Fraction] = Field(default_factory=dict)  # part of the tiles' rate by `Kernel.alignment`; 1 where not named


class AttentionCurve(Config):
    """Fused attention: blocks of queries spread over multiprocessors."""

    efficiency: Fraction  # of the specified peak, in the limit of long sequences and large heads
    head_half: NotNegative = 0.0  # head dimension at which half of the rate is reached
    keys_half: NotNegative = 0.0  # a block of queries costs as much as this many keys more
    block: int = Field(128, gt=0)  # queries that one multiprocessor handles at a time
    wave: Annotated[float, Field(ge=0, le=1)] = 1.0  # as in GemmCurve
    fixed: Seconds = 0.0  # start and end of a kernel
    keys_block: int = Field(1, gt=0)  # keys behind the causal mask are left out in whole blocks of so many
    backward: Positive = 0.8  # rate of the backward pass (2.5 times the FLOPs) over that of the forward pass, `fixed` apart


class MemoryCurve(Config):
    """Kernels bound by memory traffic."""

    efficiency: Fraction  # of the specified memory bandwidth
    reduction: Fraction = 0.6  # the same, of kernels that need whole rows or columns
    fixed: Seconds = 0.0
    operators: dict[str, OperatorTable] = Field(default_factory=dict)  # by `Kernel.variant`, before the rates above


class Overhead(Config):
    """Memory that a process needs besides its tensors."""

    context: Bytes  # the driver's context and loaded kernels
    communicator: Bytes  # buffers of one communicator
    reserve: Annotated[float, Field(ge=0, lt=1)]  # allocator's fragmentation, as a fraction of what the tensors take


class Profile(Config):
    """Measured prices of one kind of machine."""

    name: str
    gpu: str  # catalogue name of the GPU that was measured
    applies_to: tuple[str, ...] = ()  # catalogue names that it serves
    provenance: dict[str, Provenance]  # by part: gemm, attention, memory, launch, links, overhead
    gemm: dict[str, GemmCurve] = Field(min_length=1)  # by dtype
    attention: AttentionCurve
    older: dict[str, AttentionCurve] = Field(default_factory=dict)  # earlier fused kernels, by `Kernel.variant`
    memory: MemoryCurve
    optimizer: Fraction  # of the memory bandwidth, for multi-tensor updates
    launch: Seconds  # host time to launch one kernel
    eager: Seconds = 0.0  # the same of a kernel that a Python module of a framework launches; 0: as `launch`
    synchronous: bool = False  # the host waits for every kernel (a CPU): then `launch` is part of the kernel's time
    slowdown: float = Field(1.0, ge=1)  # of compute while a collective runs on the same GPU
    links: dict[str, LinkPrice]  # protocol Simple, which every profile prices
    collective_launch: Seconds  # software latency of one collective, protocol Simple
    protocols: dict[str, Transport] = Field(default_factory=dict)  # the other ones, by name: sim/protocols.py
    copy_rate: Annotated[BytesPerSecond, Field(gt=0)] = float("inf")  # at which a rank copies its own piece in a collective
    tables: tuple[CollectiveTable, ...] = ()  # measured collectives: they go before the formula
    wire: dict[str, Positive] = Field(default_factory=dict)  # by operation, or "operation/ranks" of groups of so many: how many
    # times as long as its algorithm needs the library keeps links busy; not in tables, which were measured
    processes: int = Field(0, ge=0)  # of a node without GPUs, that had a core each when it was measured; 0: GPUs
    wrapping: dict[str, Wrapping] = Field(
        default_factory=dict
    )  # of PyTorch's wrappers, by "axis/operation", e.g. "dp/all_gather"
    overhead: Overhead

    @model_validator(mode="after")
    def _complete(self) -> Profile:
        known = sorted({*PROTOCOLS, *IN_SWITCH, *P2P} - {SIMPLE})
        unknown = sorted(set(self.protocols) - set(known))
        if unknown:
            raise ValueError(f"protocols={unknown}: must be of {', '.join(known)} (Simple is `links`)")
        missing = [kind for kind in KINDS if kind not in (*self.links, *UNPRICED)]
        if missing:
            raise ValueError(f"links={sorted(self.links)}: must price every kind of link; missing: {', '.join(missing)}")
        return self

    def launching(self, eager: bool) -> float:
        """Host seconds per kernel; 0 where launching is part of the kernel's own time."""
        if self.synchronous:
            return 0.0
        return self.eager if eager and self.eager else self.launch

    def every_protocol(self) -> dict[str, Transport]:
        """All protocols by name, Simple among them, with every kind of link priced."""
        simple = {kind: self.link(kind) for kind in KINDS}
        result = {SIMPLE: Transport.model_construct(base=self.collective_launch, links=simple)}
        for name, one in self.protocols.items():
            result[name] = Transport.model_construct(base=one.base, links=complete(name, one.links, simple))
        return result

    def link(self, kind: str) -> LinkPrice:
        """The price of a kind of link; rates of the node's CPUs are as they are described."""
        return self.links.get(kind) or LinkPrice.model_construct(efficiency=1.0, latency=0.0, fill=0.0)


def gemm_seconds(
    curve: GemmCurve,
    peak: float,
    bandwidth: float,
    sms: int,
    shape: tuple[Any, Any, Any, Any],
    traffic: Any,
    least: Callable[..., Any] = min,
    rate: float = 1.0,
) -> Any:
    """Seconds of the product `shape` = (batch, m, n, k) that moves `traffic` bytes, with the fastest tile, at the clock that the
    power limit allows. rate: part of the tiles' rate that its alignment leaves.

    The energy of a product is that of its FLOPs and of its traffic, whatever the tiles; multiprocessors that wait for the last
    wave take little. Numbers, or arrays of one length when `least` is `np.minimum`.
    """
    free, energy = (
        unlimited_seconds(curve, peak, bandwidth, sms, shape, traffic, least, rate),
        energy_seconds(curve, peak, shape, traffic),
    )
    return curve.fixed + (free + energy + abs(free - energy)) / 2  # the longer


def energy_seconds(curve: GemmCurve, peak: float, shape: tuple[Any, Any, Any, Any], traffic: Any) -> Any:
    """Seconds in which the power limit delivers the energy of the product `shape` = (batch, m, n, k) with `traffic` bytes."""
    batch, m, n, k = shape
    return (2 * batch * m * n * k + curve.byte_energy * traffic) / (peak * curve.sustained)


def unlimited_seconds(
    curve: GemmCurve,
    peak: float,
    bandwidth: float,
    sms: int,
    shape: tuple[Any, Any, Any, Any],
    traffic: Any,
    least: Callable[..., Any] = min,
    rate: float = 1.0,
) -> Any:
    """The same at the highest clock, without `fixed`."""
    batch, m, n, k = shape
    k = k / rate
    move = traffic / (bandwidth * curve.memory)
    partial = 8 * batch * m * n / (bandwidth * curve.memory)  # an fp32 partial result is written and read
    best: Any = None
    for tile in curve.tiles:
        step = 2 * tile.m * tile.n * sms / (peak * curve.efficiency * tile.efficiency)  # one tile, one k
        tiles = batch * -(-m // tile.m) * -(-n // tile.n)
        least_waves = (tiles + sms + abs(tiles - sms)) / (2 * sms)  # max(tiles / sms, 1)
        together = tiles > sms * tile.resident  # otherwise each multiprocessor has as many as fall to it
        rounds = -(-tiles // sms) * (1 - together) + -(-tiles // (sms * tile.resident)) * tile.resident * together
        waves = curve.wave * rounds + (1 - curve.wave) * least_waves
        whole = waves * step * (k + curve.depth)
        parts = least(sms // tiles + (tiles > sms), 8)
        cut = waves * step * (k / parts + curve.depth) + curve.split + parts * partial
        seconds = least(whole, cut)
        best = seconds if best is None else least(best, seconds)
    return (best**curve.blend + move**curve.blend) ** (1 / curve.blend)


def attention_seconds(
    curve: AttentionCurve, peak: float, sms: int, shape: tuple[Any, ...], least: Callable[..., Any] = min
) -> Any:
    """Seconds of arithmetic of a fused forward pass of `shape` = (batch, heads, kv_heads, queries, keys, head_dim, causal).

    The mask of causal attention is aligned at the last query and the last key. Numbers, or arrays when `least` is `np.minimum`.
    """
    batch, heads, _, queries, keys, dim, causal = shape
    masked = least(queries, keys) ** 2 / 2
    seen = keys - causal * masked / queries  # keys that a query sees, on average
    per_query = least(keys, seen + causal * (curve.keys_block - 1) / 2)
    rate = peak * curve.efficiency * dim / (dim + curve.head_half) / sms
    blocks = batch * heads * -(-queries // curve.block)
    least_waves = (blocks + sms + abs(blocks - sms)) / (2 * sms)
    waves = curve.wave * -(-blocks // sms) + (1 - curve.wave) * least_waves
    return curve.fixed + waves * 4 * curve.block * dim * (per_query + curve.keys_half) / rate


def attention_backward_seconds(curve: AttentionCurve, forward: Any) -> Any:
    """Seconds of arithmetic of the backward pass of a forward pass that takes `forward`: 2.5 times the FLOPs (Dao 2023,
    arXiv:2307.08691, counts 5 products for 2), and the start and end of one kernel, too.
    """
    return curve.fixed + (forward - curve.fixed) * 2.5 / curve.backward


class Prices:
    """Seconds of device time for kernels on `gpu`, by `profile`."""

    def __init__(self, profile: Profile, gpu: Hardware) -> None:
        self.profile = profile
        self.gpu = gpu
        self._sms = max(gpu.sms, 1)  # a CPU process counts as one
        self.seconds = lru_cache(maxsize=65536)(self._seconds)
        self._tables = {(one.operation, one.ranks, one.nodes): one for one in profile.tables}
        self.choices: dict[Hashable, dict[Hashable, Any]] = {}  # of collective algorithms, by topology and grid (sim.pricing)

    def table(self, operation: str, ranks: int, nodes: int) -> CollectiveTable | None:
        """The measured prices of `operation` among exactly so many ranks on so many nodes."""
        return self._tables.get((operation, ranks, nodes))

    def _seconds(self, kernel: Kernel) -> float:
        if kernel.kind == "gemm":
            return self._gemm(kernel)
        if kernel.kind.startswith("attention"):
            return self._attention(kernel)
        if kernel.variant == WRAPPING and self.profile.wrapping:
            return 0.0
        memory = self.profile.memory
        if kernel.variant in memory.operators:
            return memory.operators[kernel.variant].seconds(kernel.bytes)
        efficiency = {"optimizer": self.profile.optimizer, "reduction": memory.reduction}.get(kernel.kind, memory.efficiency)
        return memory.fixed + kernel.bytes / (self.gpu.memory_bandwidth * efficiency)

    def _peak(self, dtype: str) -> float:
        try:
            return self.gpu.peak[dtype]
        except KeyError:
            raise UserError(f"dtype={dtype!r}: the GPU has no such peak{nearest(dtype, self.gpu.peak)}") from None

    def _curve(self, dtype: str) -> GemmCurve:
        """The curve of a dtype, or one that was measured with another: in the same part of its peak, but a tile starts and ends,
        and bytes are paid for, in as many seconds as there.
        """
        curves = self.profile.gemm
        found = curves.get(dtype) or curves.get(_SIBLING.get(dtype, ""))
        if found is not None:
            return found
        measured, curve = next(iter(curves.items()))
        slower = self._peak(dtype) / self.gpu.peak.get(measured, self._peak(dtype))
        return curve.model_copy(update={"depth": curve.depth * slower, "byte_energy": curve.byte_energy * slower})

    def _gemm(self, kernel: Kernel) -> float:
        batch, m, n, k = kernel.shape
        curve, peak, bandwidth = self._curve(kernel.dtype), self._peak(kernel.dtype), self.gpu.memory_bandwidth
        width = _WIDTH[kernel.dtype]
        plain = batch * (width * (m * k + k * n) + max(width, 2) * m * n)  # a result of 16 bits or more, written once
        more = max(0.0, kernel.bytes - plain)  # to read and write what the result is added to
        shape, rate = (batch, m, n, k), curve.aligned.get(kernel.alignment, 1.0)
        price = gemm_seconds(curve, peak, bandwidth, self._sms, shape, min(kernel.bytes, plain), rate=rate)
        return float(price + curve.exposed * more / (bandwidth * curve.memory))

    def _attention(self, kernel: Kernel) -> float:
        curve = self.profile.older.get(kernel.variant) if kernel.variant else self.profile.attention
        if curve is None:
            raise UserError(f"attention={kernel.variant}: profile '{self.profile.name}' has no price of it{_has(self.profile)}")
        forward: float = attention_seconds(curve, self._peak(kernel.dtype), self._sms, kernel.shape)
        arithmetic = attention_backward_seconds(curve, forward) if kernel.kind == "attention_backward" else forward
        return max(arithmetic, curve.fixed + kernel.bytes / (self.gpu.memory_bandwidth * self.profile.memory.efficiency))

    def extrapolation(self, kernel: Kernel) -> str | None:
        """Why the price of `kernel` lies outside what was measured, or None when it is inside."""
        part = _PART[kernel.kind]
        provenance = self.profile.provenance.get(part)
        if provenance is None or not provenance.measured:
            return f"{part}: not measured for profile '{self.profile.name}'"
        if part == "gemm" and not {kernel.dtype, _SIBLING.get(kernel.dtype)} & set(self.profile.gemm):
            return f"gemm: {kernel.dtype} was not measured, priced as {next(iter(self.profile.gemm))}"
        for name, value in zip(_SHAPE.get(part, ()), kernel.shape, strict=False):
            low, high = provenance.measured_range.get(name, (value, value))
            if not low <= value <= high:
                far = value / high if value > high > 0 else low / value if value > 0 else float("inf")
                return f"{part}: {name}={value} is outside the measured {low:g} to {high:g}, {far:.3g} times"
        return None


def _has(profile: Profile) -> str:
    return f", only of {', '.join(profile.older)}" if profile.older else ""
