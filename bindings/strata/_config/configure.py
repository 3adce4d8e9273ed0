"""Turns a model, an optimizer and the user's options into the core's Config: pure but for looking
at what the machine has free.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._errors import check_choice
from .._optim.groups import check_optimizer, group_spec, moments_of
from . import device, machine
from .choices import (
    ACTIVATIONS,
    AS_IS,
    IO_ENGINES,
    check_page_size,
    check_snapshots,
    check_split,
    check_workers,
)
from .frozen import Frozen, check_frozen, coded_parameters, stored_forms
from .managed import DTYPE_NAMES, dtype_names
from .ranks import RANK_GRADIENTS, TIMEOUT_MAX_S, Ranks, plans_of_all
from .sizes import TIERS, Size, format_size, parse_budgets, parse_size
from .units import Chosen, UnitSpec, find_units, used_apart
from .update_modes import (
    STATE_DTYPES,
    UPDATE_KINDS,
    LockFree,
    Update,
    check_moments,
    check_state_dtype,
    check_update,
    core_mode,
)

if TYPE_CHECKING:
    from .._core import Config, GroupSpec, ParamSpec, Plan, StoredName

FREE_SHARE = 0.8  # of the free host memory that strata takes of its own accord
DISK_SHARE = 0.9
DEVICE_SHARE = 0.25  # of that, where not everything fits
WORKERS_MAX = 4
WORKERS_MAX_GPU = 16  # the processors have little else to do, and more do not make memory faster
UNBOUNDED = 1 << 50
FLOAT_MAX = sys.float_info.max

# Keywords whose type would otherwise be noticed late, or never.
KINDS: tuple[tuple[str, Any, str], ...] = (
    ("memory", (Mapping, NoneType), "a dictionary such as {'device': '8GiB'}"),
    ("update", (str, LockFree), UPDATE_KINDS),
    ("state_dtype", (torch.dtype, str), "torch.float32, torch.bfloat16 or '8bit'"),
    ("max_grad_norm", (float, int, NoneType), "a number or None"),
    ("max_unit_norm", (float, int, NoneType), "a number or None"),
    ("gradient_accumulation_steps", int, "a whole number"),
    ("skip_nonfinite", bool, "True or False"),
    ("workers", (int, NoneType), "a whole number or None"),
    ("seed", int, "a whole number"),
    ("init_device", (str, torch.device), "a device such as 'cuda'"),
    ("split", (int, NoneType), "a whole number or None"),
    ("snapshots", int, "a whole number"),
    ("rank_timeout", (float, int, NoneType), "seconds, or None"),
)

log = logging.getLogger("strata")


@dataclass
class Options:
    """The keywords of strata.wrap(), which documents them."""

    memory: Mapping[str, Size] | None = None
    ssd_path: str | Path | Sequence[str | Path] | None = None
    dtype: torch.dtype | None = None
    update: Update = "on_step"
    state_dtype: torch.dtype | str = torch.float32
    max_grad_norm: float | None = None
    max_unit_norm: float | None = None
    gradient_accumulation_steps: int = 1
    skip_nonfinite: bool = False
    units: Chosen | None = None
    page_size: Size = "auto"
    io_engine: str = "auto"
    workers: int | None = None
    weights: str | Path | None = None
    seed: int = 0
    init_device: str | torch.device = "cpu"
    activations: str | None = "auto"
    split: int | None = None
    device: str | torch.device = "auto"
    snapshots: int = 0
    frozen: Frozen = AS_IS
    rank_gradients: str = "mean"
    rank_timeout: float | None = None
    ranks: Ranks | None = None  # none of wrap()'s: what torch.distributed has started

    def check(self) -> None:
        """Raises for a value that can be seen to be wrong by itself."""
        for name, kinds, what in KINDS:
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise TypeError(f"{name} must be {what}, not {value!r}")
        check_update(self)
        check_state_dtype(self.state_dtype)
        check_choice("io_engine", self.io_engine, IO_ENGINES)
        device.parse(self.device)
        if self.activations is not None:
            check_choice("activations", self.activations, ACTIVATIONS)
        check_split(self.split, self.activations)
        if self.page_size != "auto":
            check_page_size(parse_size(self.page_size))
        if self.gradient_accumulation_steps < 1:
            raise ValueError(
                "gradient_accumulation_steps must be at least 1, not "
                f"{self.gradient_accumulation_steps}"
            )
        check_snapshots(self.snapshots, self.ssd_paths())
        check_frozen(self.frozen)
        check_choice("rank_gradients", self.rank_gradients, RANK_GRADIENTS)
        if self.rank_timeout is not None and not 0 < self.rank_timeout <= TIMEOUT_MAX_S:
            raise ValueError(
                f"rank_timeout must be a number of seconds up to {TIMEOUT_MAX_S:.0f}, or None to "
                f"wait for as long as it takes, not {self.rank_timeout}"
            )
        for name in ("max_grad_norm", "max_unit_norm"):
            norm = getattr(self, name)
            if norm is None:
                continue
            if not norm > 0:
                raise ValueError(f"{name} must be positive, or None, not {norm}")
            if norm > FLOAT_MAX and norm != float("inf"):  # a whole number may be
                raise ValueError(f"{name} is larger than any float: pass None for no clipping")
        if self.workers is not None:
            check_workers(self.workers)
        if self.dtype is not None and self.dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype {self.dtype} is not supported; valid: {dtype_names()}")

    def ssd_paths(self) -> list[str]:
        """The SSD folders, absolute."""
        if self.ssd_path is None:
            return []
        paths = [self.ssd_path] if isinstance(self.ssd_path, str | Path) else list(self.ssd_path)
        if not all(map(str, paths)):
            raise ValueError("ssd_path is empty: give a folder on the disk to use, or None")
        for path in paths:
            if not Path(path).exists():
                raise FileNotFoundError(f"ssd_path: there is no folder {path}; make it first")
        return [str(Path(path).absolute()) for path in paths]

    def shared_by(self) -> int:
        """Ranks among which the machine's host memory, SSD and processors are shared."""
        return self.ranks.together if self.ranks is not None else 1

    def least(self, number: int) -> int:
        """Of what the machine has free now: ranks look at different moments, and must choose the
        same budgets."""
        return self.ranks.least(number) if self.ranks is not None else number

    def free_host_bytes(self) -> int:
        """What is taken of its own accord by this process."""
        return self.least(int(machine.free_host_bytes() * FREE_SHARE)) // self.shared_by()

    def own_ssd_paths(self) -> list[str]:
        """Those of this rank, made where they are missing."""
        if self.ranks is None or not self.ranks.folder:
            return self.ssd_paths()
        paths = [Path(path) / f"rank-{self.ranks.rank}" for path in self.ssd_paths()]
        for path in paths:
            path.mkdir(exist_ok=True)
        return [str(path) for path in paths]


