"""Computations that only GPUs are asked for, by the path that measures them there."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from calibration.launch.place import Place  # noqa: E402
from calibration.measure import kernels  # noqa: E402
from calibration.measure.bench import Bench  # noqa: E402
from calibration.measure.grid import grid  # noqa: E402

SHAPE = (32, 48, 64)  # of a linear layer: tokens, outputs, inputs


@pytest.mark.parametrize(("layout", "own"), [("forward", (32, 48, 64)), ("input", (32, 64, 48)), ("weight", (48, 64, 32))])
def test_products_in_fp8_have_results_of_16_bits(layout: str, own: tuple[int, int, int]) -> None:
    """PyTorch's CPU kernel of the operator that runs on tensor cores."""
    bench = Bench(Place(0, 1, 0, "cpu", (), lambda _: None), 0.001)
    probe = kernels._product(SHAPE, layout, "fp8")
    assert tuple(probe.case[name] for name in "mnk") == own
    assert probe.run(bench).value > 0
    result = kernels._narrow(own, layout, bench)()
    assert (tuple(result.shape), result.dtype) == (own[:2], torch.bfloat16)


def test_a_gpu_with_fp8_has_all_layouts_measured_but_attention() -> None:
    found = [probe.case for probe in kernels.probes(grid("cuda", False).within(("bf16", "fp8"))) if probe.part == "gemm"]
    layouts = {dtype: {case["layout"] for case in found if case["dtype"] == dtype} for dtype in ("bf16", "fp8")}
    assert layouts == {"bf16": {"forward", "input", "weight", "batched"}, "fp8": {"forward", "input", "weight"}}
