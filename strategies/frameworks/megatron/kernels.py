"""Megatron-LM's and Transformer Engine's fused kernels.

Around experts (megatron/core/transformer/moe): a top-k and its scatters into scores and a map, and for the load balancing loss
once more softmax, top-k and map, with sums of both (topk_routing_with_score_function, compute_routing_scores_for_aux_loss in
moe_utils.py: 16 kernels over tokens and experts); the product of these sums and its record, sums of the map by rank and expert,
and four copies of them to the host (switch_load_balancing_loss_func there, preprocess and _maybe_dtoh_and_synchronize in
token_dispatcher.py: 14 of few numbers); the map of rows for the fused permutation, three, and of chunks, one before the experts
and one after (transformer_engine/pytorch/triton/permutation.py). Backward 16 for scores and loss. With fused routing
(--moe-router-fusion) softmax, top-k and map are one kernel, and so are the loss's scores and the loss, whose sums of the map are
left to PyTorch: three besides the first, and two backward (transformer_engine/pytorch/router.py). Of what each rank gathers of
the counts, and of the weights that go with the tokens, the bytes are left out: 1/hidden of the tokens'.

For the sizes of its all-to-all, and the list of rows by expert that Transformer Engine's GroupedLinear is given, the host waits
once in every such layer, forward and where it is recomputed, not backward (cuda_sync_point; not padded to capacity); the kernels
of DeepEP and HybridEP, too, tell the host how much will come (num_recv_tokens_per_expert_list in deep_ep). GroupedLinear launches
a product for each expert, and but for delayed scaling a cast, from a loop in C++ (transformer_engine/pytorch/csrc/extensions,
split_quantize; nvte_multi_stream_cublas_gemm). In fp8 and nvfp4 an expert's rows must be a multiple of 16 or 32: TEGroupedMLP
(megatron/core/transformer/moe/experts.py) copies tokens, and the weights that go with them, with padding before the experts, and
results without it behind them, one launch each (transformer_engine/pytorch/module/fp8_padding.py, fp8_unpadding.py), where
HybridEP has not padded them on their way (pad_multiple in token_dispatcher.py). moe_router_padding_for_fp8 is not the default.
"""

from __future__ import annotations

import math

from strategies.frameworks import TRANSFORMER_ENGINE, Alignment, KernelSet, Routing, kernel_sets
from strategies.frameworks.megatron.options import MegatronOptions
from strategies.frameworks.megatron.runtime import MegatronRuntime
from strategies.frameworks.options import Options

ROUTING, FUSED_ROUTING = Routing(scores=16, counts=14, places=5, backward=16), Routing(scores=3, counts=11, places=5, backward=2)
BUCKET, PER_RANK = 40e6, 1e6  # parameters (megatron/core/distributed/distributed_data_parallel.py)


@kernel_sets("megatron")
class Megatron(KernelSet):
    """`kernels: megatron` in a plan: Megatron-Core with Transformer Engine."""

    options: MegatronOptions = MegatronOptions.model_validate({})
    accumulates_in_products = norms_in_fp8 = fp8_experts = deterministic = sequences_first = weighs_before_combining = True
    runtime = MegatronRuntime()
    beside_products = "weight_gradient"
    fp8_scalings = TRANSFORMER_ENGINE
    softmax_rows = 4
    experts_apart = pads_experts = sorts_copies = splits_shared_heads = hides_ring = True
    replicas_last = True  # megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py, outer_fsdp_group_grad_reduce

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self.overlap_param_gather, self.graphed = self.options.overlap_param_gather, self.options.cuda_graph
        self.routing = FUSED_ROUTING if self.options.router_fusion else ROUTING

    def waits_for_counts(self, exchanged: bool) -> bool:
        """Always."""
        return True

    def bucket(self, overlap: bool, first: bool, dp: int) -> float | None:
        """max(40e6, 1e6·dp) parameters; whole stages without overlap, on pipeline ranks after the first and in chunks after the
        first (distributed_data_parallel.py; training.py, disable_bucketing).
        """
        return max(BUCKET, PER_RANK * dp) if overlap and first else math.inf

    def alignment(self, ranks: int) -> Alignment:
        """The distributed optimizer's parameters start at 128 bytes or a multiple, of 2 bytes each, and its buckets end where
        ranks have equal parts and the next one starts at 256 bytes; with large powers of two in them, NCCL's messages of many
        ranks keep their bandwidth (megatron/core/distributed/param_and_grad_buffer.py, _pad_start_of_param_if_needed,
        _pad_end_of_bucket_if_needed). Two pipeline stages' copies of a tied embedding have buckets of their own, so that the same
        dp ranks own the same parts of both (_does_param_require_new_bucket).
        """
        end = 2**16 if self.options.pad_buckets_for_high_nccl_busbw else 128
        return Alignment(64, math.lcm(ranks, end), shared_apart=True)

    def before_reduction(self, gradient: int, joined: bool, copies: int, scaled: bool) -> list[tuple[str, int]]:
        """Megatron-Core takes the norm of each bucket, to find NaN, and scales the bucket by 1/copies, unless the collective is
        to average (megatron/core/distributed/param_and_grad_buffer.py, start_grad_sync; with one copy the factor is 1, and it is
        left out).
        """
        check = [("gradient check", gradient)] if self.options.check_gradients and not scaled else []
        scale = [("gradient scale", 2 * gradient)] if copies > 1 and not self.options.average_in_collective else []
        return check + scale
