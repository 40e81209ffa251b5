"""Measurements as they come from a machine, and the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

import shardyard
from calibration.fit.machine import kernels
from calibration.samples import Merged

MODEL = {"name": "tiny", "layers": 2, "hidden": 128, "heads": 2, "vocabulary": 256, "context": 64}


@pytest.fixture(scope="module")
def one_search() -> Iterator[None]:
    """Curves of the same samples are searched for once."""
    known: dict[tuple[Any, ...], dict[str, float]] = {}
    search: Callable[..., dict[str, float]] = kernels.search

    def once(price: Any, bounds: Any, seconds: Any, out: Any) -> dict[str, float]:
        key = (*bounds.items(), *seconds, *out)
        if key not in known:
            known[key] = search(price, bounds, seconds, out)
        return dict(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "search", once)
        yield


@pytest.fixture(scope="module")
def unsearched() -> Iterator[None]:
    """Numbers of curves are in the middle of their bounds: that they are found has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "search", lambda price, bounds, *_: {name: (a * b) ** 0.5 for name, (a, b) in bounds.items()})
        yield


def with_small_caches(place: Any, *arguments: Any) -> Any:
    """A rank's session as on a machine whose caches little memory overflows, without memory that is mapped beforehand, of small
    models, with one thread: to map 0.9 GB for each case, layers of 512 features that are cut, and threads that wait for each
    other beside other tests, took most of its time.
    """
    import torch

    from calibration.devices.cpu import CpuDevice
    from calibration.measure import bench, layer, pipeline_passes, session, side_effects, training, variability

    setattr(CpuDevice, "cache", lambda self: 2.0**20)  # noqa: B010
    bench.ROOM = session.LARGEST = 0.0
    training.LAYERS = 2
    side_effects.CUT, side_effects.WIDTHS = ((64, 16), (96, 32)), (32, 256)
    pipeline_passes.HIDDEN, pipeline_passes.TOKENS = 64, 16
    layer.FITTED, layer.CHECKED = ((64, 32), (128, 16), (512, 256)), ((64, 64),)  # one of them is the anchor
    variability.STRETCH = 0.02
    torch.set_num_threads(1)
    return session.measure(place, *arguments)


def case(part: str, value: float, context: str = "alone", **sizes: Any) -> Merged:
    return Merged(part, sizes, context, value, value, 0.0, 1, 0)


def collective(seconds: Any, operation: str = "all_reduce", ranks: int = 2) -> list[Merged]:
    """In a step twice as dear as alone; sizes of 1 KiB to 64 MiB."""
    sizes = [2.0**power for power in range(10, 27)]
    return [
        case("collective", factor * seconds(size), context, operation=operation, bytes=size, ranks=ranks, nodes=1)
        for size in sizes
        for context, factor in (("alone", 1.0), ("step", 2.0))
    ]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(shardyard.main, list(arguments))
