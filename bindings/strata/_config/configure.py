"""Turns a model, an optimizer and the user's options into the core's Config: pure but for looking
at what the machine has free.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from .._optim.groups import check_optimizer, group_spec, moments_of
from . import device, machine
from .budgets import choose_budgets
from .frozen import coded_parameters, stored_forms
from .managed import DTYPE_NAMES
from .options import Options
from .sharding import sharding_of
from .sizes import parse_budgets, parse_size
from .units import UnitSpec, find_units, used_apart
from .update_modes import STATE_DTYPES, check_moments, core_mode

if TYPE_CHECKING:
    from .._core import Config, GroupSpec, ParamSpec, Plan, StoredName

WORKERS_MAX = 4
WORKERS_MAX_GPU = 16  # the processors have little else to do, and more do not make memory faster


def configure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options,
    make_plan: Callable[[Config], Plan],
) -> tuple[Config, dict[nn.Module, list[int]]]:
    """The Config, and the modules to hook with the units that each one reads."""
    options.check()
    device_name = device.choose(options.device, model)
    _check_devices(model, device_name)
    foreign = check_optimizer(optimizer, model)
    if foreign is not None and options.state_dtype != torch.float32:
        raise ValueError(
            f"state_dtype={options.state_dtype!r} is not supported with {foreign.name}, which runs "
            "as its own class on float32 state: leave state_dtype out"
        )
    # What is clipped unit by unit are the gradients of blocks.
    forms = stored_forms(model, _trained_by(optimizer), options.frozen)
    slivers = options.max_unit_norm is None
    units, hooked = find_units(model, options.units, slivers, coded_parameters(model, forms))
    groups = [
        group_spec(optimizer, g, group, foreign) for g, group in enumerate(optimizer.param_groups)
    ]
    check_moments(options.state_dtype, (len(moments_of(group)) for group in groups))
    config = config_of(model, optimizer, options, units, groups, forms, device_name)
    config["apart"] = used_apart(units, hooked) if options.max_unit_norm else []
    config["together"] = _entered_together(model, hooked)
    given = parse_budgets(options.memory)
    for tier in given.keys() & {"host", "ssd"}:
        given[tier] //= options.shared_by()
    free = device.free_bytes(device_name)
    if free is not None:
        device.check_budget(device_name, given.get("device", 0), free, model)
    choose_budgets(config, given, make_plan, free, options)
    return config, hooked


def config_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options,
    units: Sequence[UnitSpec],
    groups: list[GroupSpec],
    forms: Mapping[str, StoredName],
    device_name: str,
) -> Config:
    """The Config of a model that is cut into these units, still without budgets. `forms`: of those
    that rest as codes, by name."""
    unit_of = {p: u for u, unit in enumerate(units) for p in unit.params}
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    is_trained = _trained_by(optimizer)
    params: list[ParamSpec] = []
    for i, (name, parameter) in enumerate(model.named_parameters()):
        trainable = is_trained(parameter)
        params.append(
            {
                "name": name,
                "numel": parameter.numel(),
                "dtype": DTYPE_NAMES[options.dtype or parameter.dtype],
                "trainable": trainable,
                "unit": unit_of[i],
                "group": group_of[id(parameter)] if trainable else 0,
            }
        )
        if name in forms:
            params[-1]["stored"] = forms[name]
    update, max_staleness = core_mode(options.update)
    workers = options.workers or max(1, default_workers(device_name) // options.shared_by())
    config: Config = {
        "params": params,
        "units": [unit.name for unit in units],
        "groups": groups,
        "page_bytes": 0 if options.page_size == "auto" else parse_size(options.page_size),
        "device_bytes": 0,
        "host_bytes": 0,
        "ssd_bytes": 0,
        "ssd_paths": options.own_ssd_paths(),
        "io_engine": options.io_engine,
        "workers": workers,
        "accumulate": options.gradient_accumulation_steps > 1,
        "update": update,
        "max_staleness": max_staleness,
        "moment_dtype": STATE_DTYPES[str(options.state_dtype)],
        "pin_workers": options.ranks is None and not any(map(sharding_of, model.parameters())),
        "compute_threads": device.compute_threads(device_name),
        "device": device_name,
        "snapshots": options.snapshots,
    }
    if options.ranks is not None:
        config["ranks"] = options.ranks.spec(options.rank_gradients)
    return config


def default_workers(device_name: str = device.HOST) -> int:
    """Threads that update parameters where nobody says how many."""
    spare = machine.processors() - device.compute_threads(device_name)
    if device_name != device.HOST:
        return max(1, min(WORKERS_MAX_GPU, spare))
    # Where none is spare, workers share them all with the computation.
    return min(WORKERS_MAX, spare if spare > 0 else machine.processors())


def _trained_by(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter], bool]:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return lambda parameter: parameter.requires_grad and id(parameter) in known


def _entered_together(
    model: nn.Module, hooked: dict[nn.Module, list[int]]
) -> list[tuple[str, list[int]]]:
    """By module: the units that are entered while it runs. One that owns parameters beside
    sub-modules is still running when those enter."""
    names = {name: hooked[module] for name, module in model.named_modules() if module in hooked}
    result = []
    for name, units in names.items():
        parts = name.split(".") if name else []
        around = (names.get(".".join(parts[:depth]), []) for depth in range(len(parts)))
        entered = sorted({*units, *itertools.chain.from_iterable(around)})
        result.append((name or "the model itself", entered))
    return result


def _check_devices(model: nn.Module, device_name: str) -> None:
    """Parameters come from the CPU, the meta device, or the device that they go to."""
    valid = (torch.device("cpu"), torch.device("meta"), device.torch_device(device_name))
    for name, parameter in model.named_parameters():
        if parameter.device not in valid:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, and the model is to compute on "
                f"{device_name}: pass device={str(parameter.device)!r}, or wrap the model before "
                "it is moved (on the CPU or the meta device)"
            )
