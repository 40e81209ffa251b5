"""Computations that only GPUs are asked for, by the path that measures them there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from calibration.devices.cpu import CpuDevice  # noqa: E402
from calibration.launch.place import Place  # noqa: E402
from calibration.measure import bench as bench_module  # noqa: E402
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


def test_copies_inside_of_the_host_are_timed_by_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's stream has no work of them: events there are recorded one right after the other."""

    class Board(CpuDevice):
        """Its events see nothing of what the host does."""

        def times(self, *_: Any) -> Any:
            """Two microseconds between two events."""
            return torch.full((5,), 2e-6).numpy()

    place = Place(0, 1, 0, "cpu", (), print)
    place.__dict__["compute"] = Board()
    monkeypatch.setattr(kernels, "COPIED", 2**22)
    seconds = {ways: kernels._copy(*ways)(Bench(place, 0.01)).value for ways in (("host", "host"), ("pageable", "device"))}
    assert seconds["pageable", "device"] == pytest.approx(2e-6)
    assert 2**22 / seconds["host", "host"] < 2e11
    assert seconds["host", "host"] > 1e-5


def test_no_case_takes_more_memory_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit a board of 16 GB is left out by that. Besides operands in turn, of which there is one of each here."""
    from calibration.devices.holding import Holding

    class Board(CpuDevice):
        """With the copies of a GPU, and no cache to overflow."""

        ordered = True

        def cache(self) -> float:
            """None."""
            return 0.0

    monkeypatch.setattr(bench_module, "ROOM", 0.0)
    monkeypatch.setattr(kernels, "LAYER", 12 * 64**2)
    monkeypatch.setattr(kernels, "WIDTH", 64)
    place = Place(0, 1, 0, "cpu", (), print)
    place.__dict__["compute"] = Board()
    sizes: dict[str, Any] = {
        "products": ((64, 256, 128),),
        "batched": ((4, 64, 64, 32),),
        "attention": ((2, 4, 128, 32), (1, 8, 64, 64)),
        "elements": (2**16,),
        "parameters": 12 * 64**2 * 4,
    }
    found = 0
    for probe in kernels.probes(replace(grid("cuda", False), dtypes=("fp16", "fp32"), **sizes)):
        if probe.takes:
            found += 1
            with Holding() as holding:
                probe.run(Bench(place, 1e-4))
            assert holding.peak <= 1.02 * probe.takes + 2**12, probe.case
    assert found > 30
