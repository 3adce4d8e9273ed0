"""Hooks of every kind that people register: on modules, tensors, parameters, globally."""

import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from habits import Block, Habit, Habits, Mode, Net, Run, mean_loss
from torch import nn

HABITS = Habits()


@HABITS.add
def calls_counted_by_hooks(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    calls: dict[str, int] = defaultdict(int)
    for name, module in model.named_modules():

        def before(m: Any, args: Any, name: str = name) -> None:
            calls[f"{name} before"] += 1

        def after(m: Any, args: Any, out: Any, name: str = name) -> None:
            calls[f"{name} after"] += 1

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    run.train(model, optimizer)
    run.count(dict(calls))


@HABITS.add
def covariances(run: Run) -> None:
    """K-FAC: of what enters a layer, and of the gradients of what leaves it."""
    model, optimizer = run.wrap(Net())
    entered: dict[str, torch.Tensor] = {}
    left: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def enter(m: Any, args: Any, name: str = name) -> None:
                x = args[0].detach()
                entered[name] = entered.get(name, 0) * 0.9 + x.t() @ x / len(x)

            def leave(m: Any, gi: Any, go: Any, name: str = name) -> None:
                left[name] = left.get(name, 0) * 0.9 + go[0].t() @ go[0]

            module.register_forward_pre_hook(enter)
            module.register_full_backward_hook(leave)
    run.train(model, optimizer)
    run.count(entered)
    run.note(left)


@HABITS.add
def ranges_observed(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    high: dict[str, float] = defaultdict(float)
    seen: dict[str, int] = defaultdict(int)
    for name, module in model.named_modules():

        def observe(m: Any, args: Any, out: torch.Tensor, name: str = name) -> None:
            high[name] = max(high[name], out.detach().abs().max().item())
            seen[name] += 1

        module.register_forward_hook(observe)
    run.train(model, optimizer)
    run.note(dict(high))
    run.count(dict(seen))


@HABITS.add
def outputs_changed_by_hooks(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    model.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    model.blocks[1].register_forward_hook(lambda m, args, out: out.clamp(-2, 2))
    model.blocks[1].up.register_forward_hook(lambda m, args, out: out * 1.1)
    model.head.register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0] + 0.1,), kwargs), with_kwargs=True
    )
    model.stem.register_forward_hook(lambda m, args, out: torch.tanh(out), always_call=True)
    run.train(model, optimizer)


@HABITS.add
def gradients_changed_by_module_hooks(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    norms: list[float] = []

    def clip(m: Any, grad_input: Any, grad_output: Any) -> Any:
        norms.append(grad_output[0].norm().item())
        return tuple(g if g is None else g * 0.5 for g in grad_input)

    model.blocks[1].register_full_backward_hook(clip)
    model.blocks[2].up.register_full_backward_hook(clip)
    model.blocks[0].register_full_backward_pre_hook(lambda m, g: (g[0].clamp(-1e-2, 1e-2),))
    model.register_full_backward_hook(clip)
    run.train(model, optimizer)
    run.note(norms)


@HABITS.add
def features_collected(run: Run) -> None:
    """A perceptual loss: what inner layers gave, kept in a dict by hooks."""
    model, optimizer = run.wrap(Net())
    features: dict[str, torch.Tensor] = {}
    for name in ("stem", "blocks.0", "blocks.1.up", "blocks.2"):

        def keep(m: Any, args: Any, out: torch.Tensor, name: str = name) -> None:
            features[name] = out

        model.get_submodule(name).register_forward_hook(keep)

    def loss_of(m: Any, step: int) -> torch.Tensor:
        loss = mean_loss(m, step)
        run.note({name: f.mean() for name, f in features.items()})
        return loss + sum(1e-2 * f.square().mean() for f in features.values())

    run.train(model, optimizer, loss_of)


@HABITS.add
def hook_that_removes_itself(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    shapes: list[Any] = []
    handles = {}

    def once(m: Any, args: Any, out: torch.Tensor) -> None:
        shapes.append(tuple(out.shape))
        handles.pop(m).remove()

    for module in model.modules():
        if isinstance(module, nn.Linear):
            handles[module] = module.register_forward_hook(once)
    run.train(model, optimizer)
    run.note(shapes, len(handles))


@HABITS.add
def hooks_of_state_dicts(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    calls: list[str] = []

    def rename(m: Any, state: Any, prefix: str, meta: Any) -> None:
        calls.append("saved")
        state[prefix + "extra"] = torch.ones(2)

    def restore(m: Any, state: Any, prefix: str, *rest: Any) -> None:
        calls.append("loaded")
        state.pop(prefix + "extra", None)

    model.blocks[0].register_state_dict_post_hook(rename)
    model.blocks[0].register_load_state_dict_pre_hook(restore)
    run.train(model, optimizer, steps=2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    run.note(sorted(state), list(calls))
    run.train(model, optimizer, steps=1)


@HABITS.add
def hooks_from_before_wrapping(run: Run) -> None:
    plain = Net()
    calls: list[str] = []
    plain.blocks[0].register_forward_hook(lambda m, args, out: calls.append("forward"))
    plain.blocks[1].up.register_forward_pre_hook(lambda m, args: calls.append("inner"))
    plain.blocks[1].register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
    handle = plain.head.register_forward_hook(lambda m, args, out: out * 2)
    model, optimizer = run.wrap(plain)
    run.train(model, optimizer, steps=2)
    handle.remove()
    run.train(model, optimizer, steps=2)
    run.count(calls)


@HABITS.add
def hook_that_raises_once(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    fails: list[int] = []

    def check(m: Any, args: Any, out: torch.Tensor) -> None:
        if fails:
            fails.clear()
            raise ValueError("an activation too large")

    model.blocks[1].register_forward_hook(check)
    run.train(model, optimizer, steps=2)
    fails.append(1)
    with pytest.raises(ValueError, match="too large"):
        mean_loss(model, 2)
    optimizer.zero_grad()
    run.train(model, optimizer, steps=2)


@HABITS.add
def model_looked_at_by_hooks(run: Run) -> None:
    """A hook reads parameters of its own module, of another, and of the whole model."""
    model, optimizer = run.wrap(Net())
    seen: list[Any] = []
    whole = weakref.ref(model)

    def read(m: Any, args: Any, out: Any) -> None:
        other: Any = whole()
        seen.append((m.up.weight.norm().item(), other.blocks[2].up.weight.norm().item()))

    model.blocks[1].register_forward_hook(read)
    run.train(model, optimizer)
    run.count(seen)


@HABITS.add
def activations_watched_for_dead_units(run: Run) -> None:
    dead: dict[str, torch.Tensor] = {}

    class Relu(Block):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.down(self.act(self.up(self.norm(x))))
            return found

    model, optimizer = run.wrap(Net(Relu))
    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):

            def watch(m: Any, args: Any, out: torch.Tensor, name: str = name) -> None:
                dead[name] = dead.get(name, 0) + (out == 0).float().sum(0)

            module.register_forward_hook(watch)
    run.train(model, optimizer)
    run.count(dead)


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_hooks(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
