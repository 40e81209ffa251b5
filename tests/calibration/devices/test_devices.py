"""Devices behind one interface: which GPU it is, what it has, how work on it is timed. GPUs are stood in for by what torch.cuda
says of real ones."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import calibration.execute
from calibration.devices import device, unseen
from calibration.devices.cpu import CpuDevice
from calibration.devices.cuda import CudaDevice
from calibration.execute import device_of, execute
from calibration.launch.place import Place, prepare
from calibration.machine import another_gpu, catalogue_cluster, catalogue_gpu, known_gpu, own_part, part_of
from calibration.measure.grid import grid
from calibration.request import Request, check_parts
from sim.pricing.profile_file import yaml_text
from strategies.read_job import read_job
from topologies.cluster_files import load_cluster
from topologies.reading import UserError

GIB = 2.0**30
TINY = {"name": "tiny", "layers": 2, "hidden": 64, "heads": 4, "vocabulary": 64, "context": 16}


def a_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, memory: float, capability: tuple[int, int] = (9, 0), count: int = 1
) -> None:
    """torch.cuda as it is on a machine with `count` of these."""
    import torch

    own = SimpleNamespace(
        name=name,
        total_memory=memory,
        multi_processor_count=132,
        major=capability[0],
        minor=capability[1],
        L2_cache_size=50 * 2**20,
        uuid="8e7d2bf5-0000-0000-0000-000000000000",
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: own)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index=0: (0.9 * memory, memory))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)


# as torch.cuda.get_device_name() prints them in public logs, and total_memory
@pytest.mark.parametrize(
    ("name", "gib", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA H100 NVL", 93.1, "h100-nvl"),
        ("NVIDIA H200", 139.8, "h200-sxm"),
        ("NVIDIA GH200 480GB", 94.5, "gh200-96gb"),
        ("NVIDIA H20", 95.6, "h20"),
        ("NVIDIA H800", 79.1, "h800-sxm"),
        ("NVIDIA B200", 178.4, "b200-sxm"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-pcie-80gb"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-sxm2-16gb"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-sxm2-32gb"),
        ("Tesla V100-SXM3-32GB", 31.7, "v100-sxm3-32gb"),
        ("Tesla T4", 14.6, "t4"),
        ("NVIDIA A10G", 22.1, "a10g"),
        ("NVIDIA A10", 22.1, "a10"),
        ("NVIDIA L4", 22.2, "l4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("AMD Instinct MI300X", 191.5, "mi300x"),
        # like others, but not the same hardware: other bandwidth, other power, a part of one
        ("NVIDIA A100-PCIE-40GB", 39.4, None),
        ("Tesla V100-PCIE-16GB", 15.8, None),
        ("NVIDIA H200 NVL", 139.8, None),
        ("NVIDIA GH200 144G HBM3e", 141.0, None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19.6, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
        ("NVIDIA L40", 44.4, None),
        ("NVIDIA H100 80GB HBM3", 63.0, None),
        ("Quadro RTX 6000", 23.6, None),
    ],
)
def test_gpus_are_told_apart_by_name_and_memory(name: str, gib: float, gpu: str | None) -> None:
    assert known_gpu(name, gib * GIB) == gpu


def test_a_gpu_that_is_not_known_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    a_gpu(monkeypatch, "NVIDIA A100-PCIE-40GB", 39.4 * GIB)
    request = Request(tmp_path / "p.yaml")
    with pytest.raises(UserError, match=r"A100-PCIE-40GB.*42 GB is not in the catalogue.*--cluster FILE"):
        check_parts(request, "cuda", 1)
    own = tmp_path / "own.yaml"
    own.write_text(
        "node: {gpus: 1, wiring: bare, gpu: {name: a100-pcie-40gb, sms: 108, peak: {bf16: 312 TFLOP/s, fp32: 19.5 TFLOP/s},"
        " memory: 40 GiB, memory_bandwidth: 1555 GB/s}}\n"
    )
    check_parts(Request(tmp_path / "p.yaml", cluster=str(own)), "cuda", 1)


def test_a_cluster_of_other_gpus_than_those_at_hand_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    a_gpu(monkeypatch, "NVIDIA H200", 139.8 * GIB)
    assert another_gpu(load_cluster("hgx-h200"), "cuda") is None
    assert "h200-sxm" in str(another_gpu(load_cluster("dgx-h100"), "cuda"))
    with pytest.raises(UserError, match="GPUs of another kind"):
        check_parts(Request(tmp_path / "p.yaml", cluster="dgx-h100"), "cuda", 1)


def test_a_job_for_other_gpus_or_for_more_is_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any process is started."""
    plan = {"precision": "bf16", "global_batch": 8}
    h200, h100 = (read_job(model=TINY, cluster={"based_on": name}, plan=plan) for name in ("hgx-h200", "dgx-h100"))
    a_gpu(monkeypatch, "NVIDIA H200", 139.8 * GIB)
    assert device_of(h200) == "cuda"
    with pytest.raises(
        UserError, match=r"dgx-h100 has GPUs of another kind \(h100-sxm\) .*could be compared with its prediction"
    ):
        execute([h100], 0)
    monkeypatch.setattr(calibration.execute, "launch", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(UserError, match="needs 8 GPUs, and torch finds 1 on this machine"):
        execute([h200], 0)


def test_the_makers_own_node_comes_before_those_of_clouds() -> None:
    assert catalogue_cluster("h100-sxm", 8).name == "dgx-h100"
    assert catalogue_cluster("a100-sxm-80gb", 8).name == "dgx-a100"
    assert catalogue_cluster("h200-sxm", 4).name == "hgx-h200"
    with pytest.raises(UserError, match="describe how it is wired"):
        catalogue_cluster("t4", 4)


@pytest.mark.parametrize(
    ("gpu", "count"),
    [
        ("h200-sxm", 1),
        ("h200-sxm", 2),
        ("h100-sxm", 8),
        ("h100-sxm", 3),  # for which eight network cards are no equal parts
        ("a100-sxm-80gb", 4),
        ("l40s", 2),  # one on each socket
        ("a10g", 4),
        ("v100-sxm2-16gb", 8),  # in a DGX-1V as those of 32 GB
    ],
)
def test_a_part_of_a_node_is_a_cluster(gpu: str, count: int, tmp_path: Any) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml_text(part_of(gpu, count)))
    cluster = load_cluster(str(path))
    assert (cluster.gpus, cluster.node.gpu.name) == (count, gpu)


