"""A `Profile` of measured constants, and the `Prices` that turn a kernel into seconds on a GPU.

Every price is a roofline with an efficiency that depends on shape. Efficiencies are fractions of the GPU's specified peaks, so a
profile measured on one variant serves its siblings (an A100 of 40 GB and one of 80 GB). A profile is data: files of
`sim/pricing/profiles`, made by `calibration/fit/published_kernels/refit.py` from kernel and collective measurements, never from
training steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import inf
from typing import Annotated, Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary

from pydantic import Field, model_validator

from sim.pricing.kernel_curves import (
    POWER,
    AttentionCurve,
    Fp8Attention,
    Fraction,
    GemmCurve,
    Hardware,
    MemoryCurve,
    Positive,
    Product,
    Rates,
    attention_backward_seconds,
    attention_seconds,
    gemm_clocks,
    ordered_splits,
    ordered_stretch,
)
from sim.pricing.provenance import Provenance
from sim.pricing.transfers.measured_tables import CollectiveTable, Wrapping
from sim.pricing.transfers.protocols import (
    COLLNET,
    IN_SWITCH,
    IN_SWITCH_COLLNET,
    P2P,
    PROTOCOLS,
    SENDS,
    SIMPLE,
    LinkPrice,
    Transport,
    complete,
    with_collnet,
    with_loops,
    with_rings,
)
from sim.pricing.transfers.protocols import Rates as LinkRates
from sim.pricing.transfers.protocols import rates as link_rates
from sim.program import EARLY_CUBLAS, WRAPPER_COPY, Collective, Kernel, Send
from sim.remembered import kept
from topologies.board import KINDS, UNPRICED
from topologies.cluster_files import gpu_names, load_gpu
from topologies.documents.units import Bytes, BytesPerSecond, Seconds
from topologies.hardware import AT, Gpu
from topologies.links.topology import kind_of_link
from topologies.reading import Config, UserError, nearest

_PART = {
    "gemm": "gemm",
    "attention_forward": "attention",
    "attention_backward": "attention",
    "memory": "memory",
    "reduction": "memory",
    "optimizer": "memory",
}  # kind of kernel -> part of the profile that prices it
_SHAPE = {"gemm": ("batch", "m", "n", "k"), "attention": ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "causal")}
_WIDTH = {
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "fp4": 0.5625,
}  # bytes of an operand's element; of fp4 with scales
SDPA = "sdpa"  # the variant that is PyTorch's own: where it was not measured, it may be the GPU's fastest (cuDNN's on Blackwell)
FORWARD = ("forward", "recompute")  # phases of kernels of a forward pass
# Of a multi-tensor update: elements of a thread block of 512 threads (multi_tensor_apply.cuh), and how many blocks have room on a
# multiprocessor, all of whose registers two take (github.com/pytorch/pytorch pull 123566)
BLOCK_ELEMENTS, BLOCKS_AT_ONCE = 65536, 2
REMEMBERED = 65536  # kernels, and products
_CLOSEST = {"fp4": "fp8"}  # whose tiles are alike: it stands in where a type was not measured
_SIBLING = {"bf16": "fp16", "fp16": "bf16"}  # tensor cores run both alike


class Crowding(Config):
    """What kernels take longer in a training step than alone: other kernels leave nothing in caches, and other ranks use the
    memory too.
    """

    factor: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    rate: Annotated[BytesPerSecond, Field(gt=0)] = float("inf")  # of operands and results of matrix products, besides


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
    provenance: dict[str, Provenance]  # by part: gemm, attention, memory, launch, links, overhead; SDPA, where it is another
    gemm: dict[str, GemmCurve] = Field(min_length=1)  # by dtype
    gemm_of: dict[str, dict[str, GemmCurve]] = Field(default_factory=dict)  # instead, by catalogue name of a GPU that it serves
    sustained_of: dict[str, dict[str, Fraction]] = Field(default_factory=dict)  # the same of `GemmCurve.sustained` alone, where
    # it was measured; otherwise it follows from both boards' watts
    forward: dict[str, GemmCurve] = Field(default_factory=dict)  # the same of forward passes, where they were fitted apart
    attention: AttentionCurve
    attention_of: dict[str, AttentionCurve] = Field(default_factory=dict)  # instead, by catalogue name of a GPU that it serves
    older: dict[str, AttentionCurve] = Field(default_factory=dict)  # earlier fused kernels, by `Kernel.variant`
    fp8_attention: Fp8Attention | None = None  # None: kernels in fp8 have no price
    memory: MemoryCurve
    optimizer: Fraction  # of the memory bandwidth, for multi-tensor updates
    update_block: Seconds = 0.0  # thread blocks of an update in one pass that do not fill the GPU take at least; 0: not known
    launch: Seconds  # host time to launch one kernel
    eager: Seconds = 0.0  # the same of a kernel that a Python module of a framework launches; 0: as `launch`
    collective_call: Seconds = 0.0  # the same of a collective that it calls: Python, c10d, launch; 0: as a kernel
    throttling: float = Field(POWER, ge=1e-3, le=10)  # a lower limit's clock falls as its watts to this power
    variability: float = Field(0.0, ge=0, le=1)  # standard deviation of the logarithm of kernels' seconds among GPUs of this kind
    synchronous: bool = False  # the host waits for every kernel (a CPU): then `launch` is part of the kernel's time
    crowding: dict[Literal["forward", "backward"], Crowding] = Field(default_factory=dict)  # of the kernels of a pass
    anchors: dict[str, Seconds] = Field(default_factory=dict)  # measured again beside executions: see calibration/drift.py
    slowdown: float = Field(1.0, ge=1, le=1e6)  # of compute while a collective runs on the same GPU
    links: dict[str, LinkPrice]  # protocol Simple, which every profile prices
    collective_launch: Seconds  # software latency of one collective, protocol Simple
    protocols: dict[str, Transport] = Field(default_factory=dict)  # the other ones, by name: sim/pricing/transfers/protocols.py
    rings: dict[str, LinkPrice] = Field(
        default_factory=dict
    )  # a ring's step between nodes by protocol, where it was measured; absent: what other algorithms pay
    tuner: bool = False  # a plugin of the network chooses what is fastest instead of NCCL's estimate: sim/pricing/transports.py
    sends_ll: Bytes = 16 * 1024.0  # for one peer up to which NCCL's all-to-all in a node is in LL: 16 KiB, until 2.28 by channel
    copy_rate: Annotated[BytesPerSecond, Field(gt=0)] = float("inf")  # at which a rank copies its own piece in a collective
    tables: tuple[CollectiveTable, ...] = ()  # measured collectives: they go before the formula
    narrow_sum: Seconds = 0.0  # more for each number of 16 bits that a rank adds up in a collective of `tables`
    wire: dict[str, Positive] = Field(default_factory=dict)  # by operation, or "operation/ranks" of groups of so many: how many
    # times as long as its algorithm needs the library keeps links busy; not in tables, which were measured
    processes: int = Field(0, ge=0, le=2**20)  # of a node without GPUs, that had a core each when it was measured; 0: GPUs
    wrapping: dict[str, Wrapping] = Field(
        default_factory=dict
    )  # of PyTorch's wrappers, by "axis/operation", e.g. "dp/all_gather"; per matrix in a split backward pass, by its bytes of
    # the output's gradient: "pp/weight_gradient"; and per pass that its pipeline runtime calls: "pp/pass"
    overhead: Overhead

    @model_validator(mode="after")
    def _complete(self) -> Profile:
        known = sorted({*PROTOCOLS, *IN_SWITCH, *P2P, *SENDS, *COLLNET, *IN_SWITCH_COLLNET} - {SIMPLE})
        unknown = sorted(set(self.protocols) - set(known))
        if unknown:
            raise ValueError(f"protocols={unknown}: must be of {', '.join(known)} (Simple is `links`)")
        if self.rings and set(self.rings) != {*self.protocols, SIMPLE} & set(PROTOCOLS):
            raise ValueError(f"rings={sorted(self.rings)}: must be of the same protocols as prices, or of none")
        missing = [kind for kind in KINDS if kind not in (*self.links, *UNPRICED)]
        if missing:
            raise ValueError(f"links={sorted(self.links)}: must price every kind of link; missing: {', '.join(missing)}")
        return self

    def launching(self, eager: bool) -> float:
        """Host seconds per kernel; 0 where launching is part of the kernel's own time."""
        if self.synchronous:
            return 0.0
        return self.eager if eager and self.eager else self.launch

    def interpreted(self, eager: bool) -> float:
        """The part of a launch in which Python runs: all of it but the launch itself, where both are known."""
        seconds = self.launching(eager)
        return seconds - self.launch if eager and self.eager > self.launch else seconds

    def calling(self, eager: bool) -> float:
        """Host seconds that the call of a collective takes longer than the launch of a kernel."""
        return max(0.0, self.collective_call - self.launching(eager)) if eager and not self.synchronous else 0.0

    def every_protocol(self) -> dict[str, Transport]:
        """All protocols by name, Simple among them, with every kind of link priced."""
        simple = {kind: self.link(kind) for kind in KINDS}
        result = {SIMPLE: Transport.model_construct(base=self.collective_launch, links=simple)}
        for name, protocol in self.protocols.items():
            links = complete(name, protocol.links, simple)
            result[name] = protocol.model_copy(update={"links": links})
        further = simple["spine"].latency - simple["nic"].latency
        result = with_loops(with_rings(result, self.rings, further), further)
        return with_collnet(result, simple)

    def link(self, kind: str) -> LinkPrice:
        """The price of a kind of link; rates of the node's CPUs are as they are described."""
        return self.links.get(kind) or LinkPrice.model_construct(efficiency=1.0, latency=0.0, fill=0.0)


