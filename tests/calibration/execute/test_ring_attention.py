"""Blocks of ring attention by the kernels of GPUs, as far as shapes go: PyTorch's own rules for tensors without data."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from calibration.execute.model import context_parallel  # noqa: E402


@pytest.mark.parametrize(
    ("dtype", "flash"), [(torch.float32, True), (torch.bfloat16, True), (torch.float16, True), (torch.float16, False)]
)
@pytest.mark.parametrize("keys", [24, 48])
def test_kernels_of_gpus_are_called_as_they_are_declared(
    dtype: torch.dtype, flash: bool, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results, one sum for each query in fp32, and a gradient for each argument; fp32 has rows of sums in multiples of 32. A GPU
    before Ampere has no flash attention: there 16 bits take the kernel of fp32.
    """
    if dtype == torch.float32 or not flash:
        for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"):
            monkeypatch.setattr(context_parallel.aten, name, None)
    q, k, v = (torch.empty(2, 4, length, 16, device="meta", dtype=dtype) for length in (48, keys, keys))
    result, sums = context_parallel._fused(q, k, v, keys == 48, flash)
    assert (result.shape, result.dtype, sums.shape, sums.dtype) == (q.shape, dtype, q.shape[:-1], torch.float32)
    gradients = context_parallel._fused_backward(torch.empty_like(q), q, k, v, result, sums, keys == 48, flash)
    assert [each.shape for each in gradients] == [q.shape, k.shape, v.shape]
