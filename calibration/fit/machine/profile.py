"""From samples to a profile: every part fitted, with its provenance; what was not measured keeps the prices it had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from calibration.devices import class_of
from calibration.devices.monitor import REASONS
from calibration.drift import anchors_of
from calibration.fit.machine import kernels, overheads
from calibration.fit.machine.links import LEAST, PAIRS, RINGS, fit_links, transports
from calibration.fit.machine.parts import Fitted, Parts
from calibration.fit.machine.provenance import quality
from calibration.fit.machine.tables import Point, errors, leave_out, narrow_sum, rows, series_name, tables
from calibration.fit.published_kernels.products import sustained
from calibration.samples import Merged
from sim.pricing.kernel_curves import AttentionCurve, GemmCurve
from sim.pricing.prices import SDPA, Prices

PASSES = {  # of strategies.lowering.optimizer_step and strategies.data_parallel.compressed -> what was measured
    "gradient norm": "norm",
    "gradient clipping": "scaling",
    "gradients from buckets": "list copy",
    "gradient copy": "list copy",
    "parameter copy": "list copy",
    "gradient zeroing": "zeroing",
    "gradient cast": "narrowing",
    "gradient average": "narrowing",
}
STREAMS, REDUCTIONS = ", ".join(kernels.STREAMS), ", ".join(kernels.REDUCTIONS)
STEADY = 0.01  # by which products may slow down that do not reach the power limit


class Fit(Parts):
    """Builds a profile from `base`, part by part."""

    def all(self, name: str) -> Fitted:
        """Every part that there are samples of."""
        if self.gpu.sms:
            self.kept()
        self.launch()
        for step in (self.gemm, self.attention, self.memory, self.collectives):
            step()
        for besides in (overheads.wrappers, overheads.footprint, overheads.crowding, overheads.variability):
            besides(self)
        disturbed = sum(sample.disturbed == sample.visits for sample in self.merged)
        if disturbed:
            share = disturbed / len(self.merged)
            self.result.notes.append(
                f"{disturbed} of {len(self.merged)} cases ({share:.0%}) were measured while others used the machine: "
                "measure again when it is quiet"
            )
        self.change["anchors"] = anchors_of(self.merged)
        update = self.change | {"name": name, "provenance": self.provenance, "gpu": self.gpu.name, "applies_to": ()}
        self.result.profile = self.base.model_copy(update=update)
        return self.result

    def kept(self) -> None:
        """Prices of another board's kernels stay those of this board: its power limit leaves another part of them."""
        there = self.base.gpu if self.base.gpu != self.gpu.model else ""

        def of_board(curves: Mapping[str, AttentionCurve]) -> dict[str, AttentionCurve]:
            return {name: curve.model_copy(update={"gpu": curve.gpu or there}) for name, curve in curves.items()}

        self.change |= {"gemm": {dtype: self.known.curve(dtype) for dtype in self.base.gemm}, "gemm_of": {}, "sustained_of": {}}
        self.change |= of_board({"attention": self.base.attention})
        self.change |= {name: of_board(getattr(self.base, name)) for name in ("attention_of", "older")}

    @cached_property
    def known(self) -> Prices:
        """This GPU's by the profile that the fit starts from."""
        return Prices(self.base, self.gpu)

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
        forward: dict[str, GemmCurve] = {}  # a core's library reads weights as they lie, backward passes turn them
        every = self.of("gemm")
        for dtype in dict.fromkeys(str(sample.case["dtype"]) for sample in every):
            samples = [sample for sample in every if sample.case["dtype"] == dtype]
            if len(samples) < kernels.LEAST or dtype not in self.gpu.peak:
                continue
            ahead = [sample for sample in samples if sample.case.get("layout") == "forward"]
            if not self.gpu.sms and kernels.LEAST <= len(ahead) <= len(samples) - kernels.LEAST:
                forward[dtype], points = kernels.fit_gemm(ahead, self.gpu, dtype, self._launch, name=", forward")
                compared += points
                samples = [sample for sample in samples if sample not in ahead]
            known, name = self.known.curve(dtype) if self.gpu.sms else None, ", backward" if dtype in forward else ""
            curves[dtype], points = kernels.fit_gemm(samples, self.gpu, dtype, self._launch, known, self.base.throttling, name)
            curves[dtype] = self._at_the_limit(curves[dtype], dtype)
            compared += points
        if not curves:
            return
        self.change["forward"] = forward
        self.change["gemm"] = self.change.get("gemm", {}) | curves  # what of a GPU was not measured stays
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
        measured = (
            f"{value:.4g} {unit}"
            for kind, unit in (("clock", "MHz"), ("power", "W"), ("temperature", "°C"))
            if (value := self.value("sustained", kind=kind))
        )
        why = (reason for reason in REASONS.values() if self.value("sustained", kind=reason))
        said = ", ".join([*measured, *why])
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
        """Fused attention; materialised attention is made of products and softmax, and checks them.

        What a GPU was measured with is PyTorch's own kernel; its fastest one keeps the price that others measured, if they did.
        """
        fused = [sample for sample in self.of("attention") if sample.case["way"] != "materialised"]
        if len(fused) < kernels.LEAST:
            return
        dtype = str(fused[0].case["dtype"])
        curve, points = kernels.fit_attention(fused, self.gpu, dtype, self._launch, self.base.attention)
        known = self.base.provenance.get("attention")
        part = "attention"
        if self.gpu.sms:
            self.change["older"] |= {SDPA: curve}
            part = SDPA if known is not None and known.measured else part
        if part != SDPA:
            self.change["attention"] = curve
        batch, heads, length, dim = kernels.columns(fused, "batch", "heads", "sequence", "head_dim")
        ranges = {"batch": batch, "heads": heads, "head_dim": dim, "queries": length, "keys": length}
        self.note(
            part,
            f"{len(fused)} passes of causal scaled_dot_product_attention, {dtype}, forward and backward",
            "formula of sim/pricing/prices.py fitted to half of them",
            points,
            ranges,
            quality(fused),
        )
        self.result.points["attention"] = self.result.points.pop(part)

    def memory(self) -> None:
        """A table of each operator that is priced by itself, one curve for all others; the optimizer's rate."""
        samples = self.of("memory")
        if len(samples) < kernels.LEAST:
            return
        curve, points = kernels.fit_memory(samples, self.gpu, self._launch)
        operators, more_points = kernels.operator_tables(samples, self._launch)
        others = (
            f"for others one fixed time, a rate for {STREAMS} and one for the reductions {REDUCTIONS}, fitted to half of them"
        )
        if not self.gpu.sms:
            classes, points = kernels.class_tables(samples, self._launch)
            operators |= classes
            others = f"for others one table of {STREAMS} together and one of the reductions {REDUCTIONS}"
        named = [name for name in operators if name in kernels.OPERATORS]
        passes = self._passes()
        self.change["memory"] = curve.model_copy(
            update={"operators": operators, "fractions": self.base.memory.fractions | passes}
        )
        kinds, more = dict.fromkeys(str(sample.case["kind"]) for sample in samples), quality(samples)
        apart = kernels.error(more_points, True)
        more |= {"operators": apart} if apart is not None else {}
        update = self._fraction("adam", "fused")
        if update:  # which blocks that wait for others are part of
            self.change |= {"optimizer": update, "update_block": 0.0}
        self.note(
            "memory",
            f"{', '.join(kinds)}, {len(samples)} sizes; torch.optim.Adam, fused; passes over all gradients",
            f"a table of each of {', '.join(named)}, errors of every other size by those beside it; {others}",
            [*points, *more_points],
            {"bytes": kernels.columns(samples, "bytes")[0]},
            more,
        )

    def _fraction(self, kind: str, variant: str) -> float | None:
        """Of the memory bandwidth that an update or a pass over all gradients reaches; None when it was not measured."""
        found = (o for o in self.of("optimizer") if o.case["kind"] == kind and o.case["variant"] == variant)
        sample = next(found, None)
        return sample and min(1.0, float(sample.case["bytes"]) / sample.value / self.gpu.memory_bandwidth)

    def _passes(self) -> dict[str, float]:
        """Of passes besides the update, by the name that the optimizer step has for each."""
        measured = {name: self._fraction(kind, "list") for name, kind in PASSES.items()}
        return {name: share for name, share in measured.items() if share}

    def collectives(self) -> None:
        """gloo: tables, and the formula where they end. NCCL: the formula."""
        measured = rows(self.merged)
        if not measured:
            return
        gloo = class_of(self.head["device"]).backend == "gloo"
        compared: list[Point] = []
        if gloo:
            collective_tables = tables(self.merged)
            self.change |= {
                "tables": tuple(collective_tables),
                "narrow_sum": narrow_sum(self.merged),
                "processes": min(int(self.head["ranks"]), int(self.head.get("cores", 0) or 2**20)),
            }
            compared = leave_out(self.merged)
            self.result.alone = {
                series_name(table.operation, table.ranks, table.nodes): [(entry.bytes, entry.alone) for entry in table.prices]
                for table in collective_tables
            }
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
            "sizes beside it; numbers of 16 bits take longer to add up than their bytes do, by an all-reduce of them; elsewhere "
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
