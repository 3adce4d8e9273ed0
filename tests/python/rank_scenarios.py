"""What ranks do in tests/python/test_ranks.py: each function runs in every rank of a run, and in a
process that is alone, which takes the micro-batches of all."""

from __future__ import annotations

import time
from typing import Any

import pytest
import strata
import torch
from rank_loops import (
    BATCHES,
    WIDTH,
    Rank,
    batches_of,
    hash_of,
    make_model,
    options_of,
    train,
    wrap,
)
from strata._runtime import wrapped
from strata._runtime.lander import Lander, Landing
from torch import distributed, nn


def bits(run: Rank, steps: int = 3, units: int = 3, **options: Any) -> str:
    """The parameters after some steps. One alone divides as all together do."""
    model, optimizer = wrap(run, make_model(units), **options_of(run, options))
    train(run, model, optimizer, steps)
    return hash_of(model)


def trains_two(run: Rank, **options: Any) -> list[str]:
    """Two models at once, and a third when the first is gone; their parameters are the same."""
    pairs = [wrap(run, make_model(), **options) for _ in range(2)]
    strata.unwrap(pairs[0][0])
    pairs[0] = wrap(run, make_model(), **options)
    for model, optimizer in pairs:
        train(run, model, optimizer, 2)
    hashes = [hash_of(model) for model, _ in pairs]
    assert hashes[0] == hashes[1]
    return hashes


def says_how_it_is_partitioned(run: Rank, **options: Any) -> list[list[str]]:
    """By a plan that rank 0 makes alone, and by the report of some steps: in a sentence, and all of
    it."""
    model = make_model()
    said: list[Any] = []
    if run.rank == 0:
        said = [strata.plan(model, torch.optim.AdamW(model.parameters()), **options)]
    model, optimizer = wrap(run, model, **options)
    train(run, model, optimizer, 3)
    said.append(strata.report(model))
    return [[each.partition, str(each)] for each in said]


def folders_apart(run: Rank, root: str, **options: Any) -> str:
    """As bits(), each rank with an ssd_path of its own."""
    return bits(run, ssd_path=f"{root}/{run.rank}", **options)


class LateLander(Lander):
    """Gradients are on their way for a while when the backward is over, as those of a GPU are."""

    def put(self, landing: Landing, byte_count: int = 0, index: int = -1) -> None:
        """Each one takes some milliseconds."""

        def late(stream: int) -> None:
            if byte_count:
                time.sleep(0.003)
            landing(stream)

        super().put(late, byte_count, index)


def lands_late(run: Rank, **options: Any) -> str:
    """As bits(), where gradients land on a thread of their own."""
    wrapped.Inline = lambda: LateLander(torch.device("cpu"), 1 << 30)  # type: ignore[assignment,misc]
    return bits(run, **options)


def codes(run: Rank, form: str, steps: int = 3, **options: Any) -> str:
    """The parameters after some steps over layers that are frozen, and rest as codes."""
    model = make_model()
    for unit in model:
        unit[0].weight.requires_grad_(False)  # type: ignore[index]
    model, optimizer = wrap(run, model, frozen=form, **options_of(run, options))
    train(run, model, optimizer, steps)
    return hash_of(model)


class Experts(nn.Module):
    """Which experts a rank uses is its own affair."""

    def __init__(self, width: int = WIDTH, inner: int = 3 * WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.Linear(inner, width)) for _ in range(3)
        )

    def forward(self, batch: torch.Tensor, use: int, times: int = 1) -> torch.Tensor:
        batch = self.first(batch)
        for _ in range(times):
            batch = self.experts[use](batch)
        return batch


