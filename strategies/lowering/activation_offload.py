"""Activations of layers kept in the CPUs' memory from their forward to their backward pass (`plan.offload_activations`).

Transformer Engine's schedule, which Megatron-LM's --cpu-offloading-num-layers asks for
(transformer_engine/pytorch/cpu_offload.py, OffloadSynchronizer._default_offload_sync_init). Of L layers the first N are
offloaded, so that L − N layers' activations are on the GPU at most:

* forward, the copy of layer i begins when its pass is over, on a stream of its own. Its activations stay on the GPU until the
  compute stream has waited for the copy, before the pass of layer L − N + i;
* backward, the copy back of layer i begins before the pass of layer L − N − 1 + i, when what was computed before is over; the
  layer's own pass waits for it.

With N = L − 1 nothing is hidden: each copy stands between two layers. Both directions share the stream, and PCIe with what else
crosses it. Transformer Engine leaves tensors below 1 MiB where they are, which are few; a copy begins there when its tensor is
made, here when the layer is over.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.program import Memory, Ref
from strategies.layers.layer_cost import LayerCost
from strategies.lowering.host import Host
from topologies.reading import UserError


class ActivationOffload:
    """Copies of a stage's `parts`: what each pass of a part waits for, gives back and starts."""

    def __init__(self, parts: Sequence[LayerCost], count: int, host: Host) -> None:
        layers = [number for number, part in enumerate(parts) if part.name == "layer" and part.saved]
        if count >= len(layers):
            rule = f"must be less than the {len(layers)} layers that keep activations: the last one's are needed at once"
            raise UserError(f"plan: offload_activations={count} {rule}")
        self.parts, self.host = parts, host
        on_gpu = len(layers) - count
        self.offloaded = frozenset(layers[:count])
        self._gone = {layers[on_gpu + i]: layers[i] for i in range(count)}  # forward: before a part, whose copy has to be over
        self._back = {layers[on_gpu - 1 + i]: layers[i] for i in range(count)}  # backward: before a part, whose copy begins
        self._copies: dict[int, Ref] = {}  # of each part, the copy under way

    def activations(self, part: int) -> Memory:
        """What a part keeps."""
        return (("activation", self.parts[part].saved),)

    def before_forward(self, part: int) -> tuple[tuple[Ref, ...], Memory]:
        """What a part's forward pass waits for, and what is given back when it begins."""
        if part not in self._gone:
            return (), ()
        gone = self._gone[part]
        return (self._copies.pop(gone),), tuple((kind, -size) for kind, size in self.activations(gone))

    def after_forward(self, part: int, ref: Ref) -> None:
        """Begin to copy a part's activations out."""
        if part in self.offloaded:
            self._copies[part] = self.host.activations("gpu", "cpu", self.parts[part].saved, (ref,))

    def before_backward(self, part: int, computed: Ref | None) -> tuple[Ref, ...]:
        """Begin to copy back what a part's backward pass asks for; what the pass waits for."""
        if part in self._back:
            source, after = self._back[part], () if computed is None else (computed,)
            size = self.parts[source].saved
            self._copies[source] = self.host.activations("cpu", "gpu", size, after, self.activations(source))
        return (self._copies.pop(part),) if part in self.offloaded else ()
