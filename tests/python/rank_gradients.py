"""What ranks do with p.grad in tests/python/test_ranks.py: see rank_scenarios.py."""

from __future__ import annotations

from typing import Any

import strata
import torch
from rank_loops import BATCHES, Rank, batches_of, hash_of, make_model, options_of, wrap
from rank_scenarios import Experts
from torch import nn
from torch.utils.checkpoint import checkpoint


def clips(run: Rank, **options: Any) -> list[Any]:
    """As loops of others do it; norms and parameters. Every other step is looked at twice."""
    model, optimizer = wrap(run, make_model(), **options_of(run, options))
    norms = []
    for step in range(4):
        mine = run.share(batches_of(step))
        for batch in mine:
            (model(batch).square().mean() / len(mine)).backward()
            if step % 2 and batch is mine[0] and run.ranks > 1:
                assert all(p.grad is not None for p in model.parameters())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.005).item())
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert abs(total - 0.005) < 1e-6
        optimizer.step()
        optimizer.zero_grad()
    return [norms, hash_of(model)]


def scales(run: Rank) -> list[Any]:
    """With a loss scaler, whose second step overflows on the last rank, and on no other."""
    model, optimizer = wrap(run, make_model())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(4):
        mine = run.share(batches_of(step))
        for batch in mine:
            last = batch is mine[-1] and run.rank == run.ranks - 1
            factor = float("inf") if step == 1 and last else 1.0
            scaler.scale(model(batch).square().mean() * factor / len(mine)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.005)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [scales, hash_of(model)]


def scales_halves(run: Rank) -> list[Any]:
    """Parameters in float16, whose sums are in float32, though ranks have not asked for that."""
    sums = 1 if run.ranks > 1 else 4
    how = {"dtype": torch.float16, "gradient_accumulation_steps": sums}
    model, optimizer = wrap(run, make_model(), 1e-3, **how)
    scaler = strata.GradScaler(init_scale=2.0**19)  # no element is subnormal
    norms = []
    for step in range(3):
        mine = run.share(batches_of(step))
        for batch in mine:
            loss = model(batch.half()).float().square().mean()
            scaler.scale(loss / len(mine)).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.005).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [norms, hash_of(model)]


def zeroes(run: Rank) -> str:
    """Gradients that become zero, by one call and by another, where a later backward of this rank
    or of another one leaves parameters out: there they are zero still."""
    model, optimizer = wrap(run, Experts())
    for step in range(4):
        numbered = list(enumerate(batches_of(step)))
        for number, batch in run.share(numbered):  # type: ignore[arg-type]
            loss = model(batch, (number + step) % 2 if step < 2 else 0).square().mean()
            (loss * run.ranks / BATCHES).backward()
        if step == 1:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return hash_of(model)


def drops(run: Rank) -> str:
    """Gradients that are thrown away, all of them or one, ahead of a step."""
    model, optimizer = wrap(run, make_model())
    for step in range(3):
        for throws_away in (True, False):
            mine = run.share(batches_of(step))
            for batch in mine:
                (model(batch).square().mean() / len(mine)).backward()
            if throws_away:
                optimizer.zero_grad()
        next(model.parameters()).grad = None
        optimizer.step()
        model.zero_grad()
    return hash_of(model)


def drops_many(run: Rank) -> str:
    """A module's own zero_grad(), which drops gradients one by one, of many parameters and for
    several passes that are thrown away in a row."""
    torch.manual_seed(0)
    many = nn.Sequential(*[nn.Linear(8, 8) for _ in range(40)])
    model, optimizer = wrap(run, many)
    for step in range(2):
        for attempt in range(5):
            mine = run.share(batches_of(step, 8))
            for batch in mine:
                (model(batch).square().mean() / len(mine)).backward()
            if attempt < 4:
                model.zero_grad(set_to_none=attempt % 2 == 0)
        optimizer.step()
        model.zero_grad()
    return hash_of(model)


def drops_unread(run: Rank) -> str:
    """All of them, one by one, without a look; ranks used other parameters. Then a rank that has no
    gradient in the next backward is the first that lands one."""
    model, optimizer = wrap(run, Experts())
    for step in range(3):
        for attempt in range(2):
            numbered = list(enumerate(batches_of(step)))
            for number, batch in run.share(numbered):  # type: ignore[arg-type]
                loss = model(batch, (number + attempt) % 2).square().mean()
                (loss * run.ranks / BATCHES).backward()
            if attempt == 0:
                for parameter in model.parameters():
                    parameter.grad = None
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    return hash_of(model)


class Checkpointed(nn.Module):
    """Blocks that run backwards of their own in the backward, of which some may be left out."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.last = nn.Linear(width, width)

    def forward(self, batch: torch.Tensor, left_out: int) -> torch.Tensor:
        batch = batch.clone().requires_grad_()
        for number, block in enumerate(self.blocks):
            if number != left_out:
                batch = checkpoint(block, batch, use_reentrant=True)
        return self.last(batch)


def checkpoints(run: Rank) -> str:
    """Ranks that leave out other blocks; each backward is one pass, however many run within it."""
    torch.manual_seed(0)
    model, optimizer = wrap(run, Checkpointed())
    for step in range(3):
        numbered = list(enumerate(batches_of(step, 24)))
        for number, batch in run.share(numbered):  # type: ignore[arg-type]
            loss = model(batch, 1 if number % 4 == 1 else 3).square().mean()
            (loss * run.ranks / BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_of(model)


def scales_often(run: Rank) -> list[Any]:
    """Each factor is written when the next one comes."""
    model, optimizer = wrap(run, make_model())
    norms = []
    for step in range(2):
        mine = run.share(batches_of(step))
        for batch in mine:
            (model(batch).square().mean() / len(mine)).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            for factor in (0.7, 3.0, 0.1, 1.1):
                parameter.grad.mul_(factor)
            norms.append(parameter.grad.norm().item())
        optimizer.step()
        optimizer.zero_grad()
    return [norms, hash_of(model)]


def parts(run: Rank, what: str) -> None:
    """Rank 1 does something to gradients that rank 0 does not."""
    model, optimizer = wrap(run, make_model())
    for batch in run.share(batches_of(0)):
        model(batch).square().mean().backward()
    scales = what in {"scales", "scales first"}
    gradient = next(model.parameters()).grad if scales or run.rank == 1 else None
    if run.rank == 1 and what == "scales":
        gradient.mul_(0.5)  # type: ignore[union-attr]
    if what == "scales first":
        gradient.mul_(0.5 + run.rank).mul_(0.3)  # type: ignore[union-attr]
    if run.rank == 1 and what == "drops":
        optimizer.zero_grad()
    optimizer.step()
