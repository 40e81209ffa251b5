"""Run a module's passes on the meta device and write down what PyTorch dispatches. Imports torch: import it inside a function."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strategies.models.tracing.blocks import find_blocks
from strategies.models.tracing.builders import builder_of
from strategies.models.tracing.fused_kernels import FusedKernels
from strategies.models.tracing.hugging_face import without_padding
from strategies.models.tracing.losses import loss_of
from strategies.models.tracing.records import LOSS, Module, Tensor, Trace, TracedOp
from strategies.models.tracing.tensor_parallel import cut, is_distributed, is_partial, is_whole, local, name_of
from topologies.reading import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INPUTS = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool}


def record(module: Module, batch: int, precision: str, fused_attention: bool, tp: int = 1) -> Trace:
    """The trace of a microbatch on one of `tp` ranks. Raises UserError where the module fails, or works on values that a shape
    does not have.
    """
    try:
        dtype = DTYPES[precision]
    except KeyError:
        raise UserError(f"precision={precision}: a module is traced in {', '.join(DTYPES)}") from None
    net = built(module, dtype)
    inputs = [
        torch.zeros(batch, *each.shape, device="meta", dtype=dtype if each.dtype == "float" else INPUTS[each.dtype])
        for each in module.input
    ]
    by_place = sum(not each.name for each in module.input)
    named = {each.name: tensor for each, tensor in zip(module.input[by_place:], inputs[by_place:], strict=True)}
    sample = inputs[:by_place], named
    try:
        with without_padding(module.source):
            blocks = find_blocks(net, *sample)
            with cut(net, module, tp) as own:
                if tp > 1:  # DTensor finds how operators are cut by running them whole, once
                    _Recorder(own, blocks, sample, fused_attention).run()
                    own.zero_grad()
                trace = _Recorder(own, blocks, sample, fused_attention).run()
                trace.samples = batch
                return trace
    except UserError:
        raise
    except Exception as error:
        sizes = ", ".join("x".join(map(str, each.shape)) for each in module.input)
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = "; values of tensors cannot be looked at, as there are none" if "meta" in str(error) else ""
        if counts := re.search(r"torch\.(nonzero|masked_select|unique\w*)|aten::(nonzero|masked_select|_?unique\w*)", why):
            why = f"{counts[0]} makes as many rows as values say, and there are none"
            hint = "; give every row its place (experts as torch.nn.functional.grouped_mm, masks as products)"
        elif re.search("bfloat16|half|low precision", why, re.IGNORECASE):
            hint = "; precision=fp32 may do, where operators know no 16 bits"
        elif isinstance(error, TypeError | IndexError | KeyError) and "str" in why:
            hint = "; inputs are tensors: give a dict's by name to a module of yours that makes the dict"
        if "more than 1 value per channel" in why:
            hint = "; a batch normalisation has one number of each channel: take more samples, as plan.microbatch=2"
        if re.search(r"missing \d+ required positional|specify|must be provided|cannot be `?None", why):
            hint = "; other inputs have names, as --input 96:int64,decoder_input_ids=32:int64"
        raise UserError(f"model {module.source}: its passes on --input {sizes} failed: {why}{hint}") from error


def built(module: Module, dtype: torch.dtype, device: str = "meta") -> nn.Module:
    """The module as its builder makes it there, in training. Raises UserError."""
    builder = builder_of(module)
    try:
        with torch.device(device):
            net = builder()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"model {module.source}: failed while it was made: {type(error).__name__}: {error}") from error
    if not isinstance(net, nn.Module):
        raise UserError(f"model {module.source}: made {type(net).__name__}, which is no torch.nn.Module")
    for name, each in net.named_modules():
        if isinstance(each, nn.RNNBase | nn.LSTMCell | nn.GRUCell):  # without a GPU PyTorch dispatches other operators
            what = f"{f'{name} is an ' if name else 'it is an '}nn.{type(each).__name__}"
            kernel = "it as one kernel of cuDNN" if isinstance(each, nn.RNNBase) else "what follows its products as one kernel"
            why = f"GPUs run {kernel}, which no profile has measured"
            raise UserError(f"model {module.source}: {what}: {why}; trace the module without it, or its products as nn.Linear")
    return net.to(device=device, dtype=dtype).train()


class _Recorder(TorchDispatchMode):
    """Writes down every operator, and which tensors are there while it runs."""

    def __init__(
        self, net: nn.Module, blocks: list[str], sample: tuple[list[Any], dict[str, Any]], fused_attention: bool
    ) -> None:
        super().__init__()
        self.net, self.blocks, self.sample, self.fused_attention = net, blocks, sample, fused_attention
        self.names = {local(each).untyped_storage()._cdata: name for name, each in net.named_parameters()}
        outside = [*map(local, net.parameters()), *map(local, net.buffers()), *sample[0], *sample[1].values()]
        self.outside = {each.untyped_storage()._cdata for each in outside}
        shapes = {name: tuple(local(each).shape) for name, each in net.named_parameters()}
        self.trained = {name for name, each in net.named_parameters() if each.requires_grad}
        still = frozenset(name for name, each in net.named_parameters() if not each.requires_grad)
        self.trace = Trace([], blocks, shapes, {}, [0.0] * len(blocks), frozen=still)
        cut_over = any(is_distributed([type(each.data)]) for each in net.parameters())
        self.trace.replicated = frozenset(name for name, each in net.named_parameters() if cut_over and is_whole(each))
        self.trace.buffers = {name: (each.element_size(), each.numel()) for name, each in net.named_buffers()}
        self.synchronised = {name for name, each in net.named_modules() if isinstance(each, nn.SyncBatchNorm)}
        self.part, self.path, self.part_of_node = 0, [""], dict[int, tuple[int, str]]()
        self.kept: dict[int, str] = {}  # storage -> name, of what autograd keeps
        self.live: dict[int, tuple[Any, float]] = {}  # storage -> weak reference, bytes
        self.entered: list[set[int]] = [set() for _ in blocks]  # storages of each block's inputs
        self.pinned: list[Any] = []  # so that no other storage gets the address of one that is told by it
        self.activations: dict[int, tuple[Any, int]] = {}  # storage -> weak reference, part that made it last; of gradients' way
        self.handed_on: list[dict[int, float]] = [{} for _ in blocks]  # by block: storages made before and read from it on
        self.gradients: set[int] = set()  # storages of parameters' gradients
        self.made: set[int] = set()  # storages of the last operator's results
        self.in_backward = self.is_paused = False

    def paused(self) -> Any:
        """A context in which nothing is written down."""
        recorder = self

        class Paused:
            def __enter__(self) -> None:
                recorder.is_paused = True

            def __exit__(self, *_: object) -> None:
                recorder.is_paused = False

        return Paused()

    def run(self) -> Trace:
        """Both passes."""
        handles = [
            each.register_post_accumulate_grad_hook(self._accumulated) for each in self.net.parameters() if each.requires_grad
        ]
        handles += [handle for name, each in self.net.named_modules() for handle in self._watch(name, each)]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept), self:
                loss = self._loss()
                self.in_backward = True
                loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        passing = (sum(sizes.values()) for sizes in self.handed_on)
        self.trace.handed_on = [max(pair) for pair in zip(passing, self.trace.boundaries, strict=True)]
        self.trace.kept_inputs = [
            next((self.kept[each] for each in storages if each in self.kept), "") for storages in self.entered
        ]
        return self.trace

    def _loss(self) -> Any:
        with FusedKernels(self):
            result: Any = self.net(*self.sample[0], **self.sample[1])
        self.part = len(self.blocks) + 1
        returned = [local(each) for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.trace.result = float(sum(each.numel() * each.element_size() for each in returned))
        self.path.append(LOSS)

        def labels(rows: Any) -> Any:
            with self.paused():
                made = torch.zeros(rows.shape[0], dtype=torch.long, device="meta")
                self.outside.add(made.untyped_storage()._cdata)
                self.pinned.append(StorageWeakRef(made.untyped_storage()))
            return made

        loss, self.trace.loss = loss_of(result, labels)
        self.path.pop()
        return loss

    def _watch(self, name: str, module: nn.Module) -> list[Any]:
        """Hooks that tell which module, and which block, runs."""

        def enter(_: Any, args: Any, kwargs: Any) -> None:
            self.path.append(name)
            if name in self.blocks:
                number = self.blocks.index(name)
                self.part = number + 1
                tensors = [local(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
                handed = [each for each in tensors if each.requires_grad]
                if not handed and number:  # of frozen blocks before it
                    handed = [each for each in tensors if each.is_floating_point()]
                self.entered[number] = {each.untyped_storage()._cdata for each in handed}
                self.trace.boundaries[number] = float(sum(each.numel() * each.element_size() for each in handed))

        def leave(*_: Any) -> None:
            self.path.pop()
            if name in self.blocks and name == self.blocks[-1]:
                self.part = len(self.blocks) + 1

        return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]

    def _keep(self, tensor: Any) -> Any:
        storage = local(tensor).untyped_storage()
        key = storage._cdata
        if key not in self.outside and key not in self.kept:
            node = self._node()
            self.kept[key] = f"kept {len(self.kept)}"
            if key in self.made and self.trace.ops[-1].node == node:  # its own result, counted with what it keeps
                self.trace.ops[-1].live -= float(storage.nbytes())
            self.trace.saved.setdefault(node, []).append((self.kept[key], float(storage.nbytes())))
            self.part_of_node.setdefault(node, (self.part, self.path[-1]))
            self.pinned.append(StorageWeakRef(storage))
        with self.paused():
            return tensor.detach()  # a result that its own node keeps would never go, but for the search for cyclic garbage

    @staticmethod
    def _node() -> int:
        """The node of the graph that the forward operator at hand has made."""
        return int(torch._C._autograd._get_sequence_nr()) - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_distributed(types):
            return NotImplemented  # and is asked again for what a rank runs
        result = func(*args, **(kwargs or {}))
        if not self.is_paused and not func.is_view and func.overloadpacket.__name__ not in ("_unsafe_view", "detach", "detach_"):
            flat = tree_leaves((args, kwargs or {}))
            tensors = [each for each in flat if isinstance(each, torch.Tensor)]
            numbers = tuple(each for each in args if all(isinstance(leaf, bool | int | float) for leaf in tree_leaves(each)))
            outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            self.add(name_of(func), tensors, outputs, numbers)
        elif not self.is_paused and not self.in_backward:
            self.part_of_node[self._node()] = (self.part, self.path[-1])
        return result

    def add(self, name: str, inputs: Any, outputs: Any, arguments: tuple[Any, ...]) -> None:
        """An operator that has run."""
        part, path, node, again = self.part, self.path[-1], self._node(), False
        if self.in_backward:
            current = torch._C._current_autograd_node()
            again = current is not None and torch.is_grad_enabled()  # gradients themselves are made without
            node = int(current._sequence_nr()) if current is not None else -1
            part, path = self.part_of_node.get(node, (self.part, ""))
            self.part = part
        else:
            self.part_of_node[node] = (part, path)
            self._pass_on(part, inputs, outputs)
        block = self.blocks[part - 1] if 0 < part <= len(self.blocks) else ""
        label = path.removeprefix(block).removeprefix(".") or "block"
        read, written = (tuple(map(self._described, tensors)) for tensors in (inputs, outputs))
        self.trace.ops.append(
            TracedOp(
                name,
                part,
                self.in_backward,
                node,
                label,
                read,
                written,
                arguments,
                self._living(outputs),
                path in self.synchronised,
                again,
            )
        )

    def _pass_on(self, part: int, inputs: Any, outputs: Any) -> None:
        """What an operator of the forward pass reads of parts before its own is handed on to it by every block between, skip
        connections too. Of what gradients come back to, as a stage computes the rest (positions, masks) by itself.
        """
        read = {tensor.untyped_storage()._cdata: tensor for tensor in inputs}
        for key, tensor in read.items():
            _, made = self.activations.get(key, (None, part))
            for number in range(made, min(part, len(self.blocks))):
                self.handed_on[number][key] = float(tensor.untyped_storage().nbytes())
        trained = any(key in self.activations or self.names.get(key, "") in self.trained for key in read)
        for tensor in outputs:
            if trained and tensor.is_floating_point():
                storage = tensor.untyped_storage()
                self.activations[storage._cdata] = StorageWeakRef(storage), part

    def _described(self, tensor: Any) -> Tensor:
        storage = tensor.untyped_storage()
        size = float(min(tensor.numel() * tensor.element_size(), storage.nbytes()))
        name = self.names.get(storage._cdata, "")
        return Tensor(tuple(tensor.shape), tensor.element_size(), size, name, tensor.is_floating_point())

    def _living(self, outputs: Any) -> float:
        """Bytes of the step's tensors that are there and that autograd does not keep; parameters' gradients are left out."""
        self.made = {tensor.untyped_storage()._cdata for tensor in outputs}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            self.live.setdefault(storage._cdata, (StorageWeakRef(storage), float(storage.nbytes())))
        gone = [key for key, (reference, _) in self.live.items() if reference.expired()]
        for key in gone:
            del self.live[key]
        known = self.outside | self.gradients
        return sum(size for key, (_, size) in self.live.items() if key not in self.kept and key not in known)

    def _accumulated(self, parameter: Any) -> None:
        self.gradients.add(local(parameter.grad).untyped_storage()._cdata)
        if is_partial(parameter.grad):
            self.trace.partial.add(self.names[local(parameter).untyped_storage()._cdata])
