"""What a rank does outside of its GPU: copies over PCIe, updates on the CPUs, reads and writes of NVMe disks.

ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840): gradients are copied to the CPUs' memory as they are reduced, beside the
backward pass; the CPUs update, tile by tile, each tile's parameters on their way back while the next one is updated. Per step and
rank Ψ/n gradients go out and Ψ/n parameters come in. ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857): states and
parameters may also lie on disks; they are read ahead and written behind. Copies, updates, reads and writes have a stream each.
Ranks of a node share the CPUs' memory, the disks and PCIe switches; copies are not counted against the memory's bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sim.program import COMPUTE, Memory, Op, Ref, Send
from strategies.layers.layer_cost import LayerCost
from strategies.plan.options import Offload
from strategies.plan.resolved import Resolved

_WAYS = {  # (from, to) -> stream, axis
    ("gpu", "cpu"): ("to host", "host"),
    ("cpu", "gpu"): ("from host", "host"),
    ("cpu", "cpu"): ("cpu", "cpu"),
    ("nvme", "cpu"): ("nvme read", "nvme"),
    ("cpu", "nvme"): ("nvme write", "nvme"),
}
TILES = 3  # of states in the CPUs' memory when they lie on disks: one is read, one updated, one written


def offloaded(options: Offload | None, sharded: frozenset[str]) -> tuple[str, ...]:
    """Model states that no GPU holds. Gradients that are not sharded stay, to be accumulated."""
    if options is None:
        return ()
    states = ("optimizer", *(("gradient",) if "gradient" in sharded else ())) if options.optimizer else ()
    return (*states, "parameter") if options.parameters else states


class Host:
    """The part of a pipeline rank outside of its GPU. add: puts an op into the rank's program."""

    def __init__(self, plan: Resolved, rank: int, add: Callable[[Op], Ref]) -> None:
        self.plan, self.rank, self.add, self.options = plan, rank, add, plan.offload
        self._works: dict[tuple[str, str, float, str], Send] = {}  # each distinct piece of work is priced once
        self._fetched: list[Ref] = []  # copies of parameters to the GPU so far

    @property
    def updates(self) -> bool:
        """Whether the CPUs do."""
        return self.options is not None and self.options.optimizer is not None

    @property
    def has_parameters(self) -> bool:
        """Whether the rank's part of the parameters lies here."""
        return self.options is not None and self.options.parameters is not None

    def takes(self, sharded: frozenset[str]) -> tuple[str, ...]:
        """Model states that the GPU need not hold."""
        return offloaded(self.options, sharded)

    @property
    def checkpoints(self) -> bool:
        """Whether it has inputs of layers until these are recomputed."""
        return self.plan.runtime.checkpoints_on_cpu

    def checkpoint(self, source: str, target: str, kept: Memory) -> Ref:
        """Copy the input of a layer, for which the compute stream waits (tensor.to of DeepSpeed's checkpointing.py)."""
        size, there = sum(size for _, size in kept), kept if target == "gpu" else ()
        return self._move(source, target, size, self.plan.bytes_per_element, "checkpoint", (), there, stream=COMPUTE)

    def activations(self, source: str, target: str, size: float, after: tuple[Ref, ...], there: Memory = ()) -> Ref:
        """Copy a layer's activations out or back, beside compute (`strategies.lowering.activation_offload`)."""
        width = self.plan.bytes_per_element
        return self._move(source, target, size, width, "activations", after, there, stream="offload")

    def _move(
        self,
        source: str,
        target: str,
        size: float,
        width: float,
        label: str,
        after: tuple[Ref, ...],
        allocate: Memory = (),
        free: Memory = (),
        stream: str = "",
    ) -> Ref:
        usual, axis = _WAYS[source, target]
        key = source, target, size, label
        if key not in self._works:
            self._works[key] = Send(size, self.rank, label, axis, width, (source, target))
        return self.add(Op(stream or usual, self._works[key], after, allocate, free))

    def gradients(self, elements: float, after: tuple[Ref, ...], free: Memory = ()) -> Ref:
        """Copy reduced gradients out."""
        width = self.plan.bytes_per_gradient
        piece: Memory = () if free or self.plan.copies == 1 else (("temporary", elements * width),)
        return self._move("gpu", "cpu", elements * width, width, "gradients", after, piece, piece + free)

    def fetch(self, elements: float, after: tuple[Ref, ...], gathered: Memory = ()) -> Ref:
        """Copy the rank's part of parameters to the GPU. From a disk they are read before, as soon as a buffer is free."""
        width, options = self.plan.bytes_per_element, self.options
        assert options is not None
        if options.parameters == "nvme":
            free = self._fetched[-options.buffers :][:1] if len(self._fetched) >= options.buffers else []
            after = (*after, self._move("nvme", "cpu", elements * width, width, "parameters", tuple(free)))
        piece = gathered or (("temporary", elements * width),)
        ref = self._move("cpu", "gpu", elements * width, width, "parameters", after, piece, () if gathered else piece)
        self._fetched.append(ref)
        return ref

    def update(self, elements: float, traffic: float, after: tuple[Ref, ...]) -> Ref:
        """The CPUs update `elements` parameters, which costs `traffic` bytes of memory; returns what makes them available."""
        plan, options = self.plan, self.options
        assert options is not None
        tiles = max(1, math.ceil(elements / options.tile))
        states, each = plan.bytes_per_optimizer_state * elements / tiles, elements / tiles
        written: list[Ref] = []
        for tile in range(tiles):
            ready = after
            if options.optimizer == "nvme" and states:
                free = written[tile - TILES : tile - TILES + 1] if tile >= TILES else []
                ready = (*after, self._move("nvme", "cpu", states, 4.0, "states", tuple(free)))
            ref = self._move("cpu", "cpu", traffic / tiles, 4.0, f"{plan.optimizer} on the CPUs", ready)
            if options.optimizer == "nvme" and states:
                written.append(self._move("cpu", "nvme", states, 4.0, "states", (ref,)))
            ref = self._settle(each, ref)
        return ref

    def _settle(self, elements: float, after: Ref) -> Ref:
        """Bring new parameters from the CPUs' memory to where they are kept."""
        width, place = self.plan.bytes_per_element, self.options and self.options.parameters
        if place == "cpu":
            return after
        return self._move("cpu", place or "gpu", elements * width, width, "new parameters", (after,))

    def store(self, elements: float, after: Ref) -> Ref:
        """Bring parameters that the GPU has updated to where they are kept."""
        width = self.plan.bytes_per_element
        ref = self._move("gpu", "cpu", elements * width, width, "new parameters", (after,))
        return self._settle(elements, ref) if self.options and self.options.parameters == "nvme" else ref

    def held(self, shards: int, elements: float, layers: Sequence[LayerCost]) -> Memory:
        """("cpu", bytes) and ("nvme", bytes) of one rank: states and gradients of `elements` parameters, what is on its way of a
        stage's `layers`, and checkpoints.
        """
        plan, options = self.plan, self.options
        result: list[tuple[str, float]] = []
        if self.checkpoints:  # of one microbatch
            result.append(("cpu", sum(part.saved for part in layers if part.name == "layer")))
        if plan.offload_activations:
            kept = [part.saved for part in layers if part.name == "layer" and part.saved]
            result.append(("cpu", sum(kept[: plan.offload_activations])))
        if options is None:
            return tuple(result)
        if options.optimizer:
            result += [
                (options.optimizer, plan.bytes_per_optimizer_state * elements),
                ("cpu", plan.bytes_per_gradient * elements),
            ]
        if options.optimizer == "nvme":
            result.append(("cpu", min(elements, TILES * options.tile) * plan.bytes_per_optimizer_state))
        if options.parameters:
            result.append((options.parameters, plan.bytes_per_element * elements))
        if options.parameters == "nvme":
            largest = sorted((part.parameters for part in layers), reverse=True)[: options.buffers]
            result.append(("cpu", sum(largest) * plan.bytes_per_element / shards))
        return tuple(result)
