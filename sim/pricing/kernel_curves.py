"""Kernel prices: curves of an efficiency that depends on shape, and the formulas that turn them into seconds.

Every price is a roofline. Efficiencies are fractions of the GPU's specified peaks. The formulas are plain arithmetic that numbers
and numpy arrays share, so the fit and the simulation use the same code.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from sim.pricing.transfers.measured_tables import OperatorTable
from topologies.documents.units import Seconds
from topologies.reading import Config

LARGEST = 1e15  # of a number without a unit
Fraction = Annotated[float, Field(ge=1e-6, le=1)]  # below a millionth it is a mistake
Portion = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
# The clock that a limit allows grows with its watts to this power: 47 products (m, n, k of 2048 and more) take 1.106 times as
# long (median) on an A100 PCIe of 300 W (github.com/MooreThreads/SimuMax configs/system/a100_pcie.json) as by the prices of an
# A100 SXM of 400 W and as many multiprocessors. Voltage that falls as the clock does would give 1/3, one that stays 1; power that
# does not depend on the clock makes it more.
POWER = 0.35
Shape = tuple[Any, Any, Any, Any]  # batch, m, n, k: numbers, or arrays of one length
Traffic = tuple[Any, Any]  # bytes of a product's operands and of its result
KEYS = 128  # in a block of FlashAttention-2's backward pass
PARTS = (1, 2, 3, 4, 5, 6, 8)  # into which k may be cut, so that there are more tiles


class Hardware(Protocol):
    """What prices need to know of a GPU: specified peaks in FLOP/s by dtype, bytes per second, multiprocessors, the board's
    limit in watts (0: not known)."""

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

    @property
    def power(self) -> float: ...


class Tile(Config):
    """A kernel's output tile: `m` × `n` elements per multiprocessor, at `efficiency` of the best tile's rate."""

    m: int = Field(gt=0, le=2**20)
    n: int = Field(gt=0, le=2**20)
    efficiency: Fraction
    resident: int = Field(1, gt=0, le=1024)  # how many a multiprocessor works on at a time; they share its rate, and end together


class GemmCurve(Config):
    """Matrix products of one dtype: whole tiles on multiprocessors, blended with the time to move the operands, never faster than
    the board's power limit delivers the energy that they take; and then results are stored, in part while nothing is multiplied.
    """

    efficiency: Fraction  # of the specified peak that the best tile sustains
    tiles: tuple[Tile, ...] = Field(min_length=1, max_length=1000)
    depth: NotNegative = 0.0  # a tile's start and end cost as much as this many more k
    wave: Portion = 1.0  # 1: the last wave of tiles counts as whole; 0: perfectly balanced
    split: Seconds = 2e-6  # extra time of a product whose k is cut in parts, so that there are more tiles
    memory: Fraction = 0.8  # of the memory bandwidth when limited by it
    blend: float = Field(4.0, ge=1, le=16)  # arithmetic and traffic overlap: (a^p + t^p)^(1/p); large p is the maximum
    fixed: Seconds = 0.0  # start and end of a kernel
    sustained: Fraction = 1.0  # of the specified peak at which FLOPs alone would draw the power limit at the highest clock
    byte_energy: NotNegative = 0.0  # a byte of traffic takes as much energy as so many FLOPs
    cached: float = Field(1.0, ge=1, le=1e6)  # the cache, which holds partial results, is so many times as fast as the memory
    exposed: Portion = 0.6  # of the traffic of results, and of what they are added to, passes while nothing is multiplied
    aligned: dict[int, Fraction] = Field(default_factory=dict)  # part of the tiles' rate by `Kernel.alignment`; 1 where not named
    batched: Fraction = 1.0  # part of the tiles' rate that the kernels of several products at once reach
    split_accumulator: Fraction = 1.0  # part of the tiles' rate of both gradients' products, whose sums leave the tensor cores
    early: dict[str, Fraction] = Field(default_factory=dict)  # by dtype: of the peak, what batched products whose rows are no
    # multiple of 16 bytes reach at most with cuBLAS before CUDA 11.7


class Ordered(Config):
    """A fused backward pass of attention that adds up query gradients in a fixed order, and so has the same bits every time."""

    rate: float = Field(ge=1e-3, le=1e3)  # over that of one that does not
    scratch: NotNegative = 0.0  # bytes of workspace per score, which PyTorch fills before


class AttentionCurve(Config):
    """Fused attention: blocks of queries spread over multiprocessors."""

    efficiency: Fraction  # of the specified peak, in the limit of long sequences and large heads
    head_half: NotNegative = 0.0  # head dimension at which half of the rate is reached
    keys_half: NotNegative = 0.0  # a block of queries costs as much as this many keys more
    block: int = Field(128, gt=0, le=2**20)  # queries that one multiprocessor handles at a time
    wave: Portion = 1.0  # as in GemmCurve
    fixed: Seconds = 0.0  # start and end of a kernel
    keys_block: int = Field(1, gt=0, le=2**20)  # keys behind the causal mask are left out in whole blocks of so many
    backward: float = Field(
        0.8, ge=1e-3, le=1e3
    )  # rate of the backward pass (2.5 times the FLOPs) over that of the forward pass, `fixed` apart
    ordered: Ordered | None = None  # None: as FlashAttention-2, `ordered_stretch`
    gpu: str = ""  # catalogue name of the GPU that it was measured on, where that is not the profile's
    sustained: Fraction = 1.0  # part of its rate that the power limit of that GPU leaves


class Fp8Attention(Config):
    """How many times as fast as in 16 bits a fused attention kernel is in fp8, by how many keys it has: linear in their logarithm
    in between, as the nearest beyond.
    """

    keys: tuple[PositiveInt, ...] = Field(min_length=1)  # ascending
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @model_validator(mode="after")
    def _complete(self) -> Fp8Attention:
        rates = (*self.forward, *self.backward)
        if sorted(set(self.keys)) != list(self.keys) or {len(self.forward), len(self.backward)} != {len(self.keys)}:
            raise ValueError("keys must ascend, and forward and backward have a rate for each")
        if not all(1e-3 <= rate <= 1e3 for rate in rates):
            raise ValueError(f"rates must be from 0.001 to 1,000, not {min(rates)} to {max(rates)}")
        return self

    def faster(self, keys: int, backward: bool) -> float:
        """The factor of a kernel with so many keys."""
        return float(np.interp(math.log(max(1, keys)), np.log(self.keys), self.backward if backward else self.forward))


class MemoryCurve(Config):
    """Kernels bound by memory traffic."""

    efficiency: Fraction  # of the specified memory bandwidth
    reduction: Fraction = 0.6  # the same, of kernels that need whole rows or columns
    fixed: Seconds = 0.0
    fractions: dict[str, Fraction] = Field(default_factory=dict)  # by `Kernel.variant` or label, instead of the rates above
    operators: dict[str, OperatorTable] = Field(default_factory=dict)  # the same as tables, which come first; "memory" and
    # "reduction": of all kernels of that kind that have neither a table nor a fraction


class Rates(NamedTuple):
    """Specified rates of a device in one dtype."""

    peak: float  # FLOP/s
    bandwidth: float  # bytes per second of its memory
    sms: int  # multiprocessors that share the peak


class Product(NamedTuple):
    """A matrix product, or as many as arrays of one length have elements."""

    shape: Shape
    traffic: Traffic  # the result with whatever it is added to
    aligned: float = 1.0  # part of the tiles' rate that its alignment leaves
    moved: Traffic | None = None  # of `traffic` what takes energy, where that is not all of it

    @property
    def several(self) -> bool:
        """Whether it is many products."""
        return any(isinstance(size, np.ndarray) for size in self.shape)


def gemm_clocks(curve: GemmCurve, rates: Rates, product: Product, throttling: float = POWER) -> tuple[Any, Any]:
    """Seconds of a product with the fastest tile: at the highest clock, and at the one that the power limit allows.

    The energy of a product at the highest clock is that of its FLOPs and of the traffic beside them, whatever the tiles;
    multiprocessors that wait for the last wave, or for results to be stored, take little. When that energy in that time is more
    than the board's limit, the clock falls until it is not: voltage falls with the clock, so that power falls with about its
    third power, and the clock as power to `throttling`.
    """
    highest, energy, alone = gemm_phases(curve, rates, product)
    drawn = energy / (rates.peak * curve.sustained * highest)  # of the limit
    limited = highest * ((drawn + 1 + abs(drawn - 1)) / 2) ** throttling
    return highest + alone, limited + alone


def gemm_phases(curve: GemmCurve, rates: Rates, product: Product) -> tuple[Any, Any, Any]:
    """Seconds in which a product's FLOPs are done, at the highest clock; the energy that this takes, in FLOPs; and seconds in
    which none are.
    """
    batch, m, n, k = product.shape
    operands, result = product.traffic
    read, stored = product.moved or product.traffic
    reached = rates.bandwidth * curve.memory
    arithmetic = arithmetic_seconds(curve, rates, product, reached)
    beside = (operands + (1 - curve.exposed) * result) / reached
    highest = (arithmetic**curve.blend + beside**curve.blend) ** (1 / curve.blend)
    energy = 2 * batch * m * n * k + curve.byte_energy * (read + (1 - curve.exposed) * stored)
    return highest, energy, curve.fixed + curve.exposed * result / reached


def arithmetic_seconds(curve: GemmCurve, rates: Rates, product: Product, reached: float) -> Any:
    """Seconds of whole tiles at the highest clock, with the fastest tile and the best number of parts of k.

    reached: bytes per second of the memory; every part writes an fp32 partial result that is read again, from the cache.
    """
    (batch, m, n, k), sms, several = product.shape, rates.sms, product.several
    depth = k / product.aligned
    tiles, least = ([_Columns.of(curve.tiles)], np.minimum) if several else (curve.tiles, min)
    best: Any = None
    for tile in tiles:
        step = 2 * tile.m * tile.n * sms / (rates.peak * curve.efficiency * tile.efficiency)  # one tile, one k
        whole = batch * -(-m // tile.m) * -(-n // tile.n)
        for parts in PARTS:
            count = whole * parts
            least_waves = (count + sms + abs(count - sms)) / (2 * sms)  # max(count / sms, 1)
            together = count > sms * tile.resident  # otherwise each multiprocessor has as many as fall to it
            rounds = -(-count // sms) * (1 - together) + -(-count // (sms * tile.resident)) * tile.resident * together
            seconds = (curve.wave * rounds + (1 - curve.wave) * least_waves) * step * (depth / parts + curve.depth)
            if parts > 1:
                seconds = seconds + curve.split + parts * 8 * batch * m * n / (reached * curve.cached)
            best = seconds if best is None else least(best, seconds)
    return best.min(axis=0) if several else best


class _Columns(NamedTuple):
    """All tiles of a curve at once: columns, against which products are rows."""

    m: Any
    n: Any
    efficiency: Any
    resident: Any

    @classmethod
    def of(cls, tiles: Iterable[Tile]) -> _Columns:
        """Shape (tiles, 1) each."""
        return cls(*(np.array([getattr(tile, name) for tile in tiles])[:, None] for name in cls._fields))


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


def ordered_splits(sms: int, shape: tuple[Any, ...]) -> int:
    """Thread blocks among which FlashAttention-2 deals out a head's keys, when query gradients are added up in a fixed order: so
    many that every multiprocessor has one (csrc/flash_attn/src/flash_bwd_launch_template.h, run_flash_bwd_seqk_parallel).
    """
    return -(-max(1, sms) // int(shape[0] * shape[1]))


def ordered_stretch(sms: int, shape: tuple[Any, ...]) -> float:
    """The factor by which FlashAttention-2's backward pass takes longer in that order.

    Otherwise every block of keys has a thread block of its own, which spread evenly; now a few have many each. Thread blocks go
    to multiprocessors in turn, one at a time on each (it takes 144 KB of shared memory): often a second wave leaves most idle.
    """
    batch, heads, _, _, keys, _, causal = shape
    splits, blocks = ordered_splits(sms, shape), -(-keys // KEYS)
    dealt = [range(first, blocks, splits) for first in range(splits)]
    # blocks of queries that see them
    work = [sum(blocks - block for block in queue) if causal else len(queue) for queue in dealt]
    free = [0] * max(1, sms)
    for _ in range(batch * heads):
        for each in work:
            heapq.heapreplace(free, free[0] + each)
    return max(free) * max(1, sms) / float(batch * heads * sum(work))
