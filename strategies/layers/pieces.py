"""Pieces that layers are made of: a matrix, a norm, a residual connection … with their forward and backward work on one rank.

A piece says once what it runs forward, what it runs backward, which tensors it keeps in between, and which parameters it holds;
a layer is a list of pieces. Gradients run in the reverse order of the list.

Work follows Megatron-LM with Transformer Engine's fusions, or with `kernels: torch` what `strategies.layers.eager` says:
* a kernel's bytes are the tensors that it reads and writes, once each; vectors of one feature or one token are left out;
* biases of matrices are added in the epilogue of the product, or in the memory kernel that follows; their gradients are sums of
  their own over all tokens;
* bias, dropout and residual addition are one kernel; scale, mask and softmax are one; the activation is one, with its gate;
* a norm's backward kernel makes its weight's gradient too; the residual gradient is added by a kernel of its own (autograd);
* a weight gradient is accumulated by the product that makes it: its result is written, and read before that when a step has
  more than one microbatch.

Tensor parallelism cuts matrices by columns, then rows (arXiv:1909.08053 section 3). Forward, an all-reduce follows a matrix cut
by rows; backward, one follows the input gradient of a matrix cut by columns. With sequence parallelism (arXiv:2205.05198 section
4.2.2) a reduce-scatter takes the all-reduce's place and an all-gather stands before the other matrix; and as only 1/tp of the
input is kept, backward gathers it once more for the weight gradient. A real run hides that gather behind the input gradient,
and the input gradient's reduction behind the weight gradient; here the compute stream waits for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sim.program import Collective, Kernel
from strategies.model import Model
from strategies.plan import Resolved

Item = Kernel | Collective
Items = tuple[Item, ...]
Split = Literal["columns", "rows", "none"]
FLOAT = 4  # bytes of fp32, in which statistics and the loss are computed whatever the precision


@dataclass(frozen=True, slots=True)
class Piece:
    """Work, tensors and parameters of one step of a layer on one rank, for one microbatch."""

    forward: Items = ()
    input_gradient: Items = ()
    weight_gradient: Items = ()
    saved: Mapping[str, float] = field(default_factory=dict)  # tensors kept for backward: name -> bytes; one name, one tensor
    core: bool = False  # part of the attention core, which selective recomputation runs again
    inner: Mapping[str, float] = field(default_factory=dict)  # as `saved`, of tensors that selective recomputation restores
    temporary: float = 0.0  # bytes of tensors that exist only while it runs
    parameters: int = 0  # elements on this rank
    replicated: int = 0  # of them, those that every tp rank holds
    experts: int = 0  # of the parameters, those of routed experts that are spread over ep ranks
    flops: float = 0.0  # of forward matrix products of the whole tp group on this cp rank's tokens, attention counted in full


@dataclass(frozen=True)
class Share:
    """What one tp rank works on: sizes of its part of a microbatch, and makers of kernels and collectives in the plan's types."""

    model: Model
    resolved: Resolved

    @property
    def tp(self) -> int:
        """Tensor parallel degree."""
        return self.resolved.plan.tp

    @property
    def cp(self) -> int:
        """Context parallel degree."""
        return self.resolved.plan.cp

    @property
    def element(self) -> int:
        """Bytes of an activation element."""
        return self.resolved.plan.bytes_per_element

    @property
    def eager(self) -> bool:
        """PyTorch's own operators in place of fused kernels."""
        return self.resolved.plan.kernels == "torch"

    @property
    def batch(self) -> int:
        """Sequences of the microbatch."""
        return self.resolved.plan.microbatch

    @property
    def sequence(self) -> int:
        """Tokens of one sequence, on all cp ranks together."""
        return self.resolved.sequence

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch on this cp rank."""
        return self.batch * self.sequence // self.cp

    @property
    def parted(self) -> int:
        """Tokens of the rank outside attention and MLP: 1/tp of all with sequence parallelism."""
        return self.tokens // self.tp if self.resolved.plan.sequence_parallel else self.tokens

    @property
    def stream(self) -> int:
        """Elements of the residual stream on this rank."""
        return self.parted * self.model.hidden

    @property
    def dropout(self) -> bool:
        """Dropout on the residual stream."""
        asked = self.resolved.plan.dropout
        return self.model.dropout if asked is None else asked

    @property
    def attention_dropout(self) -> bool:
        """Dropout on attention probabilities."""
        asked = self.resolved.plan.dropout
        return self.model.attention_dropout if asked is None else asked

    @property
    def heads(self) -> int:
        """Query heads of the rank."""
        return self.model.heads // self.tp

    @property
    def kv_heads(self) -> int:
        """Key and value heads of the rank: at least one; with more ranks than heads, several hold the same."""
        return max(1, self.model.kv_heads // self.tp)

    @property
    def rows(self) -> int:
        """Rows of the vocabulary on this rank, padded up when tp does not divide them (as Megatron-LM pads)."""
        return -(-self.model.padded_vocabulary // self.tp)

    def gemm(self, label: str, phase: str, m: int, n: int, k: int, batch: int = 1) -> Kernel:
        """`batch` products of (m, k) by (k, n)."""
        moved = float(self.element * batch * (m * k + k * n + m * n))
        return Kernel("gemm", label, phase, 2.0 * batch * m * n * k, moved, self.resolved.plan.precision, (batch, m, n, k))

    def weight_gemm(self, label: str, outputs: int, inputs: int, tokens: int, batch: int = 1) -> Kernel:
        """Gradient of a matrix (of `batch` of them), accumulated in the gradient's type."""
        moved = float(batch * (self.element * tokens * (outputs + inputs) + self.accumulated(outputs * inputs)))
        flops, shape = 2.0 * batch * outputs * inputs * tokens, (batch, outputs, inputs, tokens)
        return Kernel("gemm", label, "backward", flops, moved, self.resolved.plan.precision, shape)

    def accumulated(self, elements: int) -> int:
        """Bytes moved to accumulate so many gradient elements: written, and read when a step has more than one microbatch."""
        return self.resolved.plan.bytes_per_gradient * elements * (1 if self.resolved.microbatches == 1 else 2)

    def memory(self, label: str, phase: str, moved: float) -> Kernel:
        """A kernel bound by `moved` bytes."""
        return Kernel("memory", label, phase, 0.0, float(moved), self.resolved.plan.precision)

    def collective(self, operation: str, label: str, size: float, width: int = 0) -> Items:
        """A collective of the tp group over a full buffer of `size` bytes; nothing when tp is 1."""
        return self.along("tp", self.tp, operation, label, size, width=width)

    def along(
        self, axis: str, degree: int, operation: str, label: str, size: float, algorithm: str = "", width: int = 0
    ) -> Items:
        """A collective along `axis` over a full buffer of `size` bytes, in elements of `width` bytes (an activation's);
        nothing when its degree is 1.
        """
        if degree == 1:
            return ()
        algorithm, width = algorithm or self.resolved.plan.algorithm, width or self.element
        return (Collective(operation, float(size), axis, label, algorithm, width=width),)

    def gather(self, label: str, features: int = 0) -> Items:
        """All tokens of `features` (hidden) from the 1/tp of every rank; nothing without sequence parallelism."""
        size = self.element * self.tokens * (features or self.model.hidden)
        return self.collective("all_gather", label, size) if self.resolved.plan.sequence_parallel else ()

    def reduce(self, label: str, features: int = 0) -> Items:
        """The sum of all ranks' partial results, on every rank or (sequence parallelism) a part of the tokens on each."""
        operation = "reduce_scatter" if self.resolved.plan.sequence_parallel else "all_reduce"
        return self.collective(operation, label, self.element * self.tokens * (features or self.model.hidden))


