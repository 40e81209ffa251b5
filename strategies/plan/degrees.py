"""Degrees of parallelism: the fields of a plan that say how many ranks each axis has, and how experts are spread over them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import Field

from strategies.models.parts import unsaid
from topologies.cluster import MAX_GPUS
from topologies.reading import Config

Ranks = Annotated[int, Field(gt=0, le=MAX_GPUS)]
Count = TypeVar("Count", int, float)


def _is_alltoall(value: object) -> bool:
    return value == "alltoall"


class Degrees(Config):
    """World size W = tp·cp·pp·dp; the ep ranks are among the cp·dp ranks."""

    tp: Ranks = Field(1, description="tensor parallel degree (Megatron-LM)")
    pp: Ranks = Field(1, description="pipeline parallel degree: number of stages")
    dp: Ranks | None = Field(None, description="data parallel degree; by default what the other degrees leave of the GPUs")
    cp: Ranks = Field(1, description="context parallel degree: ranks that share the tokens of each sequence")
    cp_method: Literal["ring", "ulysses", "all_gather"] = Field(
        "ring",
        description="how cp ranks attend to each other's tokens: ring passes keys and values on (arXiv:2310.01889), ulysses "
        "exchanges tokens for heads (arXiv:2309.14509), all_gather gathers keys and values first (arXiv:2407.21783)",
    )
    ep: Ranks = Field(
        1,
        description="expert parallel degree: ranks over which the experts of a layer are spread, all cp ranks and dp ranks, with "
        "expert_tp=1 tp ranks too (Megatron-LM's --expert-model-parallel-size)",
    )
    imbalance: float = Field(1.0, ge=1, le=MAX_GPUS, description="tokens of the busiest of the ep ranks relative to the mean")
    expert_spread: float | None = Field(
        None,
        ge=0,
        le=100,
        exclude_if=unsaid,
        description="instead of imbalance, standard deviation of the tokens of a layer's experts relative to their mean: the "
        "busiest of the ep ranks is that of random loads, drawn anew for each layer; 0: tokens choose at random",
    )
    capacity_factor: float | None = Field(
        None,
        ge=1e-3,
        le=1e3,
        description="tokens that an expert takes relative to the mean (GShard); more are dropped; by default no limit",
    )
    pad_to_capacity: bool = Field(False, description="tokens of every expert are padded to its capacity, computed and exchanged")
    expert_tp: Ranks | None = Field(
        None,
        description="tensor parallel degree of experts: tp by default; or 1: experts are not cut, and tp ranks count among "
        "the ep ranks (Megatron-LM's --expert-tensor-parallel-size)",
    )
    token_dispatcher: Literal["alltoall", "allgather", "deepep", "hybridep"] = Field(
        "alltoall",
        exclude_if=_is_alltoall,
        description="what ep ranks exchange: a copy of a token for each of its experts (Megatron-LM's all-to-all dispatcher), "
        "all tokens, of which each rank takes those of its experts (allgather, the default of Megatron-LM's arguments), or a "
        "copy for each rank that has any of them (DeepEP, HybridEP: --moe-token-dispatcher-type flex)",
    )
    dispatcher_sms: int | None = Field(
        None,
        ge=0,
        le=1024,
        exclude_if=unsaid,
        description="multiprocessors that deepep's or hybridep's kernels take from compute beside them, by default 20 and 16 "
        "(Megatron-LM's --moe-flex-dispatcher-num-sms); 0: none, as DeepEP's low-latency kernels with a hook",
    )
    ep_nodes: Ranks = Field(
        1, description="nodes of the ep ranks: above 1 a token is sent to a node once, and from there to ranks (DeepSeek-V3)"
    )
    routed_nodes: Ranks | None = Field(None, description="with ep_nodes, nodes that a token is sent to (DeepSeek-V3: 4)")
    sequence_parallel: bool = Field(
        False, description="split norms and dropout of the tp ranks along the sequence (Korthikanti 2022)"
    )
    sync_norm: bool = Field(
        False,
        description="norms take their statistics over the tokens of all dp and cp ranks (PyTorch's SyncBatchNorm): an "
        "all-gather of 2·features + 1 numbers of each rank forward, an all-reduce of 2·features backward",
    )

    @property
    def whole_experts(self) -> bool:
        """Whether experts are not cut: each tp rank has its own."""
        return self.expert_tp == 1 and self.tp > 1

    @property
    def ep_of_copies(self) -> int:
        """How many of the cp·dp ranks, which have the same parameters, the experts are spread over; with whole experts tp ranks
        are among the ep ranks, too.
        """
        return self.ep // self.tp if self.whole_experts else self.ep

    def expert_sharers(self, ranks: Count) -> Count:
        """How many of `ranks` ranks with the same parameters, among which states are shared out, have the same experts."""
        return max(1, ranks // self.ep_of_copies)

    @property
    def ep_of_dp(self) -> int:
        """How many dp ranks the experts are spread over. The cp ranks come first: Megatron-Core's grid of experts has no cp
        (megatron/core/parallel_state.py, expert_decoder_rank_generator; arXiv:2504.14960), and torchtitan's ep is
        dp_shard_in_ep · cp (torchtitan/distributed/parallel_dims.py).
        """
        return max(1, self.ep_of_copies // self.cp)

    @property
    def ep_inside_cp(self) -> bool:
        """Whether the ranks that experts are spread over are some of the cp ranks: neighbours, as in Megatron-Core's grid."""
        return 1 < self.ep_of_copies < self.cp

    @property
    def attending(self) -> tuple[str, ...]:
        """The axes of the rank grid along which the ranks differ that share the tokens of a sequence."""
        return ("ep", "cp") if self.ep_inside_cp else ("cp",)
