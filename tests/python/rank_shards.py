"""What processes do in tests/python/test_rank_shards.py: they train the model of shard_models.py
with strata and with plain PyTorch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import strata
import torch
from rank_loops import Rank, options_of
from shard_models import (
    OPTIMIZERS,
    WIDTH,
    Model,
    batch_of,
    distance,
    make,
    make_model,
    mesh_of,
    plain,
    shards_of,
    spread,
    train,
)
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

ROOM = {"device": "2MiB", "host": "24MiB"}


def trains(
    run: Rank,
    *,
    sequence: bool = False,
    clip: float = 0.0,
    inside: bool = False,
    kind: str = "",
    rule: str = "adamw",
    **options: Any,
) -> dict[str, Any]:
    """All processes are of one mesh. `inside`: step() clips."""
    mesh = mesh_of(run, (run.ranks,))
    wanted, norms = plain(mesh, [0], sequence, clip, kind, rule)
    model = make(kind, mesh, sequence)
    references = list(model.parameters())
    inner = OPTIMIZERS[rule](references)
    asked = options_of(run, {"memory": ROOM, **options})
    strata.plan(model, inner, **asked)  # leaves all as it is
    assert all(a is b for a, b in zip(model.parameters(), references, strict=True))
    model, optimizer = strata.wrap(
        model, inner, **asked, **({"max_grad_norm": clip} if inside else {})
    )
    kinds = {type(p).__name__ for p in model.parameters()}
    hollow = all(p.to_local().is_meta for p in references if isinstance(p, DTensor))
    if inside:
        found = [norm for step in range(4) for norm in _step(model, optimizer, step)]
    else:
        found = train(model, optimizer, [0], clip=clip)
    trained = shards_of(model)
    with torch.inference_mode():
        answer = model(batch_of(9))
    model = strata.unwrap(model)
    answers = float((model(batch_of(9)) - answer).abs().max())
    same_objects = all(a is b for a, b in zip(model.parameters(), references, strict=True))
    back = shards_of(model)
    spread_again = sum(isinstance(p, DTensor) for p in model.parameters())
    train(model, inner, [0], steps=1)  # goes on by itself
    return {
        "distance": distance(trained, wanted),
        "norms": [abs(a - b) / b for a, b in zip(found, norms, strict=True)],
        "kinds": sorted(kinds),
        "back": distance(back, trained),
        "dtensors": spread_again,
        "same_objects": same_objects,
        "hollow": hollow,
        "answers": answers,
    }


def _step(model: nn.Module, optimizer: Any, step: int) -> list[float]:
    """One that clips by itself. Returns the norm ahead of that."""
    train(model, optimizer, [0], steps=1, first=step)
    norm = strata.report(model).grad_norm
    assert norm is not None
    return [norm]


def trains_in_groups(
    run: Rank, clip: float | None = None, idle: bool = False, **options: Any
) -> float:
    """Two copies of a mesh of two: each has batches of its own. `idle`: the second has none."""
    mesh = mesh_of(run, (2, run.ranks // 2))
    wanted, _ = plain(mesh["tp"], [0] if idle else [0, 1], False, clip or 0.0, "", "sgd")
    model = make("", mesh["tp"])
    model, optimizer = strata.wrap(
        model,
        OPTIMIZERS["sgd"](model.parameters()),
        memory=ROOM,
        rank_group=mesh["dp"],
        max_grad_norm=clip,
        **options_of(run, options),
    )
    copy = mesh.get_local_rank("dp")
    train(model, optimizer, [] if idle and copy else [copy])
    return distance(shards_of(model), wanted)


def saves_and_loads(run: Rank) -> bool:
    """Each process its shards, to a path of its own."""
    mesh = mesh_of(run, (run.ranks,))

    def begin(seed: int) -> tuple[nn.Module, Any]:
        model = spread(make_model(), mesh)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(seed)
        inner = OPTIMIZERS["adamw"](model.parameters())
        return strata.wrap(model, inner, memory=ROOM, max_grad_norm=1.0)

    path = run.folder / f"checkpoint-{run.rank}"
    model, optimizer = begin(0)
    train(model, optimizer, [0], steps=2)
    strata.save(model, path)
    train(model, optimizer, [0], steps=2, first=2)
    wanted = shards_of(model)
    strata.unwrap(model)
    model, optimizer = begin(1)
    strata.load(model, path)
    train(model, optimizer, [0], steps=2, first=2)
    return distance(shards_of(model), wanted) == 0


def reads_files(run: Rank) -> float:
    """The model is on the meta device, and the file has whole tensors."""
    from safetensors.torch import save_file

    path = Path(run.folder) / f"whole-{run.rank}.safetensors"
    save_file(make_model().state_dict(), path)
    mesh = mesh_of(run, (run.ranks,))
    wanted, _ = plain(mesh, [0], False, 0.0)
    with torch.device("meta"):
        model = Model()
    spread(model, mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = strata.wrap(model, optimizer, memory=ROOM, weights=path)
    train(model, optimizer, [0])
    return distance(shards_of(model), wanted)


def skips(run: Rank) -> list[Any]:
    """One process has an infinity in a shard's gradient, and all leave the step out."""
    model = spread(make_model(), mesh_of(run, (run.ranks,)))
    model, optimizer = strata.wrap(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), memory=ROOM, skip_nonfinite=True
    )
    train(model, optimizer, [0], steps=1)
    before = shards_of(model)
    weight = model.blocks[1].up.weight
    if run.rank == 1:
        weight.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    train(model, optimizer, [0], steps=1, first=1)
    optimizer: Any = optimizer
    return [distance(shards_of(model), before), bool(optimizer.last_finite)]


