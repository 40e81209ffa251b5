"""Writes how much faster fused attention is in fp8 than in 16 bits, `Profile.fp8_attention`, as NVIDIA publishes of cuDNN.

`python -m calibration.fit.published_kernels.fp8_attention` rewrites that part of the profiles in `MEASURED`. The milliseconds are
those of github.com/NVIDIA/cudnn-frontend (MIT) benchmark/attention_training/results/llama3.1, h200 at 816ea4573a68 and gb200 at
d6d35d692753, backend cudnn: causal, two sequences, 64 heads of 128 with 8 of keys and values. Kernels by themselves, without the
casts around them. On Hopper the backward pass in fp8 leaves nothing out behind the mask: it takes as long without one, and longer
than in 16 bits. A GB300's, whose exponentials are faster, gain more (1.5 forward, 1.2 backward at 8,192 keys), which is not
written: a profile has one gain of all of its GPUs.
"""

from __future__ import annotations

import sys
from typing import Any

from calibration.fit.published_kernels.refit import file_of, rewrite, tidy

H200 = {  # keys -> ms forward in 16 bits and in fp8, backward in 16 bits and in fp8
    2048: (0.257, 0.192, 0.856, 1.265),
    4096: (0.893, 0.627, 2.779, 4.391),
    8192: (3.357, 2.260, 10.448, 16.298),
    16384: (13.888, 8.819, 40.803, 62.439),
    32768: (56.813, 36.800, 166.714, 244.696),
}
GB200 = {
    2048: (0.131, 0.097, 0.410, 0.449),
    4096: (0.417, 0.307, 1.248, 1.232),
    8192: (1.410, 1.081, 4.239, 3.906),
    16384: (5.468, 4.104, 17.085, 13.779),
    32768: (22.086, 16.023, 72.066, 53.768),
}
MEASURED = {"h100": ("an H200", H200), "h200": ("one H200", H200), "b200": ("one GPU of a GB200", GB200)}  # by profile
NOTES = {"h100": " Taken from the H200, which has the same multiprocessors."}


def rates(milliseconds: dict[int, tuple[float, float, float, float]]) -> dict[str, Any]:
    """Of kernels in fp8 over those in 16 bits, as a profile's file spells them."""
    rows = [milliseconds[keys] for keys in sorted(milliseconds)]
    forward, backward = ([tidy(row[at] / row[at + 1]) for row in rows] for at in (0, 2))
    return {"keys": sorted(milliseconds), "forward": forward, "backward": backward}


def refit(name: str) -> None:
    """Rewrite `fp8_attention` of the shipped profile `name`."""
    machine, milliseconds = MEASURED[name]
    data = file_of(name)
    data["fp8_attention"] = rates(milliseconds)
    data["provenance"]["fp8_attention"] = PROVENANCE | {"machine": machine, "rule": PROVENANCE["rule"] + NOTES.get(name, "")}
    print(name, data["fp8_attention"], flush=True)
    rewrite(name, data)


PROVENANCE: dict[str, Any] = {
    "measured": True,
    "machine": "",
    "versions": "cuDNN 9.27, cudnn-frontend 1.31",
    "date": "2026-09-28",
    "source": "github.com/NVIDIA/cudnn-frontend (MIT) benchmark/attention_training/results/llama3.1",
    "grid": "causal, batch 2, 64 heads of 128 with 8 of keys and values, sequences of 2048 to 32768",
    "rule": "Seconds in 16 bits over seconds in fp8 of the same shape and passes; not fitted. Other shapes gain as those with as "
    "many keys.",
}


if __name__ == "__main__":
    for profile_name in sys.argv[1:] or MEASURED:
        refit(profile_name)
