"""Prices of products and memory-bound kernels against published measurements."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.pricing.kernel_curves import Fp8Attention, Product, Rates, gemm_clocks
from sim.pricing.prices import Prices, _power_shares
from sim.pricing.shipped import load_profile, profile_for, profile_names
from sim.program import ALIGNED, EARLY_CUBLAS, Kernel
from strategies.frameworks import kernel_set
from strategies.frameworks.megatron_2021.options import Megatron2021Options
from tests.sim.conftest import MEASURED, Gpu, attention, prices, sizes
from topologies.cluster_files import load_gpu
from topologies.reading import UserError

# Measured seconds, bf16: systems/data at 095f58a51c4c of github.com/ai-dynamo/aiconfigurator (Apache-2.0), on A100-SXM4-80GB, and
# on an H200 near its power limit, the same shapes on both; on a B200, run over and over with operands that are all normally
# distributed, configs/system/b200_bf16_ceperm.json of github.com/MooreThreads/SimuMax. Some are among the rows fitted to.
PRODUCTS = (  # profile, m, n, k, seconds
    ("a100", 2048, 4096, 4096, 0.000305227),
    ("a100", 4096, 12288, 4096, 0.00151726),
    ("a100", 8192, 5120, 5120, 0.00167804),
    ("a100", 512, 4096, 16384, 0.000282708),
    ("h200", 2048, 4096, 4096, 0.000102308),
    ("h200", 4096, 12288, 4096, 0.000600373),
    ("h200", 8192, 5120, 5120, 0.000616949),
    ("h200", 512, 4096, 16384, 0.000106105),
    ("b200", 2048, 8192, 14336, 0.000420909),
    ("b200", 4096, 8192, 14336, 0.000897808),
    ("b200", 16384, 12288, 5120, 0.001829571),
    ("b200", 65536, 1536, 24576, 0.004408031),
)


def gemm(m: int, n: int, k: int, batch: int = 1, dtype: str = "bf16") -> Kernel:
    traffic = 2.0 * batch * (m * k + k * n + m * n)
    return Kernel("gemm", "product", "forward", 2.0 * batch * m * n * k, traffic, dtype, (batch, m, n, k))


@pytest.mark.parametrize(("name", "m", "n", "k", "seconds"), PRODUCTS)
def test_product_near_measurement(name: str, m: int, n: int, k: int, seconds: float) -> None:
    assert prices(name).seconds(gemm(m, n, k)) == pytest.approx(seconds, rel=0.25)


def test_products_are_right_within_5_percent_in_the_median() -> None:
    """But for a B200: the limit is the mean of this board's and of a faster one's."""
    errors = {(name, m): prices(name).seconds(gemm(m, n, k)) / seconds - 1 for name, m, n, k, seconds in PRODUCTS}
    assert statistics.median(abs(error) for (name, _), error in errors.items() if name != "b200") < 0.05
    assert statistics.median(error for (name, _), error in errors.items() if name == "b200") == pytest.approx(-0.08, abs=0.03)


def test_rows_that_are_not_aligned_slow_products_down() -> None:
    """A100, fp16, TFLOP/s of 8192 × vocabulary × 14336, and of 64 products for scores and contexts of 2048 tokens by head size
    (github.com/EleutherAI/cookbook sizing/results/transformer_data, vocab_v_sweep.out and h_sweep.out).
    """
    price = Prices(load_profile("a100"), load_gpu("a100-sxm-40gb"))
    vocabulary = {51136: 255.4, 51137: 76.1, 51138: 136.9, 51140: 138.4, 51144: 227.9}
    rates = {n: 2e-12 * 8192 * n * 14336 / price.seconds(rowed(8192, n, 14336)) for n in vocabulary}
    assert rates == pytest.approx(vocabulary, rel=0.25)
    scores = {128: 91.6, 134: 70.6, 136: 88.8, 144: 93.3}
    rates = {dim: 2e-12 * 64 * 2048**2 * dim / price.seconds(rowed(2048, 2048, dim, 64)) for dim in scores}
    assert rates == pytest.approx(scores, rel=0.25)
    contexts = {134: 88.6, 136: 115.6, 144: 127.1}
    rates = {dim: 2e-12 * 64 * 2048**2 * dim / price.seconds(rowed(2048, dim, 2048, 64)) for dim in contexts}
    assert rates == pytest.approx(contexts, rel=0.25)


def test_an_early_cublas_multiplies_batches_of_unaligned_rows_slowly() -> None:
    """TFLOP/s of 384 products of (1024, 1024) by (1024, 140) with CUDA 11.6 and 11.7 (github.com/pytorch/pytorch issue 83272)."""
    price = Prices(load_profile("a100"), load_gpu("a100-sxm-40gb"))
    work = 384 * 2e-12 * 1024 * 1024 * 140
    for variant, rates in ((EARLY_CUBLAS, {"fp16": 53.9, "bf16": 12.2}), ("", {"fp16": 85.8, "bf16": 85.6})):
        kernels = {dtype: replace(rowed(1024, 140, 1024, 384), dtype=dtype, variant=variant) for dtype in rates}
        assert {dtype: work / price.seconds(kernel) for dtype, kernel in kernels.items()} == pytest.approx(rates, rel=0.1)


def rowed(m: int, n: int, k: int, batch: int = 1) -> Kernel:
    """A product in fp16 with rows of n and k elements."""
    return replace(gemm(m, n, k, batch, "fp16"), alignment=math.gcd(ALIGNED, n, k))


def test_products_of_a_v100_are_right_within_5_percent_in_the_median() -> None:
    """TFLOP/s of m, n, k in fp16: github.com/EleutherAI/cookbook sizing/results/gemm_data/mm, v100.out."""
    rates = {
        (1024, 4096, 1024): 60.5,
        (2048, 4096, 2048): 69.7,
        (4096, 4096, 4096): 85.0,
        (8192, 4096, 8192): 88.5,
        (2304, 4096, 2048): 82.1,
        (2304, 4096, 4096): 82.1,
        (27648, 4096, 160): 48.2,
    }
    price = prices("v100")
    errors = [2e-12 * m * n * k / price.seconds(gemm(m, n, k, dtype="fp16")) / rate - 1 for (m, n, k), rate in rates.items()]
    assert statistics.median(map(abs, errors)) < 0.05
    assert max(map(abs, errors)) < 0.1


def test_a_copy_runs_at_the_published_fraction_of_bandwidth() -> None:
    """A100-80GB, one read and one write: 1732 GB/s; two reads: 1759 (github.com/te42kyfo/gpu-benches gpu-stream)."""
    seconds = prices("a100").seconds(Kernel("memory", "copy", "forward", 0.0, 1e10))
    assert 1e10 / seconds == pytest.approx(1.745e12, rel=0.01)


def test_each_launch_of_a_kernel_starts_and_ends() -> None:
    prices = Prices(load_profile("b200"), load_gpu("b200-sxm"))
    once, often = (Kernel("memory", "cast", "forward", 0.0, 1e8, "bf16", (), launches=launches) for launches in (1, 16))
    assert prices.seconds(often) - prices.seconds(once) == pytest.approx(15 * prices.profile.memory.fixed)


@settings(max_examples=60, deadline=None)
@given(m=sizes, n=sizes, k=sizes, batch=st.integers(1, 64), name=st.sampled_from((*MEASURED, "generic")))
def test_no_product_is_faster_than_the_hardware(m: int, n: int, k: int, batch: int, name: str) -> None:
    price, kernel = prices(name), gemm(m, n, k, batch)
    seconds = price.seconds(kernel)
    assert max(kernel.flops / price.gpu.peak["bf16"], kernel.bytes / price.gpu.memory_bandwidth) < seconds < float("inf")


def at_full_clock(name: str, m: int, n: int, k: int) -> float:
    """Seconds of a product without its operands' traffic when no power limit lowers the clock."""
    price = prices(name)
    curve = price.profile.gemm["bf16"]
    gpu = price.gpu
    rates = Rates(gpu.peak["bf16"], gpu.memory_bandwidth, gpu.sms)
    return float(gemm_clocks(curve, rates, Product((1, m, n, k), (0.0, 0.0)))[0])


