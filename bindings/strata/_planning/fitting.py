"""Cuts layers into tiles where a unit is too large for the device, when a model is wrapped.

config, hooked, plan = fit(model, optimizer, options, make_plan)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._config import machine
from .._config.choices import HOST, PAGE_BYTES_MIN
from .._config.configure import configure
from .._config.options import Options
from .._config.ranks import plans_of_one_page_size
from .._config.sharding import dtensor_of
from .._config.sizes import format_size, parse_budgets
from .._config.units import find_units
from .._errors import StrataError, with_more
from .._storage.ssd_folders import remove_leftovers
from ..nn.causal_lm import columns_of, why_not_chunked
from ..nn.replace import put_tiles, remove_tiles
from ..nn.tiles import Tiled, why_not
from . import budget_check

if TYPE_CHECKING:
    from .._core import Config, Plan, StepPlan, Trace

    Fitted = tuple[Config, dict[nn.Module, list[int]], Plan]

TILE_SHARE = 8  # of the device: one tile computes, others come, and activations have room
DEVICE_BYTES_MIN = PAGE_BYTES_MIN // 2  # tiles of a smaller one would be thousands, and not fit
TILES = 8  # that are proposed
WHOLE_COPIES = 4  # of a layer in its backward: parameters, gradients, and what they are added up in
LOGIT_BYTES = 12  # that a loss has of each at most: itself, in float32, and its gradient
UNIT_SHARE = 2  # where one unit is larger than the device, those above this part of it are cut too

log = logging.getLogger("strata")


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options,
    make_plan: Callable[[Config], Plan],
) -> Fitted:
    """The configuration under which the model fits; with tiles where it would not without.

    Only then: tiles change the last bits of sums. Raises StrataError where nothing helps. The
    caller takes the tiles out again where it does not need them.
    """
    remove_leftovers(options.own_ssd_paths())
    config, hooked = configure(model, optimizer, options, make_plan)
    given = parse_budgets(options.memory)
    if "device" in given and config["device"] == HOST:
        given["device"] *= options.shared_by()
    for warning in budget_check.check(given, config["device"], config["ssd_paths"]):
        log.warning("%s", warning)
    try:
        return config, hooked, plan_or_refuse(config, make_plan)
    except StrataError as error:
        counts = tiles_wanted(model, options, config["device_bytes"])
        if not counts:
            raise
        try:
            cut = _cut(model, optimizer, options, make_plan, counts)
        except ValueError as reason:
            why = f"; its layers cannot be cut into tiles either: {reason}"
            raise with_more(error, why) from reason
        if cut is None:
            raise
        log.info("does not fit as it is (%s): cut into tiles: %s", error, _listed(counts))
        return cut


def _cut(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options,
    make_plan: Callable[[Config], Plan],
    counts: dict[str, int],
) -> Fitted | None:
    """The configuration with tiles. None where that does not fit, ValueError where these tiles
    cannot be; then the model is as it was."""
    try:
        put_tiles(model, counts, optimizer)
        config, hooked = configure(model, optimizer, options, make_plan)
        return config, hooked, plan_or_refuse(config, make_plan)
    except StrataError:
        remove_tiles(model, optimizer)
        return None
    except ValueError:
        remove_tiles(model, optimizer)
        raise


def plan_or_refuse(config: Config, make_plan: Callable[[Config], Plan]) -> Plan:
    """The plan of `config`; with several ranks it gets a page size that all of them find. Raises
    StrataError where the budgets cannot work, with the smallest that would, and for an SSD with
    what is free."""
    try:
        plans = plans_of_one_page_size(config, make_plan)
        return plans[config["ranks"]["rank"] if "ranks" in config else 0]
    except StrataError as error:
        if not config["ssd_paths"] or not error.needed_bytes or error.tier != "ssd":
            raise
        free = format_size(machine.free_disk_bytes(config["ssd_paths"]))
        there = ", ".join(config["ssd_paths"])
        raise with_more(error, f" ({there}: {free} free)") from error


def tiles_wanted(model: nn.Module, options: Options, device_bytes: int) -> dict[str, int]:
    """The layers in units that are too large for the device, and into how many tiles to cut each.

    None where no unit is larger than the device, where that is no device at all, and where the
    user clips the gradients of units by themselves: tiles would be clipped apart.
    """
    if options.max_unit_norm is not None or device_bytes < DEVICE_BYTES_MIN:
        return {}
    parameters = list(model.parameters())
    units = [unit.params for unit in find_units(model, options.units)[0]]
    sizes = [sum(_bytes(parameters[p], options) for p in unit) for unit in units]
    if max(sizes) <= device_bytes:
        return {}
    large = {
        id(parameters[p])
        for unit, size in zip(units, sizes, strict=True)
        if size * UNIT_SHARE > device_bytes
        for p in unit
    }
    counts = {}
    for name, module in model.named_modules():
        weight = next(module.parameters(recurse=False), None)
        if weight is None or id(weight) not in large or isinstance(module, Tiled):
            continue
        count = -(-_bytes(weight, options) * TILE_SHARE // max(1, device_bytes))
        if name and count > 1 and dtensor_of(weight) is None and not why_not(module):
            counts[name] = min(count, weight.shape[0])
    return counts


def _bytes(parameter: nn.Parameter, options: Options) -> int:
    return parameter.numel() * (options.dtype or parameter.dtype).itemsize


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} into {count}" for name, count in counts.items())


def advice(model: nn.Module, plan: StepPlan, trace: Trace, device_bytes: int) -> str:
    """What strata.nn could do about a step that was refused, to follow the refusal: only what would
    free as much as the device lacks. A buffer that a loop has beside the loss stays, for example.
    """
    lack = plan.device_bytes_min - device_bytes
    modules = dict(model.named_modules())
    for unit in plan.refused_units if lack > 0 else ():
        names = [name for name in unit.split("+") if name in modules]
        inputs = _input_bytes(unit, trace)
        if found := _advice_for(names, model, lack, inputs):
            return found
    return ""


def _input_bytes(unit: str, trace: Trace) -> int:
    """The largest tensor that was there before the unit and is saved for its backward."""
    of = {index for index, traced in enumerate(trace.units) if traced.name == unit}
    return max((t.bytes for t in trace.tensors if t.unit in of and t.input), default=0)


def _advice_for(names: list[str], model: nn.Module, lack: int, input_bytes: int) -> str:
    named = [model.get_submodule(name) for name in names]
    if not why_not_chunked(model):
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        shared = {id(p): p for p in head.parameters()}
        if any(id(p) in shared for module in named for p in module.parameters()):
            weight = next(iter(shared.values()))
            rows = input_bytes // max(1, weight.shape[-1] * weight.itemsize)
            if LOGIT_BYTES * rows * columns_of(head) >= lack:
                return "; strata.nn.chunk_loss(model) makes the loss do without the logits"
    if len(named) == 1 and type(named[0]) in (nn.Linear, nn.Embedding):
        whole = WHOLE_COPIES * sum(p.nbytes for p in named[0].parameters())
        if whole * (TILES - 1) // TILES >= lack:
            return (
                f"; strata.nn.tile(model, {names[0]!r}, {TILES}) ahead of strata.wrap() cuts it "
                "into tiles"
            )
    return ""