def test_which_gpus_of_a_mesh_are_left_the_user_says() -> None:
    for gpu, count in (("v100-sxm2-32gb", 4), ("l40s", 3), ("h100-pcie", 2)):
        with pytest.raises(UserError, match="describe how .* wired, --cluster FILE"):
            part_of(gpu, count)


def test_a_part_of_a_machine_that_the_user_describes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    a_gpu(monkeypatch, "NVIDIA A100-PCIE-40GB", 39.4 * GIB, (8, 0))
    own = tmp_path / "own.yaml"
    own.write_text("based_on: pcie-l40s\nname: mine\nnode: {gpus: 4, gpu: {based_on: a100-sxm-40gb, name: a100-pcie-40gb}}\n")
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml_text(own_part(str(own), 2, "cuda")))
    cluster = load_cluster(str(path))
    assert (cluster.gpus, cluster.node.gpu.name) == (2, "a100-pcie-40gb")
    with pytest.raises(UserError, match=r"own\.yaml: has 4 GPUs in a node, and 8 are to be measured"):
        own_part(str(own), 8, "cuda")
    a_gpu(monkeypatch, "NVIDIA H200", 139.8 * GIB)
    with pytest.raises(UserError, match="GPUs of another kind"):
        own_part("dgx-h100", 1, "cuda")


