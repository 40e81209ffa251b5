"""Fields of a plan that say which parameters are trained: adapters beside frozen weights (`lora`), or a part of the model
(`freeze`), and which the optimizer is not given (`outside_optimizer`); and, of each part of a model, what follows for its
backward pass.

LoRA (Hu et al. 2021, arXiv:2106.09685) puts two thin matrices beside a frozen one: W·x + (α/r)·B·A·x, with A of r × in and B of
out × r elements. DoRA (Liu et al. 2024, arXiv:2402.09353) trains the lengths of the sum's rows apart from their directions. QLoRA
(Dettmers et al. 2023, arXiv:2305.14314) keeps the frozen ones in 4 bits. A frozen weight has no gradient and no optimizer state;
the gradient of its input is made all the same, down to the lowest part that is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from strategies.models.parts import unsaid
from strategies.plan.adapter_config import read_adapter_config
from topologies.reading import Config, folded, nearest

NF4_BLOCK, NF4_GROUP = 64, 256  # numbers that share a scale, scales that share another (arXiv:2305.14314, section 3)

# By folded name the modules that are meant: Megatron Bridge's names of fused and of single matrices, and what PEFT's users write.
QKV, FC1 = ("linear_q", "linear_k", "linear_v"), ("linear_fc1_gate", "linear_fc1_up")
FUSED = {"linear_qkv": QKV, "linear_fc1": FC1}
MODULES = (*FUSED, *QKV, *FC1, "linear_proj", "linear_fc2")
TARGETS: Mapping[str, tuple[str, ...]] = {
    **{folded(name): (name,) for name in MODULES},
    "qkv": ("linear_qkv",),
    "proj": ("linear_proj",),
    "fc1": ("linear_fc1",),
    "fc2": ("linear_fc2",),
    "qproj": ("linear_q",),
    "kproj": ("linear_k",),
    "vproj": ("linear_v",),
    "oproj": ("linear_proj",),
    "gateproj": ("linear_fc1_gate",),
    "upproj": ("linear_fc1_up",),
    "downproj": ("linear_fc2",),
    "attention": ("linear_qkv", "linear_proj"),
    "mlp": ("linear_fc1", "linear_fc2"),
    "alllinear": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
}
SHOWN = (
    "all-linear",
    "attention",
    "mlp",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    *FUSED,
    "linear_proj",
    "linear_fc2",
)


NAMES: Mapping[str, str] = {  # folded names of PEFT, bitsandbytes and NeMo -> field
    **dict.fromkeys(("r", "lorar", "dim", "lorarank", "adapterdim", "loradim"), "rank"),
    "loraalpha": "alpha",
    "usedora": "dora",
    **dict.fromkeys(("targetmodules", "loratargetmodules"), "targets"),
    **dict.fromkeys(("loradropout", "adapterdropout"), "dropout"),
    "a2aexperimental": "all_to_all",
    "bnb4bitquanttype": "weights",
    "bnb4bitusedoublequant": "double_quantization",
}


class Lora(Config):
    """Low-rank adapters beside frozen matrices of the layers; all else is frozen. PEFT's and NeMo's names are read, too."""

    other_names: ClassVar[Mapping[str, str]] = NAMES

    rank: PositiveInt = Field(description="r: rows of A and columns of B (PEFT's r, Megatron Bridge's dim)", le=2**16)
    alpha: PositiveFloat | None = Field(
        None, description="α: results are multiplied by α/r, 1 unless said; the product costs the same whatever the number"
    )
    targets: tuple[str, ...] = Field(
        min_length=1,
        max_length=16,
        description="matrices of each layer that have an adapter, by PEFT's names (q_proj, k_proj, v_proj, o_proj, gate_proj, "
        "up_proj, down_proj) or Megatron Bridge's (linear_qkv, linear_proj, linear_fc1, linear_fc2, linear_q, …); attention, "
        "mlp and all-linear are several",
    )
    dora: bool = Field(
        False,
        exclude_if=unsaid,
        description="DoRA: a trained number per output scales the frozen and the adapter's result together, divided by the norms "
        "of their rows, which every forward pass computes (PEFT's use_dora)",
    )
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="share of the adapter's inputs that is dropped; 0 runs no dropout")
    weights: Literal["same", "fp8", "nf4"] = Field(
        "same",
        description="what frozen matrices of layers are kept in: the plan's precision (same), fp8 or NVFP4 alone with `fp8` "
        "(Transformer Engine's fp8_model_init, NeMo's fp8_params), or 4 bits, dequantised before each product (nf4, QLoRA)",
    )
    double_quantization: bool = Field(True, description="nf4: scales of 64 numbers are quantised to 8 bits (QLoRA)")
    fp8_transposes: Literal["kept", "made", "none"] = Field(
        "kept",
        description="weights=fp8: copies by columns for the input gradients, which Hopper's fp8 products need: kept beside the "
        "others, made before each product (NeMo's disable_parameter_transpose_cache), or none (Blackwell)",
    )
    all_to_all: bool = Field(
        False,
        description="tp with sequence parallelism: adapters of matrices cut by rows exchange features for tokens in one step in "
        "place of a gather of all features (NeMo's a2a_experimental)",
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        """Read PEFT's file, and take what others call a field for it, where the field is not there."""
        if isinstance(data, str) and data.endswith(".json"):
            return read_adapter_config(data)
        if not isinstance(data, Mapping):
            return data
        names = {
            key: NAMES.get(folded(key), key) if isinstance(key, str) and key not in cls.model_fields else key for key in data
        }
        return data if len(set(names.values())) < len(names) else {names[key]: value for key, value in data.items()}

    @field_validator("targets", mode="before")
    @classmethod
    def _modules(cls, given: Any) -> Any:
        """Names as the frameworks have them; parts of a fused matrix that is named, too, are left out."""
        names = [given] if isinstance(given, str) else given
        if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
            return given
        result: list[str] = []
        for name in names:
            known = TARGETS.get(folded(name.rpartition(".")[2]))
            if known is None:
                raise ValueError(f"'{name}' is no matrix of a layer that may have an adapter{nearest(name, SHOWN)}")
            result += known
        for fused, parts in FUSED.items():
            if fused in result:
                result = [name for name in result if name not in parts]
        return tuple(sorted(set(result), key=MODULES.index))

    @property
    def bytes_per_weight(self) -> float | None:
        """Bytes that a frozen element of a layer's matrix takes, or with weights=fp8 such numbers; None: as in the plan's
        precision.
        """
        if self.weights == "fp8":
            return 2.0 if self.fp8_transposes == "kept" else 1.0
        if self.weights == "nf4":
            scale = 1 + 4 / NF4_GROUP if self.double_quantization else 4
            return 0.5 + scale / NF4_BLOCK
        return None


