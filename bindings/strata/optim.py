"""What users construct for optimizers, beside the classes of torch.optim.

optimizer = strata.optim.Lion(model.parameters(), lr=1e-4)        # also strata.Lion
model, optimizer = strata.wrap(model, optimizer, update=strata.optim.LockFree(max_staleness=1))

scaler = strata.optim.GradScaler()                                # for float16
scaler.scale(loss).backward()
scaler.step(optimizer)                                            # what strata.wrap() returned
scaler.update()
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from ._config.update_modes import LockFree
from ._optim.lion import Lion
from ._runtime.optimizer import StrataOptimizer

__all__ = ["GradScaler", "Lion", "LockFree"]


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for wrapped models: same growth, backoff, state and defaults. Whether a
    gradient overflowed is known from the sums of squares that are taken while gradients land: no
    pass over them is made, and the whole step is skipped and counts for nothing. An optimizer that
    strata did not wrap is treated as torch would.

    Args:
        device: "cpu" or "cuda", where losses are. Default: CUDA where there is any.
        init_scale: what losses are multiplied by at first.
        growth_factor: what the scale is multiplied by after `growth_interval` good steps.
        backoff_factor: what it is multiplied by after an overflow.
        growth_interval: steps.
        enabled: False: does nothing.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> model, optimizer = strata.wrap(
        ...     model, torch.optim.AdamW(model.parameters()), dtype=torch.float16
        ... )
        >>> scaler = strata.GradScaler("cpu")
        >>> loss = model(torch.ones(1, 64, dtype=torch.float16)).float().mean()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.get_scale()
        65536.0
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Divides the gradients by the scale and updates, or skips the step where one overflowed.

        With max_grad_norm= or max_unit_norm= it is the divided gradients that are clipped.

        Raises:
            RuntimeError: updates cannot wait for the check (update="in_backward", and LockFree with
                a staleness); a closure was given; or update() was not called since the last step().
        """
        if not self._enabled or not isinstance(optimizer, StrataOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if any(given is not None for given in (*args, *kwargs.values())):  # Accelerate gives None
            raise RuntimeError("GradScaler.step() of a wrapped optimizer takes no closure")
        scale, _ = self._check_scale_growth_tracker("step")
        record = self._per_optimizer_states[id(optimizer)]
        if record["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        if record["stage"] is OptState.UNSCALED:
            found = [each.item() for each in record["found_inf_per_device"].values()]
            optimizer.step(overflowed=any(found))
        else:
            optimizer.step(loss_scale=self.get_scale())
            # update() reads it there.
            overflowed = torch.full((), float(not optimizer.last_finite), device=scale.device)
            record["found_inf_per_device"] = {scale.device: overflowed}
        record["stage"] = OptState.STEPPED
        return None

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Called by torch's unscale_(), which refuses gradients in float16 otherwise."""
        if isinstance(optimizer, StrataOptimizer):
            optimizer.check_loss_scale()
            allow_fp16 = True
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