@pytest.mark.parametrize("name", [name for name in profile_names() if name not in ("v100", "cpu-gloo")])
def test_a_product_pays_for_whole_tiles(name: str) -> None:
    """The smallest tile is 64 × 64: 129 rows cost what 192 cost."""
    assert at_full_clock(name, 129, 8192, 65536) == pytest.approx(at_full_clock(name, 192, 8192, 65536), rel=0.02)


def test_the_last_wave_counts_as_whole() -> None:
    """3072 × 1152 is 108 tiles of 256 × 128, one per multiprocessor of an A100; a ninth more columns need a second wave."""
    assert at_full_clock("a100", 3072, 1280, 8192) > 1.25 * at_full_clock("a100", 3072, 1152, 8192)


@pytest.mark.parametrize(("k", "rate"), [(64, 66e12), (128, 98e12), (256, 174e12), (512, 214e12), (1024, 224e12)])
def test_a_shallow_product_is_slow(k: int, rate: float) -> None:
    """8192 × 8192 × k as measured on an A100 (the table of `PRODUCTS`); heads of attention have k = 64 and 128."""
    assert gemm(8192, 8192, k).flops / prices("a100").seconds(gemm(8192, 8192, k)) == pytest.approx(rate, rel=0.15)


def test_the_power_limit_slows_real_numbers() -> None:
    """An A100 multiplies 8192 × 8192 × 8192 at 257 TFLOP/s, and zeros, which take less energy, at 295 (thonking.ai, "Strangely,
    matrix multiplications on GPUs run faster when given predictable data")."""
    product = gemm(8192, 8192, 8192)
    assert product.flops / prices("a100").seconds(product) == pytest.approx(257e12, rel=0.01)
    assert product.flops / at_full_clock("a100", 8192, 8192, 8192) == pytest.approx(295e12, rel=0.05)