def scales(run: Rank) -> list[Any]:
    """The recipe of float16: gradients are unscaled, and clipped by the norm of what is rounded.
    Returns the norm, and the shards that all processes have whole."""
    mesh = mesh_of(run, (run.ranks,))
    model = spread(make_model(), mesh)
    model, optimizer = strata.wrap(
        model, OPTIMIZERS["sgd"](model.parameters()), memory=ROOM, dtype=torch.float16
    )
    scaler = strata.GradScaler(init_scale=1000.0)
    norms = []
    for step in range(2):
        tokens = batch_of(step)
        logits = model(tokens).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten().flip(0))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [norms, [float(p.double().sum()) for p in (model.head.weight, model.head.bias)]]


def fails_and_goes_on(run: Rank) -> list[bool]:
    """wrap() does not succeed, and the model is as it was, with its gradients."""
    mesh = mesh_of(run, (run.ranks,))
    model = spread(make_model(), mesh)
    model(batch_of(0)).sum().backward()
    before = [(p, type(p), p.grad) for p in model.parameters()]
    optimizer = OPTIMIZERS["adagrad"](model.parameters())
    try:
        strata.wrap(model, optimizer, memory={"device": "64KiB", "host": "64KiB"})
    except strata.StrataError:
        now = [(p, type(p), p.grad) for p in model.parameters()]
        pairs = list(zip(now, before, strict=True))
        same = all(a is b for x, y in pairs for a, b in zip(x, y, strict=True))
        grouped = optimizer.param_groups[0]["params"]
        return [same, all(a is b for a, (b, _, _) in zip(grouped, before, strict=True))]
    return []


def looks_at_old(run: Rank) -> str:
    """What is said of the gradient of a parameter that was given to wrap()."""
    model = spread(make_model(), mesh_of(run, (run.ranks,)))
    references = list(model.parameters())
    model, _ = strata.wrap(model, OPTIMIZERS["sgd"](references), memory=ROOM)
    model(batch_of(0)).sum().backward()
    try:
        torch.nn.utils.clip_grad_norm_(references, 1.0)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def keeps_gradients(run: Rank) -> list[bool]:
    """Norms of gradients that somebody has a view of, and changes by it."""
    model = spread(make_model(), mesh_of(run, (run.ranks,)))
    model, _ = strata.wrap(model, OPTIMIZERS["sgd"](model.parameters()), memory=ROOM)
    model(batch_of(0)).sum().backward()
    weight, other = model.embed.weight, model.blocks[0].up.weight  # type: ignore[union-attr, index]
    norm = float(weight.grad.norm())  # type: ignore[union-attr]
    view = weight.grad.view(-1)  # type: ignore[union-attr]
    view.mul_(2)
    doubled = float(weight.grad.norm())  # type: ignore[union-attr]
    view.mul_(2)
    del view
    kept = other.grad.view(-1)  # type: ignore[union-attr]  # the first one goes to the core now
    fourfold = float(weight.grad.norm())  # type: ignore[union-attr]
    return [abs(doubled / norm - 2) < 1e-5, abs(fourfold / norm - 4) < 1e-5, kept is not None]


def odd(run: Rank, what: str) -> str:
    """What is said of parameters, or options, that cannot be."""
    mesh = mesh_of(run, (run.ranks,))
    model: nn.Module = spread(make_model(), mesh)
    options: dict[str, Any] = {"memory": ROOM}
    if what == "partial":
        weight = model.blocks[0].norm.weight  # type: ignore[union-attr, index]
        model.blocks[0].norm._parameters["weight"] = nn.Parameter(  # type: ignore[union-attr, index]
            DTensor.from_local(weight.detach(), mesh, [Partial()])
        )
    elif what == "empty":
        few = nn.Parameter(distribute_tensor(torch.ones(1, WIDTH), mesh, [Shard(0)]))
        model.register_parameter("few", few)
    elif what == "group":
        options["rank_group"] = distributed.group.WORLD
    elif what == "units":
        options["max_unit_norm"] = 1.0
    elif what == "lock_free":
        options |= {"update": strata.LockFree(1), "max_grad_norm": 1.0}
    elif what == "frozen":
        options["frozen"] = "int8"
    elif what == "split":
        options["split"] = 2
    elif what == "no budgets":
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        del options["memory"]
    else:
        return _odd_later(model, what)
    kinds = [type(p) for p in model.parameters()]
    try:
        strata.wrap(model, torch.optim.AdamW(model.parameters()), **options)
    except ValueError as error:
        assert [type(p) for p in model.parameters()] == kinds
        return str(error)
    return "nothing"


def _odd_later(model: nn.Module, what: str) -> str:
    """Of a model that is wrapped."""
    model, _ = strata.wrap(model, torch.optim.AdamW(model.parameters()), memory=ROOM)
    tokens = batch_of(0)
    try:
        model(tokens).sum().backward()
        if what == "given":
            weight = next(model.parameters())
            weight.grad = torch.zeros_like(weight)
        if what == "largest":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
    except RuntimeError as error:
        return str(error)
    return "nothing"
