"""Between a backward that has updated parameters and step(): what is refused, and the way back."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import build, tight
from stacks import Blocks, steps
from strata._runtime.wrapped import Wrapped, wrapped
from torch import nn

MODES: dict[str, Any] = {
    "on_step": "on_step",
    "in_backward": "in_backward",
    "exact": strata.LockFree(max_staleness=0),
    "late": strata.LockFree(max_staleness=2),
}


def interrupted(model: nn.Module) -> Wrapped:
    """A backward that ends between the second and the third block."""

    def raise_there(grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    seen = []
    handle = model.blocks[2].register_forward_hook(lambda m, args, out: seen.append(args[0]))
    loss = model(torch.randn(3, 48)).square().sum()
    handle.remove()
    seen[0].register_hook(raise_there)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    return wrapped(model)


def masters(state: Wrapped) -> list[torch.Tensor]:
    return [state.read(i) for i in range(len(state.params))]


def calls(
    model: Any, optimizer: Any, values: Any, moments: Any, folder: Path
) -> list[Callable[[], object]]:
    """All that needs, or leaves, parameters of one state."""
    return [
        lambda: strata.save(model, folder / "c"),
        lambda: strata.export_safetensors(model, folder / "e"),
        model.state_dict,
        model.blocks[0].state_dict,
        optimizer.state_dict,
        optimizer.zero_grad,
        lambda: model(torch.randn(3, 48)),
        lambda: model.blocks[0](torch.randn(3, 48)),
        lambda: model.head.weight.sum(),
        lambda: model.load_state_dict(values),
        lambda: optimizer.load_state_dict(moments),
        lambda: model.head.weight.data.copy_(values["head.weight"]),
        lambda: strata.unwrap(model),
    ]


def test_a_half_step_is_no_state_to_save(core: ModuleType, tmp_path: Path) -> None:
    model, optimizer = tight(build(Blocks), update="in_backward")
    steps(model, optimizer)
    values, moments = model.state_dict(), optimizer.state_dict()
    state = interrupted(model)
    before = [state.session.param_step(i) for i in range(len(state.params))]
    assert len(set(before)) == 2
    for what in calls(model, optimizer, values, moments, tmp_path):
        with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\).*strata.load"):
            what()
    assert not (tmp_path / "c").exists()
    optimizer.step()  # ends it
    optimizer.zero_grad()
    after = [state.session.param_step(i) for i in range(len(state.params))]
    assert after == before
    strata.save(model, tmp_path / "c")
    steps(model, optimizer)


def test_between_a_whole_backward_and_its_step(core: ModuleType, tmp_path: Path) -> None:
    model, optimizer = tight(build(Blocks), update="in_backward")
    model(torch.randn(3, 48)).square().sum().backward()
    with pytest.raises(RuntimeError, match="between backward"):
        strata.save(model, tmp_path / "c")
    optimizer.step()
    strata.save(model, tmp_path / "c")


@pytest.mark.parametrize("mode", MODES)
def test_load_forgets_the_step_it_comes_into(tmp_path: Path, mode: str) -> None:
    model, optimizer = tight(build(Blocks), update=MODES[mode])
    steps(model, optimizer, 2)
    strata.save(model, tmp_path / "c")
    steps(model, optimizer, 1)
    state = interrupted(model)
    kept = build(Blocks)  # something else draws from the random stream
    strata.load(model, tmp_path / "c")
    assert not any(state.session.gradient_count(i) for i in range(len(state.params)))
    assert not state.session.in_half_step()
    fresh, other = tight(kept, update=MODES[mode])
    strata.load(fresh, tmp_path / "c")
    for mine, expected in zip(masters(state), masters(wrapped(fresh)), strict=True):
        assert torch.equal(mine, expected)
    if mode != "late":
        assert steps(model, optimizer) == steps(fresh, other)
        for mine, expected in zip(masters(state), masters(wrapped(fresh)), strict=True):
            assert torch.equal(mine, expected)


def test_a_graph_from_before_load_is_refused(core: ModuleType, tmp_path: Path) -> None:
    model, _ = tight(build(Blocks))
    strata.save(model, tmp_path / "c")
    loss = model(torch.randn(3, 48)).square().sum()
    strata.load(model, tmp_path / "c")
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


@pytest.mark.parametrize("stop", [0.55, 0.75, 0.95])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_load_that_ends_half_way_is_no_state_either(
    core: ModuleType, tmp_path: Path, stop: float, error: type[BaseException]
) -> None:
    model, optimizer = tight(build(Blocks))
    steps(model, optimizer)
    kept = masters(wrapped(model))
    strata.save(model, tmp_path / "good")
    steps(model, optimizer)
    values, moments = model.state_dict(), optimizer.state_dict()

    def progress(done: int, total: int) -> None:
        if done > stop * total:
            raise error

    with pytest.raises(error):
        strata.load(model, tmp_path / "good", progress=progress)
    others = calls(model, optimizer, values, moments, tmp_path)
    for what in (*others, optimizer.step, lambda: strata.save(model, tmp_path / "good")):
        with pytest.raises(RuntimeError, match=r"half-way.*Call strata.load\(\) again"):
            what()
    strata.load(model, tmp_path / "good")
    assert all(map(torch.equal, masters(wrapped(model)), kept))
    steps(model, optimizer)
    strata.save(model, tmp_path / "good")