def test_a_product_that_moves_nothing_takes_its_arithmetic(toy_prices) -> None:
    """1e12 FLOP/s, m = n = k = 1: nothing is waited for, neither operands nor the result."""
    curve = {"efficiency": 1.0, "tiles": [{"m": 1, "n": 1, "efficiency": 1.0}], "memory": 1.0, "exposed": 1.0, "blend": 8.0}
    assert toy_prices(gemm={"bf16": curve}).seconds(replace(gemm(1, 1, 1), bytes=0.0)) == pytest.approx(2e-12, abs=0)


def test_accumulating_in_fp32_is_dearer() -> None:
    """14336 × 4096 × 4096 on an A100: 2196 us into an fp32 sum, 2088 and 2091 us without (github.com/MooreThreads/SimuMax
    configs/system/a100_pcie.json)."""
    plain = gemm(14336, 4096, 4096)
    more = replace(plain, bytes=plain.bytes + 6 * 14336 * 4096)  # 4 bytes read and 4 written in place of 2
    price = prices("a100")
    assert price.seconds(more) / price.seconds(plain) == pytest.approx(2196 / 2090, abs=0.03)


def test_a_softmax_reaches_less_of_the_bandwidth_than_a_copy() -> None:
    """PyTorch on an A100: from 16384 to 32768 rows of 4096 in fp16 a softmax takes 210 us more (github.com/PrincetonUniversity/
    LLMCompass ae/figure5/cf/real_hardware/softmax_A100.csv)."""
    rows = [4.0 * rows * 4096 for rows in (16384, 32768)]
    less, more = (prices("a100").seconds(Kernel("reduction", "softmax", "forward", 0.0, moved, "fp16")) for moved in rows)
    assert more - less == pytest.approx(210e-6, rel=0.02)


def test_spread_of_shapes_held_out() -> None:
    """What an error bar needs: percentiles in order around a small median."""
    for name in MEASURED:
        for part in ("gemm", "attention"):
            spread = load_profile(name).provenance[part].spread
            assert {"large", "small"} <= set(spread)
            low, middle, high = spread["large"]
            assert low < middle < high
            assert abs(middle) < 0.05


def test_faster_hardware_is_never_slower() -> None:
    slow, fast = Gpu({"bf16": 1e14}, 1e12, 100), Gpu({"bf16": 2e14}, 2e12, 100)
    update = Kernel("optimizer", "update", "optimizer", 0.0, 1e9)
    for kernel in (gemm(4096, 4096, 4096), gemm(64, 512, 65536), attention(2, 16, 2048, 2048, 128), update):
        assert Prices(load_profile("h100"), fast).seconds(kernel) < Prices(load_profile("h100"), slow).seconds(kernel)