@pytest.mark.parametrize(
    ("capability", "first", "others"),
    [((7, 0), "fp16", ("fp32",)), ((8, 0), "bf16", ("fp16", "tf32", "fp32")), ((9, 0), "bf16", ("fp16", "tf32", "fp32", "fp8"))],
)
def test_a_gpu_is_measured_in_precisions_that_it_has(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], first: str, others: tuple[str, ...]
) -> None:
    """Tensor cores take bf16 from compute capability 8.0, fp8 from 8.9 (CUDA C++ Programming Guide)."""
    a_gpu(monkeypatch, "any", 16 * GIB, capability)
    has = device("cuda").precisions()
    assert has == (first, *others)
    for quick in (True, False):
        measured = grid("cuda", quick).within(has).dtypes
        assert measured[0] == first
        assert set(measured) <= set(has)
    assert device("cuda").flash == (first == "bf16")


@pytest.mark.parametrize(("visible", "local", "index"), [(None, 3, 3), ("0,1,2,3", 3, 3), ("3", 3, 0), ("GPU-8e7d2bf5", 1, 0)])
def test_a_launcher_may_show_each_process_one_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, local: int, index: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    place = Place(local, 4, local, "cuda", (), lambda _: None)
    assert place.compute.index == index
    a_gpu(monkeypatch, "NVIDIA H200", 139.8 * GIB, count=1)
    if index == 0:
        prepare(place)
    else:
        with pytest.raises(UserError, match=f"needs GPU {index} of this machine, and torch finds 1"):
            prepare(place)


class Stream:
    """What a GPU would do, on a clock of its own: 10 µs per launch of the host, kernels of 1 µs."""

    def __init__(self) -> None:
        self.host = self.busy = 0.0

    def launch(self, seconds: float) -> None:
        """The host queues a kernel."""
        self.host += 10e-6
        self.busy = max(self.busy, self.host) + seconds

    def sleep(self, cycles: int) -> None:
        """torch.cuda._sleep, at 2 GHz."""
        self.launch(cycles / 2e9)

    def event(self, enable_timing: bool) -> Any:
        """torch.cuda.Event."""
        stream, mark = self, SimpleNamespace(time=0.0)
        mark.record = lambda: setattr(mark, "time", stream.busy)
        mark.elapsed_time = lambda end: 1e3 * (end.time - mark.time)
        return mark


def test_short_kernels_are_not_timed_at_the_speed_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty kernels of 1 µs that a host launches in 10 µs each: events around them see 1 µs each once the stream is held while
    they are queued, and 10 µs without."""
    for holds in (True, False):
        stream = Stream()
        monkeypatch.setattr(time, "perf_counter", lambda stream=stream: stream.host)
        gpu = CudaDevice()
        gpu._cuda = SimpleNamespace(Event=stream.event, synchronize=lambda index: None)
        if holds:
            gpu._cuda._sleep = stream.sleep
        seconds = gpu.times(lambda stream=stream: stream.launch(1e-6), 5, None, 20, time.perf_counter)
        # the first stretch tells how long to hold
        assert seconds[1:] == pytest.approx([1e-6 if holds else 1e-5] * 4, rel=0.1)


def test_a_core_is_timed_by_the_clock_that_is_given() -> None:
    ticks = iter(range(100))
    done: list[str] = []
    seconds = device("cpu").times(lambda: done.append("a"), 3, lambda: done.append("b"), 2, lambda: float(next(ticks)))
    np.testing.assert_array_equal(seconds, [0.5, 0.5, 0.5])
    assert done == ["b", "a", "a"] * 3


def test_memory_of_a_gpu_is_its_own_and_of_cores_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu(monkeypatch, "NVIDIA H200", 100e9)
    assert device("cuda").free(8) == pytest.approx(90e9)
    cores = device("cpu")
    assert cores.free(4) == pytest.approx(cores.free(1) / 4, rel=0.2)
    assert device("cuda").cache() == 50 * 2**20
    assert catalogue_gpu("NVIDIA H200") == "h200-sxm"


def test_a_process_without_a_context_asks_the_driver_what_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA's answer would make a context: half a gigabyte of the GPU, and in exclusive mode the only one."""
    import torch

    a_gpu(monkeypatch, "NVIDIA H200", 100e9)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked; echo 71234\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for has, free in ((True, 90e9), (False, 71234 * 2**20)):
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index, has=has: has, raising=False)
        assert device("cuda").free(1) == pytest.approx(free)
    assert "--id=GPU-8e7d2bf5-0000-0000-0000-000000000000 --query-gpu=memory.free" in (tmp_path / "asked").read_text()
    tool.write_text("#!/bin/sh\necho '[N/A]'\n")
    assert device("cuda").free(1) == pytest.approx(90e9)


