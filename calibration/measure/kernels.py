"""Computations of a training step, one at a time: products, attention, memory-bound operations, updates, launches, copies.

Imports torch: import this module inside the function that needs it. Operands are taken from as many copies as overflow the
caches, because a step comes back to a tensor long after it used it. Each rank computes while all others do: processes of one
machine share its memory bandwidth, as they do in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibration.devices import device
from calibration.measure.bench import DTYPES, Action, Bench, Probe, Reading
from calibration.measure.calls import CALLED
from calibration.measure.grid import Grid, Shape

COPIED = 2**26  # bytes of a copy
LAUNCHES = 1000  # of the smallest operation, one after the other


def probes(grid: Grid) -> list[Probe]:
    """Every computation of the grid."""
    result: list[Probe] = []
    for dtype in grid.dtypes:
        result += [_product(shape, layout, dtype) for shape in grid.products for layout in ("forward", "input", "weight")]
        result += [_batched(shape, dtype) for shape in grid.batched if dtype != "fp8"]  # attention's, which is not in fp8
    main = grid.dtypes[0]
    result += [_attention(shape, main, way) for shape in grid.attention for way in ("forward", "backward", "materialised")]
    result += [_memory(kind, count, main) for kind in MEMORY for count in grid.elements]
    result += [_optimizer(name, variant, grid.parameters) for name in ("adam", "sgd") for variant in VARIANTS]
    result += [_pass(name, grid.parameters) for name in PASSES]
    result += [Probe("launch", {"kind": kind}, run) for kind, run in (("operator", _launch), ("autograd", _autograd))]
    result += [Probe("launch", {"kind": kind}, run) for kind, run in CALLED.items()]
    return result + [Probe("copy", {"from": a, "to": b, "bytes": float(COPIED)}, _copy(a, b)) for a, b in WAYS]


def on_device(cases: list[Probe], bench: Bench) -> list[Probe]:
    """Without copies to and from a device whose memory is the host's."""
    return [
        probe for probe in cases if bench.place.compute.ordered or "device" not in (probe.case.get("from"), probe.case.get("to"))
    ]


@contextmanager
def precision(dtype: str, bench: Bench) -> Iterator[None]:
    """TF32 on tensor cores only when asked."""
    before = bench.place.compute.use_tf32(dtype == "tf32")
    try:
        yield
    finally:
        bench.place.compute.use_tf32(before)


def _width(dtype: str) -> int:
    return int(DTYPES[dtype].itemsize)


def _product(shape: Shape, layout: str, dtype: str) -> Probe:
    """A linear layer's product in one of its layouts; the case's m, n, k are the product's own."""
    m, n, k = shape
    own = {"forward": (m, n, k), "input": (m, k, n), "weight": (n, k, m)}[layout]
    size = _width(dtype) * (m * k + n * k + m * n)

    def run(bench: Bench) -> Reading:
        if dtype == "fp8":
            return bench.kernel(_narrow(own, layout, bench))
        operands = [torch.randn(*size, device=bench.device).to(DTYPES[dtype]) for size in ((m, k), (n, k), (m, n))]
        turns = bench.cold(lambda: [tensor.clone() for tensor in operands], size)
        actions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
            "forward": lambda x, w, g: functional.linear(x, w),
            "input": lambda x, w, g: g @ w,
            "weight": lambda x, w, g: g.t() @ x,
        }
        action = actions[layout]
        with precision(dtype, bench):
            return bench.kernel(lambda: action(*next(turns)))

    case: dict[str, str | float] = {"layout": layout, "dtype": dtype, "batch": 1, "m": own[0], "n": own[1], "k": own[2]}
    return Probe("gemm", case, run, takes=4.0 * size)


def _narrow(shape: Shape, layout: str, bench: Bench) -> Action:
    """A product in fp8 with a result of 16 bits. Tensor cores take both operands along the numbers that are added up, so that
    backward passes have transposed copies, which are made elsewhere; they add up in fp32, the forward pass in fewer bits
    (Transformer Engine's use_split_accumulator).
    """
    m, n, k = shape
    left, right = (torch.randn(rows, k, device=bench.device).to(DTYPES["fp8"]) for rows in (m, n))
    one = torch.ones((), device=bench.device)
    fast = layout == "forward" and bench.place.compute.ordered
    turns = bench.cold(lambda: (left.clone(), right.clone()), left.nbytes + right.nbytes)

    def product() -> Tensor:
        a, b = next(turns)
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return product


