"""The program of a step: ops on streams, as CUDA would run them.

A stream runs its ops in order; ops on different streams are ordered only by explicit waits (`Op.after`). Ranks that run the same
program on symmetric hardware are one `Cohort`: one list of ops, however many ranks. Everything else (overlap, bubbles, exposed
communication, peak memory) emerges when `sim.engine.player` plays the program.

Units: bytes, seconds, FLOPs, elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from sim.grid import Grid

COMPUTE = "compute"  # the stream on which kernels run
WRAPPER_COPY = "wrapping"  # variant of a kernel: PyTorch's wrapper of a collective copies a list of tensors
PIPELINE_PASS = "pp/pass"  # calls of a kernel: what PyTorch's pipeline runtime does for the pass that begins with it
EARLY_CUBLAS = "early"  # variant of a matrix product: cuBLAS before CUDA 11.7
HOST = "host"  # the stream that launches kernels
CPU = "cpu"  # the axis of the CPUs' work on the optimizer, which sends nothing
SIDE_STREAM = "beside"  # the stream of collectives that a block starts and joins later
SIDE_STREAM_ACROSS_NODES = "beside across nodes"  # exchanges between nodes, beside others inside nodes

MEMORY_KINDS = ("parameter", "gradient", "optimizer", "activation", "temporary", "buffer")
# what PyTorch's caching allocator has: of no tensor, blocks that it keeps, too small for the tensors that are made meanwhile, or
# a second copy; and which bytes of tensors lie in blocks of another stream than compute's, which no other stream uses
CACHED = "cached"
STREAM_POOLS = GATHERED, REDUCED = "gathered", "reduced"


ALIGNED = 16  # elements: products with rows aligned to more are no faster (see GemmCurve.aligned)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel launch (or, on a CPU, one operator call).

    kind: which price applies, with the meaning of `shape`:
      "gemm"                (batch, m, n, k): batch products of (m, k) by (k, n)
      "attention_forward",
      "attention_backward"  (batch, heads, kv_heads, queries, keys, head_dim, causal 0/1): a fused (flash) kernel
      "memory"              (): bound by `bytes` of memory traffic
      "reduction"           (): the same, of a kernel that needs whole rows or columns (a softmax, sums over tokens)
      "optimizer"           (): one multi-tensor update, bound by `bytes`; or (elements, blocks): in one pass over so many
                            elements, in launches of so many thread blocks at most
    flops: floating-point operations executed; bytes: memory traffic of one pass over inputs and outputs.
    phase: "forward", "backward", "recompute" or "optimizer"; the breakdown adds up by it.
    """

    kind: str
    label: str
    phase: str
    flops: float
    bytes: float
    dtype: str = "bf16"
    shape: tuple[int, ...] = ()
    variant: str = ""  # an older fused attention; a PyTorch operator with a price of its own; WRAPPER_COPY, EARLY_CUBLAS
    alignment: int = ALIGNED  # of a product: elements to which rows of all its matrices are aligned, a power of two up to ALIGNED
    ordered: bool = False  # of attention_backward: query gradients are added up in a fixed order
    kept: float = 0.0  # of a weight's gradient in the second half of a split backward pass: bytes of its output's, kept till then
    calls: str = ""  # what the host does around its launch besides: a name in op_costs.py:CALLS or a profile's `wrapping`
    launches: int = 1  # how many launches it is: products of several experts, each by itself from one call of compiled code
    waits: bool = False  # the host waits for its end before it launches what follows (a copy of counts to the host)
    launcher: str = ""  # what launches it, where its pass does not: a name in op_costs.py:LAUNCHERS


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """A collective of every rank's group along `axis`; `bytes` is the full buffer S, as nccl-tests counts it.

    along: the axes of the group where they are more than `axis`, under which the answer still counts it: gradients are summed
    over the dp and the cp ranks at once. Where `Cohort.at` fixes `axis`, the cohorts that it tells apart meet: each has
    an op with this label.
    repeat: how many times in a row (a gradient bucket that was cut in pieces), each of `bytes`; or a part of one time: a round of
    a ring of n ranks is 1 / (n − 1).
    cohorts: instead of groups along `axis`, pairs of ranks of these two cohorts that share their other coordinates (tied
    embeddings).
    counts: of an all_to_allv, what member i of the group has for member j, in equal units; `bytes` is the largest row.
    pieces: tensors of a list that the host makes for each time, one per rank, and the GPU copies to or from the buffer of NCCL
    (torch.distributed.all_gather, reduce_scatter); 0 where they take one buffer (all_gather_into_tensor).
    sms: multiprocessors that its kernels keep from compute beside it; None: those of NCCL, as the profile's slowdown has it.
    """

    operation: str
    bytes: float
    axis: str
    label: str
    algorithm: str = "auto"
    repeat: float = 1
    width: float = 2.0  # bytes per element, so that volumes can be given in elements
    cohorts: tuple[int, int] | None = None
    counts: tuple[tuple[int, ...], ...] = ()
    along: tuple[str, ...] = ()
    pieces: int = 0
    sms: int | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which the ranks of a group differ."""
        return self.along or (self.axis,)


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """`bytes` from this cohort's ranks to the ranks of cohort `to` that share their other coordinates (one flow per rank).

    route: instead, a copy that each rank makes by itself, between "gpu", "cpu" (memory of its node) and "nvme" (disks of its
    node); `to` is then its own cohort. From "cpu" to "cpu" it is the CPU's pass over `bytes` of memory.
    """

    bytes: float
    to: int
    label: str
    axis: str = "pp"
    width: float = 2.0  # bytes per element
    route: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """A collective that the compute stream does not wait for: it runs on the stream beside when everything launched before it
    has ended (the event that PyTorch's process groups record), and kernels go on until its `Join`.
    """

    collective: Collective
    stream: str = SIDE_STREAM


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """The compute stream waits for the oldest `Start` of this very collective object that it has not waited for yet."""

    collective: Collective


Item = Kernel | Collective | Start | Join


class SharedItems(tuple[Item, ...]):
    """Items in order, hashed as an object: stages share those of their layers, and prices are remembered by them. A hash of the
    value would visit each kernel; equal items that are not shared are priced again.
    """

    __hash__ = object.__hash__

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Those that run here, each time, also where nothing waits for them yet."""
        works = (item.collective if isinstance(item, Start) else item for item in self if not isinstance(item, Join))
        return tuple(work for work in works if isinstance(work, Collective))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes along which ranks meet here."""
        return tuple(dict.fromkeys(axis for work in dict.fromkeys(self.collectives) for axis in work.axes))

    @cached_property
    def beside(self) -> dict[Collective, str]:
        """The stream of each collective that runs beside kernels."""
        return {item.collective: item.stream for item in self if isinstance(item, Start)}


class _Run(NamedTuple):
    times: int
    items: SharedItems


class Run(_Run):
    """`items` in order, `times` times over: the layers of a stage are one Run. Every Start is joined before the items end."""

    __slots__ = ()

    def __new__(cls, times: int, items: Iterable[Item]) -> Run:
        """Items that are shared stay the same object."""
        return super().__new__(cls, times, items if isinstance(items, SharedItems) else SharedItems(items))


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive kernels and the collectives that they wait for, launched in one go (e.g. one stage, one microbatch).

    Blocks, collectives and sends compare by identity: ops that do the same share the object, and it is a key of prices.
    """

    name: str
    runs: tuple[Run, ...]

    @cached_property
    def collectives(self) -> tuple[tuple[int, Collective], ...]:
        """Its collectives, each with how often it runs."""
        return tuple((times, work) for times, items in self.runs for work in items.collectives)

    @cached_property
    def meetings(self) -> tuple[Collective, ...]:
        """Its distinct collectives."""
        distinct = dict.fromkeys(items for _, items in self.runs)
        return tuple(dict.fromkeys(work for items in distinct for work in items.collectives))

    @cached_property
    def beside(self) -> dict[Collective, str]:
        """The stream of each collective that it starts beside its kernels."""
        return {work: stream for _, items in self.runs for work, stream in items.beside.items()}

    def items(self) -> Iterator[tuple[int, Kernel | Collective]]:
        """Each kernel and collective with how often it runs."""
        for run in self.runs:
            for item in run.items:
                if isinstance(item, Start):
                    yield run.times, item.collective
                elif not isinstance(item, Join):
                    yield run.times, item


Work = Block | Collective | Send


class Ref(NamedTuple):
    """The op numbered `op` of cohort `cohort`, to be waited for."""

    cohort: int
    op: int


Memory = tuple[tuple[str, float], ...]  # (kind of MEMORY_KINDS, CACHED or of STREAM_POOLS, bytes); those of one kind add up


@dataclass(slots=True)
class Op:
    """One entry of a stream. Waits for everything in `after` (and for the stream's previous op), then does `work`.

    allocate: taken when the op starts; free: given back when it ends.
    `microbatch` and `chunk` are −1 where they mean nothing.
    """

    stream: str
    work: Work
    after: tuple[Ref, ...] = ()
    allocate: Memory = ()
    free: Memory = ()
    microbatch: int = -1
    chunk: int = -1
    held: bool = False  # the host too waits for what it waits for, and launches it and what comes after it only then


@dataclass(slots=True, eq=False, weakref_slot=True)
class Cohort:
    """Ranks with one program. `at` fixes the coordinates they share, e.g. {"pp": 3}; along other axes they differ."""

    at: dict[str, int]
    ops: list[Op] = field(default_factory=list)
    resident: Memory = ()  # held for the whole step
    hosted: Memory = ()  # held in the node by each rank: ("cpu", bytes of its memory), ("nvme", bytes of its disks)
    steady: tuple[int, int] | None = None  # where the ops of one step begin and end, when it is played among others like it
    passes: list[int] = field(default_factory=list, compare=False)  # where the ops of each pass of its schedule begin
    allotment: int = 0  # which of its ranks run this program, where not all have as many microbatches: see `Program`

    @property
    def count(self) -> int:
        """How many ops there are."""
        return len(self.ops)

    @property
    def kinds(self) -> list[Op]:
        """Ops of which all others differ in their microbatch and in what they wait for only."""
        return self.ops

    def waits(self, number: int) -> tuple[Ref, ...]:
        """What op `number` waits for."""
        return self.ops[number].after

    def like(self, number: int) -> Op:
        """An op that does what op `number` does, for whatever microbatch."""
        return self.ops[number]

    def add(self, op: Op) -> int:
        """Append `op` to the program; returns its number in the cohort."""
        self.ops.append(op)
        return len(self.ops) - 1


class Launching(NamedTuple):
    """What Python or autograd takes to launch a kernel of an eager program, by its pass, as parts of what `Profile.eager` has
    over `Profile.launch`.
    """

    forward: float = 1.0  # and what is recomputed
    backward: float = 1.0


PYTHON = Launching()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Program:
    """One training step of the whole job, or a round of `steps`, from 0 to the end of the last op of any rank.

    Where cohorts are `steady`, several steps are played without a pause between them, and that part of the ops is the step. FLOPs
    and tokens are of one step; of ops that are only priced they are left out.
    """

    grid: Grid
    cohorts: list[Cohort]
    model_flops: float = 0.0  # of the whole job, without recomputation, by the stated counting rule
    hardware_flops: float = 0.0  # `model_flops` and what is recomputed
    dtype: str = ""  # whose peak MFU and HFU are relative to
    tokens: float = 0.0  # of the whole job
    parameters: int = 0  # Ψ of the model
    steps: int = 1
    threads: int = 1  # of one process, each launching on a GPU of its own: Python runs in one of them at a time
    eager: bool = False  # Python modules launch the kernels one by one, nothing compiled does
    launching: Launching = PYTHON  # what that takes the host
    blocking: bool = False  # the host waits for each kernel to end before it launches the next
    graphed: bool = False  # one CUDA graph launches all but the update: of the rest nothing takes the host anything
    expandable: bool = False  # segments of the caching allocator grow: no memory is lost between blocks
    description: str = ""
    allotments: tuple[
        int, ...
    ] = ()  # of each rank of a cohort, in order, where cohorts with equal `at` share the ranks that they
    # fix: those of allotment a run the program of the cohort with this number
    masked_flops: float | None = None  # `model_flops` without the part that a causal mask hides; None where nothing is masked
