"""What a step takes besides its kernels and collectives: wrappers, crowded caches, memory of the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calibration.devices import class_of
from calibration.fit.machine.parts import Parts
from calibration.measure.layer_check import FITTED, checks
from calibration.measure.layer_check import crowding as layers_crowding
from calibration.samples import Case
from sim.pricing.op_costs import SPLIT
from sim.pricing.prices import Overhead
from sim.pricing.transfers.measured_tables import Wrapping
from sim.program import PIPELINE_PASS

WRAPPED = {  # wrapper -> the collectives that it makes, by axis and operation
    "ddp": ("dp/all_reduce",),
    "fsdp2": ("dp/all_gather", "dp/reduce_scatter"),
    "dtensor": ("tp/all_reduce", "tp/all_gather", "tp/reduce_scatter"),
    "split": (SPLIT,),
    "pipeline": (PIPELINE_PASS,),
}

ENOUGH = 8  # GPUs, of which one is always slower than another: fewer say too little about others of their kind


def wrappers(fit: Parts) -> None:
    """Launch, compute beside collectives, PyTorch's wrappers."""
    slow, reverse = (fit.value("overlap", kind=kind) for kind in ("compute", "collective"))
    wrapping: dict[str, Wrapping] = {}
    for wrapper, names in WRAPPED.items():
        pairs = sorted((_bytes(o.case), o.value) for o in fit.of("wrapping") if o.case["wrapper"] == wrapper)
        if pairs:
            wrapping |= dict.fromkeys(names, _wrapping(pairs))
    fit.change |= ({"slowdown": slow} if slow else {}) | ({"wrapping": wrapping} if wrapping else {})
    if "launch" not in fit.change:
        return
    beside = f"a collective beside compute takes {reverse:.3g} times as long, which is in `slowdown` already" if reverse else ""
    fit.note(
        "launch",
        "1,000 operators on one element, forward and backward; all-reduce and products at once; PyTorch's wrappers "
        "around 8 tiny layers in a group of one; backward passes in two halves; 1F1B of a layer on each of two ranks",
        f"seconds per operator; per collective of a wrapper; per matrix of a split pass, or pass of a pipeline. {beside}".strip(),
    )


def crowding(fit: Parts) -> None:
    """How much longer a CPU's layers take in a step than their parts, with these prices."""
    if fit.gpu.sms or not {"gemm", "memory", "attention"} <= set(fit.change):
        return
    fit.change["crowding"] = {}
    profile = fit.base.model_copy(update=fit.change | {"gpu": fit.gpu.name})
    crowded, found = layers_crowding(fit.merged, profile, fit.cluster)
    if not crowded:
        return
    fit.change["crowding"] = crowded
    left = checks(fit.merged, profile.model_copy(update={"crowding": crowded}), fit.cluster, FITTED)
    fit.note(
        "crowding",
        f"layers of {', '.join(f'{check.hidden} features, {check.tokens} tokens' for check in found)}, pass by pass, on all "
        "ranks at once",
        "a factor on the prices of the parts, and seconds per byte of products' operands and results: least squares of relative "
        "errors; errors are the layers'",
        more={f"{check.hidden} features, {check.tokens} tokens": abs(check.error) for check in left},
    )


def footprint(fit: Parts) -> None:
    """Memory besides tensors."""
    context, communicator, reserve = (fit.value("footprint", kind=kind) for kind in ("context", "communicator", "reserve"))
    if context is None:
        return
    old = fit.base.overhead
    overhead: dict[str, Any] = {
        "context": round(context),
        "communicator": round(communicator or 0.0),
        "reserve": min(0.99, reserve or old.reserve),
    }
    fit.change["overhead"] = Overhead.model_construct(**overhead)
    where = class_of(fit.head["device"]).beyond
    fit.note(
        "overhead",
        "one process before its tensors, and with a second communicator",
        f"{where}; communicator: after three all-reduces",
    )


def variability(fit: Parts) -> None:
    """How far ranks come apart that do the same work."""
    deviation = fit.value("variability")
    if deviation is None or (fit.gpu.sms and fit.head["ranks"] < ENOUGH):
        return
    fit.change["variability"] = min(1.0, deviation)
    fit.note(
        "variability",
        f"stretches of equal work that {int(fit.head['ranks'])} ranks start together",
        "the standard deviation with which the slowest of so many normally distributed ranks takes as much longer than the mean "
        "as was measured, in the mean over stretches",
    )


def _bytes(case: Case) -> float:
    """Of a collective in fp32: a layer's matrix, or its activations; of a split pass, on average of a layer's matrices, which
    have as many outputs as 3 (query, key and value), 1, 4 and 1 times its width.
    """
    width = float(case["width"])
    return (9 if case["wrapper"] == "split" else 4) * width * float(case.get("tokens", width))


def _wrapping(pairs: Sequence[tuple[float, float]]) -> Wrapping:
    """Fixed part and copying rate from the bytes and seconds of a narrow and a wide layer."""
    (small, low), (large, high) = pairs[0], pairs[-1]
    rate = (large - small) / (high - low) if large > small and high > low else float("inf")
    return Wrapping.model_construct(fixed=low, rate=rate)
