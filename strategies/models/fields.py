"""The fields of a model, and what of them contradicts what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from strategies.models.delta_net import DeltaNet
from strategies.models.parts import (
    EXPERTS,
    LAYERS,
    TOKENS,
    WIDTH,
    Experts,
    Kind,
    Latent,
    Layers,
    Patches,
    SharedBlocks,
    Tokens,
    Width,
    unsaid,
)
from strategies.models.state_space import StateSpace
from strategies.models.tracing.records import Module
from topologies.reading import Config


def _head_dim(data: dict[str, Any]) -> int:
    latent: Latent | None = data.get("latent")
    hidden, heads = int(data.get("hidden", 1)), int(data.get("heads", 1))
    return latent.nope_head_dim + latent.rope_head_dim if latent else max(1, hidden // heads)


def _is_true(value: object) -> bool:
    return value is True


def _is_attention(value: object) -> bool:
    return value == "attention"


def _is_zero(value: object) -> bool:
    return value == 0


# what Hugging Face, Megatron-LM and papers call fields, folded: see `topologies.reading.folded`
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("hiddensize", "dmodel", "nembd", "width"), "hidden"),
    **dict.fromkeys(("numhiddenlayers", "numlayers", "nlayer", "nlayers", "depth"), "layers"),
    **dict.fromkeys(("numattentionheads", "nhead", "nheads", "numheads"), "heads"),
    **dict.fromkeys(("numkeyvalueheads", "numquerygroups", "nkvheads"), "kv_heads"),
    **dict.fromkeys(("headdimension", "headsize", "kvchannels", "dhead"), "head_dim"),
    **dict.fromkeys(("intermediatesize", "ffnhiddensize", "dff", "ninner"), "ffn"),
    **dict.fromkeys(("vocabsize", "vocabularysize", "paddedvocabsize", "nvocab"), "vocabulary"),
    **dict.fromkeys(("maxpositionembeddings", "contextlength", "npositions", "seqlength", "blocksize"), "context"),
}


class ModelFields(Config):
    """Sizes of a transformer. Defaults are GPT-2's; what is left out of a YAML has them."""

    other_names: ClassVar[Mapping[str, str]] = OTHER_NAMES

    name: str = Field(description="Name for people.")
    source: str = Field("", description="Where the sizes come from.")
    family: Literal["decoder", "encoder", "encoder_decoder"] = Field(
        "decoder", description="Decoder: causal attention. Encoder: full attention. Encoder-decoder: kinds of layers say which."
    )
    hidden: Width = Field(description="Features of a token between layers.")
    layers: Layers = Field(description="Transformer layers.")
    heads: Width = Field(description="Attention heads.")
    latent: Latent | None = Field(None, description="Multi-head latent attention in place of ordinary attention.")
    kv_heads: Width = Field(default_factory=lambda data: data.get("heads", 1), description="Key and value heads (heads).")
    head_dim: Width = Field(default_factory=_head_dim, description="Features of a query or key head (hidden / heads).")
    ffn: Width = Field(
        default_factory=lambda data: 4 * data.get("hidden", 1), description="Intermediate size of a dense layer (4 · hidden)."
    )
    gated: bool = Field(False, description="Feed-forward of three matrices (SwiGLU) in place of two.")
    experts: Experts | None = Field(None, description="Mixture of experts; none: every layer is dense.")
    vocabulary: Annotated[int, Field(ge=0, le=TOKENS)] = Field(description="Tokens of the vocabulary; 0: patches of images.")
    vocabulary_multiple: Tokens = Field(1, description="The embedding is padded to a multiple of this many tokens.")
    context: Tokens = Field(description="Longest sequence in tokens.")
    window: Tokens | None = Field(None, description="Sliding window of causal attention in tokens; none: all.")
    chunk: Tokens | None = Field(
        None, exclude_if=unsaid, description="Tokens of a block within which tokens attend to each other (Llama 4); none: all."
    )
    sinks: bool = Field(
        False, exclude_if=unsaid, description="A learned number per head takes part in every softmax of scores (gpt-oss)."
    )
    positions: Literal["rotary", "learned", "alibi", "relative", "none"] = Field(
        "learned",
        description="Learned: an embedding of context × hidden; alibi: added to scores by distance (arXiv:2108.12409); "
        "relative: learned numbers that are added to scores (T5, arXiv:1910.10683).",
    )
    position_rows: Tokens | None = Field(
        None,
        exclude_if=unsaid,
        description="Rows of learned positions where they are not context (OPT has 2 more), or buckets of relative ones.",
    )
    rotary_dim: Width | None = Field(
        None, exclude_if=unsaid, description="Features of a head with rotary position where not all have it (GPT-NeoX, GLM)."
    )
    token_types: Annotated[int, Field(ge=0, le=WIDTH)] = Field(0, description="Rows of the segment embedding (BERT: 2).")
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="Layernorm has weight and bias, rmsnorm only weight.")
    norms: Annotated[int, Field(gt=0, le=16)] = Field(2, description="Norms over hidden in one layer.")
    norm_weights: bool = Field(True, exclude_if=_is_true, description="Norms have parameters (OLMo's have none).")
    norm_bias: bool = Field(True, exclude_if=_is_true, description="Layernorm has a bias besides the weight (Cohere's has none).")
    parallel: bool = Field(
        False,
        exclude_if=unsaid,
        description="Attention and feed-forward block read the same residual stream (GPT-NeoX, Falcon);"
        " with norms=1 also the same norm.",
    )
    qk_norm: bool | Literal["whole", "unweighted"] = Field(
        False,
        description="Queries and keys are normed over head_dim (Qwen3); whole: over all heads together (OLMo 2); "
        "unweighted: over head_dim without parameters (Llama 4).",
    )
    attention_gate: bool = Field(
        False,
        exclude_if=unsaid,
        description="A sigmoid gate per feature, which the query matrix makes too, multiplies attention's result (Qwen3-Next).",
    )
    embedding_scale: bool = Field(False, exclude_if=unsaid, description="Embedded tokens are multiplied by a number (Gemma).")
    embedding_norm: bool = Field(False, description="A norm follows the embedding (BERT).")
    final_norm: bool = Field(True, description="A norm follows the last layer.")
    attention_bias: bool = Field(True, description="Query, key and value have biases (latent: the first of their two matrices).")
    output_bias: bool = Field(True, description="The output projection of attention has a bias.")
    mlp_bias: bool = Field(True, description="The feed-forward matrices have biases.")
    logit_softcap: bool = Field(False, exclude_if=unsaid, description="Logits pass through a tanh (Gemma 2).")
    head: bool = Field(True, description="A head predicts tokens: hidden → vocabulary.")
    tied: bool = Field(True, description="The head's matrix is the token embedding.")
    head_bias: bool = Field(False, description="The head has a bias per token of the vocabulary (BERT).")
    head_transform: bool = Field(False, description="A matrix hidden → hidden with bias and a norm precede the head (BERT).")
    pooler: bool = Field(False, description="A matrix hidden → hidden with bias on the first token (BERT).")
    pooler_classes: Annotated[int, Field(ge=0, le=WIDTH)] = Field(
        0, description="Outputs of a classifier on the pooler (BERT's next sentence: 2)."
    )
    classes: Annotated[int, Field(ge=0, le=WIDTH)] = Field(
        0, exclude_if=_is_zero, description="Outputs of a classifier on the first token, without a pooler (ViT)."
    )
    patches: Patches | None = Field(None, exclude_if=unsaid, description="Images in place of tokens.")
    module: Module | None = Field(
        None, exclude_if=unsaid, description="A traced torch.nn.Module, which says everything else (`--model FILE.py:NAME`)."
    )
    pattern: Annotated[tuple[str, ...], Field(max_length=LAYERS)] = Field(
        (), exclude_if=unsaid, description="Kinds of layers that are not all alike, in order, repeated over the layers."
    )
    kinds: Annotated[tuple[Kind, ...], Field(max_length=100)] = Field(
        (), exclude_if=unsaid, description="What the kinds of the pattern have otherwise than the model says."
    )
    cross: bool = Field(False, exclude_if=unsaid, description="Layers also attend to an encoder's result (kinds say which).")
    joins: bool = Field(False, exclude_if=unsaid, description="A norm of the encoder's result precedes the layer (kinds say).")
    targets: Tokens | None = Field(
        None, exclude_if=unsaid, description="Tokens of a decoder's sequence beside an encoder; none: as many as the encoder's."
    )
    state_space: StateSpace | None = Field(
        None, exclude_if=unsaid, description="Mamba-2's mixer, of layers whose `mixer` it is or that have both."
    )
    delta_net: DeltaNet | None = Field(
        None, exclude_if=unsaid, description="The gated delta net of layers whose `mixer` it is (Qwen3-Next)."
    )
    mixer: Literal["attention", "state_space", "both", "delta_net", "none"] = Field(
        "attention",
        exclude_if=_is_attention,
        description="What mixes tokens in a layer: attention, the state space, both side by side (Falcon-H1), the gated delta "
        "net, or nothing.",
    )
    feed_forward: bool = Field(
        True,
        exclude_if=_is_true,
        description="Layers have a feed-forward block (those of Mamba-2 and some of Nemotron-H have none).",
    )
    shared_blocks: SharedBlocks | None = Field(
        None, exclude_if=unsaid, description="Blocks that several layers share, of layers whose `shared_block` says so (Zamba2)."
    )
    shared_block: Literal["own", "again"] | None = Field(
        None,
        exclude_if=unsaid,
        description="A block of `shared_blocks` precedes the layer's mixer; own: the layer is the first that has it.",
    )
    mtp: Annotated[int, Field(ge=0, le=16)] = Field(
        0,
        exclude_if=_is_zero,
        description="Layers after the last that predict tokens further ahead, each with a norm of its own and the model's "
        "embedding and head (DeepSeek-V3's multi-token prediction, Megatron-Core's --mtp-num-layers).",
    )
    dropout: bool = Field(False, description="Dropout on the residual stream: masks are kept for backward.")
    attention_dropout: bool = Field(False, description="Dropout on attention probabilities.")

    @model_validator(mode="after")
    def _check(self) -> ModelFields:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}: {_remainder(self.heads, self.kv_heads)}")
        if self.latent is None and "head_dim" not in self.model_fields_set and self.hidden % self.heads:
            rule = f"must divide hidden={self.hidden} when head_dim is not given: {_remainder(self.hidden, self.heads)}"
            raise ValueError(f"heads={self.heads} {rule}")
        if self.latent and self.head_dim != _head_dim({"latent": self.latent}):
            parts = f"{self.latent.nope_head_dim} + {self.latent.rope_head_dim}"
            raise ValueError(f"head_dim={self.head_dim} must be latent.nope_head_dim + latent.rope_head_dim = {parts}")
        if self.experts and self.experts.first_dense > self.layers:
            raise ValueError(f"experts.first_dense={self.experts.first_dense} must be at most layers={self.layers}")
        if self.experts and self.experts.experts * self.layers > EXPERTS * self.experts.every:
            count = f"{self.layers}·{self.experts.experts}"
            raise ValueError(f"layers·experts.experts = {count}: more than {EXPERTS:,} experts are not simulated")
        for part, needs in (("head_bias", "head"), ("head_transform", "head"), ("pooler_classes", "pooler")):
            if getattr(self, part) and not getattr(self, needs):
                raise ValueError(f"{part}={getattr(self, part)} needs {needs}=True")
        for problem in self._contradictions():
            raise ValueError(problem)
        return self

    def _contradictions(self) -> Iterator[str]:
        """Fields of what not all models have."""
        names = [kind.name for kind in self.kinds]
        for name in names:
            if name not in self.pattern or names.count(name) > 1:
                yield f"kinds: '{name}' must be in pattern, and only one kind may be called so"
        for kind in self.kinds:
            heads, shared = kind.heads or self.heads, kind.kv_heads or self.kv_heads
            if heads % shared:
                yield f"kinds: '{kind.name}': kv_heads={shared} must divide heads={heads}: {_remainder(heads, shared)}"
        if self.parallel and (self.norms > 2 or self.latent or self.experts or self.family == "encoder_decoder"):
            yield "parallel=True is for dense layers with 1 or 2 norms and ordinary attention"
        if (self.vocabulary == 0) != (self.patches is not None or self.module is not None):
            yield f"vocabulary={self.vocabulary}: must be 0 for images (patches), and positive for tokens"
        if self.patches and (self.head or self.token_types or self.context != self.patches.tokens):
            yield f"patches: needs head=False, token_types=0 and context={self.patches.tokens}, which is patches and class token"
        if self.patches and self.patches.size > self.patches.image:
            yield f"patches.size={self.patches.size} must be at most patches.image={self.patches.image}"
        if self.family == "encoder_decoder" and not {"encoder", "decoder"} <= {kind.family for kind in self.kinds}:
            yield "family=encoder_decoder needs kinds of both families in pattern"
        if self.family != "encoder_decoder" and (
            self.targets or self.cross or any(kind.cross or kind.joins for kind in self.kinds)
        ):
            yield "targets, cross and joins are for family=encoder_decoder"
        if self.positions == "relative" and not self.position_rows:
            yield "positions=relative needs position_rows, the buckets of distances"
        if self.position_rows and self.positions == "learned" and self.position_rows < self.context:
            yield f"position_rows={self.position_rows} must be at least context={self.context}"
        if self.rotary_dim and (self.latent or self.rotary_dim > self.head_dim):
            yield f"rotary_dim={self.rotary_dim} must be at most head_dim={self.head_dim}, and is for ordinary attention"
        mixers = {self.mixer, *(kind.mixer for kind in self.kinds)}
        if mixers & {"state_space", "both"} and self.state_space is None:
            yield "mixer=state_space or both needs state_space, its sizes"
        if "delta_net" in mixers and self.delta_net is None:
            yield "mixer=delta_net needs delta_net, its sizes"
        if {self.shared_block, *(kind.shared_block for kind in self.kinds)} - {None} and self.shared_blocks is None:
            yield "shared_block needs shared_blocks, their sizes"
        if self.attention_gate and (self.latent or self.family == "encoder_decoder"):
            yield "attention_gate=True is for ordinary attention of decoders or encoders"
        if (mixers - {None, "attention"} or not self.feed_forward) and (
            self.parallel or self.norms != 2 or self.family != "decoder"
        ):
            yield "mixer is for decoders with a norm before each block"
        for name, mixer, block in [("", self.mixer, self.feed_forward), *((k.name, k.mixer, k.feed_forward) for k in self.kinds)]:
            if mixer == "none" and block is False:
                yield f"{name or 'the model'}: layers with mixer=none need a feed_forward block"
        if self.mtp and (self.family != "decoder" or not self.head or self.patches or self.module):
            yield f"mtp={self.mtp} is for decoders with a head"
        if self.window and self.chunk:
            yield "window and chunk exclude each other"


def _remainder(whole: int, part: int) -> str:
    return f"{whole} % {part} = {whole % part}"