def experts(run: Rank, steps: int = 2) -> str:
    """Micro-batch b uses expert b % 2, b + 1 times; the third expert nobody."""
    torch.manual_seed(0)
    model, optimizer = wrap(run, Experts())
    for step in range(steps):
        numbered = list(enumerate(batches_of(step)))
        for number, batch in run.share(numbered):  # type: ignore[arg-type]
            loss = model(batch, number % 2, number + 1).square().mean()
            (loss * run.ranks / BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_of(model)


def meets_after_backward(run: Rank, width: int = 256, inner: int = 16384) -> bool:
    """Rank 1 alone has gradients, of more than its outbox holds, and both meet ahead of step()."""
    torch.manual_seed(0)
    model, optimizer = wrap(run, Experts(width, inner))
    for _ in range(2):
        model(torch.ones(2, width), run.rank).square().mean().backward()
        distributed.barrier()
        optimizer.step()
        optimizer.zero_grad()
    return True


def uneven(run: Rank) -> str:
    """Rank 0 has three micro-batches, rank 1 one."""
    model, optimizer = wrap(run, make_model())
    batches = batches_of(0)
    for batch in batches if run.ranks == 1 else (batches[1:] if run.rank else batches[:1]):
        (model(batch).square().mean() * run.ranks).backward()
    optimizer.step()
    return hash_of(model)


def against_ddp(run: Rank, steps: int = 3) -> float:
    """The largest difference from DistributedDataParallel, in float32."""
    plain = nn.parallel.DistributedDataParallel(make_model())
    ours, optimizer = strata.wrap(
        model := make_model(), torch.optim.AdamW(model.parameters(), lr=1e-3), max_grad_norm=1.0
    )
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(steps):
        batch = run.share(batches_of(step))[0]
        for each in (plain, ours):
            each(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for each in (theirs, optimizer):
            each.step()
            each.zero_grad()
    shown = ours.state_dict()
    return max(
        (shown[name] - value).abs().max().item()
        for name, value in plain.module.state_dict().items()
    )


def one_reads(run: Rank) -> str | None:
    """Rank 0 alone, when the others have come to the end of the script."""
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    if run.rank:
        return None
    time.sleep(0.3)
    return hash_of(model)


def one_evaluates(run: Rank) -> str:
    """Rank 0 runs forwards between steps, and the others do not."""
    model, optimizer = wrap(run, make_model())
    for step in range(2):
        train(run, model, optimizer, 1, first=step)
        if run.rank == 0:
            with torch.no_grad():
                for batch in batches_of(99):
                    model(batch)
    return hash_of(model)


def kinds(run: Rank) -> dict[str, Any]:
    """Frozen and tied parameters, and buffers."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.middle = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
            self.frozen = nn.Linear(32, 32).requires_grad_(False)
            self.head = nn.Linear(32, 50, bias=False)
            self.head.weight = self.embed.weight
            rows = torch.arange(3.0) + torch.initial_seed()  # rank 0's count here, too
            self.register_buffer("rows", rows.expand(2, 3))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.frozen(self.middle(self.embed(tokens))))

    torch.manual_seed(run.rank)  # rank 0's values count
    model = Tied()
    model, optimizer = wrap(run, model)
    frozen = model.state_dict()["frozen.weight"].clone()
    tokens = torch.arange(8)
    for _ in range(2):
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shown = model.state_dict()
    return {
        "frozen": bool((shown["frozen.weight"] == frozen).all()),
        "tied": bool((shown["head.weight"] == shown["embed.weight"]).all()),
        "hash": hash_of(model),
    }


def unwraps(run: Rank) -> list[str]:
    """Twice in one process: the plain model is the same on all ranks, and is wrapped again."""
    model = make_model()
    hashes = []
    for _ in range(2):
        model, optimizer = wrap(run, model)
        train(run, model, optimizer, 1)
        model = strata.unwrap(model)
        hashes.append(hash_of(model))
    return hashes


def writes(run: Rank) -> list[str]:
    """Parameters are loaded, and changed in place, when ranks have computed with them: the forward
    behind it sees the new values on all of them."""
    plain, model = make_model(), make_model()
    model, optimizer = wrap(run, model)
    batch = batches_of(0)[0]
    model(batch)
    for round_ in range(4):
        time.sleep(0.05 * ((run.rank + round_) % 2))  # another one is the first each time
        torch.manual_seed(round_)
        values = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
        run.meet()  # others have seen the old ones
        for each in (plain, model):
            each.load_state_dict(values)
        assert torch.equal(model(batch), plain(batch))
        run.meet()
        for each in (plain, model):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(0.5)
        assert torch.equal(model(batch), plain(batch))
    train(run, model, optimizer, 1)
    return [hash_of(model)]


def writes_alone(run: Rank) -> None:
    """Rank 0 changes parameters, and rank 1 does not."""
    model, optimizer = wrap(run, make_model())
    if run.rank == 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    train(run, model, optimizer, 1)


def catches(run: Rank) -> str:
    """Rank 1's first forward raises, and the script goes on."""
    model, optimizer = wrap(run, make_model())
    if run.rank == 1:
        hook = model[1].register_forward_pre_hook(_raise)
        try:
            model(batches_of(0)[0])
        except ArithmeticError:
            hook.remove()
    train(run, model, optimizer, 2)
    return hash_of(model)


def _raise(*_: Any) -> None:
    raise ArithmeticError("by the test")


def raises(run: Rank) -> None:
    """Rank 1 raises, when rank 0 waits for it by means of torch."""
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    if run.rank == 1:
        _raise()
    distributed.barrier()


def ends_early(run: Rank, width: int = 256, inner: int = 16384) -> None:
    """Rank 0 makes one step less; the other has larger gradients than its outbox."""
    torch.manual_seed(0)
    model, optimizer = wrap(run, Experts(width, inner))
    for _ in range(1 + run.rank):
        model(torch.ones(2, width), 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def at_moment(run: Rank, where: str, victim: int, **options: Any) -> None:
    """Steps without end; the victim says when it is there, and stays until a signal comes."""
    model, optimizer = wrap(run, make_model(), **options)
    train(run, model, optimizer, 1)

    def stay(*_: Any) -> None:
        if run.rank == victim:
            run.mark("there")
            time.sleep(1000)

    if where == "forward":
        model[1].register_forward_pre_hook(stay)
    if where == "backward":
        model[1].register_full_backward_hook(stay)
    if where == "step":
        optimizer.register_step_pre_hook(stay)
    train(run, model, optimizer, 1000)


def stopped(run: Rank, steps: int = 6) -> str:
    """The test stops a rank when it has come to the second step."""
    import logging

    logging.basicConfig(level=logging.WARNING)
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    if run.rank == 1:
        run.mark("there")
        run.await_go()
    train(run, model, optimizer, steps, first=1)
    return hash_of(model)


def differs(run: Rank) -> None:
    """Rank 1 has another learning rate."""
    model, optimizer = wrap(run, make_model(), 2e-2 if run.rank == 1 else 1e-2)
    train(run, model, optimizer, 1)


def refuses(run: Rank, what: str) -> str:
    """What several ranks cannot do yet; the words."""
    try:
        model, optimizer = wrap(run, make_model())
        optimizer.zero_grad()
        model(batches_of(0)[0]).square().mean().backward()
        if what == "grad":
            next(model.parameters()).grad.sum().item()  # type: ignore[union-attr]
        if what == "snapshot":
            optimizer.step()
            strata.snapshot(model, run.folder / "snapshots")
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def empty_parameters(run: Rank) -> float:
    """Parameters without elements train, and their steps are the same after a save and a load."""
    model = make_model(1)
    model.register_parameter("rows", nn.Parameter(torch.empty(4, 0)))
    model, optimizer = wrap(run, model)
    for step in range(3):
        (model(batches_of(step)[run.rank]).square().mean() + model.rows.sum()).backward()
        assert model.rows.grad is not None
        optimizer.step()
        optimizer.zero_grad()
    strata.save(model, run.folder / "saved")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    strata.load(model, run.folder / "saved")
    return float(optimizer.state_dict()["state"][0]["step"])


def optimizer_state(run: Rank) -> list[float]:
    """Every rank reads the whole state, whatever it owns of it, and edits of one are refused."""
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 2)
    found = [float(optimizer.state[p]["exp_avg"].norm()) for p in model.parameters()]
    run.meet()
    told = r"optimizer.load_state_dict\(\) on all ranks"
    with pytest.raises(RuntimeError, match=told):
        optimizer.state[model[0][0].weight]["exp_avg"].zero_()
    with pytest.raises(RuntimeError, match=told):
        optimizer.state.clear()
    assert found == [float(optimizer.state[p]["exp_avg"].norm()) for p in model.parameters()]
    run.meet()
    return found