def test_gpus_that_torch_does_not_see_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert unseen() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "was built without CUDA and finds no GPU" in str(unseen())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unseen() is None


def test_operands_in_turn_are_more_than_three_times_a_gpus_cache() -> None:
    """Of 100 KB each, where the L2 cache has 126 MB (B200): a core has 16 of them at most."""
    from calibration.measure.bench import Bench

    class Board(CpuDevice):
        """With the cache of a B200."""

        copies = CudaDevice.copies

        def cache(self) -> float:
            """Its L2."""
            return 126e6

    for board, count in ((Board(), 3780), (CpuDevice(), 16)):
        place = Place(0, 1, 0, "cpu", (), print)
        place.__dict__["compute"] = board
        numbers = iter(range(10_000))
        turns = Bench(place, 0.01).cold(lambda numbers=numbers: next(numbers), 1e5)
        assert [next(turns) for _ in range(count + 1)] == [*range(count), 0]


def test_workspaces_of_cublas_are_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator holds them from the first product on; they are given back to be counted."""
    import torch

    figures = {"memory_allocated": 50, "max_memory_allocated": 70, "max_memory_reserved": 96}
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: figures.__setitem__("memory_allocated", 42), raising=False
    )
    gpu = CudaDevice()
    quiet = {name: lambda *_: None for name in ("empty_cache", "synchronize", "reset_peak_memory_stats")}
    gpu._cuda = SimpleNamespace(**quiet, **{name: lambda index, name=name: figures[name] for name in figures})
    with gpu.memory() as memory:
        pass
    assert (memory.base, memory.peak, memory.reserved) == (50, 62, 96)


def test_peak_memory_is_the_allocators_on_a_gpu_and_that_of_live_tensors_on_cores() -> None:
    """What is held at the mark, most after it, and what the allocator had reserved for that."""
    import torch

    said: list[str] = []
    figures = {"memory_allocated": 10, "max_memory_allocated": 70, "max_memory_reserved": 96}
    gpu = CudaDevice(1)
    gpu._cuda = SimpleNamespace(
        empty_cache=lambda: said.append("empty"),
        synchronize=lambda index: said.append(f"wait {index}"),
        reset_peak_memory_stats=lambda index: said.append(f"reset {index}"),
        **{name: lambda index, value=value: value for name, value in figures.items()},
    )
    with gpu.memory() as memory:
        said.clear()
        memory.mark()
    assert (memory.base, memory.peak, memory.reserved) == (10, 70, 96)
    assert said == ["wait 1", "reset 1", "wait 1"]
    with device("cpu").memory() as memory:
        held = torch.zeros(1000)
        torch.zeros(5000)
        memory.mark()
        torch.zeros(250)
    assert (memory.base, memory.peak, memory.reserved) == (held.nbytes, held.nbytes + 1000, held.nbytes + 1000)


def test_nothing_else_asks_torch_cuda() -> None:
    """Device-specific calls are in this room alone."""
    room = Path(__file__).parents[3] / "calibration"
    asks = re.compile(r"""torch\.(backends\.)?cuda|[!=]= *["']cuda["']""")
    others = [path for path in room.rglob("*.py") if "devices" not in path.parts and asks.search(path.read_text())]
    assert not others
