"""Prices of attention kernels against published measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.pricing.kernel_curves import AttentionCurve, attention_seconds, ordered_stretch
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from sim.program import Kernel
from tests.sim.conftest import MEASURED, attention, prices, sizes
from topologies.cluster_files import load_gpu
from topologies.reading import UserError

ATTENTION = (  # profile, batch, heads, kv_heads, sequence, head_dim, seconds of the causal forward pass
    ("a100", 4, 32, 8, 4096, 128, 0.00339585),
    ("a100", 1, 64, 8, 8192, 128, 0.00620356),
    ("h100", 4, 32, 8, 4096, 128, 0.00101102),
    ("h100", 1, 64, 8, 8192, 128, 0.0018347),
    ("b200", 4, 32, 8, 4096, 128, 0.000548832),
    ("b200", 1, 64, 8, 8192, 128, 0.000931611),
)


@pytest.mark.parametrize(("name", "batch", "heads", "kv_heads", "length", "dim", "seconds"), ATTENTION)
def test_attention_near_measurement(
    name: str, batch: int, heads: int, kv_heads: int, length: int, dim: int, seconds: float
) -> None:
    traffic = 4.0 * batch * length * dim * (heads + kv_heads)
    kernel = Kernel("attention_forward", "a", "forward", 0.0, traffic, "bf16", (batch, heads, kv_heads, length, length, dim, 1))
    assert prices(name).seconds(kernel) == pytest.approx(seconds, rel=0.2)


def test_flash_attention_2_forward_and_backward_on_a100() -> None:
    """173 TFLOP/s over both passes (causal, 4k, head dimension 128, 16 heads, batch 4), FlashAttention-2's own benchmark."""
    passes = [attention(4, 16, 4096, 4096, 128, kind=kind) for kind in ("attention_forward", "attention_backward")]
    both = sum(map(prices("a100").seconds, passes))
    assert 3.5 * 2 * 4 * 16 * 4096**2 * 128 / both == pytest.approx(173e12, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 16),
    heads=st.integers(1, 96),
    queries=sizes,
    more=sizes,
    dim=st.sampled_from((64, 128, 256)),
    causal=st.integers(0, 1),
    name=st.sampled_from((*MEASURED, "generic")),
)
def test_no_attention_is_faster_than_the_hardware(
    batch: int, heads: int, queries: int, more: int, dim: int, causal: int, name: str
) -> None:
    price = prices(name)
    keys = queries + more
    pairs = queries * keys - causal * queries * (queries - 1) / 2
    for kind, factor in (("attention_forward", 4), ("attention_backward", 10)):
        seconds = price.seconds(attention(batch, heads, queries, keys, dim, causal, kind))
        assert factor * batch * heads * dim * pairs / price.gpu.peak["bf16"] * 0.999 < seconds < float("inf")


def test_causal_attention_is_cheaper_and_backward_dearer() -> None:
    price = prices("h100")
    causal, full = (price.seconds(attention(1, 32, 8192, 8192, 128, causal=mask)) for mask in (1, 0))
    assert 0.5 < causal / full < 0.6
    backward = price.seconds(attention(1, 32, 8192, 8192, 128, kind="attention_backward"))
    assert backward / causal == pytest.approx(2.5 / 0.86, rel=0.02)  # less what starts and ends once


# TFLOP/s of forward and backward passes together, causal, 16,384 tokens of 2,048 features: labels of the plots
# flash2_a100_fwd_bwd_benchmark.png and flash2_h100_fwd_bwd_benchmark.png of github.com/Dao-AILab/flash-attention
OLDER = (  # profile, plan.attention, sequence, head_dim, TFLOP/s
    ("a100", "flash2", 2048, 128, 155),
    ("a100", "flash2", 16384, 64, 171),
    ("a100", "flash1", 2048, 128, 69),
    ("a100", "flash1", 8192, 64, 92),
    ("a100", "triton", 4096, 128, 74),
    ("a100", "triton", 16384, 64, 80),
    ("h100", "flash2", 8192, 128, 308),
    ("h100", "flash2", 1024, 64, 192),
    ("h100", "flash1", 8192, 128, 135),
    ("h100", "flash1", 2048, 64, 136),
)


@pytest.mark.parametrize(("name", "variant", "length", "dim", "rate"), OLDER)
def test_older_attention_kernels_run_at_their_published_rates(name, variant, length, dim, rate) -> None:
    batch, heads = 16384 // length, 2048 // dim
    shape = (batch, heads, heads, length, length, dim, 1)
    both = [Kernel(f"attention_{way}", "a", way, 0.0, 0.0, "bf16", shape, variant) for way in ("forward", "backward")]
    flops = 3.5 * 2 * batch * heads * length**2 * dim
    assert flops / sum(map(prices(name).seconds, both)) / 1e12 == pytest.approx(rate, rel=0.15)