def default_workers(device_name: str = device.HOST) -> int:
    """Threads that update parameters where nobody says how many."""
    spare = machine.processors() - device.compute_threads(device_name)
    if device_name != device.HOST:
        return max(1, min(WORKERS_MAX_GPU, spare))
    # Where none is spare, workers share them all with the computation.
    return min(WORKERS_MAX, spare if spare > 0 else machine.processors())


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
    _choose_budgets(config, given, make_plan, free, options)
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
        "io_engine": options.io_engine,  # type: ignore[typeddict-item]
        "workers": workers,
        "accumulate": options.gradient_accumulation_steps > 1,
        "update": update,
        "max_staleness": max_staleness,
        "moment_dtype": STATE_DTYPES[str(options.state_dtype)],
        "pin_workers": options.ranks is None,
        "compute_threads": device.compute_threads(device_name),
        "device": device_name,
        "snapshots": options.snapshots,
        "apart": [],
        "together": [],
    }
    if options.ranks is not None:
        config["ranks"] = options.ranks.spec(options.rank_gradients, options.rank_timeout)
    return config


def _trained_by(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter], bool]:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return lambda parameter: parameter.requires_grad and id(parameter) in known


def tier_budgets(config: Config) -> dict[str, int]:
    """Bytes of each tier."""
    return {tier: config[f"{tier}_bytes"] for tier in TIERS}  # type: ignore[literal-required]


