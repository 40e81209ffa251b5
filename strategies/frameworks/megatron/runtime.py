"""What Megatron-LM's buffers and optimizers do otherwise than PyTorch's."""

from __future__ import annotations

from strategies.frameworks.runtime import Runtime


class MegatronRuntime(Runtime):
    """Gradients are in buffers that are set to zero (megatron/core/distributed/distributed_data_parallel.py, zero_grad_buffer);
    the host reads their norm (megatron/core/optimizer/clip_grads.py, get_grad_norm_fp32, and since it may stay on the GPU,
    ChainedOptimizer in optimizer.py); loops in Python copy them to fp32 and masters back to parameters (distrib_optimizer.py,
    _copy_model_grads_to_main_grads, _copy_main_params_to_model_params).
    """

    zeroes_gradients = reads_norm = copies_each_tensor = fp8_buffers = True
