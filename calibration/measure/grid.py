"""What is measured: sizes for a quick look and for a full calibration, on a CPU core and on a GPU. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from calibration.devices import Kind

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "send",
    "barrier",
)
Shape = tuple[int, ...]
# Bytes of a collective below which latency counts: fewer sizes, in a step measured more often, because now and then one takes a
# slice of the operating system's scheduler, ten times as long as the others, which its mean must tell.
SMALL = 2**20
OFTEN = 3
SPARSE = 4  # factor between such sizes
# Parameters that are updated on a CPU core: with gradients and states 240 MiB, more than its share of a last-level cache, and not
# more than models that are trained there. Where two cores see a cache of 300 MB an update takes 1.44 ns a parameter so, as in
# steps (1.48), and 2.3 with four times that cache.
UPDATED = 15 * 2**20


@dataclass(frozen=True)
class Grid:
    """Sizes. products: (m, n, k), each in the three layouts of a linear layer; batched: (batch, m, n, k)."""

    rounds: int  # visits of every case, one after the other, so that slow changes of the machine touch all alike
    budget: float  # seconds of repetitions of a case
    calm: float  # seconds to wait for a quiet machine before a round, and in all for disturbed cases
    repeated: int  # least repetitions of a collective in a step
    smallest: int  # bytes of a collective
    largest: int
    factor: int
    rare: int  # of every so many sizes only the largest, for operations that training seldom does
    dtypes: tuple[str, ...]
    products: tuple[Shape, ...]
    batched: tuple[Shape, ...]
    attention: tuple[Shape, ...]  # batch, heads, sequence, head size
    elements: tuple[int, ...]  # of memory-bound operations
    parameters: int  # of the optimizer's update
    side: int  # of the square product between two collectives: some 10 ms of a core, 0.2 ms of a GPU
    overlapped: int  # bytes of the all-reduce that compute runs beside
    pressed: float  # seconds of products without a pause, after which the clock is the one of training

    @property
    def sizes(self) -> list[int]:
        """Bytes of collectives."""
        result = [self.smallest]
        while result[-1] * self.factor <= self.largest:
            result.append(result[-1] * (max(SPARSE, self.factor) if result[-1] < SMALL else self.factor))
        return result if result[-1] >= self.largest else [*result, self.largest]  # beyond it prices would be extrapolated

    def within(self, precisions: Sequence[str]) -> Grid:
        """Of precisions that the device has; where it has none of them, the one that it trains in."""
        return replace(self, dtypes=tuple(each for each in self.dtypes if each in precisions) or tuple(precisions[:1]))


def _products(tokens: tuple[int, ...], widths: tuple[int, ...]) -> tuple[Shape, ...]:
    """Layers of a transformer: square, out to four times the width, and back."""
    return tuple((m, n, k) for m in tokens for w in widths for n, k in ((w, w), (4 * w, w), (w, 4 * w)))


def grid(device: Kind, quick: bool) -> Grid:
    """Seconds when `quick`, else minutes."""
    if device == "cpu":
        if quick:
            return Grid(
                3,
                0.02,
                1.0,
                4,
                2**10,
                2**24,
                4,
                2,
                ("fp32",),
                (
                    (128, 256, 256),
                    (256, 1024, 256),
                    (64, 512, 512),
                    (128, 512, 512),
                    (128, 2048, 512),
                    (256, 512, 512),
                    (256, 2048, 512),
                    (512, 512, 2048),
                    (1024, 512, 512),
                    (512, 4096, 512),
                ),
                ((8, 128, 128, 64), (8, 128, 64, 128)),
                ((4, 8, 64, 64), (2, 4, 128, 64), (1, 8, 256, 64), (2, 8, 256, 64), (1, 4, 512, 32)),
                (2**14, 2**16, 2**18, 2**20, 2**21),
                UPDATED,
                768,
                2**23,
                2.0,
            )
        return Grid(
            3,
            0.12,
            30.0,
            12,
            2**10,
            2**28,
            2,
            1,
            ("fp32",),
            (
                *_products((64, 256, 1024), (128, 384, 768)),
                (512, 512, 512),
                (512, 2048, 512),
                (512, 512, 2048),
                (2048, 512, 512),
                (4096, 256, 256),
                (256, 8192, 512),
                (512, 32000, 512),
                (1024, 4096, 1024),
            ),
            tuple((b, s, t, d) for b, s in ((8, 128), (16, 256), (8, 512)) for t, d in ((s, 64), (64, s))),
            (
                (4, 8, 32, 64),
                (4, 8, 64, 32),
                (2, 8, 64, 64),
                (8, 8, 64, 64),
                (4, 12, 64, 64),
                (4, 4, 64, 128),
                (1, 4, 128, 64),
                (4, 4, 128, 64),
                (2, 10, 128, 64),
                (4, 8, 128, 32),
                (2, 8, 128, 128),
                (2, 8, 192, 64),
                (1, 8, 256, 64),
                (2, 8, 256, 32),
                (1, 8, 256, 128),
                (2, 12, 256, 64),
                (2, 8, 384, 64),
                (2, 8, 512, 64),
                (1, 12, 512, 64),
                (1, 4, 768, 64),
                (1, 8, 1024, 64),
                (1, 4, 1024, 128),
                (1, 8, 2048, 64),
            ),
            (2**12, 2**15, 2**17, 2**18, 2**19, 2**20, 2**21, 2**22, 2**23, 2**24),
            UPDATED,
            768,
            2**23,
            20.0,
        )
    if quick:
        return Grid(
            1,
            0.01,
            0.0,
            5,
            2**10,
            2**26,
            8,
            1,
            ("bf16",),
            ((512, 4096, 4096), (2048, 4096, 1024), (4096, 4096, 4096), (8192, 1024, 4096)),
            ((32, 1024, 1024, 128), (32, 1024, 128, 1024)),
            ((1, 16, 1024, 128), (2, 32, 2048, 128), (1, 32, 4096, 64)),
            (2**20, 2**24, 2**26),
            2**26,
            4096,
            2**28,
            10.0,
        )
    return Grid(
        2,
        0.05,
        0.0,
        20,
        2**10,
        2**32,
        2,
        1,
        ("bf16", "fp16", "tf32", "fp32", "fp8"),
        (
            *_products((256, 1024, 2048, 4096, 8192), (1024, 2048, 4096, 8192)),
            (4096, 32000, 4096),
            (4096, 128256, 4096),
            (8192, 28672, 8192),
            (8192, 6144, 4096),
        ),
        tuple((b, s, t, d) for b, s in ((16, 512), (32, 1024), (32, 2048)) for t, d in ((s, 128), (128, s))),
        tuple(
            (b, h, s, d)
            for b, s in ((8, 512), (4, 1024), (2, 2048), (1, 4096), (1, 8192))
            for h, d in ((16, 64), (32, 64), (16, 128), (32, 128))
        ),
        (2**14, 2**17, 2**20, 2**22, 2**24, 2**26, 2**28),
        2**29,
        4096,
        2**28,
        120.0,
    )
