"""Accelerators of the catalogue that are not measured: their figures, and what answers say of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardyard import read_job, simulate, summarise
from sim.pricing.kernel_curves import Product, Rates, gemm_clocks
from sim.pricing.shipped import load_profile, profile_for, profile_names, serves
from topologies.cluster_files import gpu_names, load_gpu

# AMD's best product of an MI325X over its typical ones: calibration.fit.published_kernels.amd_products
TYPICAL = 831.40 / 616.42
EXAMPLES = Path(__file__).parents[2] / "examples/clusters"


# dense bf16 (fp16 where there is none), bytes per second, gigabytes: sources are in the files
@pytest.mark.parametrize(
    ("name", "flops", "bandwidth", "gigabytes"),
    [
        ("v100-sxm2-16gb", 125e12, 900e9, 16),
        ("t4", 65e12, 320e9, 16),
        ("a10", 125e12, 600e9, 24),
        ("a10g", 70e12, 600e9, 24),
        ("l4", 121e12, 300e9, 24),
        ("rtx-4090", 165.2e12, 1008e9, 24),
        ("h20", 148e12, 4000e9, 96),
        ("h800-sxm", 989e12, 3350e9, 80),
        ("h100-nvl", 835.5e12, 3900e9, 94),
        ("gh200-96gb", 989e12, 4000e9, 96),
        ("b300-sxm", 2250e12, 7750e9, 288),
        ("mi300x", 1307e12, 5300e9, 192),
        ("mi325x", 1307e12, 6000e9, 256),
        ("mi350x", 2307e12, 8000e9, 288),
        ("mi355x", 2500e12, 8000e9, 288),
        ("tpu-v5e", 197e12, 819e9, 16),
        ("tpu-v5p", 459e12, 2765e9, 95),
        ("tpu-v6e", 918e12, 1640e9, 32),
        ("tpu7x", 2307e12, 7380e9, 192),
        ("gaudi2", 432e12, 2460e9, 96),
        ("gaudi3", 1835e12, 3670e9, 128),
    ],
)
def test_figures(name: str, flops: float, bandwidth: float, gigabytes: float) -> None:
    gpu = load_gpu(name)
    assert name in gpu_names()
    assert gpu.peak.get("bf16", gpu.peak.get("fp16")) == flops
    assert gpu.memory_bandwidth == bandwidth
    assert 0.98 * gigabytes * 1e9 <= gpu.memory <= gigabytes * 2**30  # GB or GiB, less what the driver keeps
    assert ("bf16" in gpu.peak) == (name not in ("v100-sxm2-16gb", "t4"))


@pytest.mark.parametrize(
    ("name", "shape", "seconds", "slower"),
    [  # the best product that stas00/ml-engineering found: compute/accelerator/README.md at 744d01e
        ("mi300x", (10240, 15360, 8192), 3.855446e-3, TYPICAL),
        ("mi325x", (13312, 10240, 8192), 2.845436e-3, TYPICAL),
        ("mi355x", (12288, 8192, 8192), 1.053845e-3, TYPICAL),
        ("gaudi2", (14336, 15360, 2048), 2.154151e-3, 1.05),
        ("gaudi3", (16384, 4096, 768), 82.928e-6, 1.05),
    ],
)
def test_products_take_what_was_measured(name: str, shape: tuple[int, int, int], seconds: float, slower: float) -> None:
    """slower: than the best product, by this factor at most."""
    gpu, (m, n, k) = load_gpu(name), shape
    profile = profile_for(name)
    assert profile.name == name
    rates = Rates(gpu.peak["bf16"], gpu.memory_bandwidth, gpu.sms)
    product = Product((1, m, n, k), (2.0 * (m * k + k * n), 2.0 * m * n))
    assert 0.95 < gemm_clocks(profile.gemm["bf16"], rates, product)[1] / seconds < slower
    assert not profile.provenance["gemm"].measured


@pytest.mark.parametrize("name", ["tpu-v5e", "h20", "l4", "t4"])
def test_others_are_priced_by_the_generic_profile(name: str) -> None:
    assert profile_for(name).name == "generic"
    assert load_profile("generic").provenance["gemm"].measured is False


@pytest.mark.parametrize(
    ("cluster", "chips"), [("tpu-v5e-pod", 256), ("tpu-v5p-512", 512), ("tpu-v6e-pod", 256), ("tpu7x-512", 512)]
)
def test_slices_of_tpus(cluster: str, chips: int) -> None:
    plan = {"data_parallel": "zero3", "recompute": "full", "sequence": 4096}
    job = read_job(None, model="llama-3.1-8b", cluster=str(EXAMPLES / f"{cluster}.yaml"), plan=plan)
    summary = summarise(simulate(job))
    assert summary.gpus == chips
    assert 0.05 < summary.mfu < 0.7
    assert any("profile generic was made for any, and is used here for tpu" in note for note in summary.notes)


@pytest.mark.parametrize("name", gpu_names())
def test_a_gpu_has_the_first_profile_that_names_it(name: str) -> None:
    model = load_gpu(name).model
    named = [each for each in profile_names() if serves(load_profile(each), model)]
    assert profile_for(model).name == (named or ["generic"])[0]
