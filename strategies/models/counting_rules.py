"""Counting rules of papers, for checks on the back of an envelope; the simulation does not use them."""

from __future__ import annotations

from strategies.models.model import Model

GIB = 2.0**30


def activations_by_zero(model: Model, batch: int, sequence: int) -> float:
    """Bytes of activations by the rule of the ZeRO paper: 12 × hidden × batch × sequence × layers elements of 2 bytes.

    Rajbhandari et al. 2020, arXiv:1910.02054, section 3.2 ("for a GPT-2 like architecture the total activations is about
    12 × hidden dim × batch × seq length × transformer layers"); the output of the embedding, in fp32, is added.
    """
    tokens = batch * sequence
    return 12.0 * model.hidden * tokens * model.layers * 2 + 4.0 * model.hidden * tokens


def activations_by_megatron(model: Model, batch: int, sequence: int) -> float:
    """Bytes of activations of all layers by the rule of Megatron-LM's authors: s·b·h·(34 + 5·a·s/h) for each layer, in 16 bits,
    with dropout and scores in memory (Korthikanti et al. 2022, arXiv:2205.05198, equation 1).
    """
    return model.layers * sequence * batch * model.hidden * (34 + 5 * model.heads * sequence / model.hidden)
