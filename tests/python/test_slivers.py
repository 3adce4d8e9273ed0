"""Adapters of many frozen blocks share units: they take the pages that they fill, and train as they
would alone."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import strata
import torch
from strata._cli.doctor import capacity
from strata._cli.doctor.run import Diagnosis
from strata._cli.options import doctor_parser
from strata._planning.meta_trace import count_step
from strata._profiling.calibrate import Calibration, typical_costs
from strata._runtime.wrapped import wrapped
from strata._torch_compat import FakeTensorMode
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS = 256, 12
PAGE = 64 << 10
BLOCK = 4 * WIDTH * WIDTH  # bytes in float32
TIGHT = {"device": f"{(2 * BLOCK >> 10) + 512}KiB", "host": "64MiB"}
MODES: dict[str, dict[str, Any]] = {
    "roomy": {"memory": {"device": "64MiB", "host": "64MiB"}},
    "tight": {"memory": TIGHT},
    "recompute": {"memory": TIGHT, "activations": "recompute"},
    "in_backward": {"memory": TIGHT, "update": "in_backward"},
    "lock_free": {"memory": TIGHT, "update": strata.LockFree(max_staleness=0)},
}


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it, as LoRA has."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.base(x) + self.up(self.down(x)))


class Checkpointed(Adapted):
    """The user's own checkpoint within."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def model(kind: Callable[[int], nn.Module] = Adapted, rank: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[kind(rank) for _ in range(LAYERS)])


def adamw(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in of.parameters() if p.requires_grad], lr=1e-2)


def train(of: nn.Module, optimizer: Any, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = of(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def apart(kind: Callable[[int], nn.Module] = Adapted) -> tuple[list[float], list[torch.Tensor]]:
    """Of a model whose blocks keep what they train: max_unit_norm, which is never reached."""
    of = model(kind)
    of, optimizer = strata.wrap(of, adamw(of), page_size=PAGE, max_unit_norm=1e9, **MODES["roomy"])
    losses = train(of, optimizer)
    assert len(wrapped(of).units) == LAYERS
    strata.unwrap(of)
    return losses, [p.detach().clone() for p in of.parameters()]


@pytest.mark.parametrize("kind", [Adapted, Checkpointed])
@pytest.mark.parametrize("mode", MODES)
def test_bits_are_those_of_blocks_that_keep_theirs(
    mode: str, kind: Callable[[int], nn.Module]
) -> None:
    losses, values = apart(kind)
    of = model(kind)
    of, optimizer = strata.wrap(of, adamw(of), page_size=PAGE, **MODES[mode])
    assert len(wrapped(of).units) == LAYERS + 1
    assert train(of, optimizer) == losses
    strata.unwrap(of)
    assert all(map(torch.equal, of.parameters(), values))


def test_they_take_the_pages_that_they_fill() -> None:
    of = model()
    plans = [
        strata.plan(of, adamw(of), page_size=PAGE, max_unit_norm=norm, **MODES["roomy"])
        for norm in (None, 1e9)
    ]
    needed = LAYERS * 2 * WIDTH * 4 * 4  # elements, and float32 in four roles
    together, alone = (plan.plan for plan in plans)
    assert together["trained_bytes"] == alone["trained_bytes"] == needed
    assert together["trained_page_bytes"] == 4 * PAGE
    assert alone["trained_page_bytes"] == LAYERS * 4 * PAGE
    assert "what is trained takes pages of 256.0 KiB" in str(plans[0])


def test_a_block_stays_while_its_backward_comes_back_to_it() -> None:
    """Nodes read the adapter and the block by turns: neither leaves between them."""
    of = model()
    of, optimizer = strata.wrap(
        of, adamw(of), page_size=PAGE, memory=TIGHT, activations=None, device="host"
    )
    train(of, optimizer, 3)
    session = wrapped(of).session
    before = session.stats()["host to device bytes"]
    train(of, optimizer, 1)
    moved = session.stats()["host to device bytes"] - before
    assert LAYERS * BLOCK < moved <= 2 * LAYERS * (BLOCK + PAGE), "in forward, and in backward"
    strata.unwrap(of)


def test_on_shapes_blocks_compute_and_save_and_the_adapters_stay() -> None:
    """As in the session: the planner can recompute what blocks save, and adapters come once."""
    with FakeTensorMode():
        of = model(rank=2)
        counted = count_step(of, lambda: of(torch.randn(8, WIDTH)).square().mean())
    adapters = next(i for i, unit in enumerate(counted.units) if "trained" in unit.name)
    assert {tensor.unit for tensor in counted.tensors} == {*range(LAYERS + 1)} - {adapters}
    for use in counted.uses:
        if use.unit != adapters and not use.backward:
            assert use.flops >= 2 * 8 * WIDTH * WIDTH
    backwards = [use.unit for use in counted.uses if use.backward]
    assert backwards == [adapters, *range(LAYERS, 0, -1)]


@pytest.mark.thorough
def test_the_largest_base_of_adapters_rests_in_four_bits() -> None:
    told = argparse.Namespace(**vars(doctor_parser("").parse([])) | {"device": "host"})
    room = {"device": 1 << 30, "host": 1 << 30, "ssd": 0}
    speeds = Calibration(typical_costs(), 1e12, 1e11)
    whole = capacity.largest(room, speeds, told, "host")
    base = capacity.largest(room, speeds, told, "host", capacity.ADAPTERS)
    assert whole is not None
    assert base is not None
    assert base.parameters > 5 * whole.parameters
    said = str(Diagnosis([], room, whole, base))
    assert "largest base of adapters (--lora r=8 --frozen nf4)" in said
