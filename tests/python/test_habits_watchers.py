"""What looks on from outside: hooks on tensors and parameters, global ones, modes, profilers."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from habits import WIDTH, Block, Habit, Habits, Mode, Net, Run, batch, mean_loss
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

HABITS = Habits()


@HABITS.add
def hooks_on_activations(run: Run) -> None:
    norms: list[float] = []

    class Hooked(Block):
        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.inner(x)
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: norms.append(grad.norm().item()))
                hidden.register_hook(lambda grad: grad * 0.9)
            return x + hidden

    run.train(*run.wrap(Net(Hooked)))
    run.note(norms)


@HABITS.add
def hooks_on_parameters(run: Run) -> None:
    """Clamped and masked in the backward: p.register_hook."""
    plain = Net()
    mask = torch.rand(WIDTH, WIDTH) > 0.5
    plain.stem.weight.register_hook(lambda grad: grad * mask)
    model, optimizer = run.wrap(plain)
    calls: list[float] = []
    for p in model.blocks.parameters():
        p.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
    model.head.weight.register_hook(lambda grad: calls.append(grad.norm().item()))
    run.train(model, optimizer)
    run.note(calls)


@HABITS.add
def gradients_that_have_been_accumulated(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    names = {p: name for name, p in model.named_parameters()}
    seen: dict[str, int] = defaultdict(int)

    def landed(p: torch.Tensor) -> None:
        seen[names[p]] += 1  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(landed)
    run.train(model, optimizer)
    run.note(dict(seen))


@HABITS.add
def saved_tensors_packed_by_hand(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def loss_of(m: Any, step: int) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True), unpack):
            return mean_loss(m, step)

    def unpack(values: Any) -> torch.Tensor:
        return torch.from_numpy(values)

    run.train(model, optimizer, loss_of)


@HABITS.add
def saved_on_the_processor(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def loss_of(m: Any, step: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return mean_loss(m, step)

    run.train(model, optimizer, loss_of)


@HABITS.add
def global_hooks(run: Run) -> None:
    calls: dict[str, int] = defaultdict(int)
    model, optimizer = run.wrap(Net())
    handles = [
        modules.register_module_forward_pre_hook(
            lambda m, args: calls.__setitem__("before", calls["before"] + 1)
        ),
        modules.register_module_forward_hook(
            lambda m, args, out: calls.__setitem__(type(m).__name__, calls[type(m).__name__] + 1)
        ),
        modules.register_module_full_backward_hook(
            lambda m, gi, go: calls.__setitem__("backward", calls["backward"] + 1)
        ),
    ]
    try:
        run.train(model, optimizer)
    finally:
        for handle in handles:
            handle.remove()
    run.count(dict(calls))


@HABITS.add
def class_activation_maps(run: Run) -> None:
    """retain_grad() on an inner output."""
    model, optimizer = run.wrap(Net())
    kept: list[torch.Tensor] = []

    def keep(m: Any, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.retain_grad()
            kept.append(out)

    model.blocks[1].register_forward_hook(keep)

    def look(step: int) -> None:
        run.note((kept[-1] * kept[-1].grad).sum(1).relu())

    run.train(model, optimizer, then=look)
    run.count(len(kept))


@HABITS.add
def hooks_on_several_gradients(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    seen: list[Any] = []
    params = [model.blocks[0].up.bias, model.blocks[1].up.bias]
    torch.autograd.graph.register_multi_grad_hook(
        params, lambda grads: seen.append([g is None or g.norm() for g in grads])
    )
    run.train(model, optimizer)
    run.note(seen)


class Matmuls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("addmm", "mm", "gelu", "native_layer_norm"):
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Counts calls of F.gelu."""

    gelus = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gelus += func is torch.nn.functional.gelu
        return func(*args, **(kwargs or {}))


@HABITS.add
def modes_around_a_step(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=2)
    with Matmuls() as operators, Functions() as functions:
        loss = mean_loss(model, 5)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.count(dict(operators.seen), functions.gelus)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        model(batch(0))
    run.note(flops.get_total_flops())


@HABITS.add
def anomalies_looked_for(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def loss_of(m: Any, step: int) -> torch.Tensor:
        with torch.autograd.detect_anomaly(check_nan=True):
            return mean_loss(m, step)

    run.train(model, optimizer, loss_of, steps=2)


@HABITS.add
def profiled_in_the_middle(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=3)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiler as profile, torch.profiler.record_function("step"):
        run.train(model, optimizer, steps=1)
    run.note(any(event.key == "step" for event in profile.key_averages()))


@HABITS.add
def profiled_behind_a_look(run: Run) -> None:
    """At shapes, by a forward with gradients that nobody goes backward from."""
    model, optimizer = run.wrap(Net())
    run.note(model(batch(0)).shape)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.train(model, optimizer, steps=2)
    run.note(bool(profile.key_averages()))


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_watchers(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
