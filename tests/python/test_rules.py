"""Every update rule of the core against torch.optim, computed in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from strata import _core

COUNT = 1003  # ends inside a block of every kind
STEPS = 12
GROUP: dict[str, Any] = {
    "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0,
    "dampening": 0.0, "lr_decay": 0.0, "initial_accumulator": 0.0, "nesterov": False,
    "maximize": False,
}  # fmt: skip


class Lion(torch.optim.Optimizer):
    """As Chen et al. (2023) write it; torch has none."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], **more: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, **more})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                beta1, beta2 = group["betas"]
                grad = -p.grad if group["maximize"] else p.grad
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (beta1 * mean + (1 - beta1) * grad).sign())
                mean.mul_(beta2).add_(grad, alpha=1 - beta2)


def betas(group: dict[str, Any]) -> tuple[float, float]:
    return group["beta1"], group["beta2"]


REFERENCES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p, g: torch.optim.AdamW(
        p, g["lr"], betas(g), g["eps"], g["weight_decay"], maximize=g["maximize"]
    ),
    "adam": lambda p, g: torch.optim.Adam(
        p, g["lr"], betas(g), g["eps"], g["weight_decay"], maximize=g["maximize"]
    ),
    "sgd": lambda p, g: torch.optim.SGD(
        p, g["lr"], g["momentum"], g["dampening"], g["weight_decay"], g["nesterov"],
        maximize=g["maximize"],
    ),
    "lion": lambda p, g: Lion(
        p, g["lr"], betas(g), weight_decay=g["weight_decay"], maximize=g["maximize"]
    ),
    "adagrad": lambda p, g: torch.optim.Adagrad(
        p, g["lr"], g["lr_decay"], g["weight_decay"], g["initial_accumulator"], g["eps"],
        maximize=g["maximize"],
    ),
}  # fmt: skip

CASES: list[dict[str, Any]] = [
    {"rule": "adamw", "weight_decay": 0.1},
    {"rule": "adamw", "beta1": 0.3, "beta2": 0.95, "eps": 1e-3, "maximize": True},
    {"rule": "adam", "weight_decay": 0.1},
    {"rule": "adam", "beta1": 0.0},
    {"rule": "sgd", "weight_decay": 0.1},
    {"rule": "sgd", "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"rule": "sgd", "momentum": 0.9, "nesterov": True, "maximize": True},
    {"rule": "lion", "beta2": 0.99, "weight_decay": 0.1},
    {"rule": "lion", "beta1": 0.4, "beta2": 0.3, "maximize": True},
    {"rule": "adagrad", "eps": 1e-10},
    {"rule": "adagrad", "lr_decay": 0.1, "initial_accumulator": 0.5, "weight_decay": 0.1},
    {"rule": "adagrad", "eps": 1e-4, "maximize": True},
]


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(COUNT, generator=generator) for _ in range(STEPS)]


def by_torch(group: dict[str, Any], start: torch.Tensor) -> torch.Tensor:
    param = torch.nn.Parameter(start.double())
    optimizer = REFERENCES[group["rule"]]([param], group)
    for gradient in gradients():
        param.grad = gradient.double()
        optimizer.step()
    return param.detach()


def by_core(
    group: Any, start: torch.Tensor, moment_dtype: Any = "float32", threads: int = 2
) -> torch.Tensor:
    param = start.clone()
    stored = {"float32": torch.float32, "bfloat16": torch.bfloat16, "block8": torch.uint8}
    moments = [torch.zeros(COUNT, dtype=stored[moment_dtype]) for _ in range(2)]
    scales = [torch.zeros(-(-COUNT // 64), dtype=torch.bfloat16) for _ in range(2)]
    addresses = [s.data_ptr() if moment_dtype == "block8" else 0 for s in scales]
    for step, gradient in enumerate(gradients(), start=1):
        _core.update_span(
            group, "float32", "float32", COUNT, param.data_ptr(), 0, moments[0].data_ptr(),
            moments[1].data_ptr(), gradient.data_ptr(), step, 1.0, threads, "best",
            moment_dtype=moment_dtype, scales1=addresses[0], scales2=addresses[1],
        )  # fmt: skip
    return param


def start_values() -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_rule_gives_what_torch_gives_in_float64(case: dict[str, Any]) -> None:
    group = GROUP | case
    start = start_values()
    expected = by_torch(group, start)
    actual = by_core(group, start)
    assert (expected - start).abs().mean() > 1e-3, "the reference did nothing"
    # Float32 rounding of the parameter at every step, and of the step itself.
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rule", ["adamw", "sgd", "lion", "adagrad"])
@pytest.mark.parametrize(("moment_dtype", "bound"), [("bfloat16", 0.006), ("block8", 0.03)])
def test_short_moments_change_little(rule: str, moment_dtype: str, bound: float) -> None:
    group = GROUP | {"rule": rule, "momentum": 0.9}
    start = start_values()
    exact = by_core(group, start)
    lossy = by_core(group, start, moment_dtype)
    error = (lossy - exact).norm() / (exact - start).norm()
    # A step of lion is nothing but signs, and few of them are near enough to zero to turn.
    assert error > 0 or rule == "lion"
    assert error < bound


@pytest.mark.parametrize("moment_dtype", ["bfloat16", "block8"])
def test_short_moments_do_not_depend_on_threads(moment_dtype: str) -> None:
    group = GROUP | {"rule": "adamw"}
    one, many = (by_core(group, start_values(), moment_dtype, threads) for threads in (1, 5))
    assert torch.equal(one, many)
