"""Parameters that the user changes in place: nothing of them, and no update, is lost."""

from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import assert_same, build, tight
from strata import _core
from torch import nn
from torch.optim import SGD

MODES: list[Any] = ["on_step", "in_backward", strata.LockFree(0), strata.LockFree(2)]


class Words(nn.Module):
    """Both ways to write in a forward: an embedding with a maximal norm, and an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 48, max_norm=0.5)
        self.layers = nn.Sequential(*[nn.Sequential(Scaled(48, 48), nn.Tanh()) for _ in range(3)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.words(tokens))
        return out


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(1.0)
        return super().forward(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clamp: bool) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randint(40, (2, 6))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if clamp:
            for parameter in model.parameters():
                parameter.data.clamp_(-10, 10)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("update", MODES, ids=str)
def test_updates_survive_writes_in_a_forward(core: ModuleType, update: Any) -> None:
    """Modules that write see the newest parameters, so also LockFree gives plain PyTorch's."""
    plain, inner = build(Words), build(Words)
    train(plain, sgd(plain), 12, clamp=False)
    model, optimizer = tight(inner, sgd(inner), update=update)
    train(model, optimizer, 12, clamp=False)
    assert_same(model, plain, 1e-5)


class Plain(Words):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 48)
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(3)]
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("update", MODES[:3], ids=str)
def test_a_write_that_changes_nothing_changes_nothing(
    core: ModuleType, update: Any, dtype: torch.dtype
) -> None:
    """Masters keep what 16 bits do not hold."""

    def trained(clamp: bool) -> nn.Module:
        inner = build(Plain)
        model, optimizer = tight(
            inner, SGD(inner.parameters(), lr=1e-3), dtype=dtype, update=update
        )
        train(model, optimizer, 4, clamp)
        return strata.unwrap(model)

    assert_same(trained(True), trained(False))


def test_a_write_to_one_element_keeps_the_masters_of_others(core: ModuleType) -> None:
    exact = torch.linspace(0.1, 0.9, 48 * 48).reshape(48, 48)
    model, _ = tight(build(Plain), dtype=torch.bfloat16)
    weight = model.get_parameter("layers.0.0.weight")
    weight.data.copy_(exact)
    weight.data[3, 5] = 7.0
    after = strata.unwrap(model).get_parameter("layers.0.0.weight").detach()
    exact[3, 5] = 7.0
    assert torch.equal(after, exact)


GROUP: dict[str, Any] = {
    "rule": "sgd", "lr": 1.0, "beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.0,
    "momentum": 0.0, "dampening": 0.0, "lr_decay": 0.0, "initial_accumulator": 0.0,
    "nesterov": False, "maximize": False,
}  # fmt: skip
NUMEL = 90_000
STEPS = 5


def session(**changes: Any) -> Any:
    """One unit of one parameter, in some pages."""
    config: dict[str, Any] = {
        "params": [
            {"name": "p", "numel": NUMEL, "dtype": "bfloat16", "trainable": True, "unit": 0,
             "group": 0},
        ],
        "units": ["unit"], "groups": [GROUP], "page_bytes": 1 << 16, "device_bytes": 64 << 16,
        "host_bytes": 64 << 16, "ssd_bytes": 0, "ssd_paths": [], "io_engine": "auto", "workers": 1,
        "accumulate": False, "update": "on_step", "max_staleness": 0, "moment_dtype": "float32",
        "pin_workers": False, "compute_threads": 1,
    }  # fmt: skip
    return _core.Session(config | changes)


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_rests_on_the_device_keeps_its_masters(rests: bool, dtype: str) -> None:
    kind = getattr(torch, dtype)
    params = [
        {"name": "p", "numel": NUMEL, "dtype": dtype, "trainable": True, "unit": 0, "group": 0}
    ]
    core = session(params=params)
    exact = torch.linspace(0.1, 0.9, NUMEL)
    core.write(0, "master", 0, exact.data_ptr(), NUMEL)
    core.adopt(on_device=[rests], param_bytes=8 << 16)
    view = torch.from_dlpack(core.tensor(0))
    for value in (1.0, 2.0):  # the first write of the unit, and a later one
        core.expect_write(0)
        core.enter(0, False)
        assert view.dtype == kind
        view[17] = exact[17] = value
        core.device_written(0)
        view[18] = exact[18] = value
        core.device_written(0)
        core.leave(0)
    read = torch.empty(NUMEL)
    core.read(0, "master", 0, read.data_ptr(), NUMEL)
    core.close()
    assert torch.equal(read, exact)


def test_a_write_behind_an_update_is_refused_and_the_update_kept() -> None:
    """Under LockFree the first write in a forward may come too late; later ones see the newest."""
    core = session(update="lock_free", max_staleness=4)
    zeros, minus_one = torch.zeros(NUMEL), torch.full((NUMEL,), -1.0, dtype=torch.bfloat16)
    core.write(0, "master", 0, zeros.data_ptr(), NUMEL)
    view = torch.from_dlpack(core.tensor(0))

    def step() -> None:
        core.enter(0, True)
        core.land_gradient(0, minus_one.data_ptr(), "bfloat16")
        core.leave(0)
        core.step([GROUP], 0.0, 1.0, False)

    core.enter(0, False)  # sees zeros, and an update comes meanwhile
    step()
    core.drain()
    view.mul_(1.0)
    with pytest.raises(strata.StrataError, match=r"parameter p was changed .*on_step"):
        core.device_written(0)
    core.leave(0)
    for _ in range(STEPS):
        step()
        core.enter(0, False)
        view.mul_(1.0)
        core.device_written(0)
        core.leave(0)
    core.drain()
    read = torch.empty(NUMEL)
    core.read(0, "master", 0, read.data_ptr(), NUMEL)
    core.close()
    assert read.unique().tolist() == [1.0 + STEPS]
