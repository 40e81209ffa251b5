"""Adam and what is built like it: two moments per parameter."""

from __future__ import annotations

from strategies.optimizers import FLOAT, Optimizer, optimizers

BLOCK = 256  # numbers that share a scale (bitsandbytes/optim/optimizer.py, Optimizer2State; 2,048 in arXiv:2110.02861)
# all in place but one (torch/optim/adam.py), with decoupled weight decay
ADAM = (
    ("decay", 2),
    ("first moment scale", 2),
    ("first moment", 3),
    ("second moment scale", 2),
    ("second moment", 3),
    ("root", 2),
    ("root scale", 2),
    ("epsilon", 2),
    ("update", 4),
)


@optimizers("adam")
def adam() -> Optimizer:
    """Adam and AdamW (arXiv:1412.6980, arXiv:1711.05101): two states in fp32, or as exp_avg_dtype and exp_avg_sq_dtype say."""
    return Optimizer(states=2 * FLOAT, operators=ADAM)


@optimizers("adam8bit")
def adam8bit() -> Optimizer:
    """Adam with states of 8 bits and a scale in fp32 for each block of 256 (bitsandbytes' AdamW8bit; Dettmers et al. 2021,
    arXiv:2110.02861). Embeddings, which bitsandbytes may keep in 32 bits, have 8 here.
    """
    return Optimizer(states=2 * (1 + FLOAT / BLOCK), operators=ADAM)


@optimizers("lamb")
def lamb() -> Optimizer:
    """LAMB (You et al. 2019, arXiv:1904.00962): Adam's update is written, and after the norms of each tensor and its update are
    taken it is added (Apex's FusedLAMB, csrc/multi_tensor_lamb.cu: two stages).
    """
    after = (("lamb norms", 2 * FLOAT), ("lamb update", FLOAT + 3 * FLOAT))
    return Optimizer(states=2 * FLOAT, operators=ADAM, after=after, whole_tensors=True)
