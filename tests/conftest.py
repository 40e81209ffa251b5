"""Toy hardware whose answers can be worked out by hand."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from sim.pricing.prices import Prices, Profile
from strategies.job import Job
from strategies.read_job import read_job
from strategies.schedules import schedules
from topologies.cluster import Cluster
from topologies.reading import build

# torch's; tensors are tiny, and on a busy machine a product of them takes 20 times as long with threads that wait for each other
os.environ["OMP_NUM_THREADS"] = "1"
gc.set_threshold(500_000, 20, 20)  # as `shardyard.command_line` does: looking for cycles took an eighth of the time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with Ctrl-C ignored


def pytest_collection_finish() -> None:
    """What is there before the first test stays: it is not looked at again in every collection of cycles."""
    gc.freeze()


LINKS = ("nvlink", "pcie", "host", "nic", "leaf", "spine", "loopback")
GPU: dict[str, Any] = {
    "name": "toy",
    "sms": 1,
    "peak": {"bf16": "1 TFLOP/s", "fp16": "1 TFLOP/s", "fp32": "1 TFLOP/s"},
    "memory": "1 PB",
    "memory_bandwidth": "1 TB/s",
}
NONE = {"nvlink": "0 s", "pcie": "0 s", "nic": "0 s"}


@pytest.fixture(scope="session")
def toy_cluster() -> Callable[..., Cluster]:
    """Nodes behind one switch, 1 GB/s per GPU and per NIC, without latency."""

    def make(gpus: int = 8, nodes: int = 1, multicast: bool = False, sharp: int = 0, **node: Any) -> Cluster:
        parts = {
            "gpu": GPU | {"multicast": multicast},
            "gpus": gpus,
            "wiring": "switch",
            "nvlink": "1 GB/s",
            "pcie": "1 TB/s",
            "nics": gpus,
            "nic": "1 GB/s",
        }
        data = {
            "name": "toy",
            "node": parts | {"latency": NONE} | node,
            "nodes": nodes,
            "fabric": {"kind": "single", "hop_latency": "0 s", "sharp": sharp},
        }
        return build(Cluster, data, "toy")

    return make


@pytest.fixture(scope="session")
def toy_profile() -> Callable[..., Profile]:
    """Everything at its peak, nothing costs latency; keyword arguments replace fields."""

    def make(**fields: Any) -> Profile:
        curve = {"efficiency": 1.0, "tiles": [{"m": 1, "n": 1, "efficiency": 1.0}], "memory": 1.0}
        data = {
            "name": "toy",
            "gpu": "toy",
            "provenance": {},
            "gemm": {"bf16": curve, "fp16": curve, "fp32": curve},
            "attention": {"efficiency": 1.0, "block": 1, "backward": 1.0},
            "memory": {"efficiency": 1.0},
            "optimizer": 1.0,
            "launch": "0 s",
            "links": {kind: {"efficiency": 1.0, "latency": "0 s"} for kind in LINKS},
            "collective_launch": "0 s",
            "overhead": {"context": "0 B", "communicator": "0 B", "reserve": 0.0},
        }
        return build(Profile, data | fields, "toy")

    return make


@pytest.fixture(scope="session")
def toy_prices(toy_cluster: Callable[..., Cluster], toy_profile: Callable[..., Profile]) -> Callable[..., Prices]:
    """Prices of the toy profile on the toy GPU."""
    return lambda **fields: Prices(toy_profile(**fields), toy_cluster().node.gpu)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AbstractContextManager[None]]:
    """`with full_disk(room)`: no file can grow beyond so many bytes, as on a disk without more (Python ignores the signal)."""

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would not notice that it wrote half of a module

    @contextmanager
    def limited(room: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are a dot: they have tests of their own."""
    from PIL import Image

    from reports.figures import Drawing

    monkeypatch.setattr(Drawing, "__call__", lambda self, data, path, legend=True: Image.new("1", (1, 1)).save(path))


# what makes a model's layers those of Llama
LLAMA_LAYER: dict[str, Any] = {
    "gated": True,
    "positions": "rotary",
    "norm": "rmsnorm",
    "tied": False,
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
}
SMALL = {"name": "small", "hidden": 64, "layers": 4, "heads": 8, "vocabulary": 512, "context": 32}


@pytest.fixture(scope="session")
def toy_job(toy_cluster: Callable[..., Cluster]) -> Callable[..., Job]:
    """A small GPT on toy nodes: toy_job(gpus, nodes, model={…}, **plan)."""

    def make(
        gpus: int = 8, nodes: int = 1, model: dict[str, Any] | None = None, node: dict[str, Any] | None = None, **plan: Any
    ) -> Job:
        cluster = toy_cluster(gpus, nodes, **(node or {}))
        if not {"global_batch", "accumulation"} & plan.keys() and schedules[plan.get("schedule", "1f1b")].microbatches is None:
            plan["accumulation"] = 1
        job = read_job(model=SMALL | (model or {}), cluster="dgx-h100", plan={"auto": False} | plan)
        return Job(job.name, job.model, job.plan, cluster)

    return make
