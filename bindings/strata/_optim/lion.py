"""Lion, which torch.optim does not have: the update is a sign, and only one moment is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """EvoLved Sign Momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)::

        update  = sign(beta1 exp_avg + (1 - beta1) grad)
        param   = (1 - lr weight_decay) param - lr update
        exp_avg = beta2 exp_avg + (1 - beta2) grad

    Learning rates are three to ten times smaller than AdamW's, and weight decay as much larger.
    Works on its own in plain PyTorch; strata.wrap() runs it in one pass, with half of the state of
    AdamW.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate, 0 or more.
        betas: two numbers, at least 0 and below 1.
        weight_decay: 0 or more.

    Raises:
        ValueError: a hyperparameter makes no sense.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> model, optimizer = strata.wrap(model, strata.Lion(model.parameters(), lr=1e-4))
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"lr must not be negative, not {lr}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {betas}")
        if not weight_decay >= 0.0:
            raise ValueError(f"weight_decay must not be negative, not {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what `closure` returned, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                exp_avg, grad = state["exp_avg"], parameter.grad
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                update = exp_avg.lerp(grad, 1.0 - beta1).sign_()
                parameter.add_(update, alpha=-group["lr"])
                exp_avg.lerp_(grad, 1.0 - beta2)
        return loss
