"""From samples to a profile: every part fitted, with its provenance; what was not measured keeps the prices it had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calibration.fit.machine import kernels
from calibration.fit.machine.links import LEAST, PAIRS, RINGS, fit_links, transports
from calibration.fit.machine.provenance import measured_here, quality
from calibration.fit.machine.tables import Point, errors, leave_out, rows, series_name, tables
from calibration.fit.published_kernels.products import sustained
from calibration.samples import Merged
from sim.pricing.kernel_curves import GemmCurve
from sim.pricing.prices import Overhead, Profile
from sim.pricing.transfers.measured_tables import Wrapping
from topologies.cluster import Cluster

STEADY = 0.01  # by which products may slow down that do not reach the power limit
WRAPPED = {  # wrapper -> the collectives that it makes, by axis and operation
    "ddp": ("dp/all_reduce",),
    "fsdp2": ("dp/all_gather", "dp/reduce_scatter"),
    "dtensor": ("tp/all_reduce", "tp/all_gather", "tp/reduce_scatter"),
}


@dataclass
class Fitted:
    """A profile, the measurements it was made of beside its prices, and what a reader must know."""

    profile: Profile
    points: dict[str, list[Point]] = field(default_factory=dict)  # by part
    alone: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # series -> (bytes, seconds) back to back
    notes: list[str] = field(default_factory=list)


class Fit:
    """Builds a profile from `base`, part by part."""

    def __init__(self, base: Profile, cluster: Cluster, head: Mapping[str, Any], merged: Sequence[Merged]) -> None:
        self.cluster, self.gpu, self.head, self.merged = cluster, cluster.node.gpu, head, merged
        self.change: dict[str, Any] = {}
        self.provenance = dict(base.provenance)
        self.base = base
        self.result = Fitted(base)

    def of(self, part: str) -> list[Merged]:
        """Cases of a part."""
        return [sample for sample in self.merged if sample.part == part]

    def value(self, part: str, **case: Any) -> float | None:
        """The one value of a case; None when it was not measured."""
        values = [sample.value for sample in self.of(part) if case.items() <= sample.case.items()]
        return values[0] if values else None

    def note(
        self,
        part: str,
        grid: str,
        rule: str,
        points: Sequence[Point] = (),
        ranges: Mapping[str, Any] | None = None,
        more: Mapping[str, float] | None = None,
        transports: tuple[str, ...] = (),
    ) -> None:
        """Where the numbers of `part` come from."""
        self.provenance[part] = measured_here(self.head, grid, rule, points, ranges or {}, more or {}, transports)
        if points:
            self.result.points[part] = [*self.result.points.get(part, []), *points]

    def all(self, name: str) -> Fitted:
        """Every part that there are samples of."""
        self.launch()
        for step in (self.gemm, self.attention, self.memory, self.collectives, self.side_effects, self.footprint):
            step()
        disturbed = sum(sample.disturbed == sample.visits for sample in self.merged)
        if disturbed:
            share = disturbed / len(self.merged)
            self.result.notes.append(
                f"{disturbed} of {len(self.merged)} cases ({share:.0%}) were measured while others used the machine: "
                "measure again when it is quiet"
            )
        update = self.change | {"name": name, "provenance": self.provenance, "gpu": self.gpu.name, "applies_to": ()}
        self.result.profile = self.base.model_copy(update=update)
        return self.result

    @property
    def _launch(self) -> float:
        """What a synchronous host adds to every operator."""
        return float(self.change.get("launch", 0.0)) if self.base.synchronous else 0.0

    def launch(self) -> None:
        """Host time of an operator."""
        each = self.value("launch", kind="autograd") or self.value("launch", kind="operator")
        if each:
            self.change["launch"] = each
        call = self.value("launch", kind="collective backward") or self.value("launch", kind="collective")
        if each and call and not self.base.synchronous:  # a CPU's collectives were timed with their calls
            self.change["collective_call"] = each + call

    def gemm(self) -> None:
        """A curve per dtype."""
        compared: list[Point] = []
        curves: dict[Any, GemmCurve] = {}
        every = self.of("gemm")
        for dtype in dict.fromkeys(str(sample.case["dtype"]) for sample in every):
            samples = [sample for sample in every if sample.case["dtype"] == dtype]
            if len(samples) < kernels.LEAST or dtype not in self.gpu.peak:
                continue
            known = self.base.gemm.get(dtype)
            curves[dtype], points = kernels.fit_gemm(samples, self.gpu, dtype, self._launch, known, self.base.throttling)
            curves[dtype] = self._at_the_limit(curves[dtype], dtype)
            compared += points
        if not curves:
            return
        self.change["gemm"] = dict(self.base.gemm) | curves if self.gpu.sms else curves  # a GPU's fp8 stays as it was
        self._capped(curves, every)
        names = ("batch", "m", "n", "k")
        ranges = dict(zip(names, kernels.columns(every, *names), strict=True))
        self.note(
            "gemm",
            f"{len(every)} products of {', '.join(curves)}: a linear layer's forward, input gradient and weight "
            "gradient, and batched ones",
            "formula of sim/pricing/prices.py fitted to half of them; operands not in a cache",
            compared,
            ranges,
            quality(every),
        )

    def _at_the_limit(self, curve: GemmCurve, dtype: str) -> GemmCurve:
        """With the power limit that products without a pause were measured to reach, where they were."""
        late = self.value("sustained", kind="late", dtype=dtype)
        early = self.value("sustained", kind="early", dtype=dtype)
        if not (late and early and self.gpu.sms):
            return curve
        side = next(float(sample.case["side"]) for sample in self.of("sustained"))
        limit = sustained(curve, self.gpu, dtype, 2 * side**3 / late, self.base.throttling, side)
        if late < (1 + STEADY) * early:  # it does not reach the limit, which lies above what it draws
            limit = max(limit, curve.sustained)
        said = ", ".join(
            f"{value:.4g} {unit}"
            for kind, unit in (("clock", "MHz"), ("power", "W"), ("temperature", "°C"))
            if (value := self.value("sustained", kind=kind))
        )
        self.result.notes.append(
            f"{dtype} products of {side:.0f} without a pause take {late / early - 1:+.1%} once the device is warm"
            + (f" ({said})" if said else "")
        )
        return curve.model_copy(update={"sustained": limit})

    def _capped(self, curves: Iterable[str], every: Sequence[Merged]) -> None:
        """Efficiencies are at most 1: say where the description of the hardware promises less than it does."""
        peaks: Mapping[Any, float] = self.gpu.peak
        for dtype in curves:
            samples = [sample for sample in every if sample.case["dtype"] == dtype]
            batch, m, n, k = kernels.columns(samples, "batch", "m", "n", "k")
            best, peak = float((2 * batch * m * n * k / kernels.seconds_of(samples)).max()), peaks[dtype]
            if best > peak:
                self.result.notes.append(
                    f"{self.gpu.name}: a {dtype} product reached {best / 1e9:.4g} GFLOP/s, more than the {peak / 1e9:.4g} of its "
                    "description: prices are capped there"
                )

    def attention(self) -> None:
        """Fused attention; materialised attention is made of products and softmax, and checks them."""
        fused = [sample for sample in self.of("attention") if sample.case["way"] != "materialised"]
        if len(fused) < kernels.LEAST:
            return
        dtype = str(fused[0].case["dtype"])
        curve, points = kernels.fit_attention(fused, self.gpu, dtype, self._launch)
        self.change["attention"] = curve
        batch, heads, length, dim = kernels.columns(fused, "batch", "heads", "sequence", "head_dim")
        ranges = {"batch": batch, "heads": heads, "head_dim": dim, "queries": length, "keys": length}
        self.note(
            "attention",
            f"{len(fused)} passes of causal scaled_dot_product_attention, {dtype}, forward and backward",
            "formula of sim/pricing/prices.py fitted to half of them",
            points,
            ranges,
            quality(fused),
        )

    def memory(self) -> None:
        """A table of each operator that is priced by itself, one curve for all others; the optimizer's rate."""
        samples = self.of("memory")
        if len(samples) < kernels.LEAST:
            return
        curve, points = kernels.fit_memory(samples, self.gpu, self._launch)
        operators, more_points = kernels.operator_tables(samples, self._launch)
        self.change["memory"] = curve.model_copy(update={"operators": operators})
        kinds, more = dict.fromkeys(str(sample.case["kind"]) for sample in samples), quality(samples)
        apart = kernels.error(more_points, True)
        more |= {"operators": apart} if apart is not None else {}
        update = self.value("optimizer", kind="adam", variant="default")
        if update:
            traffic = next(float(sample.case["bytes"]) for sample in self.of("optimizer") if sample.case["kind"] == "adam")
            self.change["optimizer"] = min(1.0, traffic / update / self.gpu.memory_bandwidth)
        self.note(
            "memory",
            f"{', '.join(kinds)}, {len(samples)} sizes; torch.optim.Adam as it comes",
            f"a table of each of {', '.join(operators)}, errors of every other size by those beside it; for others one fixed "
            f"time, a rate for {', '.join(kernels.STREAMS)} and one for the reductions {', '.join(kernels.REDUCTIONS)}, fitted "
            "to half of the sizes",
            [*points, *more_points],
            {"bytes": kernels.columns(samples, "bytes")[0]},
            more,
        )

    def collectives(self) -> None:
        """gloo: tables, and the formula where they end. NCCL: the formula."""
        measured = rows(self.merged)
        if not measured:
            return
        gloo = self.head["device"] == "cpu"
        compared: list[Point] = []
        if gloo:
            collective_tables = tables(self.merged)
            self.change |= {
                "tables": tuple(collective_tables),
                "processes": min(int(self.head["ranks"]), int(self.head.get("cores", 0) or 2**20)),
            }
            compared = leave_out(self.merged)
            self.result.alone = {series_name(t): [(e.bytes, e.alone) for e in t.prices] for t in collective_tables}
        fitted: list[Point] = []
        if sum(row.operation in (*RINGS, *PAIRS) for row in measured) >= LEAST:
            profile, fitted = fit_links(measured, self.base, self.cluster)
            names = ("links", "collective_launch", "protocols", "copy_rate")
            self.change |= {name: getattr(profile, name) for name in names}
        more = errors(compared) if gloo else {}
        formula = kernels.error(fitted, True)
        more |= {"formula": formula} if formula is not None else {}
        operations = ", ".join(dict.fromkeys(row.operation for row in measured))
        ranks = ", ".join(str(number) for number in dict.fromkeys(row.ranks for row in measured))
        grid = f"{operations} among {ranks} ranks, back to back and between pieces of compute, sibling groups at once"
        formula_rule = "the formula of sim/pricing/transfers/protocols.py, fitted to half of the sizes in a step"
        table_rule = (
            "tables, smoothed where a larger size took less, and interpolated; errors are of every other size in a step, by the "
            "sizes beside it; elsewhere "
        )
        self.note(
            "links",
            grid,
            (table_rule if gloo else "") + formula_rule,
            compared or fitted,
            {"bytes": [row.bytes for row in measured], "ranks": [row.ranks for row in measured]},
            more | quality(self.of("collective")),
            transports(measured, self.base, self.cluster),
        )

    def side_effects(self) -> None:
        """Launch, compute beside collectives, PyTorch's wrappers."""
        slow, reverse = (self.value("overlap", kind=kind) for kind in ("compute", "collective"))
        wrapping: dict[str, Wrapping] = {}
        for wrapper, names in WRAPPED.items():
            pairs = sorted((float(o.case["width"]), o.value) for o in self.of("wrapping") if o.case["wrapper"] == wrapper)
            if pairs:
                wrapping |= dict.fromkeys(names, _wrapping(pairs, copies=wrapper != "dtensor"))
        self.change |= ({"slowdown": slow} if slow else {}) | ({"wrapping": wrapping} if wrapping else {})
        if "launch" not in self.change:
            return
        beside = (
            f"a collective beside compute takes {reverse:.3g} times as long, which is in `slowdown` already" if reverse else ""
        )
        self.note(
            "launch",
            "1,000 operators on one element, forward and backward; all-reduce and products at once; PyTorch's wrappers "
            "around 8 tiny layers in a group of one",
            f"seconds per operator; per collective of a wrapper. {beside}".strip(),
        )

    def footprint(self) -> None:
        """Memory besides tensors."""
        context, communicator, reserve = (self.value("footprint", kind=kind) for kind in ("context", "communicator", "reserve"))
        if context is None:
            return
        old = self.base.overhead
        overhead: dict[str, Any] = {
            "context": round(context),
            "communicator": round(communicator or 0.0),
            "reserve": min(0.99, reserve or old.reserve),
        }
        self.change["overhead"] = Overhead.model_construct(**overhead)
        where = "resident memory of a process" if self.head["device"] == "cpu" else "memory that the device lost"
        self.note(
            "overhead",
            "one process before its tensors, and with a second communicator",
            f"{where}; communicator: after three all-reduces",
        )


def _wrapping(pairs: Sequence[tuple[float, float]], copies: bool) -> Wrapping:
    """Fixed part and copying rate from a narrow and a wide layer (fp32)."""
    (width, low), (_, high) = pairs[0], pairs[-1]
    more = 4 * (pairs[-1][0] ** 2 - width**2)
    rate = more / (high - low) if copies and more and high > low else float("inf")
    return Wrapping.model_construct(fixed=low, rate=rate)
