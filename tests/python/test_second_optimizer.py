"""Parameters in no group of the optimizer that wrap() is given are named, and for another one."""

from typing import Any

import pytest
import strata
import torch
from torch import nn

MODES: dict[str, dict[str, Any]] = {
    "on_step": {},
    "in_backward": {"update": "in_backward"},
    "lock_free": {"update": strata.LockFree(max_staleness=0)},
    "recompute": {"activations": "recompute"},
    "bfloat16": {"dtype": torch.bfloat16},
}


def make() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def trained(wraps: bool, second: Any, **options: Any) -> torch.Tensor:
    """The parameters after some steps of two optimizers."""
    model = make() if wraps else make().to(options.get("dtype"))
    one = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    other = second(model[2].parameters(), lr=1e-2)
    if wraps:
        memory = {"device": "1MiB", "host": "4MiB"}
        model, one = strata.wrap(model, one, memory=memory, **options)
    for step in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        (model(x.to(options.get("dtype"))).float() - 1).square().mean().backward()
        if options.get("update", "on_step") == "on_step":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        one.step()
        other.step()
        one.zero_grad()
        assert model[2].weight.grad is not None  # it is not that optimizer's
        other.zero_grad()
        assert model[2].weight.grad is None
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


@pytest.mark.parametrize("second", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("mode", MODES)
def test_a_second_optimizer_trains_them(mode: str, second: Any) -> None:
    rounds = 1e-2 if mode == "bfloat16" else 1e-5
    ours, theirs = (trained(wraps, second, **MODES[mode]) for wraps in (True, False))
    torch.testing.assert_close(ours, theirs, rtol=rounds, atol=rounds)


def test_they_are_named_once_and_frozen_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    model[1].requires_grad_(False)
    strata.wrap(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    (record,) = [r for r in caplog.records if "in no group" in r.message]
    assert record.levelname == "WARNING"
    assert "'2.weight', '2.bias'" in record.message
    assert "and 4 more" in record.message
    assert "'0." not in record.message
    assert "'1." not in record.message


def test_their_gradients_are_plain() -> None:
    model = make()
    one = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model, one = strata.wrap(model, one, update="in_backward")
    for times in (1, 2):  # they add up, as in plain PyTorch
        model(torch.ones(1, 16)).sum().backward()
        assert torch.equal(model[2].bias.grad, torch.full((4,), float(times)))
        one.step()
        one.zero_grad()
    assert type(model[2].bias.grad) is torch.Tensor
    assert torch.equal(strata.gather_grad(model[2].bias), torch.full((4,), 2.0))
    model[2].bias.grad = torch.zeros(4)
    assert torch.equal(model[2].bias.grad, torch.zeros(4))
    with pytest.raises(RuntimeError, match="size"):
        model[2].bias.grad = torch.zeros(5)
    model[2].bias.grad = None
    assert model[2].bias.grad is None