def _batched(shape: Shape, dtype: str) -> Probe:
    batch, m, n, k = shape
    size = _width(dtype) * batch * (m * k + k * n)

    def run(bench: Bench) -> Reading:
        operands = [torch.randn(batch, *size, device=bench.device).to(DTYPES[dtype]) for size in ((m, k), (k, n))]
        turns = bench.cold(lambda: [tensor.clone() for tensor in operands], size)
        with precision(dtype, bench):
            return bench.kernel(lambda: torch.bmm(*next(turns)))

    return Probe("gemm", {"layout": "batched", "dtype": dtype, "batch": batch, "m": m, "n": n, "k": k}, run, takes=4.0 * size)


def _attention(shape: Shape, dtype: str, way: str) -> Probe:
    """Causal attention: fused forward, its backward alone, or both passes with scores and probabilities in memory."""
    batch, heads, length, dim = shape

    def run(bench: Bench) -> Reading:
        inputs = (torch.randn(batch, heads, length, dim, device=bench.device).to(DTYPES[dtype]) for _ in range(3))
        q, k, v = (tensor.requires_grad_(way != "forward") for tensor in inputs)
        if way == "forward":
            return bench.kernel(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        if way == "backward":
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            gradient = torch.randn_like(out)
            return bench.kernel(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
        future = torch.full((length, length), float("-inf"), device=bench.device, dtype=q.dtype).triu(1)

        def both() -> Any:
            out = (q @ k.transpose(2, 3) / dim**0.5 + future).softmax(-1) @ v
            return torch.autograd.grad(out, (q, k, v), out)

        return bench.kernel(both)

    case: dict[str, str | float] = {
        "way": way,
        "dtype": dtype,
        "batch": batch,
        "heads": heads,
        "sequence": length,
        "head_dim": dim,
    }
    scores = 8 * batch * heads * length**2 if way == "materialised" else 0  # and probabilities, masked ones, and their gradients
    return Probe("attention", case, run, takes=float(_width(dtype) * (scores + 12 * batch * heads * length * dim)))


Pass = Callable[[Tensor], Callable[[], Any]]


def _backward(forward: Callable[[Tensor], Tensor]) -> Pass:
    """The backward pass alone of a function of one tensor."""

    def prepared(x: Tensor) -> Callable[[], Any]:
        x = x.clone().requires_grad_()
        out = forward(x)
        gradient = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, x, gradient, retain_graph=True)

    return prepared


def _forward(forward: Callable[[Tensor], Any]) -> Pass:
    return lambda x: lambda: forward(x)


def _binary(x: Tensor) -> Callable[[], Any]:
    other = x.clone()
    return lambda: x + other


def _norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def _logits(x: Tensor) -> Tensor:
    return functional.log_softmax(x, -1)


# kind of operation -> (what it does to a tensor of rows, tensors of that size that it reads and writes); names and counts are
# named as in strategies.frameworks.passes where the simulator prices the operator itself
MEMORY: dict[str, tuple[Pass, float]] = {
    "copy": (_forward(torch.clone), 2),
    "scale": (_forward(lambda x: x * 0.5), 2),
    "accumulate": (_forward(lambda x: x.add_(1e-6)), 2),
    "binary": (_binary, 3),
    "norm": (_forward(_norm), 2),
    "norm backward": (_backward(_norm), 3),
    "gelu": (_forward(functional.gelu), 2),
    "gelu backward": (_backward(functional.gelu), 3),
    "silu": (_forward(functional.silu), 2),
    "silu backward": (_backward(functional.silu), 3),
    "softmax": (_forward(lambda x: x.softmax(-1)), 2),
    "softmax backward": (_backward(lambda x: x.softmax(-1)), 3),
    "dropout": (_forward(lambda x: functional.dropout(x, 0.1)), 2.25),
    "log-softmax": (_forward(_logits), 2),
    "log-softmax backward": (_backward(_logits), 3),
}
ROW = 1024  # elements of a row


def _memory(kind: str, count: int, dtype: str) -> Probe:
    prepared, tensors = MEMORY[kind]
    dtype = "fp32" if kind.startswith("log-softmax") else dtype  # of logits in fp32, as losses are computed

    def run(bench: Bench) -> Reading:
        x = torch.randn(max(1, count // ROW), ROW, device=bench.device).to(DTYPES[dtype])
        turns = bench.cold(lambda: prepared(x.clone()), count * _width(dtype) * tensors)
        return bench.kernel(lambda: next(turns)())

    case: dict[str, str | float] = {"kind": kind, "dtype": dtype, "bytes": tensors * count * _width(dtype)}
    return Probe("memory", case, run, takes=8.0 * count * (tensors + 1))


VARIANTS = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
STATES = {"adam": 2, "sgd": 0}  # numbers that the optimizer keeps per parameter
WIDTH = 512  # features of the layers whose parameters are updated
PASSES: dict[str, tuple[Callable[[list[Tensor], list[Tensor]], Any], float]] = {  # and the accesses to each number
    "norm": (lambda tensors, _: torch._foreach_norm(tensors), 1),
    "scaling": (lambda tensors, _: torch._foreach_mul_(tensors, 1.0), 2),
    "list copy": (lambda tensors, others: torch._foreach_copy_(tensors, others), 2),
    "zeroing": (lambda tensors, _: torch._foreach_zero_(tensors), 1),
    "narrowing": (lambda tensors, _: [tensor.to(torch.float16).div_(2) for tensor in tensors], 2.5),  # by PyTorch's hook
}


def _optimizer(name: str, variant: str, parameters: int) -> Probe:
    """An update of matrices of a transformer layer's proportions; traffic as the simulator counts it, in fp32."""
    parameters = _whole(parameters)
    traffic = 4 * parameters * (1 + 2 * STATES[name] + 2)

    def run(bench: Bench) -> Reading:
        tensors = [nn.Parameter(tensor) for tensor in _layers(parameters, bench)]
        for tensor in tensors:
            tensor.grad = torch.randn_like(tensor)
        kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name]
        return bench.kernel(kind(tensors, lr=1e-4, **VARIANTS[variant]).step)

    case: dict[str, str | float] = {"kind": name, "variant": variant, "bytes": float(traffic)}
    often = 10 if (name, variant) == ("adam", "fused") else 1  # the others are there to be looked at
    return Probe("optimizer", case, run, takes=4.0 * parameters * (3 + STATES[name]), rounds=often)


LAYER = 12 * WIDTH**2  # parameters of its matrices


def _whole(parameters: int) -> int:
    """Of whole layers."""
    return -(-parameters // LAYER) * LAYER


def _layers(parameters: int, bench: Bench) -> list[Tensor]:
    """Matrices of transformer layers of WIDTH features with so many parameters in all."""
    shapes = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    return [torch.randn(*shape, device=bench.device) for shape in shapes * (parameters // LAYER)]


def _pass(name: str, parameters: int) -> Probe:
    """A pass over all gradients, tensor by tensor, besides the update."""
    action, accesses = PASSES[name]
    parameters = _whole(parameters)

    def run(bench: Bench) -> Reading:
        tensors, others = _layers(parameters, bench), _layers(parameters, bench)
        return bench.kernel(lambda: action(tensors, others))

    case: dict[str, str | float] = {"kind": name, "variant": "list", "bytes": float(4 * parameters * accesses)}
    return Probe("optimizer", case, run, takes=10.0 * parameters)  # two lists in fp32, and one in 16 bits


def _launch(bench: Bench) -> Reading:
    """Seconds of the host for one operator on next to no data: what a CPU adds to every operator, and a GPU's queue hides."""
    x = torch.zeros(1, device=bench.device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            x.add_(1.0)

    return _of_all(bench, bench.launching(launch, LAUNCHES))


def _autograd(bench: Bench) -> Reading:
    """Host seconds per operator, forward and backward through autograd."""
    x = torch.zeros(1, device=bench.device, requires_grad=True)

    def launch() -> None:
        y = x
        for _ in range(LAUNCHES):
            y = y * 1.0
        y.backward()  # type: ignore[no-untyped-call]

    return _of_all(bench, bench.launching(launch, 2 * LAUNCHES))


def _of_all(bench: Bench, mine: Reading) -> Reading:
    """The mean over ranks of what each of them read."""
    return replace(mine, value=float(bench.gather([mine.value]).mean()))


WAYS = (("host", "host"), ("pageable", "device"), ("pinned", "device"), ("device", "pinned"), ("device", "device"))


def _copy(source: str, target: str) -> Callable[[Bench], Reading]:
    def run(bench: Bench) -> Reading:
        def allocated(where: str) -> Tensor:
            on = bench.device if where == "device" else torch.device("cpu")
            return torch.zeros(COPIED // 4, device=on, pin_memory=where == "pinned")

        left, right = allocated(source), allocated(target)
        hosts = None if "device" in (source, target) else device("cpu")  # no stream has work of it, whose events would tell
        return bench.kernel(lambda: right.copy_(left, non_blocking=True), hosts)

    return run
