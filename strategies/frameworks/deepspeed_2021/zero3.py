"""DeepSpeed's ZeRO-3 of 2021 (0.3.13 to 0.5): parameters are gathered and gradients reduced one tensor at a time.

deepspeed/runtime/zero/stage3.py (PartitionedParameterCoordinator, PrefetchCoordinator, reduce_ipg_grads) and
partition_parameters.py (_allgather_param, _allgather_params, _reduce_scatter_gradient) of these releases, with
contiguous_gradients:

* `torch.distributed.all_gather` and `reduce_scatter` over a list with a piece per rank. The host makes every piece, a view, and
  launches a copy of each between the list and the flat buffer that NCCL knows (torch 1.8, ProcessGroupNCCL.cpp): its time grows
  with tensors times ranks (`Collective.pieces`).
* The host waits for the whole GPU (torch.cuda.synchronize) before each gather, and before each module whose parameters were
  gathered. Parameters of later modules are gathered beside a module only when nothing is on its way and fewer than
  stage3_max_live_parameters are there, until there are stage3_prefetch_bucket_size of them: mostly one tensor.
* A recomputed layer gathers for its second forward pass, and again for its backward pass what that has released.
* Parameters that are never released are gathered in one list after the update, and copied from there piece by piece.
* When a gradient has no room in the bucket, what is in it is reduced: a reduce-scatter for each.
* From 0.3.14 on the count of modules is reset by a hook of the whole model that runs after the one that counts the model itself
  (setup_zero_stage3_hooks, _pre_forward_hook). All modules are then one off the trace, which is taken for another pass ("Tracing
  failed"): nothing is gathered ahead, and nothing kept until it is used again.

Since 0.6 (2022) each of these is one collective over flat buffers, and the host waits for events only:
`strategies.frameworks.deepspeed.prefetch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from sim.program import COMPUTE, Block, Item, Join, Kernel, Memory, Op, Ref, Run, Start
from strategies.frameworks.deepspeed.options import DeepSpeed
from strategies.frameworks.deepspeed.parameter_gather import DeepSpeedGather
from strategies.layers.tensor_overlap import Items
from strategies.layers.weight_matrices import weights
from strategies.lowering.blocks import BACKWARD, FORWARD, items_of
from strategies.lowering.stage import Stage

Tensors = tuple[int, ...]  # by number


class Use(NamedTuple):
    """What a module gathers because it is not there, gathers ahead and releases afterwards: numbers of tensors."""

    needed: Tensors
    ahead: Tensors
    released: Tensors


def uses(trace: Sequence[Tensors], sizes: Sequence[int], limits: DeepSpeed) -> list[Use]:
    """What modules do with tensors of `sizes` elements. trace: which tensors the modules of a forward and a backward pass use."""
    coming = _distances(trace, sizes)
    live: set[int] = set()
    flying: set[int] = set()
    uses_of_modules, there = [], 0
    for now, mine in enumerate(trace):
        needed = tuple(tensor for tensor in mine if tensor not in live)
        if needed or flying & set(mine):
            flying.clear()  # the host waits for all that is on its way
        live |= set(needed)
        there += sum(sizes[tensor] for tensor in needed)
        ahead: list[int] = []
        if limits.traced and not flying and there < limits.stage3_max_live_parameters:
            for tensor in (tensor for later in trace[now + 1 :] for tensor in later):
                if tensor not in live:
                    ahead.append(tensor)
                    live.add(tensor)
                    if sum(sizes[number] for number in ahead) >= limits.stage3_prefetch_bucket_size:
                        break
        flying |= set(ahead)
        there += sum(sizes[tensor] for tensor in ahead)
        released = mine if coming[now] >= (limits.stage3_max_reuse_distance if limits.traced else 0) else ()
        live -= set(released)
        there -= sum(sizes[tensor] for tensor in released)
        uses_of_modules.append(Use(needed, tuple(ahead), released))
    return uses_of_modules


def _distances(trace: Sequence[Tensors], sizes: Sequence[int]) -> list[float]:
    """Elements used between each use of tensors and the next one; infinitely many after the last."""
    result, before, used = [inf] * len(trace), dict[Tensors, tuple[int, int]](), 0
    for now, mine in enumerate(trace):
        if mine in before:
            earlier, then = before[mine]
            result[earlier] = used - then
        used += sum(sizes[tensor] for tensor in mine)
        before[mine] = now, used
    return result


class TensorwisePasses:
    """Passes of a stage's parts, module by module."""

    def __init__(self, stage: Stage, gathering: DeepSpeedGather) -> None:
        self.stage, self.gathering = stage, gathering
        self.sizes: list[int] = []
        self._pieces: dict[tuple[str, int], list[Block]] = {}
        self._uses: dict[tuple[str, int], list[Use]] = {}
        self._there: dict[int, Ref] = {}  # the gathers of tensors
        self._bucket: list[tuple[int, int, Ref]] = []  # gradients that wait: elements, tensors, what has made them
        self._makes: list[dict[int, Tensors]] = []  # of each part: which modules of its backward pass make whose gradients
        own = [self._numbered(part) for part in range(len(stage.parts))]
        order = [(FORWARD, part) for part in range(len(own))] + [(BACKWARD, part) for part in reversed(range(len(own)))]
        trace: list[Tensors] = []
        for way, part in order:
            modules = list(self._modules(way, part, own[part]))
            if way == BACKWARD:  # the last use of a tensor
                latest = {tensor: number for number, (_, tensors) in enumerate(modules) for tensor in tensors}
                self._makes.insert(0, {number: tuple(t for t, n in latest.items() if n == number) for number in latest.values()})
            self._pieces[way, part] = [Block(way, (Run(1, items),)) for items, _ in modules]
            trace += [tensors for _, tensors in modules]
        uses_of_modules = uses(trace, self.sizes, gathering.options)
        for key in order:
            count = len(self._pieces[key])
            self._uses[key], uses_of_modules = uses_of_modules[:count], uses_of_modules[count:]

    def play(self, way: str, microbatch: int, part: int, after: tuple[Ref, ...], memory: tuple[Memory, Memory]) -> Ref:
        """Add a part's pass, which takes and gives back `memory`. The host waits for gathers, and before them for everything."""
        stage, allocated, modules = self.stage, memory[0], list(zip(self._pieces[way, part], self._uses[way, part], strict=True))
        for number, (block, use) in enumerate(modules):
            for tensor in use.needed:
                self._gather(tensor)
            mine = tuple(self._there.values())
            for tensor in use.ahead:
                self._gather(tensor)
            free: Memory = (("temporary", float(sum(map(self._bytes, use.released)))),) if use.released else ()
            free += memory[1] if number == len(modules) - 1 else ()
            ref = stage.add(Op(COMPUTE, block, (*after, *mine), allocated, free, microbatch, held=True))
            for tensor in use.released:
                del self._there[tensor]
            if way == BACKWARD:
                self._collect(part, number, number == len(modules) - 1, ref)
            after, allocated = (), ()
        return ref

    def flush(self) -> None:
        """Reduce what is in the bucket."""
        if self._bucket:
            stage, tensors = self.stage, sum(count for _, count, _ in self._bucket)
            size = sum(elements for elements, _, _ in self._bucket) * stage.plan.bytes_per_gradient
            # without overlap_comm reductions are on the compute stream, behind all that was launched
            after = self._bucket[-1][2] if stage.plan.overlap else stage.last_compute() or self._bucket[-1][2]
            stage.reduce("reduce_scatter", size / tensors, tensors, (after,), pieces=stage.plan.shards)
            self._bucket.clear()

    def _collect(self, part: int, number: int, last: bool, ref: Ref) -> None:
        """Put the gradients that a module has made in the bucket; biases' and norms' with the part's last."""
        gradients = [(self.sizes[tensor], 1) for tensor in self._makes[part].get(number, ())]
        if last:
            vectors = self.gathering.vectors(part)
            rest = self.gathering.elements(part)[0] - sum(
                self.sizes[tensor] for mine in self._makes[part].values() for tensor in mine
            )
            gradients += [(rest, max(1, vectors))] if rest else []
        for elements, count in gradients:
            if sum(size for size, _, _ in self._bucket) + elements > self.gathering.options.reduce_bucket_size:
                self.flush()
            self._bucket.append((elements, count, ref))

    def _numbered(self, part: int) -> dict[str, Tensors]:
        """Numbers of the part's tensors by the label of their product, "" of those without one."""
        numbers: dict[str, Tensors] = {}
        least = self.gathering.options.stage3_param_persistence_threshold
        last = part == len(self.stage.parts) - 1
        left = self.gathering.moving(part)
        for weight in weights(self.stage.parts[part], self.stage.model, self.stage.tied if last else 0):
            size = weight.rows * weight.columns
            if size > least:
                label = weight.label.removesuffix(" weight") if weight.label.endswith(" weight") else ""
                numbers[label] = (*numbers.get(label, ()), *range(len(self.sizes), len(self.sizes) + weight.copies))
                self.sizes += [size] * weight.copies
                left -= size * weight.copies
        count = min(left, self.gathering.vectors(part))  # norms and biases, where they come and go
        numbers[""] = (*numbers.get("", ()), *range(len(self.sizes), len(self.sizes) + count))
        self.sizes += [left // count + (number < left % count) for number in range(count)]
        return numbers

    def _modules(self, way: str, part: int, own: dict[str, Tensors]) -> Iterator[tuple[Items, Tensors]]:
        """A pass cut before each product with a weight, and the tensors that each piece uses."""
        mine, joined, begun = own[""], 0, list[Item]()
        for item in items_of(self.stage.parts[part], way):
            tensors = own.get(item.label, ()) if isinstance(item, Kernel) and item.kind == "gemm" and not joined else ()
            if tensors and begun and mine:
                yield tuple(begun), mine
                begun, mine = [], ()
            mine += tensors
            joined += isinstance(item, Start) - isinstance(item, Join)
            begun.append(item)
        if begun:
            yield tuple(begun), mine

    def _bytes(self, tensor: int) -> float:
        return float(self.sizes[tensor] * self.stage.plan.bytes_per_element)

    def _gather(self, tensor: int) -> None:
        stage, plan = self.stage, self.stage.plan
        everything = tuple(ref for ref in (stage.last_compute(), stage.last("dp")) if ref is not None)
        self._there[tensor] = self.gathering.all_gather(
            self.sizes[tensor],
            plan.sharing,
            everything,
            (("temporary", self._bytes(tensor)),),
            plan.bytes_per_element,
            pieces=plan.shards,
            held=True,
        )