def device_goal(config: Config, options: Options) -> int:
    """The device bytes that frames, activations and PyTorch's own memory may take together.

    Where the user gave none, what the machine has: on the host backend they share its memory.
    """
    if "device" in parse_budgets(options.memory):
        return config["device_bytes"]
    if (gpu := device.free_bytes(config["device"])) is not None:
        return max(config["device_bytes"], int(gpu * FREE_SHARE))
    free = options.free_host_bytes()
    return config["device_bytes"] + max(0, free - config["device_bytes"] - config["host_bytes"])


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


def _choose_budgets(
    config: Config,
    given: dict[str, int],
    make_plan: Callable[[Config], Plan],
    gpu: int | None,
    options: Options,
) -> None:
    """Fills in the budgets: those given, and for the others what the machine has free. `gpu`: what
    the device has, where it has memory of its own; ranks share the rest."""
    if given.get("ssd") and not config["ssd_paths"]:
        raise ValueError("memory={'ssd': ...} needs ssd_path= as well")
    # 1. The SSD: only where a path is given, and then everything that rests may rest there.
    if config["ssd_paths"]:
        there = options.least(_default_ssd_bytes(config)) // options.shared_by()
        config["ssd_bytes"] = given.get("ssd", there)
    # 2. Device and host: what the model needs, if the machine has it.
    free = options.free_host_bytes()
    if "device" not in given or "host" not in given:
        whole: Config = {**config, "device_bytes": UNBOUNDED, "host_bytes": UNBOUNDED}
        needs = plans_of_all(whole, make_plan)
        device_bytes = max(need["device_bytes"] for need in needs)
        host_bytes = max(need["host_bytes"] for need in needs)
        given.update(shares(given, device_bytes, host_bytes, free, gpu))
    config["device_bytes"], config["host_bytes"] = given["device"], given["host"]
    log.info(
        "budgets: device (%s) %s, host %s, ssd %s; memory free: %s",
        config["device"],
        format_size(config["device_bytes"]),
        _share_text(config["host_bytes"], options),
        _share_text(config["ssd_bytes"], options),
        format_size(free),
    )


def _share_text(size: int, options: Options) -> str:
    """A budget, and where ranks share the machine's, of what it is a part."""
    count = options.shared_by()
    if count == 1 or size == 0:
        return format_size(size)
    return f"{format_size(size)} of {format_size(size * count)} (this rank, of {count})"


def shares(
    given: Mapping[str, int], device_wanted: int, host_wanted: int, free: int, gpu: int | None
) -> dict[str, int]:
    """`given` with budgets of device and host, in bytes: what is wanted, where that is there.
    `free`: of host memory, which a device without memory of its own (`gpu` None) shares."""
    if gpu is not None:
        device_bytes, host_bytes = min(device_wanted, int(gpu * FREE_SHARE)), min(host_wanted, free)
        return {"device": device_bytes, "host": host_bytes, **given}
    taken = min(given.get("device", 0), device_wanted) + min(given.get("host", 0), host_wanted)
    left = max(0, free - taken)
    device_bytes, host_bytes = min(device_wanted, left), min(host_wanted, left)
    if not {"device", "host"} & given.keys() and device_wanted + host_wanted > left:
        device_bytes = min(device_wanted, int(left * DEVICE_SHARE))
        host_bytes = min(host_wanted, left - device_bytes)
    return {"device": device_bytes, "host": host_bytes, **given}


def gradients_rest(config: Config) -> bool:
    """Whether there may be gradients behind a step, which a snapshot then has: those that add up
    over several backward() calls, and those that wait for their updates (LockFree)."""
    return config["accumulate"] or config["update"] == "lock_free"


def _default_ssd_bytes(config: Config) -> int:
    """Room for all that rests: parameter, residual or master, two moments, gradient; and for
    snapshots, which hold what is trained once each, with gradients that rest behind a step, and
    what is frozen once."""
    whole_pages = len(config["units"]) * (64 << 20)
    trained = sum(spec["numel"] for spec in config["params"] if spec["trainable"])
    frozen = sum(spec["numel"] for spec in config["params"]) - trained
    need = 18 * trained + 4 * frozen + whole_pages
    if kept := config["snapshots"]:
        of_each = 14 + 4 * gradients_rest(config)
        need += (kept + 1) * (of_each * trained + whole_pages) + 4 * frozen + whole_pages
    return min(need, int(machine.free_disk_bytes(config["ssd_paths"]) * DISK_SHARE))
