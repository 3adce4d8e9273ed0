"""The sides of a comparison: the same training loop over plain PyTorch and over strata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from .common import MIB, seconds_of


class Side(Protocol):
    """One way to train. Nothing but what is timed happens in step()."""

    model: nn.Module

    def step(self) -> float:
        """Forward, backward, update. Returns the loss."""

    def synchronize(self) -> None:
        """Waits for what the last step left running."""

    def close(self) -> None:
        """Frees everything."""


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """What a user writes."""
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


class Plain:
    """PyTorch alone, with its fastest AdamW."""

    def __init__(self, model: nn.Module, batch: torch.Tensor, **adamw: Any) -> None:
        self.model = model
        self.batch = batch
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)

    def step(self) -> float:
        """Forward, backward, update. Returns the loss."""
        return train_step(self.model, self.optimizer, self.batch)

    def synchronize(self) -> None:
        """Nothing is left running: the update is part of the step."""

    def close(self) -> None:
        """Garbage collection does it."""


class OnePass:
    """Plain PyTorch's forward and backward, and one pass of strata's AdamW over as many bytes as
    the update of the parameters reads and writes, by all threads."""

    def __init__(self, model: nn.Module, batch: torch.Tensor) -> None:
        from .adam import strata_side

        self.model = model
        self.batch = batch
        count = sum(p.numel() for p in model.parameters())
        self.update = strata_side(count, torch.get_num_threads())

    def step(self) -> float:
        """Forward, backward, update of other memory. Returns the loss."""
        loss = self.model(input_ids=self.batch, labels=self.batch).loss
        loss.backward()
        self.update()
        self.model.zero_grad()
        return float(loss.detach())

    def synchronize(self) -> None:
        """Nothing is left running."""

    def close(self) -> None:
        """Garbage collection does it."""


class Paged:
    """The same model under strata, inside the given budgets."""

    def __init__(
        self,
        model: nn.Module,
        batch: torch.Tensor,
        memory: Mapping[str, int],
        ssd_path: Path | None = None,
        options: Mapping[str, Any] | None = None,
        **adamw: Any,
    ) -> None:
        import strata

        self.batch = batch
        self.model, self.optimizer = strata.wrap(
            model,
            torch.optim.AdamW(model.parameters(), **adamw),
            memory=dict(memory),
            ssd_path=None if ssd_path is None else str(ssd_path),
            # On the host, also where there is a GPU; budgets of pages alone.
            **{"device": "host", "activations": None, **(options or {})},
        )

    @property
    def session(self) -> Any:
        """The core's session behind the model."""
        return session_of(self.model)

    def step(self) -> float:
        """Forward, backward, update (which goes on behind the caller's back). Returns the loss."""
        return train_step(self.model, self.optimizer, self.batch)

    def synchronize(self) -> None:
        """Waits for the updates and writes of the last step."""
        self.session.synchronize()

    def close(self) -> None:
        """Stops the threads, removes the files, frees the memory."""
        self.session.close()


def session_of(model: nn.Module) -> Any:
    """The core's session behind a wrapped model."""
    from strata._runtime.wrapped import wrapped

    return wrapped(model).session


def steady_step(side: Side) -> float:
    """Seconds of one step between two others. Updates of a step run on into the next one, so the
    timed step waits for those of the step before it and leaves its own to the end of the turn.
    """
    side.step()
    seconds = seconds_of(side.step)
    side.synchronize()
    return seconds


# Bytes per parameter: 16-bit parameter and gradient, then residual and two moments. Pages and
# parameters' alignment cost a little more, and what passes through to the SSD needs a staging area.
PARAM_AND_GRAD_BYTES = 4
STATE_BYTES = 10
SLACK = 1.05
STAGING_BYTES = 160 * MIB


def everything_resident(parameters: int) -> dict[str, int]:
    """Budgets under which every unit stays on the device and all state in host memory."""
    return {
        "device": int(2 * parameters * SLACK) + 64 * MIB,
        "host": int((PARAM_AND_GRAD_BYTES + STATE_BYTES) * parameters * SLACK) + 64 * MIB,
    }


def quarter_device(parameters: int) -> dict[str, int]:
    """A quarter of the 16-bit parameters on the device, all state in host memory."""
    return {**everything_resident(parameters), "device": parameters // 2}


def state_on_ssd(parameters: int) -> dict[str, int]:
    """A quarter of the 16-bit parameters on the device; host memory for parameters and gradients,
    so that the optimizer state has to rest on the SSD.
    """
    return {
        "device": parameters // 2,
        "host": int(PARAM_AND_GRAD_BYTES * parameters * SLACK) + STAGING_BYTES,
        "ssd": int(STATE_BYTES * parameters * SLACK) + 256 * MIB,
    }


def room_of_snapshots(parameters: int) -> dict[str, int]:
    """An SSD budget for two snapshots beside one that begins."""
    return {"ssd": parameters * (PARAM_AND_GRAD_BYTES + STATE_BYTES) * 5 + 256 * MIB}
