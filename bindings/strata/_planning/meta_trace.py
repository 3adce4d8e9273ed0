"""A training step of a model that has no memory: PyTorch runs it on tensors that are shapes only,
and every operation is counted. So a step of any size becomes a trace on any machine.

    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config)
        counted = count_step(model, lambda: model(input_ids=ids, labels=ids).loss)
    counted.uses[3].flops, counted.uses[3].peak_bytes, counted.tensors[0].bytes

Note [What is counted]. Arithmetic: matrix products, convolutions and attention, by PyTorch's own
formulas. Traffic: the bytes of every operation's inputs and outputs. Memory: storages, from the
operation that makes one until the last tensor over it is gone. Parameters and what was there before
do not count, gradients of parameters go at once. What a unit's forward was called with stays until
its backward is over, as recomputing needs it. A unit's backward begins when the first tensor that
its forward saved is wanted back and ends where another unit's begins, as in a wrapped model.
Arithmetic and traffic come one after the other, and no kernel has an overhead: a small model on a
fast device is slower than this says.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .._activations.arguments import tensors_in
from .._config.units import UnitSpec, find_units
from .._core import SavedTensor
from .._profiling.uses import TracedUse
from .._torch_compat import TorchDispatchMode

OUTSIDE = -1
NO_TRAFFIC = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select"}
NO_TRAFFIC |= {"unsqueeze", "squeeze", "detach", "alias", "split", "as_strided", "empty", "unbind"}


@dataclass
class CountedUse(TracedUse):
    """With what is counted; its seconds come by take_times()."""

    flops: int = 0
    traffic_bytes: int = 0
    gap_flops: int = 0  # outside any unit, just before
    gap_traffic_bytes: int = 0


@dataclass
class CountedStep:
    """What count_step() found."""

    units: list[UnitSpec]
    uses: list[CountedUse] = field(default_factory=list)
    tensors: list[SavedTensor] = field(default_factory=list)  # saved, or kept for recomputing
    saved: set[int] = field(default_factory=set)  # which of them by autograd
    moments: int = 0
    tail_flops: int = 0
    tail_traffic_bytes: int = 0
    tail_peak_bytes: int = 0
    tail_seconds: float = 0.0

    def take_times(self, flops_s: float, bytes_s: float) -> None:
        """Seconds are those of arithmetic and of traffic, one after the other."""
        for use in self.uses:
            use.seconds = use.flops / flops_s + use.traffic_bytes / bytes_s
            use.gap_seconds = use.gap_flops / flops_s + use.gap_traffic_bytes / bytes_s
        self.tail_seconds = self.tail_flops / flops_s + self.tail_traffic_bytes / bytes_s


def count_step(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    slivers: bool = True,
    coded: Collection[int] = (),
) -> CountedStep:
    """Runs forward and backward once. `slivers`, `coded`: as find_units() takes them. Call inside a
    FakeTensorMode."""
    units, hooked = find_units(model, slivers=slivers, coded=coded)
    counter = _Counter(model, CountedStep(units))
    with ExitStack() as stack:
        for module, read in hooked.items():
            stack.enter_context(counter.watch(module, read))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack))
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            handle = parameter.register_post_accumulate_grad_hook(_drop_gradient)
            stack.callback(handle.remove)
        stack.enter_context(counter)
        loss().backward()
        counter.finish()
    return counter.step


def _drop_gradient(parameter: torch.Tensor) -> None:
    """A wrapped model's gradients leave the device as soon as they are there."""
    parameter.grad = None