@pytest.mark.parametrize(
    ("elements", "bandwidth", "blocks", "seconds"),
    [
        # PyTorch's fused Adam in bf16, 14 bytes an element: AdamW of open_llama_7b_v2 on an H100 (github.com/pytorch/pytorch pull
        # 118361), Adam of 1/128 of Llama 2 70B on one of 2.4 TB/s, in launches of 320 blocks and in one (pull 119842)
        (6_738_415_616, 3.35e12, 320, 49.655e-3),
        (68_976_648_192 // 128, 2.4e12, 320, 4.539e-3),
        (68_976_648_192 // 128, 2.4e12, 10**6, 3.578e-3),
    ],
)
def test_updates_by_multi_tensor_launches_near_measurement(elements: int, bandwidth: float, blocks: int, seconds: float) -> None:
    gpu = load_gpu("h100-sxm").model_copy(update={"memory_bandwidth": bandwidth})
    update = Kernel("optimizer", "adam", "optimizer", 0.0, 14.0 * elements, "fp32", (elements, blocks))
    assert Prices(load_profile("h100"), gpu).seconds(update) == pytest.approx(seconds, rel=0.07)


@pytest.mark.parametrize(
    ("blocks", "launched", "seconds"),
    [
        (3, 16, 10.0),  # on four multiprocessors there is room for eight: three take as long as one alone
        (8, 16, 4.0),  # by their bytes
        (9, 16, 14.0),  # the last one runs by itself
        (16, 16, 8.0),
        (20, 12, 18.0),  # eight and four of a launch, then eight of another
    ],
)
def test_blocks_of_an_update_run_at_once_as_far_as_there_is_room(toy_profile, blocks: int, launched: int, seconds: float) -> None:
    gpu = Gpu({"bf16": 1e14}, 1e6, 4)
    kernel = Kernel("optimizer", "adam", "optimizer", 0.0, 5e5 * blocks, "fp32", (blocks * 65536 - 1, launched))
    assert Prices(toy_profile(update_block="10 s"), gpu).seconds(kernel) == pytest.approx(seconds)
    assert Prices(toy_profile(), gpu).seconds(kernel) == pytest.approx(blocks / 2)
    assert Prices(toy_profile(update_block="0.5 s"), gpu).seconds(kernel) == pytest.approx(blocks / 2)  # by their bytes


def test_cpu_core_reaches_its_measured_rate() -> None:
    """About 101 GFLOP/s for one pinned process, as another measurement of this sort of core found."""
    price = prices("cpu-gloo")
    assert price.profile.synchronous
    assert price.seconds(gemm(1024, 1024, 1024, dtype="fp32")) == pytest.approx(2 * 1024**3 / 101e9, rel=0.15)


def test_dtype_that_the_gpu_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="bf16"):
        prices("v100").seconds(gemm(64, 64, 64))


def test_a_slower_dtype_that_was_not_measured_starts_and_stores_as_fast() -> None:
    """An outer product is bound by what it stores, whatever the peak of arithmetic."""
    for name in ("a100", "h100"):
        wide, narrow = (prices(name).seconds(gemm(6400, 1600, 1, 48, dtype)) for dtype in ("fp32", "bf16"))
        assert wide < 2.2 * narrow  # twice as many bytes


def test_extrapolation_is_named() -> None:
    h100 = prices("h100")

    def note(kernel: Kernel, of: Prices = h100) -> str:
        outside = of.extrapolation(kernel)
        return outside.note if outside else ""

    assert h100.extrapolation(gemm(4096, 4096, 4096)) is None
    assert "m=100000" in note(gemm(100000, 4096, 4096))
    assert "batch=8" in note(gemm(64, 64, 64, batch=8))
    low = h100.profile.provenance["gemm"].measured_range["k"][0]
    half, nothing = (note(gemm(4096, 4096, k)) for k in (int(low / 2), 0))
    assert f"k={int(low / 2)} is outside the measured" in half
    assert half.endswith(f", {low / int(low / 2):.3g} times")
    assert nothing.endswith(", inf times")
    assert f"k={int(low / 4)}" in note(gemm(100000, 4096, int(low / 4)))  # of two sizes the farther one
    assert "fp32" in note(gemm(4096, 4096, 4096, dtype="fp32"))
    assert "keys=65536" in note(attention(1, 8, 4096, 65536, 128))
    assert "not measured" in note(gemm(4096, 4096, 4096), Prices(profile_for("unheard-of"), h100.gpu))


def test_same_kernel_is_priced_once() -> None:
    price = prices("h100")
    price.seconds(gemm(4096, 4096, 4096))
    price.seconds(gemm(4096, 4096, 4096))
    assert price.seconds.cache_info().hits == 1


def test_a_host_that_launches_from_python_decodes_as_published() -> None:
    """OPT-175B, 96 layers of 24 to 28 kernels: 95 ms per token on 8 A100, no CUDA graphs (facebookresearch/metaseq, pull 270)."""
    assert 95e-3 / 96 / 28 <= load_profile("a100").launching(eager=True) <= 95e-3 / 96 / 24


@pytest.mark.parametrize(
    ("gpu", "kernels", "persistent", "rows", "features", "forward", "backward"),
    [
        ("a100-sxm-40gb", "apex", False, 16384, 1024, 75.1e-6, 176.2e-6),  # github.com/NVIDIA/apex pull 1037
        ("a100-sxm-40gb", "apex", True, 16384, 1024, 53.5e-6, 86.6e-6),
        ("a100-pcie-80gb", "compiled", False, 2048, 8192, 79.9e-6, 260.1e-6),  # github.com/linkedin/Liger-Kernel benchmark/data
        ("a100-pcie-80gb", "compiled", False, 2048, 16384, 156.7e-6, 490.5e-6),
    ],
)
def test_norms_take_as_long_as_published(gpu, kernels, persistent, rows, features, forward, backward) -> None:
    prices = Prices(profile_for(gpu), load_gpu(gpu))
    options = Megatron2021Options.model_validate({"persistent_norm": True}) if persistent else None
    ways = kernel_set(kernels, options).norm(kernels == "compiled", 2)
    for passes, seconds in ((ways.forward, forward), (ways.backward, backward)):
        moved = [Kernel(way.kind, "norm", "forward", 0.0, rows * features * way.moved, variant=way.operator) for way in passes]
        assert sum(map(prices.seconds, moved)) == pytest.approx(seconds, rel=0.06)


def test_dropout_takes_as_long_as_published() -> None:
    """2 × 4096 × 4096 elements of fp16 on a V100: 572 GB/s read and written, besides the mask (github.com/facebookresearch/
    xformers pull 14).
    """
    elements = 2 * 4096 * 4096
    way = kernel_set("torch").residual(2, mask=True).forward[0]
    kernel = Kernel(way.kind, "dropout", "forward", 0.0, elements * way.moved, "fp16", variant=way.operator)
    assert Prices(profile_for("v100-sxm2-32gb"), load_gpu("v100-sxm2-32gb")).seconds(kernel) == pytest.approx(
        4 * elements / 572e9, rel=0.02
    )


def test_a_compiled_rotary_embedding_takes_as_long_as_published() -> None:
    """16384 tokens, 32 query and 8 key heads of 256 features in bf16 on an A100 PCIe: 0.724 and 1.729 ms (github.com/linkedin/
    Liger-Kernel benchmark/data/a100_all_benchmark_data.csv).
    """
    prices, ways = Prices(profile_for("a100-pcie-80gb"), load_gpu("a100-pcie-80gb")), kernel_set("compiled").rotary(2)
    for (way,), seconds in ((ways.forward, 0.724e-3), (ways.backward, 1.729e-3)):
        moved = 16384 * 40 * 256 * way.moved
        assert prices.seconds(Kernel(way.kind, "rotary", "forward", 0.0, moved, variant=way.operator)) == pytest.approx(
            seconds, rel=0.02
        )


def test_the_power_of_one_gpu_in_terms_of_the_measured_one() -> None:
    """A profile of the A100, on a GPU with a quarter of its 108 multiprocessors and half of its 312 TFLOP/s and 400 W: each has
    twice the rate and twice the power. 1 where either is not known.
    """
    profile, a100 = load_profile("a100"), load_gpu("a100-sxm-80gb")
    assert _power_shares(profile.gpu, a100) == (dict.fromkeys(a100.peak, 1.0), 1.0)
    half = a100.model_copy(update={"sms": 27, "peak": {dtype: rate / 2 for dtype, rate in a100.peak.items()}, "power": 200.0})
    shares, watts = _power_shares(profile.gpu, half)
    assert (shares, watts) == (dict.fromkeys(half.peak, 0.5), 2.0)
    assert _power_shares(profile.gpu, half.model_copy(update={"power": 0.0})) == ({}, 1.0)
    assert _power_shares(profile.gpu, half.model_copy(update={"sms": 0})) == ({}, 1.0)
    assert _power_shares(profile.gpu, half.model_copy(update={"peak": {"int8": 1e15}})) == ({}, 1.0)
    assert _power_shares("another", half) == ({}, 1.0)


def test_what_a_board_does_in_four_bits_slows_nothing_else() -> None:
    """A GB300 has 1.5 times a GB200's rate in fp4 and the same in fp8, whose products take as long as without it."""
    profile, gb300 = profile_for("gb300"), load_gpu("gb300")
    without = gb300.model_copy(update={"peak": {dtype: rate for dtype, rate in gb300.peak.items() if dtype != "fp4"}})
    size = 8192
    product = Kernel("gemm", "", "forward", 2.0 * size**3, 4.0 * size**2, "fp8", (1, size, size, size))
    attention = Kernel("attention_forward", "", "forward", 1e12, 1e8, "bf16", (1, 64, 8, size, size, 128, 1))
    for kernel in (product, attention):
        assert Prices(profile, gb300).seconds(kernel) == Prices(profile, without).seconds(kernel)


def test_hosts_that_wait_for_their_kernels_launch_within_the_kernels_time():
    core, gpu = load_profile("cpu-gloo"), load_profile("h100")
    assert [core.launching(eager) for eager in (True, False)] == [0.0, 0.0]
    assert core.calling(True) == 0.0
    assert (gpu.launching(True), gpu.launching(False)) == (gpu.eager, gpu.launch)
    assert gpu.calling(True) == pytest.approx(gpu.collective_call - gpu.eager)
    assert gpu.collective_call > gpu.eager
    assert gpu.calling(False) == 0.0


# cuDNN 9.27, milliseconds of two causal sequences, 64 heads of 128 with 8 of keys and values, on one GPU of a GB200 and on an
# H200, in 16 bits and in fp8 (github.com/NVIDIA/cudnn-frontend at d6d35d692753, benchmark/attention_training/results/llama3.1)
IN_FP8 = (
    ("b200", "attention_forward", 8192, 1.410, 1.081),
    ("b200", "attention_backward", 4096, 1.248, 1.232),
    ("b200", "attention_backward", 32768, 72.066, 53.768),
    ("h200", "attention_forward", 16384, 13.888, 8.819),
    ("h200", "attention_backward", 8192, 10.448, 16.298),
)


@pytest.mark.parametrize(("name", "kind", "keys", "wide", "narrow"), IN_FP8)
def test_attention_in_fp8_is_as_much_faster_as_measured(name: str, kind: str, keys: int, wide: float, narrow: float) -> None:
    shape = (2, 64, 8, keys, keys, 128, 1)
    seconds = [prices(name).seconds(Kernel(kind, "attention", "forward", 0.0, 0.0, dtype, shape)) for dtype in ("bf16", "fp8")]
    assert seconds[0] / seconds[1] == pytest.approx(wide / narrow, rel=1e-3)


def test_attention_in_fp8_between_and_beyond_what_was_measured() -> None:
    table = Fp8Attention(keys=(1024, 4096), forward=(1.0, 3.0), backward=(0.5, 1.5))
    assert [table.faster(keys, False) for keys in (1, 1024, 2048, 4096, 10**6)] == pytest.approx([1, 1, 2, 3, 3])
    assert table.faster(2048, True) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="keys must ascend"):
        Fp8Attention(keys=(4096, 1024), forward=(1.0, 3.0), backward=(0.5, 1.5))
