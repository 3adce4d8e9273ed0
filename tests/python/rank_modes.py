"""Ranks in every mode of updates, for tests/python/test_rank_modes.py: see rank_scenarios.py.

Each rank has one micro-batch in a step. A process that is alone takes those of all, adds them up,
and updates at step(): its bits are what the others should have.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import strata
import torch
from rank_loops import WIDTH, Rank, batches_of, hash_of, make_model, options_of
from rank_scenarios import Experts
from strata._config.update_modes import parse_update
from torch import nn


class Loop:
    """A model, and plain steps of `of` micro-batches."""

    def __init__(
        self,
        run: Rank,
        of: int,
        update: str = "on_step",
        optimizer: str = "AdamW",
        lr: float = 1e-2,
        width: int = WIDTH,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.run, self.of, self.width, self.alone = run, of, width, run.ranks == 1
        options = options_of(run, options)
        options["update"] = "on_step" if self.alone else parse_update(update)
        options["gradient_accumulation_steps"] = max(2, of) if self.alone else 1
        model = model or make_model(4, width)
        kind = getattr(torch.optim, optimizer)
        self.model, self.optimizer = strata.wrap(model, kind(model.parameters(), lr=lr), **options)

    def numbers(self) -> list[int]:
        """Those of the micro-batches of this process."""
        return list(range(self.of)) if self.alone else [self.run.rank]

    def backward(self, step: int, number: int, *more: Any) -> None:
        """Of a micro-batch."""
        dtype = next(self.model.parameters()).dtype
        batch = batches_of(step, self.width)[number].to(dtype)
        self.model(batch, *more).float().square().mean().backward()

    def end_step(self) -> None:
        """Divides by the number of micro-batches, as the mean over ranks does."""
        if self.alone:
            self.optimizer.step(loss_scale=float(self.of))  # type: ignore[call-arg]
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> float:
        """A forward that is no part of a step."""
        dtype = next(self.model.parameters()).dtype
        with torch.no_grad():
            return float(self.model(batches_of(9, self.width)[0].to(dtype)).sum())


def bits(run: Rank, of: int, steps: int = 3, **options: Any) -> str:
    """The parameters after some steps."""
    loop = Loop(run, of, **options)
    for step in range(steps):
        for number in loop.numbers():
            loop.backward(step, number)
        loop.end_step()
    return hash_of(loop.model)


def experts(run: Rank, of: int, **options: Any) -> str:
    """Micro-batch b uses expert b % 2: no unit but the first is completed by all ranks."""
    torch.manual_seed(0)
    loop = Loop(run, of, model=Experts(), **options)
    for step in range(3):
        for number in loop.numbers():
            loop.backward(step, number, number % 2)
        loop.end_step()
    return hash_of(loop.model)


def leaves_out(run: Rank, of: int, **options: Any) -> str:
    """Rank 1 has no micro-batch in the second of three steps, and half a backward in the third."""
    loop = Loop(run, of, **options)
    for step in range(3):
        for number in loop.numbers():
            if number != 1 or step == 0:
                loop.backward(step, number)
            elif step == 2:
                _half(loop, step, number)
        loop.end_step()
    return hash_of(loop.model)


def _half(loop: Loop, step: int, number: int) -> None:
    """A backward that raises ahead of the second unit's gradients."""

    def stop(*_: Any) -> None:
        raise ArithmeticError("by the test")

    hook = loop.model[1].register_full_backward_pre_hook(stop)  # type: ignore[index]
    with contextlib.suppress(ArithmeticError):
        loop.backward(step, number)
    hook.remove()


def lags(run: Rank, of: int, steps: int = 6, **options: Any) -> dict[str, Any]:
    """What all ranks end with where updates may lag, and what the report says of it."""
    loop = Loop(run, of, **options)
    for step in range(steps):
        for number in loop.numbers():
            loop.backward(step, number)
        loop.end_step()
        if run.rank == 0 or step % 2:  # the others now and then
            loop.evaluate()
    evaluated = loop.evaluate()
    seen = [unit.forwards for unit in strata.report(loop.model).lags]
    return {"hash": hash_of(loop.model), "evaluated": evaluated, "seen": seen}


def differs(run: Rank, of: int, **options: Any) -> None:
    """Rank 1 has another learning rate."""
    loop = Loop(run, of, lr=2e-2 if run.rank == 1 else 1e-2, **options)
    for step in range(2):
        loop.backward(step, run.rank)
        loop.end_step()


def refuses(run: Rank, of: int, what: str, **options: Any) -> str:
    """What a mode cannot do with several ranks; the words."""
    loop = Loop(run, of, **options)
    loop.backward(0, run.rank)
    try:
        if what == "again":
            loop.backward(0, run.rank)
        if what == "drops":
            loop.optimizer.zero_grad()
        if what == "reads":
            loop.model.state_dict()["0.0.weight"].sum().item()
        if what == "values":
            next(loop.model.parameters()).grad.sum().item()  # type: ignore[union-attr]
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def at_moment(run: Rank, of: int, where: str, victim: int, **options: Any) -> None:
    """Steps without end; the victim says when it is there, and stays until a signal comes."""
    loop = Loop(run, of, **options)

    def stay(*_: Any) -> None:
        if run.rank == victim and step > 0:
            run.mark("there")
            time.sleep(1000)

    if where == "backward":
        loop.model[1].register_full_backward_hook(stay)  # type: ignore[index]
    else:
        loop.optimizer.register_step_pre_hook(stay)
    for step in range(1000):
        loop.backward(step % 3, run.rank)
        loop.end_step()
