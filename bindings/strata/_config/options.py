"""The keywords of strata.wrap(), and what can be seen to be wrong with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from .._errors import check_choice
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
from .frozen import Frozen, check_frozen
from .managed import DTYPE_NAMES, dtype_names
from .paths import AnyPath, as_path, is_path
from .ranks import RANK_GRADIENTS, TIMEOUT_MAX_S, Ranks
from .sizes import Size, parse_size
from .units import Chosen
from .update_modes import UPDATE_KINDS, LockFree, Update, check_state_dtype, check_update

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

FREE_SHARE = 0.8  # of free memory that strata takes of its own accord
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


@dataclass
class Options:
    """The keywords of strata.wrap(), which documents them."""

    memory: Mapping[str, Size] | None = None
    ssd_path: AnyPath | Sequence[AnyPath] | None = None
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
    weights: AnyPath | None = None
    seed: int = 0
    init_device: str | torch.device = "cpu"
    activations: str | None = "auto"
    split: int | None = None
    device: str | torch.device = "auto"
    snapshots: int = 0
    frozen: Frozen = AS_IS
    rank_group: ProcessGroup | DeviceMesh | None = None  # checked where it is looked up
    rank_gradients: str = "mean"
    rank_timeout: float | None = None
    ranks: Ranks | None = None  # none of wrap()'s: those of rank_group
    # In host memory, and on the SSD, as all ranks see it.
    _free: tuple[int, int] | None = field(default=None, init=False, repr=False)

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
        if self.weights is not None:
            as_path(self.weights, "weights")
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
        given: Any = self.ssd_path
        paths = []
        for each in [given] if is_path(given) or not isinstance(given, Iterable) else given:
            paths.append(path := as_path(each, "ssd_path"))
            if not os.fspath(each):
                raise ValueError("ssd_path is empty: give a folder on the disk to use, or None")
            if not path.exists():
                raise FileNotFoundError(f"ssd_path: there is no folder {path}; make it first")
        return [str(path.absolute()) for path in paths]

    def shared_by(self) -> int:
        """Ranks among which the machine's host memory, SSD and processors are shared."""
        return self.ranks.count if self.ranks is not None else 1

    def look_at_machine(self) -> None:
        """What all ranks find free from here on: they look at different moments, and must choose
        the same budgets. All of them come here, ahead of what a rank does in its own way."""
        if self.ranks is not None:
            host, disk = machine.free_host_bytes(), self._free_disk()
            self._free = (self.ranks.all.least(host), self.ranks.all.least(disk))

    def take_page_size_of_all(self, found: int) -> bool:
        """Where page_size is "auto": the smallest of those that ranks find, by device budgets that
        may differ. Returns whether it is another one than `found`. All ranks come here."""
        if self.ranks is None or self.page_size != "auto":
            return False
        smallest = self.ranks.all.least(found)
        if smallest < found:
            self.page_size = smallest
        return smallest < found

    def free_host_bytes(self) -> int:
        """What is taken of its own accord by this process."""
        free = self._free[0] if self._free else machine.free_host_bytes()
        return int(free * FREE_SHARE) // self.shared_by()

    def free_disk_bytes(self) -> int:
        """In the folders of the SSD, which ranks share."""
        return self._free[1] if self._free else self._free_disk()

    def _free_disk(self) -> int:
        return machine.free_disk_bytes(self.ssd_paths()) if self.ssd_path is not None else 0

    def own_ssd_paths(self) -> list[str]:
        """Those of this rank, made where they are missing."""
        if self.ranks is None or not self.ranks.folder:
            return self.ssd_paths()
        paths = [Path(path) / f"rank-{self.ranks.rank}" for path in self.ssd_paths()]
        for path in paths:
            path.mkdir(exist_ok=True)
        return [str(path) for path in paths]