class _Counter(TorchDispatchMode):
    """Sees every operation below autograd."""

    def __init__(self, model: nn.Module, step: CountedStep) -> None:
        super().__init__()
        self.step = step
        self._unit_of = {
            p.untyped_storage()._cdata: u
            for p, u in zip(model.parameters(), _units_of(model, step.units), strict=True)
        }
        self._open: list[CountedUse] = []
        self._read_with: dict[int, list[int]] = {}  # by a module's own unit: all that it reads
        self._numbers: dict[int, int] = {}  # storages that are saved: index into step.tensors
        self._born: dict[int, int] = {}  # storages that are alive: moment
        self._refs: dict[int, Any] = {}
        self._inputs: dict[int, list[torch.Tensor]] = {}  # by unit, until its backward is over
        self._live = 0
        self._peak = 0
        self._flops = 0
        self._traffic = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operation."""
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        outputs = list(tensors_in(out))
        for tensor in outputs:
            self._hold(tensor)
        self._flops += _flops(packet, args, kwargs or {}, out)
        if packet.__name__ not in NO_TRAFFIC:
            inputs = [*tensors_in(args), *tensors_in(list((kwargs or {}).values()))]
            self._traffic += sum(t.numel() * t.element_size() for t in [*inputs, *outputs])
        return out

    @contextmanager
    def watch(self, module: nn.Module, units: list[int]) -> Iterator[None]:
        """Uses of units around the module's forward. Its own comes last: others are tied to it."""
        units = sorted(units)
        own = units[-1]
        self._read_with[own] = units

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._close_backward()
            for unit in units:
                self._enter(unit, False)
            given = [t for t in tensors_in([args, kwargs]) if t.is_floating_point()]
            for tensor in given:
                self._note(tensor, own, saved=False)
            self._inputs.setdefault(own, []).extend(given)

        def after(_: nn.Module, args: Any, out: Any) -> None:
            for _unit in units:
                self._leave()

        handles = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called for each tensor that autograd saves."""
        if (owner := self._unit_of.get(tensor.untyped_storage()._cdata)) is not None:
            return (tensor, OUTSIDE, owner)
        unit = self._open[-1].unit if self._open else OUTSIDE
        number = self._note(tensor, unit, saved=True) if unit != OUTSIDE else OUTSIDE
        return (tensor, number, unit)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Called when a node of the graph wants a tensor back."""
        tensor, number, unit = packed
        if all(use.unit != unit for use in self._open):
            self._come_back_to(self._read_with.get(unit, [unit] if unit != OUTSIDE else []))
        if number != OUTSIDE and self._open:
            self.step.tensors[number].last_used = len(self.step.uses) - 1
        return tensor

    def finish(self) -> None:
        """Ends the last use."""
        self._close_backward()
        self.step.tail_flops, self.step.tail_traffic_bytes = self._flops, self._traffic
        self.step.tail_peak_bytes = self._peak
        last = {use.unit: i for i, use in enumerate(self.step.uses) if use.backward}
        for tensor in self.step.tensors:
            tensor.last_used = max(tensor.last_used, last.get(tensor.unit, tensor.born))

    def _enter(self, unit: int, backward: bool) -> None:
        use = CountedUse(unit, backward, self.step.moments)
        if self._open:
            self._charge(self._open[-1])
        else:
            use.gap_flops, use.gap_traffic_bytes = self._flops, self._traffic
        use.gap_peak_bytes = self._peak
        use.live_bytes = self._live
        self._peak, self._flops, self._traffic = self._live, 0, 0
        self.step.moments += 1
        self.step.uses.append(use)
        self._open.append(use)

    def _leave(self) -> None:
        use = self._open.pop()
        self._charge(use)
        use.leave = self.step.moments
        if self._open:
            self._open[-1].peak_bytes = max(self._open[-1].peak_bytes, use.peak_bytes)
        self.step.moments += 1

    def _charge(self, use: CountedUse) -> None:
        use.flops += self._flops
        use.traffic_bytes += self._traffic
        use.peak_bytes = max(use.peak_bytes, self._peak)
        self._peak, self._flops, self._traffic = self._live, 0, 0

    def _come_back_to(self, units: list[int]) -> None:
        """Nodes of a module that reads these units run: pins.py keeps them meanwhile, and lets go
        of others."""
        while self._open and self._open[-1].backward and self._open[-1].unit not in units:
            self._inputs.pop(self._open[-1].unit, None)
            self._leave()
        opened = {use.unit for use in self._open}
        for unit in units:
            if unit not in opened:
                self._enter(unit, True)

    def _close_backward(self) -> None:
        self._come_back_to([])

    def _note(self, tensor: torch.Tensor, unit: int, saved: bool) -> int:
        """A storage that a unit's forward saves or was called with; its number in step.tensors."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            born = max(i for i, use in enumerate(self.step.uses) if use.unit == unit)
            before = self._born.get(key, -1) <= self.step.uses[born].enter
            self._numbers[key] = len(self.step.tensors)
            self.step.tensors.append(
                SavedTensor(
                    unit=unit, bytes=storage.nbytes(), born=born, last_used=born, input=before
                )
            )
            self._watch_storage(storage)
        if saved:
            self.step.saved.add(self._numbers[key])
        return self._numbers[key]

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._born or key in self._unit_of:
            return
        self._born[key] = self.step.moments
        self._live += storage.nbytes()
        self._peak = max(self._peak, self._live)
        self._watch_storage(storage)

    def _watch_storage(self, storage: torch.UntypedStorage) -> None:
        """Forgets the storage when nothing holds it any more."""
        key = storage._cdata
        if key in self._refs:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            if self._born.pop(key, None) is not None:
                self._live -= size
            self._numbers.pop(key, None)
            self._refs.pop(key, None)

        self._refs[key] = weakref.ref(storage, gone)


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> int:
    aten = torch.ops.aten
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        query, key, value, _, causal = (*args, *[False] * 5)[:5]
        key, value = (_for_heads_of(query, shape) for shape in (key.shape, value.shape))
        whole = sdpa_flop_count(query.shape, key, value)
        return int(whole) // (2 if causal else 1)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        grad, query, key, value, _, _, _, causal = args[:8]
        key, value = (_for_heads_of(query, shape) for shape in (key.shape, value.shape))
        whole = sdpa_backward_flop_count(grad.shape, query.shape, key, value)
        return int(whole) // (2 if causal else 1)
    return 0


def _for_heads_of(query: torch.Tensor, shape: torch.Size) -> torch.Size:
    """The shape of keys or values with a head for each of the query's, which several may share:
    torch before 2.13 does not count those."""
    return torch.Size((*query.shape[:2], *shape[2:]))


def _units_of(model: nn.Module, units: list[UnitSpec]) -> list[int]:
    unit_of = {p: u for u, unit in enumerate(units) for p in unit.params}
    return [unit_of[i] for i, _ in enumerate(model.parameters())]
