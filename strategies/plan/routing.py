"""How unevenly a router spreads tokens over ranks (`plan.expert_spread`): in each layer and microbatch anew, so that what counts
is the busiest rank of random loads, for which the others wait at the exchange.

An expert's share of the tokens is random with a mean of one and the given standard deviation (a gamma distribution); that tokens
choose independently adds the spread of a multinomial draw. A router that is balanced by biases instead of a loss (Wang et al.
2024, arXiv:2408.15664; DeepSeek-V3) balances experts over many steps, not in each.
"""

from __future__ import annotations

import math
from functools import lru_cache

DRAWS, SEED = 400, 1
# Multiprocessors that a dispatcher's kernels take: Megatron-LM's moe_deepep_num_sms, moe_hybridep_num_sms.
DISPATCHER_SMS = {"deepep": 20, "hybridep": 16}
MOST = 10**9  # copies of tokens that are drawn: more differ by less than a part in ten thousand


@lru_cache(maxsize=1024)
def busiest_rank(experts: int, ranks: int, copies: int, spread: float) -> float:
    """Copies of tokens on the busiest of `ranks` ranks relative to the mean, expected, where `copies` in all go to `experts`
    experts, which lie on the ranks in equal numbers.
    """
    import numpy as np

    if ranks == 1:
        return 1.0
    generator, size = np.random.default_rng(SEED), (DRAWS, experts)
    shares = generator.gamma(spread**-2, spread**2, size) if spread else np.ones(size)
    shares = np.maximum(shares, 1e-12)
    copies = min(copies, MOST)
    counts = generator.multinomial(copies, shares / shares.sum(axis=1, keepdims=True))
    loads = counts.reshape(DRAWS, ranks, experts // ranks).sum(axis=2)
    return float(loads.max(axis=1).mean() * ranks / copies)


def distinct(experts: int, ranks: int, chosen: int) -> float:
    """Ranks that have any of a token's `chosen` random experts, expected: n·(1 − C(E − E/n, k) / C(E, k))."""
    none = math.comb(experts - experts // ranks, chosen) / math.comb(experts, chosen)
    return ranks * (1 - none)