class Freeze(Config):
    """Parts of the model whose parameters are not trained."""

    layers: int = Field(0, ge=0, le=10_000, description="the first so many layers; with `lora` these have no adapters")
    embedding: bool = Field(True, description="the embedding, and a head's matrix that is the same")
    head: bool = Field(False, description="what follows the last layer: its norm and the head")


class FineTuning(Config):
    """Fields of a plan about what is trained."""

    lora: Lora | None = Field(
        None,
        exclude_if=unsaid,
        description="low-rank adapters are trained, all else is frozen: {rank: 16, targets: [q_proj, v_proj], …}, or PEFT's"
        " adapter_config.json",
    )
    freeze: Freeze | None = Field(
        None,
        exclude_if=unsaid,
        description="parts that are not trained: {layers: 8} freezes the embedding and the first 8 layers",
    )
    outside_optimizer: tuple[Literal["embedding", "head"], ...] = Field(
        (),
        max_length=2,
        exclude_if=unsaid,
        description="parts whose gradients are made and reduced, but whose parameters the optimizer is not given (in no "
        "param_groups of PyTorch's): no optimizer states and no update; the head with the norm before it",
    )

    @field_validator("outside_optimizer")
    @classmethod
    def _each_once(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        """In the model's order."""
        return tuple(sorted(set(given)))

    @property
    def trains_all(self) -> bool:
        """Whether every parameter has a gradient."""
        return self.lora is None and self.freeze is None


class Trained(NamedTuple):
    """What of a part is trained, and how far down gradients come: to its input, to its lowest trained parameter, or not at
    all.
    """

    weights: bool = True  # the part's own parameters
    adapters: bool = False
    gradient: Literal["input", "parameters", "none"] = "input"

    @property
    def anything(self) -> bool:
        """Whether it has a parameter with a gradient."""
        return self.weights or self.adapters


class TrainedParts(NamedTuple):
    """The parts of a model from the bottom up."""

    embedding: Trained
    layers: tuple[Trained, ...]
    head: Trained

    @property
    def lowest(self) -> int | None:
        """The lowest part that is trained: −1 the embedding, 0 … the layers, then the head; None: nothing is."""
        every = enumerate((self.embedding, *self.layers, self.head), -1)
        return next((number for number, part in every if part.anything), None)


def trained_parts(plan: FineTuning, layers: int) -> TrainedParts:
    """What of a model with so many layers the plan trains."""
    freeze, lora = plan.freeze or Freeze(layers=0, embedding=False, head=False), plan.lora
    frozen = [number < freeze.layers for number in range(layers)]
    bare = TrainedParts(
        Trained(lora is None and not freeze.embedding),
        tuple(Trained(lora is None and not still, lora is not None and not still) for still in frozen),
        Trained(lora is None and not freeze.head),
    )
    lowest = bare.lowest
    if lowest is None:
        return bare
    every = [
        part._replace(gradient="none" if number < lowest else "parameters" if number == lowest else "input")
        for number, part in enumerate((bare.embedding, *bare.layers, bare.head), -1)
    ]
    return TrainedParts(every[0], tuple(every[1:-1]), every[-1])
