"""A GPU's calibration from its first case to a profile, on a device that stands in for the board: what a first day would meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
from calibration import calibrate  # noqa: E402
from calibration.devices.cpu import CpuDevice  # noqa: E402
from calibration.launch.place import Place  # noqa: E402
from calibration.measure import kernels, layer, session, side_effects  # noqa: E402
from calibration.measure.grid import Grid, grid  # noqa: E402
from calibration.request import AMONG, PARTS, Request  # noqa: E402
from calibration.samples import Sample  # noqa: E402

NAME, MEMORY = "Tesla V100-SXM2-16GB", 15.8 * 2.0**30
HEAD = {
    "device": "cuda",
    "ranks": 1,
    "machine": f"{NAME}, 8 × a processor",
    "versions": "torch",
    "memory": MEMORY,
    "quick": True,
    "cores": 8,
    "facts": {"memory": MEMORY, "multiprocessors": 80.0, "capability": "7.0"},
}


class Board(CpuDevice):
    """A V100 whose kernels run on a core."""

    ordered: ClassVar[bool] = True

    def precisions(self) -> tuple[str, ...]:
        """Of compute capability 7.0."""
        return ("fp16", "fp32")

    def free(self, ranks: int) -> float:
        """Of 16 GB."""
        return 0.97 * MEMORY

    def facts(self) -> Mapping[str, Any]:
        """As the driver names it."""
        return {"name": NAME, "memory": MEMORY}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A rank that is alone, with a grid of the same cases as a GPU's in small."""
    sizes: dict[str, Any] = {
        "budget": 1e-4,
        "products": ((32, 64, 64), (64, 64, 32), (64, 128, 64)),
        "batched": ((4, 32, 32, 64),),
        "attention": ((1, 2, 32, 64), (1, 2, 64, 64)),
        "elements": (2**12, 2**14),
        "parameters": 2**20,
        "side": 32,
        "pressed": 0.6,
    }

    def quick(*_: Any) -> Grid:
        return replace(grid("cuda", True), **sizes)

    monkeypatch.setattr(session, "grid", quick)
    monkeypatch.setattr(kernels, "WAYS", [way for way in kernels.WAYS if "pinned" not in way])  # memory is pinned for a GPU alone
    monkeypatch.setattr(layer, "FITTED", ())
    for module in (layer, calibrate):
        monkeypatch.setattr(module, "CHECKED", ((64, 16),))
    monkeypatch.setattr(side_effects, "_uneven", lambda _: torch.zeros(2**16))
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    told: list[Any] = []
    place = Place(0, 1, 0, "cpu", (), told.append)
    place.__dict__.update(compute=Board(), told=told)
    yield place
    dist.destroy_process_group()


@pytest.mark.usefixtures("unsearched")
def test_a_v100_is_measured_in_fp16_and_its_profile_is_written(small: Place, tmp_path: Path) -> None:
    """It has no bf16: neither cases nor the layers that check the prices may ask for it."""
    parts = set(PARTS) - {*AMONG, "wrapping"}
    session.measure(small, True, sorted(parts), [], 0.0)
    told: list[dict[str, Any]] = small.__dict__["told"]
    samples = [Sample.model_validate(message["sample"]) for message in told if "sample" in message]
    assert {sample.part for sample in samples} == parts
    assert {sample.case["dtype"] for sample in samples if sample.part in ("gemm", "attention")} == {"fp16"}
    # from a core that slows down, as it does beside others, a power limit would follow that no profile can have
    speeds, side = {"early": 90e12, "late": 75e12}, 8192.0  # FLOP/s
    samples = [
        sample.model_copy(update={"case": {**sample.case, "side": side}, "value": 2 * side**3 / speeds[str(sample.case["kind"])]})
        if sample.part == "sustained" and sample.case["kind"] in speeds
        else sample
        for sample in samples
    ]
    result = calibrate.fit(Request(tmp_path / "v100.yaml", quick=True), HEAD, samples)
    assert 0.1 < result.fitted.profile.gemm["fp16"].sustained < 0.6  # of 125 TFLOP/s
    assert result.cluster.node.gpu.name == "v100-sxm2-16gb"
    assert result.fitted.profile.provenance["gemm"].machine.startswith(NAME)
    assert [(check.hidden, min(check.predicted) > 0) for check in result.layers] == [(64, True)]
    assert 1e8 < result.copies["host to host"] < 1e12
    assert (tmp_path / "v100.yaml").exists()


def test_what_memory_is_not_left_for_is_said_and_left_out(small: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank alone; and what the allocator has cached is given back before the next case."""
    given_back = []
    monkeypatch.setattr(Board, "give_back", lambda self: given_back.append(1))

    def full(bench: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(kernels, "_launch", full)
    session.measure(small, True, ("launch",), [], 0.0)
    told: list[dict[str, Any]] = small.__dict__["told"]
    kinds = [message["sample"]["case"]["kind"] for message in told if "sample" in message]
    assert kinds == ["autograd", "collective", "collective backward"]
    assert [message["note"] for message in told if "note" in message] == [
        "launch, operator: no memory is left for it: not measured"
    ]
    assert len(given_back) == 4