def column_linear(
    share: Share, label: str, outputs: int, bias: bool, local: int | None = None, source: str = "", inputs: int = 0
) -> Piece:
    """Matrix `inputs` (hidden) → `outputs`, of which this rank has `local` (outputs / tp); `source` names its input."""
    hidden, tokens = inputs or share.model.hidden, share.tokens
    local = local or outputs // share.tp
    gathered = share.element * tokens * hidden
    gather = share.gather(f"{label} input", hidden)
    again = () if share.eager else gather
    bias_gradient = (share.memory(f"{label} bias", "backward", share.element * tokens * local),)
    return Piece(
        forward=(*gather, share.gemm(label, "forward", tokens, local, hidden)),
        input_gradient=(share.gemm(label, "backward", tokens, hidden, local), *share.reduce(f"{label} input gradient", hidden)),
        weight_gradient=(*again, share.weight_gemm(f"{label} weight", local, hidden, tokens), *(bias_gradient if bias else ())),
        saved={source or f"{label} input": gathered if share.eager else share.element * share.parted * hidden},
        temporary=gathered + (gathered if again else 0),  # the input's gradient, and the input of all tokens
        parameters=local * (hidden + bias),
        flops=2.0 * tokens * hidden * outputs,
    )


def row_linear(share: Share, label: str, inputs: int, bias: bool) -> Piece:
    """Matrix `inputs` → hidden, of which this rank has inputs / tp; its bias is whole on every rank."""
    hidden, tokens = share.model.hidden, share.tokens
    local = inputs // share.tp
    gather = share.gather(f"{label} gradient")
    bias_gradient = (share.memory(f"{label} bias", "backward", share.element * share.stream),)
    return Piece(
        forward=(share.gemm(label, "forward", tokens, hidden, local), *share.reduce(label)),
        input_gradient=(*gather, share.gemm(label, "backward", tokens, local, hidden)),
        weight_gradient=(share.weight_gemm(f"{label} weight", hidden, local, tokens), *(bias_gradient if bias else ())),
        saved={f"{label} input": share.element * tokens * local},
        temporary=share.element * tokens * (local + (hidden if gather else 0)),
        parameters=local * hidden + hidden * bias,
        replicated=hidden * bias,
        flops=2.0 * tokens * inputs * hidden,
    )