class Extrapolation(NamedTuple):
    """That a price lies outside what was measured: what of prices it concerns, of which one note is enough; a sentence; by what
    factor a size lies outside.
    """

    kind: str
    note: str
    far: float = inf


class Prices:
    """Seconds of device time for kernels on `gpu`, by `profile`."""

    def __init__(self, profile: Profile, gpu: Hardware) -> None:
        self.profile = profile
        self.gpu = gpu
        self._sms = max(gpu.sms, 1)  # a CPU process counts as one
        self._shares, self._watts = _power_shares(profile.gpu, gpu)
        self.seconds = lru_cache(maxsize=REMEMBERED)(self._seconds)
        self._curves: dict[str, GemmCurve] = {}
        self._products: dict[Hashable, float] = {}
        self._tables = {(table.operation, table.ranks, table.nodes): table for table in profile.tables}
        # what sim.pricing.transfers.collective_costs has worked out: algorithms by topology and grid, costs by wiring
        self.choices: dict[Hashable, Any] = {}
        self.blocks: dict[Hashable, tuple[Any, dict[str, Extrapolation]]] = {}  # blocks, by sim.pricing.op_costs, with notes
        self.runs: dict[Hashable, tuple[Any, dict[str, Extrapolation]]] = {}  # the same of runs of items
        self.chains: dict[Hashable, tuple[Any, Any]] = {}  # runs in a row, by their number and objects, which are kept
        self.outside: dict[Hashable, dict[str, Extrapolation]] = {}  # notes on the kernels of runs of items
        self.transfers: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()
        self.scaled: dict[Hashable, Prices] = {}  # by strategies.planner.sensitivity: with one of them multiplied
        self.clocked: dict[float, Prices] = {}  # by the part of its clock at which the GPU runs

    def at_clock(self, clock: float) -> Prices:
        """Prices of the GPU at a part of its clock."""
        if clock not in self.clocked:
            self.clocked[clock] = Prices(self.profile, cast(Gpu, self.gpu).at_clock(clock))
        return self.clocked[clock]

    def slowing(self, work: Collective | Send) -> float | None:
        """The factor by which kernels take longer beside a collective that keeps multiprocessors from them, as their share of the
        GPU is smaller; None: `profile.slowdown`. Kernels that memory bounds lose less.
        """
        if isinstance(work, Send) or work.sms is None:
            return None
        return self._sms / max(1, self._sms - work.sms)

    @property
    def members(self) -> tuple[Prices, ...]:
        """Prices by kind of GPU: see `sim.pricing.fleet_prices`."""
        return (self,)

    def among(self, kinds: tuple[int, ...]) -> Prices:
        """Prices of a group of GPUs of these kinds."""
        return self

    def link(self, kind: str) -> LinkPrice:
        """The price of a kind of link."""
        return self.profile.link(kind_of_link(kind))

    def rates(self, kinds: Sequence[str]) -> dict[str, LinkRates]:
        """By protocol, its numbers by kind of link."""
        return {
            name: link_rates(protocol, kinds, self.profile.copy_rate) for name, protocol in self.profile.every_protocol().items()
        }

    def table(self, operation: str, ranks: int, nodes: int) -> CollectiveTable | None:
        """The measured prices of `operation` among exactly so many ranks on so many nodes."""
        return self._tables.get((operation, ranks, nodes))

    def _seconds(self, kernel: Kernel) -> float:
        phase: Any = "forward" if kernel.phase in FORWARD else kernel.phase
        crowding = self.profile.crowding.get(phase)
        if crowding is None or (kernel.variant or kernel.label) in self.profile.memory.fractions:  # measured beyond caches
            return self._alone(kernel)
        return self._alone(kernel) * crowding.factor + (kernel.bytes / crowding.rate if kernel.kind == "gemm" else 0.0)

    def _alone(self, kernel: Kernel) -> float:
        if kernel.kind == "gemm":
            return self._gemm(kernel)
        if kernel.kind.startswith("attention"):
            return self._attention(kernel)
        if kernel.variant == WRAPPER_COPY and self.profile.wrapping:
            return 0.0
        memory = self.profile.memory
        if kernel.variant in memory.operators:
            return memory.operators[kernel.variant].seconds(kernel.bytes)
        if kernel.kind in memory.operators and (kernel.variant or kernel.label) not in memory.fractions:
            return memory.operators[kernel.kind].seconds(kernel.bytes)
        usual = {"optimizer": self.profile.optimizer, "reduction": memory.reduction}.get(kernel.kind, memory.efficiency)
        efficiency = memory.fractions.get(kernel.variant or kernel.label, usual)
        moving = kernel.bytes / (self.gpu.memory_bandwidth * efficiency)
        by_blocks = kernel.kind == "optimizer" and kernel.shape
        return memory.fixed * kernel.launches + moving + (self._waiting_blocks(kernel, moving) if by_blocks else 0.0)

    def _waiting_blocks(self, kernel: Kernel, moving: float) -> float:
        """What blocks of a multi-tensor update take beyond their bytes, all of which are moved in `moving` seconds. As many of a
        launch as there is room for run at once, by their bytes; then the others, which are done no sooner than a block alone.
        """
        elements, most = kernel.shape
        blocks, room = -(-elements // BLOCK_ELEMENTS), BLOCKS_AT_ONCE * self._sms
        whole, left = divmod(blocks, most)
        last = [(whole, most % room), (1, left % room)]
        return sum(count * max(0.0, self.profile.update_block - moving * size / blocks) for count, size in last if size)

    def _peak(self, dtype: str) -> float:
        try:
            return self.gpu.peak[dtype]
        except KeyError:
            raise UserError(f"dtype={dtype!r}: the GPU has no such peak{nearest(dtype, self.gpu.peak)}") from None

    def curve(self, dtype: str) -> GemmCurve:
        """The curve of a dtype, or one that was measured with another: in the same part of its peak, but a tile starts and ends,
        and bytes are paid for, in as many seconds as there. At the power limit of this board.
        """
        result = self._curves.get(dtype)
        if result is None:
            names = dtype, _SIBLING.get(dtype, "")
            board = self.gpu.name.partition(AT)[0]
            own, every = self.profile.gemm_of.get(board, {}), self.profile.gemm
            curve = next((curves[name] for name in names for curves in (own, every) if name in curves), None)
            if curve is None:
                measured = self._measured_instead(dtype)
                curve = every[measured]
                slower = self._peak(dtype) / self.gpu.peak.get(measured, self._peak(dtype))
                curve = curve.model_copy(update={"depth": curve.depth * slower, "byte_energy": curve.byte_energy * slower})
            limits = {name: each.sustained for name, each in own.items()} | self.profile.sustained_of.get(board, {})
            limit = next((limits[name] for name in names if name in limits), None)
            shares, watts = (self._shares, self._watts) if limit is None else _power_shares(board, self.gpu)
            limit = min(1.0, (curve.sustained if limit is None else limit) * shares.get(dtype, 1.0) * watts)
            result = self._curves[dtype] = curve.model_copy(update={"sustained": limit})
        return result

    def _measured_instead(self, dtype: str) -> str:
        """The type of products whose curve stands in for one that was not measured."""
        closest = _CLOSEST.get(dtype, "")
        return closest if closest in self.profile.gemm else next(iter(self.profile.gemm))

    def _gemm(self, kernel: Kernel) -> float:
        batch, m, n, k = kernel.shape
        curve, peak, bandwidth = self.curve(kernel.dtype), self._peak(kernel.dtype), self.gpu.memory_bandwidth
        if kernel.phase in FORWARD:
            curve = self.profile.forward.get(kernel.dtype, curve)
        width = _WIDTH[kernel.dtype]
        stored = batch * max(width, 2) * m * n  # a result of 16 bits or more, written once
        operands = max(0.0, min(kernel.bytes - stored, batch * width * (m * k + k * n)))
        traffic = operands, kernel.bytes - operands  # more than `stored` is what the result is added to, read and written
        moved = operands, min(traffic[1], stored)  # what was measured of sums into fp32 is in their exposure
        reached = curve.aligned.get(kernel.alignment, 1.0) * (curve.batched if batch > 1 else 1.0)
        if kernel.phase not in FORWARD:
            reached *= curve.split_accumulator
        seconds = self._product(curve, Rates(peak, bandwidth, self._sms), Product((batch, m, n, k), traffic, reached, moved))
        if kernel.variant == EARLY_CUBLAS and kernel.dtype in curve.early:
            return max(seconds, kernel.flops / (peak * curve.early[kernel.dtype]))
        return seconds

    def _product(self, curve: GemmCurve, rates: Rates, product: Product) -> float:
        """Seconds of a product, which several kernels may be: those of a forward pass and of its repetition."""
        key = id(curve), rates, product  # curves stay
        known = self._products.get(key)
        if known is None:
            seconds = float(gemm_clocks(curve, rates, product, self.profile.throttling)[1])
            known = kept(self._products, key, seconds, REMEMBERED)
        return known

    def _attention(self, kernel: Kernel) -> float:
        curve = self.profile.older.get(kernel.variant)
        if curve is None and kernel.variant in ("", SDPA):
            curve = self.profile.attention_of.get(self.gpu.name.partition(AT)[0], self.profile.attention)
        if curve is None:
            raise UserError(f"attention={kernel.variant}: profile '{self.profile.name}' has no price of it{_has(self.profile)}")
        dtype, faster = ("bf16", self._fp8_attention(kernel)) if kernel.dtype == "fp8" else (kernel.dtype, 1.0)
        shares, watts = _power_shares(curve.gpu, self.gpu) if curve.gpu else (self._shares, self._watts)
        slower = min(1.0, curve.sustained * shares.get(dtype, 1.0) * watts**self.profile.throttling)
        peak = self._peak(dtype) * slower
        forward: float = attention_seconds(curve, peak, self._sms, kernel.shape)
        arithmetic = (attention_backward_seconds(curve, forward) if kernel.kind == "attention_backward" else forward) / faster
        bandwidth, added = self.gpu.memory_bandwidth * self.profile.memory.efficiency, 0.0
        if kernel.ordered:
            arithmetic, added = self._ordered(curve, kernel.shape, arithmetic)
        return max(arithmetic, curve.fixed + kernel.bytes / bandwidth) + added / bandwidth

    def _fp8_attention(self, kernel: Kernel) -> float:
        """How many times as fast as in 16 bits the kernel is."""
        if self.profile.fp8_attention is None:
            said = f"fp8.attention: profile '{self.profile.name}' has no price of it; leave it out, and attention has 16 bits"
            raise UserError(said)
        return self.profile.fp8_attention.faster(kernel.shape[4], kernel.kind == "attention_backward")

    def _ordered(self, curve: AttentionCurve, shape: tuple[int, ...], seconds: float) -> tuple[float, float]:
        """(seconds of arithmetic, further bytes) of a backward pass that adds up gradients in a fixed order.

        FlashAttention-2 has fp32 query gradients for each split, zeros at first (csrc/flash_attn/flash_api.cpp, mha_bwd), which
        PyTorch fills before that; they are added up at the end.
        """
        batch, heads, _, queries, keys, dim, _ = shape
        if curve.ordered is not None:
            return seconds / curve.ordered.rate, curve.ordered.scratch * batch * heads * queries * keys
        splits = ordered_splits(self._sms, shape)
        sums = 4.0 * batch * heads * queries * dim * (2 * splits + splits - 1)
        return curve.fixed + (seconds - curve.fixed) * ordered_stretch(self._sms, shape), sums

    def extrapolation(self, kernel: Kernel) -> Extrapolation | None:
        """Why the price of `kernel` lies outside what was measured, or None when it is inside."""
        part = _PART[kernel.kind]
        own = kernel.variant if part == "attention" else ""
        provenance = self.profile.provenance.get(own) or self.profile.provenance.get(part)
        if provenance is None or not provenance.measured:
            return Extrapolation(part, f"{part}: not measured for profile '{self.profile.name}'")
        if part == "gemm" and not {kernel.dtype, _SIBLING.get(kernel.dtype)} & set(self.profile.gemm):
            instead = self._measured_instead(kernel.dtype)
            return Extrapolation(f"gemm {kernel.dtype}", f"gemm: {kernel.dtype} was not measured, priced as {instead}")
        if part == "attention" and kernel.variant == SDPA and SDPA not in self.profile.older:
            priced = f"was not measured for profile '{self.profile.name}', priced as the GPU's fastest"
            return Extrapolation("attention sdpa", f"attention: PyTorch's own {priced}")
        beyond = []
        for name, value in zip(_SHAPE.get(part, ()), kernel.shape, strict=False):
            low, high = provenance.measured_range.get(name, (value, value))
            if not low <= value <= high:
                far = value / high if value > high > 0 else low / value if value > 0 else float("inf")
                said = f"{part}: {name}={value} is outside the measured {low:g} to {high:g}, {far:.3g} times"
                beyond.append(Extrapolation(f"{part} sizes", said, far))
        return max(beyond, key=lambda each: each.far, default=None)


def _has(profile: Profile) -> str:
    return f", only of {', '.join(profile.older)}" if profile.older else ""


def _power_shares(measured: str, gpu: Hardware) -> tuple[dict[str, float], float]:
    """By dtype, FLOPs per multiprocessor and clock of the measured GPU over `gpu`'s; watts per multiprocessor of `gpu` over the
    measured GPU's. Nothing and 1 where either's limit is not known.
    """
    if not (gpu.power and gpu.sms) or measured not in gpu_names():
        return {}, 1.0
    other = _catalogued(measured)
    same = [dtype for dtype in other.peak if dtype in gpu.peak]
    if not (other.power and other.sms and same):
        return {}, 1.0
    shares = {dtype: float(other.peak[dtype] / other.sms / (gpu.peak[dtype] / gpu.sms)) for dtype in same}
    narrowest = shares[same[-1]]  # of a type that only this board has
    return {dtype: shares.get(dtype, narrowest) for dtype in gpu.peak}, float(gpu.power / gpu.sms / (other.power / other.sms))


_catalogued = lru_cache(load_gpu)
