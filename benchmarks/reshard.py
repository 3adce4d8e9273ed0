"""One snapshot, loaded under other budgets, page sizes, modes of updates and tilings: the same bits
of weights and moments, and where training is exact and nothing is tiled, of the steps behind them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import strata
import torch
from strata._runtime.wrapped import wrapped
from strata._storage.stored import stored_tensors

from .common import Context, Figure
from .equal import ADAMW, HIDDEN, LAYERS, PAGES, TOKENS, VOCABULARY, budgets
from .models import llama, llama_config, tokens
from .sides import Paged

if TYPE_CHECKING:
    from strata._core import Kind

STEPS = 3  # before the snapshot, and behind it
PLACES = ("resident", "tiny", "ssd")
UPDATES: tuple[Any, ...] = ("on_step", "in_backward", strata.LockFree(max_staleness=1))
TILES = (1, 4)  # of the head
KINDS: tuple[Kind, ...] = ("master", "moment1", "moment2")


@dataclass(frozen=True)
class Setting:
    """How a run is set up."""

    place: str
    page: int
    update: Any
    tiles: int = 1

    @property
    def trains_the_same_bits(self) -> bool:
        """As every other setting for which this holds."""
        return self.tiles == 1 and self.update in ("on_step", "in_backward")


def run(context: Context) -> Iterator[Figure]:
    """Yields how many pairs of settings were tried, and how many of them differ."""
    places = PLACES[-1:] if context.quick else PLACES
    pages = PAGES[:2] if context.quick else PAGES
    savers = [Setting(p, q, "on_step") for p, q in itertools.product(places, pages)]
    loaders = [Setting(*each) for each in itertools.product(places, pages, UPDATES, TILES)]
    loads = states = steps = 0
    with context.scratch() as folder:
        for number, saver in enumerate(savers):
            series = folder / f"run-{number}"
            state, losses = _save(saver, series, folder, context.seed)
            for loader in loaders:
                found, then = _load(loader, series, folder, context.seed)
                loads += 1
                if not _same(found, state):
                    states += 1
                    context.say(f"the state differs: {saver}, {loader}")
                if loader.trains_the_same_bits and then != losses:
                    steps += 1
                    context.say(f"steps differ: {saver}, {loader}")
    yield Figure("reshard", "loads", loads, "runs")
    yield Figure("reshard", "states_that_differ", states, "runs", target=0)
    yield Figure("reshard", "exact_runs_that_differ", steps, "runs", target=0)


def _side(setting: Setting, folder: Path, seed: int) -> Paged:
    model = llama(llama_config(HIDDEN, LAYERS, VOCABULARY), torch.bfloat16, seed)
    if setting.tiles > 1:
        strata.nn.tile(model, "lm_head", setting.tiles)
    parameters = sum(p.numel() for p in model.parameters())
    memory = {"ssd": 32 * parameters + (256 << 20)}
    memory |= budgets(setting.place, setting.page, parameters)
    if isinstance(setting.update, strata.LockFree):
        memory["host"] += 6 * parameters  # sums of gradients in float32, and pages in passing
    options = {"page_size": setting.page, "update": setting.update}
    return Paged(model, tokens(TOKENS, seed, VOCABULARY), memory, folder, options, **ADAMW)


def _save(setting: Setting, series: Path, folder: Path, seed: int) -> tuple[Any, list[float]]:
    """The state that a snapshot has, and losses behind it."""
    side = _side(setting, folder, seed)
    try:
        for _ in range(STEPS):
            side.step()
        strata.snapshot(side.model, series).wait()
        return _state(side), [side.step() for _ in range(STEPS)]
    finally:
        side.close()


def _load(setting: Setting, series: Path, folder: Path, seed: int) -> tuple[Any, list[float]]:
    side = _side(setting, folder, seed)
    try:
        strata.load(side.model, series)
        return _state(side), [side.step() for _ in range(STEPS)]
    finally:
        side.close()


def _state(side: Paged) -> dict[str, torch.Tensor]:
    """Weights and moments as float32. Tiles are rows: one behind the other they are the whole."""
    state = wrapped(side.model)
    found = {}
    for tensor, kind in itertools.product(stored_tensors(side.model), KINDS):
        parts = []
        for part, shape in zip(tensor.parts, tensor.part_shapes, strict=True):
            values = torch.empty(torch.Size(shape).numel())
            state.session.read(part, kind, 0, values.data_ptr(), values.numel())
            parts.append(values)
        found[f"{tensor.name}.{kind}"] = torch.cat(parts)
    return found


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(values.view(torch.int32), b[name].view(torch.int32))
        for name, values in a.items()
    )