@pytest.mark.parametrize("name", ["a100", "h100", "h200"])
@pytest.mark.parametrize("dim", [64, 128])
def test_no_older_kernel_beats_the_fastest(name, dim) -> None:
    """`flash` is the fastest kernel of the GPU, over both passes of 16,384 tokens and sequences of 1,024 and more."""
    for length in (1024, 2048, 4096, 8192, 16384):
        shape = (16384 // length, 2048 // dim, 2048 // dim, length, length, dim, 1)
        cost = {
            variant: sum(
                prices(name).seconds(Kernel(f"attention_{way}", "a", way, 0.0, 0.0, "bf16", shape, variant))
                for way in ("forward", "backward")
            )
            for variant in ("", "flash2", "sdpa", "flash1", "triton")
        }
        assert min(cost.values()) == cost[""]


PYTORCH = (  # batch, heads, tokens, ms forward on an H100: github.com/pytorch/benchmark pull 2443, pytorch/pytorch issue 142132
    (8, 16, 2048, 0.845728),
    (2, 16, 8192, 3.27904),
    (1, 16, 16384, 6.55098),
    (1, 24, 4608, 0.7919),
)


@pytest.mark.parametrize(("batch", "heads", "tokens", "ms"), PYTORCH)
def test_attention_of_pytorch_itself(batch, heads, tokens, ms) -> None:
    kernel = replace(attention(batch, heads, tokens, tokens, 128, causal=False), variant="sdpa")
    assert 1e3 * prices("h100").seconds(kernel) == pytest.approx(ms, rel=0.1)


def test_attention_of_pytorch_where_it_was_not_measured() -> None:
    """On Blackwell torchtitan asks for cuDNN's, the GPU's fastest (github.com/pytorch/torchtitan pull 1196)."""
    ways = [attention(1, 8, 8192, 8192, 128), replace(attention(1, 8, 8192, 8192, 128), variant="sdpa")]
    assert len({prices("b200").seconds(kernel) for kernel in ways}) == 1
    outside = prices("b200").extrapolation(ways[1])
    assert outside is not None
    assert "PyTorch's own was not measured" in outside.note


def test_a_backward_pass_starts_and_ends_once() -> None:
    """It has 2.5 times the arithmetic of a forward pass, not 2.5 times the start and end of a kernel."""
    curve = prices("a100").profile.attention
    tiny = prices("a100").seconds(attention(1, 1, 16, 16, 64, kind="attention_backward"))
    assert curve.fixed < tiny < 2 * curve.fixed


def test_an_attention_kernel_without_a_price_is_refused() -> None:
    kernel = Kernel("attention_forward", "a", "forward", 0.0, 0.0, "fp16", (1, 8, 8, 1024, 1024, 64, 1), "flash1")
    with pytest.raises(UserError, match="attention=flash1: profile 'v100'"):
        prices("v100").seconds(kernel)


def test_an_ordered_backward_pass_of_flash_attention_2_leaves_multiprocessors_idle() -> None:
    """H100, FlashAttention-2 with deterministic=True, 2 × 16 heads of 128, 8,192 tokens: 8.279 ms
    (github.com/Dao-AILab/flash-attention pull request 1893). 160 thread blocks take two waves on 132 multiprocessors.
    """
    kernel = replace(attention(2, 16, 8192, 8192, 128, kind="attention_backward"), variant="flash2")
    free, ordered = (prices("h100").seconds(replace(kernel, ordered=each)) for each in (False, True))
    assert ordered == pytest.approx(8.279e-3, rel=0.05)
    assert ordered / free > 1.65


def test_thread_blocks_of_an_ordered_pass_take_turns() -> None:
    """Two heads of 256 keys on 3 multiprocessors: two thread blocks each, four, of which one waits: 2 in place of 4/3."""
    assert ordered_stretch(3, (1, 2, 2, 256, 256, 64, 0)) == pytest.approx(1.5)
    assert ordered_stretch(4, (1, 2, 2, 256, 256, 64, 0)) == pytest.approx(1.0)
    for sms in (0, 1):  # of which one is idle never, however many are unknown
        assert ordered_stretch(sms, (1, 2, 2, 256, 256, 64, 1)) == 1.0
    causal = ordered_stretch(4, (1, 2, 2, 256, 256, 64, 1))
    assert causal == pytest.approx(2 / 1.5)  # two blocks of queries see the first keys, one the last


@pytest.mark.parametrize(
    ("tokens", "forward", "backward"), [(2048, 0.409, 1.284), (8192, 5.308, 16.249), (131072, 1267.7, 3872.5)]
)
def test_flash_attention_2_on_blackwell(tokens: int, forward: float, backward: float) -> None:
    """ms on a GB200: github.com/NVIDIA/cudnn-frontend d48a60eb146e, sdpa_bf16_benchmark_results_NVIDIA_GB200.csv."""
    price = Prices(load_profile("b200"), load_gpu("gb200"))
    for kind, seconds in (("attention_forward", forward), ("attention_backward", backward)):
        kernel = replace(attention(1, 128, tokens, tokens, 128, kind=kind), variant="flash2")
        assert 1e3 * price.seconds(kernel) == pytest.approx(seconds, rel=0.08)


@pytest.mark.parametrize(("causal", "keys_block", "seen"), [(0, 33, 100), (1, 1, 50), (1, 33, 50 + 16), (1, 201, 100)])
def test_keys_behind_the_mask_are_left_out_in_whole_blocks(causal: int, keys_block: int, seen: float) -> None:
    """100 queries and keys of 64 on one multiprocessor of 1 TFLOP/s: a query sees half of the keys, half a block more, or all."""
    curve = AttentionCurve(efficiency=1.0, block=1, wave=0.0, keys_block=keys_block, backward=1.0)
    assert attention_seconds(curve, 1e12, 1, (1, 1, 1, 100, 100, 64, causal)) == pytest.approx(100 * 4 * 64 * seen / 1e12)
