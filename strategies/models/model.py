"""What a transformer is: its sizes, exact parameter counts and matrix products.

A model is read from a Hugging Face `config.json`, from a short YAML with the field names of `Model`, or is a shipped preset
(`strategies/models/presets/`). All counts are elements (Ψ), all work is FLOPs; precision and parallelism are the plan's matter.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

from strategies.models.delta_net import DeltaNet
from strategies.models.fields import ModelFields
from strategies.models.importers import is_hugging_face, read_hugging_face
from strategies.models.parts import Matrix
from strategies.models.state_space import StateSpace
from strategies.models.tracing.tracer import structure_of
from topologies.reading import UserError, build, is_there, load_yaml, nearest

_PRESETS = Path(__file__).parent / "presets"
_SUFFIXES = (".yaml", ".yml", ".json")


class Model(ModelFields):
    """A transformer: what follows from its fields."""

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
        moe = (self.patterned_layers[layer] if self.pattern else self).experts
        return moe is not None and layer >= moe.first_dense and layer % moe.every == 0

    @property
    def layer_models(self) -> tuple[Model, ...]:
        """For each layer a model all of whose layers are like it."""
        return self.patterned_layers or (self,) * self.layers

    @cached_property
    def patterned_layers(self) -> tuple[Model, ...]:
        """The same where layers are not all alike; nothing otherwise: a model that holds itself could not be compared."""
        if not self.pattern:
            return ()
        changes = {kind.name: kind.changes for kind in self.kinds}
        fields = {name: getattr(self, name) for name in type(self).model_fields} | {"pattern": (), "kinds": ()}
        alike = {name: Model.model_construct(**fields | changes.get(name, {})) for name in dict.fromkeys(self.pattern)}
        return tuple(alike[self.pattern[layer % len(self.pattern)]] for layer in range(self.layers))

    @cached_property
    def as_encoder(self) -> Model:
        """A model whose layers are like this one's and attend to all tokens."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return Model.model_construct(**fields | {"family": "encoder"})

    @cached_property
    def as_shared_block(self) -> Model:
        """A model whose layers are the blocks that layers of this one share, but for the features that attention reads."""
        own = self.shared_blocks
        assert own is not None
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        changes = {name: getattr(own, name) for name in ("heads", "kv_heads", "head_dim", "ffn")}
        changes |= {"mlp_bias": own.bias, "positions": "rotary" if own.rotary else "none", "mixer": "attention"}
        return Model.model_construct(**fields | changes | {"feed_forward": True, "shared_block": None})

    @property
    def distinct_layers(self) -> tuple[tuple[Model, int], ...]:
        """The different ones of `layer_models`, and how many layers are like each."""
        if not self.pattern:
            return ((self, self.layers),)
        counts: dict[int, tuple[Model, int]] = {}
        for model in self.layer_models:
            counts[id(model)] = model, counts.get(id(model), (model, 0))[1] + 1
        return tuple(counts.values())

    @property
    def has_attention(self) -> bool:
        """Whether a layer attends."""
        return self.mixer in ("attention", "both")

    @property
    def recurrence(self) -> StateSpace | DeltaNet | None:
        """The mixer of a layer that keeps a state in place of all earlier tokens, if it has one."""
        if self.mixer == "delta_net":
            return self.delta_net
        return self.state_space if self.mixer in ("state_space", "both") else None

    @property
    def layer_norms(self) -> int:
        """Norms over hidden in one layer."""
        return self.norms - (self.mixer == "none") - (not self.feed_forward)

    @property
    def query_features(self) -> int:
        """Results of the query matrix of ordinary attention, its gate among them."""
        return self.heads * self.head_dim * (1 + self.attention_gate)

    def mixer_matrices(self) -> list[Matrix]:
        """Weight matrices of what mixes tokens in one layer."""
        attention = self.attention_matrices() if self.has_attention else []
        return attention + (self.recurrence.matrices(self.hidden) if self.recurrence else [])

    def attention_matrices(self) -> list[Matrix]:
        """Weight matrices of the attention of one layer, in the order of the forward pass."""
        heads, width = self.heads, self.heads * self.head_dim
        output = Matrix("output", heads * self.v_head_dim, self.hidden, self.output_bias, "rows")
        if self.latent is None:
            kv = self.kv_heads * self.head_dim
            sizes = {"query": self.query_features, "key": kv, "value": kv}
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
        if not self.layer_models[layer].feed_forward:
            return []
        if not self.is_mixture(layer) or self.experts is None:
            return self._block("", self.layer_models[layer].ffn, 1, 1)
        moe = self.experts
        router = Matrix("router", self.hidden, moe.experts, moe.router_bias)
        routed = self._block("expert ", moe.ffn, moe.experts, moe.chosen)
        shared = self._block("shared ", moe.shared * moe.shared_ffn, 1, 1) if moe.shared else []
        return [router, *routed, *shared, *[Matrix("shared gate of all", self.hidden, 1)] * moe.shared_gate]

    def _block(self, prefix: str, ffn: int, copies: int, used: int) -> list[Matrix]:
        into = ("gate", "up") if self.gated else ("up",)
        up = [Matrix(prefix + name, self.hidden, ffn, self.mlp_bias, "columns", copies, used) for name in into]
        return [*up, Matrix(f"{prefix}down", ffn, self.hidden, self.mlp_bias, "rows", copies, used)]

    def matrices(self, layer: int) -> list[Matrix]:
        """All weight matrices of a layer, in the order of the forward pass."""
        own = self.layer_models[layer]
        cross = [matrix._replace(name=f"cross {matrix.name}") for matrix in own.attention_matrices() if own.cross]
        shared = own.shared_blocks if own.shared_block else None
        block = shared.matrices(own.hidden, own.shared_block == "again") if shared else []
        return block + own.mixer_matrices() + cross + self.feed_forward_matrices(layer)

    def norm_parameters(self, features: int) -> int:
        """Elements of one norm over so many features."""
        return features * (self.norm_weights + (self.norm == "layernorm" and self.norm_weights and self.norm_bias))

    def layer_parameters(self, layer: int) -> int:
        """Elements of layer 0 … layers − 1: matrices, biases and norms."""
        own = self.layer_models[layer]
        norms = (own.layer_norms + own.cross + own.joins) * self.norm_parameters(self.hidden)
        norms += sum(own.qk_norm_sizes) if own.has_attention else 0
        if own.shared_block == "own":
            norms += self.norm_parameters(2 * self.hidden) + self.norm_parameters(self.hidden)
        if own.recurrence:
            norms += sum(map(math.prod, own.recurrence.vectors))
        if self.latent:  # each bottleneck is normed
            norms += self.norm_parameters(self.latent.kv_rank) + self.norm_parameters(self.latent.q_rank or 0)
        return norms + own.heads * own.sinks + sum(matrix.parameters for matrix in self.matrices(layer))

    @property
    def qk_norm_sizes(self) -> tuple[int, ...]:
        """Elements of the parameters of the norms of queries and of keys."""
        over = {True: (self.head_dim,) * 2, "whole": (self.heads * self.head_dim, self.kv_heads * self.head_dim)}
        return tuple(map(self.norm_parameters, over.get(self.qk_norm, ())))

    @property
    def embedding_parameters(self) -> int:
        """Elements before the first layer: token, position and segment embeddings and their norm, the matrix of patches, and
        T5's relative positions, which the first layer of each of its stacks has.
        """
        rows = self.padded_vocabulary + self.token_types + self.learned_rows
        result = rows * self.hidden + (self.norm_parameters(self.hidden) if self.embedding_norm else 0)
        if self.patches:
            result += self.hidden * (self.patches.pixels + 1 + self.patches.class_token)
        return result + self.position_buckets

    @property
    def learned_rows(self) -> int:
        """Rows of the embedding of positions."""
        return (self.position_rows or self.context) if self.positions == "learned" else 0

    @property
    def position_buckets(self) -> int:
        """Elements of learned relative positions: a number per head for each bucket of distances, in every stack."""
        stacks = 2 if self.family == "encoder_decoder" else 1
        return stacks * self.heads * (self.position_rows or 0) if self.positions == "relative" else 0

    @property
    def head_parameters(self) -> int:
        """Elements after the last layer: final norm, head unless tied, and BERT's transform, pooler and classifier."""
        norms = self.norm_parameters(self.hidden) * (self.final_norm + self.head_transform)
        head = self.padded_vocabulary * self.hidden if self.head and not self.tied else 0
        square = self.hidden * (self.hidden + 1)
        bias = self.padded_vocabulary if self.head_bias else 0
        classes = self.pooler_classes + self.classes
        return norms + head + bias + square * (self.head_transform + self.pooler) + classes * (self.hidden + 1)

    @property
    def mtp_parameters(self) -> int:
        """Elements of the layers that predict tokens further ahead: each a layer like the last, a matrix 2 · hidden → hidden,
        norms of its two inputs and of its result. Embedding and head are the model's.
        """
        own = self.layer_parameters(self.layers - 1) + 2 * self.hidden**2 + 3 * self.norm_parameters(self.hidden)
        return self.mtp * own

    @cached_property
    def layer_kinds(self) -> tuple[tuple[int, int], ...]:
        """One layer of each kind, dense or a mixture, and how many there are."""
        kinds: dict[tuple[int, bool], tuple[int, int]] = {}
        for layer, own in enumerate(self.layer_models):
            kind = id(own), self.is_mixture(layer)
            kinds[kind] = kinds.get(kind, (layer, 0))[0], kinds.get(kind, (layer, 0))[1] + 1
        return tuple(kinds.values())

    @cached_property
    def parameters(self) -> int:
        """Ψ: elements of the whole model; a tied head counts once."""
        if self.module is not None:
            return sum(map(math.prod, structure_of(self.module).parameters.values()))
        layers = sum(count * self.layer_parameters(layer) for layer, count in self.layer_kinds)
        return self.embedding_parameters + layers + self.mtp_parameters + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Elements that one token passes through: Ψ without the routed experts that were not chosen."""
        kinds = (*self.layer_kinds, (self.layers - 1, self.mtp))
        matrices = ((count, matrix) for layer, count in kinds for matrix in self.matrices(layer))
        return self.parameters - sum(count * (m.parameters // m.copies) * (m.copies - m.used) for count, m in matrices)

    def forward_flops(self, batch: int, sequence: int, causal: bool, head: bool = True) -> float:
        """FLOPs of the matrix products of one forward pass over batch × sequence tokens.

        A product of m × k and k × n counts 2·m·n·k; norms, softmax, activations and the embedding lookup count nothing. Of the
        experts those chosen count. `causal=False` counts QKᵀ and AV in full, as torch.utils.flop_counter does even for causal
        attention, and within a sliding window or chunk with its tokens as keys (`counted_keys`); `causal=True` counts half of
        them where attention is causal, or what lies in the sliding window: s·w − w²/2 pairs of tokens. `head=False` leaves out
        all that follows the last layer. A backward pass is twice a forward pass. Of state-space scans and
        delta rules Megatron-LM's count is taken. sequence: of the encoder where there are two; the decoder's are `targets`.
        """
        if self.module is not None:
            trace = structure_of(self.module)
            return batch * sum(op.flops for op in trace.ops if not op.backward) / trace.samples
        tokens, targets = batch * sequence, batch * (self.targets or sequence)
        weights, attention, scans = 0, 0.0, 0.0
        for layer, count in (*self.layer_kinds, (self.layers - 1, self.mtp)):
            own = self.layer_models[layer]
            of_layer = targets if own.targets and own.family == "decoder" else tokens
            for m in self.matrices(layer):  # an encoder's result passes through the keys and values of cross-attention
                weights += (
                    count * (tokens if m.name in ("cross key", "cross value") else of_layer) * m.used * m.inputs * m.outputs
                )
        weights += self.mtp * tokens * 2 * self.hidden**2
        for own, count in (*self.distinct_layers, (self.layer_models[-1], self.mtp)):
            rows = (self.targets or sequence) if own.family == "decoder" else sequence
            if own.recurrence:
                scans += count * own.recurrence.scan_flops(batch * rows)
            masked = causal and (own.family == "decoder" or not self.pattern)
            pairs = own.visible_pairs(rows) if masked else rows * own.counted_keys(rows)
            if own.shared_block:
                attention += count * batch * pairs * 2 * own.as_shared_block.heads * own.as_shared_block.head_dim
            if own.has_attention:
                pairs += rows * sequence * own.cross
                attention += count * batch * own.heads * pairs * (own.head_dim + own.v_head_dim)
        after = 0
        if head:
            square = self.hidden**2
            after = targets * ((1 + self.mtp) * self.head * self.padded_vocabulary * self.hidden + self.head_transform * square)
            after += batch * (self.pooler * square + (self.pooler_classes + self.classes) * self.hidden)
            if self.patches:
                after += batch * self.patches.count * self.patches.pixels * self.hidden
        return 2.0 * (weights + attention + after) + scans

    def counted_keys(self, sequence: int) -> int:
        """Tokens that one attends to as model FLOPs count them: all of the sequence, but no more than the window or chunk has
        (NVIDIA-NeMo/Megatron-Bridge, training/utils/flop_utils.py; Megatron-LM and PaLM know no windows).
        """
        return min(self.window or self.chunk or sequence, sequence)

    def visible_pairs(self, sequence: int) -> float:
        """Pairs of a token and one that it attends to in causal attention, with half of the diagonal."""
        if self.chunk and self.chunk < sequence:
            whole, rest = divmod(sequence, self.chunk)
            return (whole * self.chunk**2 + rest**2) / 2
        seen = min(self.window or sequence, sequence)
        return sequence * seen - seen**2 / 2


def model_names() -> list[str]:
    """Names of the shipped presets, sorted."""
    return sorted(path.stem for path in _PRESETS.iterdir() if path.suffix in _SUFFIXES)


def load_model(name_or_path: str) -> tuple[Model, list[str]]:
    """A preset by name, or the model in a `config.json`, its folder, or a YAML; a preset goes before a file of the same name.

    The second value lists the keys of a `config.json` that were ignored: they change no size and no matrix product of the main
    model.
    Raises UserError for an unknown name or model type, a missing key, or sizes that do not fit together.
    """
    path = next((p for p in _PRESETS.iterdir() if p.stem == name_or_path and p.suffix in _SUFFIXES), Path(name_or_path))
    if is_there(path) and path.is_dir():
        path /= "config.json"
    if path.suffix not in _SUFFIXES and not is_there(path):
        hint = nearest(name_or_path, model_names())
        raise UserError(f"unknown model '{name_or_path}'{hint} or give a path to a config.json (`shardyard list models`)")
    data, ignored = load_yaml(path, constants=True), list[str]()  # the hub's files of Mamba-2 have an Infinity
    if is_hugging_face(data):
        data, ignored = read_hugging_face(data, str(path))
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return build(Model, {"name": name, **data}, str(path)), ignored
