"""What ranks do in tests/python/test_rank_groups.py: each function runs in every process of a
world, of which groups train models of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import strata
import torch
from rank_loops import BATCHES, Rank, batches_of, hash_of, make_model, wrap
from strata._config.ranks import ranks_on_paper
from strata._runtime.wrapped import wrapped
from torch import distributed, nn

# Neighbours in no group, so that ranks of a group are other ones than those of the world.
APART = ((0, 3), (1, 2))
SSD: dict[str, Any] = {
    "memory": {"device": "1MiB", "host": "10MiB", "ssd": "1GiB"},
    "page_size": "64KiB",
}


def _groups(run: Rank, how: str) -> tuple[Any, int]:
    """The group of this process, as users make one, and which of the two it is."""
    if how == "mesh":
        names = ("other", "dp")
        mesh = distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        return mesh["dp"], run.rank // 2
    backend = "cuda:gloo" if how == "gpus" else "gloo"
    groups = [distributed.new_group(list(of), backend=backend) for of in APART]
    which = next(i for i, of in enumerate(APART) if run.rank in of)
    return groups[which], which


def _begin(run: Rank, data: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of its own for each `data`. All begin with the values of the first rank."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + data + 10 * run.rank)
    return wrap(run, model, **options)


def _steps(run: Rank, data: int, model: nn.Module, optimizer: Any, first: int, end: int) -> None:
    """With batches of their own for each `data`."""
    for step in range(first, end):
        for batch in run.share(batches_of(step + 1000 * data)):
            (model(batch).square().mean() * run.ranks / BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()


def trains(run: Rank, path: str, data: int = 0, how: str = "world") -> dict[str, Any]:
    """Trains, saves, goes on and comes back. `how`: whether the world is one group, or two."""
    options: dict[str, Any] = {}
    if how != "world":
        group, data = _groups(run, how)
        run = Rank(distributed.get_group_rank(_process_group(group), run.rank), 2, run.folder)
        options["rank_group"] = group
    disk = run.folder / f"ssd-{data}"
    disk.mkdir(exist_ok=True)
    model, optimizer = _begin(run, data, ssd_path=disk, **SSD, **options)
    _steps(run, data, model, optimizer, 0, 2)
    folder = Path(path) / f"{how}-{data}"
    strata.save(model, folder, extra={"rank": run.rank})
    saved = hash_of(model)
    strata.snapshot(model, folder.with_suffix(".snapshots")).wait()
    _steps(run, data, model, optimizer, 2, 3)
    went_on = hash_of(model)
    extra = strata.load(model, folder)
    loaded = hash_of(model)
    _steps(run, data, model, optimizer, 2, 3)
    return {
        "data": data,
        "rank": run.rank,
        "saved": saved,
        "loaded": loaded,
        "went_on": went_on,
        "again": hash_of(model),
        "extra": extra["rank"],
    }


def over_a_mesh(run: Rank) -> list[Any]:
    """All processes, as a mesh to replicate and to shard over; then the middle two of its rows,
    which are not all. Ranks 1 and 2 are in both."""
    mesh = distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for group, members in ((mesh, [0, 1, 2, 3]), (_part(mesh), [1, 2])):
        if run.rank not in members:
            continue
        within = Rank(members.index(run.rank), len(members), run.folder)
        model, optimizer = _begin(within, 0, rank_group=group)
        ranks = wrapped(model).ranks
        _steps(within, 0, model, optimizer, 0, 2)
        found.append([ranks.rank if ranks is not None else -1, hash_of(model)])
        strata.unwrap(model)
    return found


def averages(run: Rank) -> list[str]:
    """Each process trains by itself, and they average their parameters, which do not all fit on the
    device at once; what comes of that here and of plain tensors, and what is refused."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + run.rank)
    plain = copy.deepcopy(model)
    memory = {"device": "450KiB", "host": "64MiB"}
    alone = {"memory": memory, "page_size": "64KiB", "rank_group": distributed.new_subgroups(1)[0]}
    strata.wrap(model, torch.optim.AdamW(model.parameters()), **alone)
    for of in (model, plain):
        for parameter in of.parameters():
            distributed.all_reduce(parameter.data)
        for parameter in of.parameters():
            parameter.data /= run.ranks
    refused = ""
    try:
        distributed.all_reduce(next(model.parameters()).data, async_op=True)
    except RuntimeError as error:
        refused = str(error)
    return [hash_of(model), hash_of(plain), refused]


def _part(mesh: distributed.DeviceMesh) -> distributed.DeviceMesh:
    """Of two processes, in two dimensions."""
    assert mesh.ndim == 2
    return distributed.DeviceMesh("cpu", [[1, 2]], mesh_dim_names=("replicate", "shard"))


def _process_group(group: Any) -> Any:
    return group.get_group() if isinstance(group, distributed.DeviceMesh) else group


def in_turn(run: Rank) -> list[tuple[int, str]]:
    """Three sessions, one behind the other; rank 1 is in all of them. The second has the group of
    the first one, which is for GPUs alone, as far as torch knows."""
    first = distributed.new_group([0, 1], backend="cuda:gloo")
    other = distributed.new_group([1, 2])
    found = []
    for group, members, data in ((first, [0, 1], 0), (first, [0, 1], 1), (other, [1, 2], 0)):
        if run.rank not in members:
            continue
        within = Rank(members.index(run.rank), 2, run.folder)
        model, optimizer = _begin(within, data, rank_group=group)
        _steps(within, data, model, optimizer, 0, 2)
        found.append((data, hash_of(model)))
        strata.unwrap(model)
    return found


def is_refused(run: Rank, what: str) -> list[str]:
    """What is said of what is no group to train with, by wrap() and by plan()."""
    group: Any = [0, 1]
    if what == "stranger":
        group = [distributed.new_group([rank]) for rank in (1, 0)][run.rank]
    if what == "mesh":
        names = ("other", "dp", "tp")
        group = distributed.init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=names)
    if what == "unnamed":
        group = distributed.init_device_mesh("cpu", (2, 1, 1))
    if what == "mesh of others":
        group = distributed.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
        if run.rank == 0:
            return []
    if what == "destroyed":
        group = distributed.new_group([0, 1])
        distributed.destroy_process_group(group)
    found = []
    for call in (strata.wrap, strata.plan):
        model = make_model()
        try:
            call(model, torch.optim.AdamW(model.parameters()), rank_group=group)  # type: ignore[operator]
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def alone(run: Rank) -> list[Any]:
    """A group of one: who is in it waits for nobody."""
    group = distributed.new_group([1])
    if run.rank == 0:
        distributed.barrier()
        return []
    model, optimizer = _begin(Rank(0, 1, run.folder), 0, rank_group=group)
    ranks = wrapped(model).ranks
    _steps(Rank(0, 1, run.folder), 0, model, optimizer, 0, 2)
    found = [ranks is None, hash_of(model)]
    distributed.barrier()
    return found


def on_paper(run: Rank) -> list[Any]:
    """Of the two groups, and of the dimension of a mesh, the rank, and how many there are."""
    found = [ranks_on_paper(_groups(run, how)[0]) for how in ("groups", "mesh")]
    return [(of.rank, of.count) for of in found if of is not None]
