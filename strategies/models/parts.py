"""Parts of a model's description: weight matrices, mixtures of experts, latent attention, kinds of layers, patches of images."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from topologies.reading import Config

LAYERS = 10_000  # DeepNet has 1,000, the largest language models 130
EXPERTS = 500_000  # of all layers together; DeepSeek-V3 has 14,848, Kimi K2 23,040
WIDTH = 2**22  # features, heads or columns; MT-NLG 530B has 20,480 features
TOKENS = 2**30  # of a sequence or a vocabulary; 100 million are the longest contexts that were announced
Layers = Annotated[int, Field(gt=0, le=LAYERS)]
Width = Annotated[int, Field(gt=0, le=WIDTH)]
Tokens = Annotated[int, Field(gt=0, le=TOKENS)]


def unsaid(value: object) -> bool:
    """Whether a field that came later than others has its default, and is left out of what is written."""
    return value is None or value is False or value in ((), "")


class Matrix(NamedTuple):
    """One weight matrix of a layer: maps `inputs` to `outputs` features of a token."""

    name: str  # "query", "key", "value", "output", "gate", "up", "down", "router", "expert up", "shared down", …
    inputs: int
    outputs: int
    bias: bool = False
    split: Literal["columns", "rows", "none"] = "none"  # how tensor parallelism cuts it: its outputs, its inputs, not at all
    copies: int = 1  # how many exist in the layer: the number of experts, otherwise 1
    used: int = 1  # how many of them one token passes through
    elsewhere: bool = False  # a parameter of another layer

    @property
    def parameters(self) -> int:
        """Elements of all copies, biases included; none of what another layer has."""
        return 0 if self.elsewhere else self.copies * self.outputs * (self.inputs + self.bias)


class Experts(Config):
    """Mixture of experts in place of the feed-forward block of layers i ≥ first_dense with i % every = 0."""

    experts: Annotated[int, Field(gt=0, le=EXPERTS)] = Field(description="Routed experts in a layer.")
    chosen: Annotated[int, Field(gt=0, le=EXPERTS)] = Field(description="Routed experts that each token passes through.")
    ffn: Width = Field(description="Intermediate size of one routed expert.")
    shared: Annotated[int, Field(ge=0, le=1024)] = Field(0, description="Shared experts, which every token passes through.")
    shared_ffn: Width = Field(default_factory=lambda data: data.get("ffn", 1), description="Size of one shared expert (ffn).")
    shared_gate: bool = Field(
        False,
        exclude_if=unsaid,
        description="A number per token, of a matrix hidden → 1, weights the shared experts (Qwen2-MoE).",
    )
    router_bias: bool = Field(False, description="The router has a bias per expert (DeepSeek-V3's load-balancing correction).")
    first_dense: Annotated[int, Field(ge=0, le=LAYERS)] = Field(0, description="Leading layers that stay dense.")
    every: Layers = Field(1, description="Every how many layers there is a mixture.")

    @model_validator(mode="after")
    def _check(self) -> Experts:
        if self.chosen > self.experts:
            raise ValueError(f"experts.chosen={self.chosen}: must be at most experts.experts={self.experts}")
        return self


class Latent(Config):
    """Multi-head latent attention: queries and keys/values pass through low-rank bottlenecks (DeepSeek-V2, arXiv:2405.04434)."""

    q_rank: Width | None = Field(None, description="Rank of the query bottleneck; none: one full matrix.")
    kv_rank: Width = Field(description="Rank of the joint key and value bottleneck.")
    nope_head_dim: Width = Field(description="Features of a query/key head without rotary position.")
    rope_head_dim: Width = Field(description="Features of a query/key head with rotary position; heads share the key's.")
    v_head_dim: Width = Field(description="Features of a value head.")


class SharedBlocks(Config):
    """Blocks of attention and feed-forward block whose parameters several layers share (Zamba2, arXiv:2411.15242).

    A layer that has one joins the residual stream with the embedded tokens and passes both through the block; a matrix of its own
    takes the result, which is added to what the layer's mixer reads.
    """

    heads: Width = Field(description="Attention heads, over 2 · hidden features.")
    kv_heads: Width = Field(default_factory=lambda data: data.get("heads", 1), description="Key and value heads (heads).")
    head_dim: Width = Field(description="Features of a head.")
    ffn: Width = Field(description="Intermediate size of the feed-forward block.")
    bias: bool = Field(False, description="Its matrices have biases.")
    rotary: bool = Field(False, description="Queries and keys have rotary positions.")
    adapter_rank: Width = Field(description="Rank of each layer's own adapter of the feed-forward block's first matrix.")
    attention_adapters: bool = Field(False, description="Queries, keys and values have adapters of each layer, too.")

    def matrices(self, hidden: int, again: bool) -> list[Matrix]:
        """Weight matrices of a layer's block, which are the first such layer's (again: another's), and of its own beside it."""
        width, kv, wide = self.heads * self.head_dim, self.kv_heads * self.head_dim, 2 * hidden
        sizes = {"query": width, "key": kv, "value": kv}
        shared = [Matrix(f"block {name}", wide, size, elsewhere=again) for name, size in sizes.items()]
        shared.append(Matrix("block output", width, hidden, elsewhere=again))
        shared += [Matrix(f"block {name}", hidden, self.ffn, self.bias, elsewhere=again) for name in ("gate", "up")]
        shared.append(Matrix("block down", self.ffn, hidden, self.bias, elsewhere=again))
        adapted = {"mlp up": (hidden, 2 * self.ffn)}
        adapted |= {name: (wide, size) for name, size in sizes.items()} if self.attention_adapters else {}
        own = [Matrix("block result", hidden, hidden)]
        for name, (inputs, outputs) in adapted.items():
            own += [Matrix(f"{name} A", inputs, self.adapter_rank), Matrix(f"{name} B", self.adapter_rank, outputs)]
        return shared + own


class Patches(Config):
    """An image cut into square patches, each of which one matrix makes a token of (ViT, arXiv:2010.11929)."""

    image: Width = Field(description="Pixels of a side of the image.")
    size: Width = Field(description="Pixels of a side of a patch.")
    channels: Width = Field(3, description="Numbers of a pixel.")
    class_token: bool = Field(True, description="A learned token precedes the patches.")

    @property
    def count(self) -> int:
        """Patches of an image; pixels that fill none are left out, as a convolution does."""
        return int((self.image // self.size) ** 2)

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return self.count + self.class_token

    @property
    def pixels(self) -> int:
        """Numbers of a patch."""
        return int(self.channels * self.size**2)

    @property
    def image_numbers(self) -> int:
        """Numbers of an image."""
        return int(self.channels * self.image**2)


class Kind(Config):
    """Layers of one kind in a model whose layers are not all alike: what they have otherwise than the model says."""

    name: str = Field(description="Name in the model's `pattern`.")
    family: Literal["decoder", "encoder"] | None = Field(None, description="Decoder: causal attention. Encoder: full attention.")
    heads: Width | None = Field(None, description="Attention heads.")
    kv_heads: Width | None = Field(None, description="Key and value heads.")
    head_dim: Width | None = Field(None, description="Features of a query or key head.")
    ffn: Width | None = Field(None, description="Intermediate size of a dense layer.")
    window: Tokens | None = Field(None, description="Sliding window of causal attention in tokens; none: all.")
    chunk: Tokens | None = Field(None, description="Tokens of a block within which tokens attend to each other; none: all.")
    positions: Literal["rotary", "none"] | None = Field(None, description="Positions of queries and keys.")
    qk_norm: bool | Literal["whole", "unweighted"] = Field(False, description="As in the model.")
    mixer: Literal["attention", "state_space", "both", "delta_net", "none"] | None = Field(None, description="As in the model.")
    feed_forward: bool | None = Field(None, description="As in the model.")
    shared_block: Literal["own", "again"] | None = Field(None, description="As in the model.")
    dense: bool = Field(False, description="Without the model's experts.")
    cross: bool = Field(False, description="Attention to the encoder's result follows that of the layer.")
    joins: bool = Field(False, description="The first layer of a decoder: a norm of the encoder's result precedes it.")

    @property
    def changes(self) -> dict[str, object]:
        """Fields of the model that are otherwise."""
        changed = {name: getattr(self, name) for name in self.model_fields_set - {"name", "dense"}}
        return changed | ({"experts": None} if self.dense else {})
