"""What a transformer is: its sizes, exact parameter counts and matrix products.

A model is read from a Hugging Face `config.json`, from a short YAML with the field names of `Model`, or is a shipped preset
(`strategies/models/presets/`). All counts are elements (Ψ), all work is FLOPs; precision and parallelism are the plan's matter.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from strategies.models.importers import is_hugging_face, read_hugging_face
from topologies.reading import Config, UserError, build, is_there, load_yaml, nearest

LAYERS = 10_000  # DeepNet has 1,000, the largest language models 130
EXPERTS = 500_000  # of all layers together; DeepSeek-V3 has 14,848, Kimi K2 23,040
WIDTH = 2**22  # features, heads or columns; MT-NLG 530B has 20,480 features
TOKENS = 2**30  # of a sequence or a vocabulary; 100 million are the longest contexts that were announced
Layers = Annotated[int, Field(gt=0, le=LAYERS)]
Width = Annotated[int, Field(gt=0, le=WIDTH)]
Tokens = Annotated[int, Field(gt=0, le=TOKENS)]
_PRESETS = Path(__file__).parent / "presets"
_SUFFIXES = (".yaml", ".yml", ".json")


class Matrix(NamedTuple):
    """One weight matrix of a layer: maps `inputs` to `outputs` features of a token."""

    name: str  # "query", "key", "value", "output", "gate", "up", "down", "router", "expert up", "shared down", …
    inputs: int
    outputs: int
    bias: bool = False
    split: Literal["columns", "rows", "none"] = "none"  # how tensor parallelism cuts it: its outputs, its inputs, not at all
    copies: int = 1  # how many exist in the layer: the number of experts, otherwise 1
    used: int = 1  # how many of them one token passes through

    @property
    def parameters(self) -> int:
        """Elements of all copies, biases included."""
        return self.copies * self.outputs * (self.inputs + self.bias)


class Experts(Config):
    """Mixture of experts in place of the feed-forward block of layers i ≥ first_dense with i % every = 0."""

    experts: Annotated[int, Field(gt=0, le=EXPERTS)] = Field(description="Routed experts in a layer.")
    chosen: Annotated[int, Field(gt=0, le=EXPERTS)] = Field(description="Routed experts that each token passes through.")
    ffn: Width = Field(description="Intermediate size of one routed expert.")
    shared: Annotated[int, Field(ge=0, le=1024)] = Field(0, description="Shared experts, which every token passes through.")
    shared_ffn: Width = Field(default_factory=lambda data: data.get("ffn", 1), description="Size of one shared expert (ffn).")
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


def _head_dim(data: dict[str, Any]) -> int:
    latent: Latent | None = data.get("latent")
    hidden, heads = int(data.get("hidden", 1)), int(data.get("heads", 1))
    return latent.nope_head_dim + latent.rope_head_dim if latent else max(1, hidden // heads)


class Model(Config):
    """Sizes of a transformer. Defaults are GPT-2's; what is left out of a YAML has them."""

    name: str = Field(description="Name for people.")
    source: str = Field("", description="Where the sizes come from.")
    family: Literal["decoder", "encoder"] = Field("decoder", description="Decoder: causal attention. Encoder: full attention.")
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
    vocabulary: Tokens = Field(description="Tokens of the vocabulary.")
    vocabulary_multiple: Tokens = Field(1, description="The embedding is padded to a multiple of this many tokens.")
    context: Tokens = Field(description="Longest sequence in tokens.")
    window: Tokens | None = Field(None, description="Sliding window of causal attention in tokens; none: all.")
    positions: Literal["rotary", "learned", "alibi"] = Field(
        "learned",
        description="Learned: an embedding of context × hidden; alibi: added to scores by distance (arXiv:2108.12409).",
    )
    token_types: Annotated[int, Field(ge=0, le=WIDTH)] = Field(0, description="Rows of the segment embedding (BERT: 2).")
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="Layernorm has weight and bias, rmsnorm only weight.")
    norms: Annotated[int, Field(gt=0, le=16)] = Field(2, description="Norms over hidden in one layer.")
    qk_norm: bool = Field(False, description="Queries and keys are normed over head_dim (Qwen3).")
    embedding_norm: bool = Field(False, description="A norm follows the embedding (BERT).")
    final_norm: bool = Field(True, description="A norm follows the last layer.")
    attention_bias: bool = Field(True, description="Query, key and value have biases (latent: the first of their two matrices).")
    output_bias: bool = Field(True, description="The output projection of attention has a bias.")
    mlp_bias: bool = Field(True, description="The feed-forward matrices have biases.")
    head: bool = Field(True, description="A head predicts tokens: hidden → vocabulary.")
    tied: bool = Field(True, description="The head's matrix is the token embedding.")
    head_bias: bool = Field(False, description="The head has a bias per token of the vocabulary (BERT).")
    head_transform: bool = Field(False, description="A matrix hidden → hidden with bias and a norm precede the head (BERT).")
    pooler: bool = Field(False, description="A matrix hidden → hidden with bias on the first token (BERT).")
    pooler_classes: Annotated[int, Field(ge=0, le=WIDTH)] = Field(
        0, description="Outputs of a classifier on the pooler (BERT's next sentence: 2)."
    )
    dropout: bool = Field(False, description="Dropout on the residual stream: masks are kept for backward.")
    attention_dropout: bool = Field(False, description="Dropout on attention probabilities.")

    @model_validator(mode="after")
    def _check(self) -> Model:
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
        return self

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the token embedding: vocabulary rounded up to vocabulary_multiple."""
        return -(-self.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def v_head_dim(self) -> int:
        """Features of a value head; differs from head_dim only in latent attention."""
        return self.latent.v_head_dim if self.latent else self.head_dim

    def is_mixture(self, layer: int) -> bool:
        """Whether layer 0 … layers − 1 has experts."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of a model with {self.layers} layers")
        return self.experts is not None and layer >= self.experts.first_dense and layer % self.experts.every == 0

    def attention_matrices(self) -> list[Matrix]:
        """Weight matrices of one layer's attention, in the order of the forward pass."""
        heads, width = self.heads, self.heads * self.head_dim
        output = Matrix("output", heads * self.v_head_dim, self.hidden, self.output_bias, "rows")
        if self.latent is None:
            kv = self.kv_heads * self.head_dim
            sizes = {"query": width, "key": kv, "value": kv}
            return [Matrix(name, self.hidden, size, self.attention_bias, "columns") for name, size in sizes.items()] + [output]
        rank, kv_rank, rope = self.latent.q_rank, self.latent.kv_rank, self.latent.rope_head_dim
        query = [Matrix("query", self.hidden, width, False, "columns")]
        if rank:
            down = Matrix("query down", self.hidden, rank, self.attention_bias)
            query = [down, Matrix("query up", rank, width, False, "columns")]
        keys = Matrix("key value down", self.hidden, kv_rank + rope, self.attention_bias)
        up = heads * (self.latent.nope_head_dim + self.latent.v_head_dim)
        return [*query, keys, Matrix("key value up", kv_rank, up, False, "columns"), output]

    def feed_forward_matrices(self, layer: int) -> list[Matrix]:
        """Weight matrices of a layer's feed-forward block: dense, or router, routed and shared experts."""
        if not self.is_mixture(layer) or self.experts is None:
            return self._block("", self.ffn, 1, 1)
        moe = self.experts
        router = Matrix("router", self.hidden, moe.experts, moe.router_bias)
        routed = self._block("expert ", moe.ffn, moe.experts, moe.chosen)
        return [router, *routed, *(self._block("shared ", moe.shared * moe.shared_ffn, 1, 1) if moe.shared else [])]

    def _block(self, prefix: str, ffn: int, copies: int, used: int) -> list[Matrix]:
        into = ("gate", "up") if self.gated else ("up",)
        up = [Matrix(prefix + name, self.hidden, ffn, self.mlp_bias, "columns", copies, used) for name in into]
        return [*up, Matrix(f"{prefix}down", ffn, self.hidden, self.mlp_bias, "rows", copies, used)]

    def matrices(self, layer: int) -> list[Matrix]:
        """All weight matrices of a layer, in the order of the forward pass."""
        return self.attention_matrices() + self.feed_forward_matrices(layer)

    def norm_parameters(self, features: int) -> int:
        """Elements of one norm over so many features."""
        return features * (2 if self.norm == "layernorm" else 1)

    def layer_parameters(self, layer: int) -> int:
        """Elements of layer 0 … layers − 1: matrices, biases and norms."""
        norms = self.norms * self.norm_parameters(self.hidden)
        if self.qk_norm:
            norms += 2 * self.norm_parameters(self.head_dim)
        if self.latent:  # each bottleneck is normed
            norms += self.norm_parameters(self.latent.kv_rank) + self.norm_parameters(self.latent.q_rank or 0)
        return norms + sum(matrix.parameters for matrix in self.matrices(layer))

    @property
    def embedding_parameters(self) -> int:
        """Elements before the first layer: token, position and segment embeddings and their norm."""
        rows = self.padded_vocabulary + self.token_types + (self.context if self.positions == "learned" else 0)
        return rows * self.hidden + (self.norm_parameters(self.hidden) if self.embedding_norm else 0)

    @property
    def head_parameters(self) -> int:
        """Elements after the last layer: final norm, head unless tied, and BERT's transform, pooler and classifier."""
        norms = self.norm_parameters(self.hidden) * (self.final_norm + self.head_transform)
        head = self.padded_vocabulary * self.hidden if self.head and not self.tied else 0
        square = self.hidden * (self.hidden + 1)
        bias = self.padded_vocabulary if self.head_bias else 0
        return norms + head + bias + square * (self.head_transform + self.pooler) + self.pooler_classes * (self.hidden + 1)

    @cached_property
    def layer_kinds(self) -> tuple[tuple[int, int], ...]:
        """One layer of each kind, dense or a mixture, and how many there are."""
        kinds: dict[bool, tuple[int, int]] = {}
        for layer in range(self.layers):
            mixture = self.is_mixture(layer)
            kinds[mixture] = kinds.get(mixture, (layer, 0))[0], kinds.get(mixture, (layer, 0))[1] + 1
        return tuple(kinds.values())

    @cached_property
    def parameters(self) -> int:
        """Ψ: elements of the whole model; a tied head counts once."""
        layers = sum(count * self.layer_parameters(layer) for layer, count in self.layer_kinds)
        return self.embedding_parameters + layers + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Elements that one token passes through: Ψ without the routed experts that were not chosen."""
        matrices = ((count, matrix) for layer, count in self.layer_kinds for matrix in self.matrices(layer))
        return self.parameters - sum(count * (m.parameters // m.copies) * (m.copies - m.used) for count, m in matrices)

    def forward_flops(self, batch: int, sequence: int, causal: bool, head: bool = True) -> float:
        """FLOPs of the matrix products of one forward pass over batch × sequence tokens.

        A product of m × k and k × n counts 2·m·n·k; norms, softmax, activations and the embedding lookup count nothing. Of the
        experts those chosen count. `causal=False` counts QKᵀ and AV in full, as torch.utils.flop_counter does even for causal
        attention; `causal=True` counts half of them, or what lies in the sliding window: (s·w − w²/2) / s² of them.
        `head=False` leaves out all that follows the last layer. A backward pass is twice a forward pass.
        """
        tokens = batch * sequence
        matrices = ((count, matrix) for layer, count in self.layer_kinds for matrix in self.matrices(layer))
        weights = sum(count * m.used * m.inputs * m.outputs for count, m in matrices)
        seen = min(self.window or sequence, sequence)
        pairs = sequence * seen - seen**2 / 2 if causal else sequence**2
        attention = self.layers * batch * self.heads * pairs * (self.head_dim + self.v_head_dim)
        after = 0
        if head:
            square = self.hidden**2
            after = tokens * (self.head * self.padded_vocabulary * self.hidden + self.head_transform * square)
            after += batch * (self.pooler * square + self.pooler_classes * self.hidden)
        return 2.0 * (tokens * weights + attention + after)


def _remainder(whole: int, part: int) -> str:
    return f"{whole} % {part} = {whole % part}"


def model_names() -> list[str]:
    """Names of the shipped presets, sorted."""
    return sorted(path.stem for path in _PRESETS.iterdir() if path.suffix in _SUFFIXES)


def load_model(name_or_path: str) -> tuple[Model, list[str]]:
    """A preset by name, or the model in a `config.json`, its folder, or a YAML; a preset goes before a file of the same name.

    The second value lists the keys of a `config.json` that were ignored: they change no size and no matrix product of the main
    model (`num_nextn_predict_layers`, DeepSeek's extra prediction layers, which are not modelled, is among them).
    Raises UserError for an unknown name or model type, a missing key, or sizes that do not fit together.
    """
    path = next((p for p in _PRESETS.iterdir() if p.stem == name_or_path and p.suffix in _SUFFIXES), Path(name_or_path))
    if is_there(path) and path.is_dir():
        path /= "config.json"
    if path.suffix not in _SUFFIXES and not is_there(path):
        hint = nearest(name_or_path, model_names())
        raise UserError(f"unknown model '{name_or_path}'{hint} or give a path to a config.json (`shardyard list models`)")
    data, ignored = load_yaml(path), list[str]()
    if is_hugging_face(data):
        data, ignored = read_hugging_face(data, str(path))
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return build(Model, {"name": name, **data}, str(path)), ignored