def whole_linear(
    share: Share, label: str, tokens: int, outputs: int, ranks: int = 1, bias: bool = True, source: str = ""
) -> Piece:
    """Matrix hidden → `outputs`, whole on every rank, on `tokens` tokens; `ranks` ranks have different tokens."""
    hidden, elements = share.model.hidden, share.element * tokens
    bias_gradient = (share.memory(f"{label} bias", "backward", elements * outputs),)
    return Piece(
        forward=(share.gemm(label, "forward", tokens, outputs, hidden),),
        input_gradient=(share.gemm(label, "backward", tokens, hidden, outputs),),
        weight_gradient=(share.weight_gemm(f"{label} weight", outputs, hidden, tokens), *(bias_gradient if bias else ())),
        saved={source or f"{label} input": elements * hidden},
        temporary=elements * hidden,
        parameters=outputs * (hidden + bias),
        replicated=outputs * (hidden + bias),
        flops=2.0 * outputs * hidden * tokens * ranks,
    )


def norm(share: Share, label: str, residual: bool = False, source: str = "", features: int = 0) -> Piece:
    """A norm of the residual stream, or of so many features. With `residual`, its input also goes another way: gradients add."""
    features = features or share.model.hidden
    size, parameters = share.element * share.parted * features, share.model.norm_parameters(features)
    addition = (share.memory(f"{label} residual", "backward", 3 * size),)
    forward: tuple[int, ...] = (2,)
    backward: tuple[int, ...] = (3,)
    kept = {source or f"{label} input": size}
    if share.eager:
        whole = share.model.norm == "layernorm"
        kept[f"{label} statistics"] = FLOAT * (size // share.element // features) * (2 if whole else 1)
        if not whole:  # written out: see strategies.layers.eager
            forward, backward, kept[f"{label} normed"] = (2, 1, 2, 2), (2, 3, 1, 2, 3, 1, 2, 2, 3), size
    return Piece(
        forward=tuple(share.memory(label, "forward", times * size) for times in forward),
        input_gradient=(*(share.memory(label, "backward", times * size) for times in backward), *(addition if residual else ())),
        saved=kept,
        parameters=parameters,
        replicated=parameters,
    )


def residual(share: Share, label: str) -> Piece:
    """Bias, dropout and residual addition. The mask has a byte per element."""
    size, mask = share.element * share.stream, share.stream * share.dropout
    backward = (share.memory(label, "backward", 2 * size + mask),) if mask else ()  # otherwise the gradient passes unchanged
    forward = (share.memory(label, "forward", 3 * size + mask),)
    return Piece(forward, backward, saved={f"{label} dropout mask": mask} if mask else {})


def pointwise(share: Share, label: str, read: int, written: int, saved: str = "") -> Piece:
    """A function of every element: `read` elements to `written`; with `saved` its input is kept under this name for backward."""
    moved = share.element * (read + written)
    return Piece(
        forward=(share.memory(label, "forward", moved),),
        input_gradient=(share.memory(label, "backward", moved + (share.element * read if saved else 0)),),
        saved={saved: share.element * read} if saved else {},
        temporary=moved,
    )
