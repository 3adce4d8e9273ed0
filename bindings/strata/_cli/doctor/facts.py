"""What `strata doctor` looks at, one fact after the other. Nothing here needs torch but the facts
about it, and nothing raises: what cannot be read is a fact as well.

    for fact in facts(options, root=Path("/")):
        print(fact.verdict, fact.name, fact.says)

A fact is BAD where training would not work, a WARNING where it would work less well than it could.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import _core
from ..._config import drives, kernel, machine
from ..._config.choices import HOST
from ..._config.machine import ROOT
from ..._config.sizes import format_size
from ..._errors import StrataError
from ..._planning.budget_check import KINDS, MEMORY_KINDS
from ..._profiling.disk_speed import disk_speeds
from ..._report.report_text import format_decimal
from ..._storage.ssd_folders import remove_leftovers

OK, WARNING, BAD = "ok", "warning", "bad"
MIXED_USE = 0.5  # of the memory free: below, other programs have most of it
PAGE_BYTES = 4 << 20
HOST_BYTES_MIN = 512 << 20  # PyTorch itself takes about as much


@dataclass(frozen=True)
class Fact:
    """Something about this machine."""

    name: str
    verdict: str
    says: str
    change: str = ""  # what to do about it
    figures: dict[str, Any] = field(default_factory=dict)  # for programs


def facts(options: argparse.Namespace, root: Path = ROOT) -> Iterator[Fact]:
    """All of them. `options`: of options.doctor_parser(); `root`: what /proc, /sys and /dev lie
    under."""
    yield system(root)
    yield processor(root)
    yield memory(root)
    yield locked_memory(root)
    yield huge_pages(root)
    yield io_uring(root)
    yield from ssds(options.ssd_path, options.io_engine, root)
    yield pytorch()
    yield gpu(options.device, root)


def system(root: Path = ROOT) -> Fact:
    """The kernel, and what is around this process."""
    where = kernel.container(root)
    around = f"in a container ({where})" if where else "no container seen"
    release = kernel.release(root)
    figures = {"kernel": release, "container": where, "python": platform.python_version()}
    says = f"Linux {release}, {around}; Python {platform.python_version()}"
    return Fact("system", OK, says, figures=figures)


def processor(root: Path = ROOT) -> Fact:
    """Processors, and how much of their time control groups grant."""
    count, quota = machine.processors(), machine.processor_quota(root)
    bfloat16 = machine.has_bfloat16(machine.processor_flags(root))
    figures = {"processors": count, "quota": quota, "bfloat16": bfloat16}
    says = f"{machine.processor_name(root)}, {count} to use"
    if not bfloat16:
        says += "; computes bfloat16 piece by piece, so float32 is faster without a GPU"
    if quota is not None and quota < count:
        says += f"; a control group grants the time of {quota:g}"
        change = f"grant more processor time, or say workers={max(1, int(quota) - 1)}"
        return Fact("processor", WARNING, says, change, figures)
    return Fact("processor", OK, says, figures=figures)


def memory(root: Path = ROOT) -> Fact:
    """Host memory, and who limits it."""
    try:
        total, free = machine.host_bytes(root), machine.free_host_bytes(root)
        installed = machine.memory_info("MemTotal", root)
    except (OSError, ValueError, IndexError) as error:
        return Fact("memory", BAD, f"not known: {error}", "mount /proc in the container")
    figures = {"total_bytes": total, "free_bytes": free, "installed_bytes": installed}
    says = f"{format_size(free)} free of {format_size(total)}"
    if total < installed:
        says += f", which a control group leaves of {format_size(installed)}"
    if free < HOST_BYTES_MIN:
        change = "end other programs, or raise the limit of the control group or container"
        return Fact("memory", BAD, says + ": too little to train with", change, figures)
    if free < MIXED_USE * total:
        change = f"end what else uses memory: {format_size(total - free)} are in use"
        return Fact("memory", WARNING, says, change, figures)
    return Fact("memory", OK, says, figures=figures)


def locked_memory(root: Path = ROOT) -> Fact:
    """How much memory may be pinned: page frames are, and the memory that io_uring is told of."""
    limit = kernel.locked_bytes(root)
    figures = {"locked_bytes_max": limit}
    if limit is None:
        return Fact("locked memory", OK, "as much as is wanted", figures=figures)
    says = f"{format_size(limit)} at most: frames beyond are not pinned, and cost io_uring a copy"
    change = "raise `ulimit -l` (containers: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
    return Fact("locked memory", WARNING, says, change, figures)


def huge_pages(root: Path = ROOT) -> Fact:
    """Whether the kernel backs frames by huge pages, for which strata asks."""
    mode = kernel.huge_pages(root)
    if mode in ("always", "madvise"):
        return Fact("huge pages", OK, mode, figures={"huge_pages": mode})
    says = "never: every copy walks many small pages" if mode else "this kernel has none"
    change = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Fact("huge pages", WARNING, says, change if mode else "", {"huge_pages": mode})


def io_uring(root: Path = ROOT, attempt: Callable[[], int] | None = None) -> Fact:
    """Whether the fastest I/O engine can be used. `attempt`: as kernel.why_no_io_uring() takes."""
    reason = kernel.why_no_io_uring(root, attempt)
    figures = {"usable": not reason}
    if not reason:
        return Fact("io_uring", OK, "can be used", figures=figures)
    says = "cannot be used, so the SSD is read by libaio or threads"
    return Fact("io_uring", WARNING, says, f"allow io_uring: {reason}", figures)


def ssds(paths: Sequence[str], io_engine: str, root: Path = ROOT) -> Iterator[Fact]:
    """A fact for each path; one that says so where there are none."""
    if not paths:
        yield Fact("SSD", OK, "none given: --ssd-path DIR measures one", figures={"path": None})
    for path in paths:
        try:
            yield ssd(path, io_engine, root)
        except StrataError as error:
            yield _bad_ssd(path, str(error), f"free space under {path}, or give another folder")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            yield _bad_ssd(path, why, f"give a folder that can be written instead of {path}")


def _bad_ssd(path: str, why: str, change: str) -> Fact:
    return Fact(f"SSD {path}", BAD, f"cannot be used: {why}", change, {"path": path})


def ssd(path: str, io_engine: str, root: Path = ROOT) -> Fact:
    """A folder for pages: what it lies on, whether it can be used, and how fast it is. Raises
    OSError where nothing can be written, and StrataError where it cannot be measured."""
    if not os.path.isdir(path):
        made = os.path.lexists(path)
        raise NotADirectoryError(
            "it is no folder" if made else "there is no such folder: make it first"
        )
    indirect = drives.why_not_direct(path)
    remove_leftovers([path])
    found, drive = machine.file_system(path), drives.drive_of(path, root)
    read, write, read_beside, write_beside = disk_speeds([path], PAGE_BYTES, io_engine)
    figures: dict[str, Any] = {
        "path": path,
        "file_system": found.kind,
        "free_bytes": found.free_bytes,
        "direct": not indirect,
        "read_bytes_s": read,
        "write_bytes_s": write,
        "read_bytes_s_beside_writes": read_beside,
        "write_bytes_s_beside_reads": write_beside,
    }
    says = f"{found.kind}" + (f" on {drive.name} {drive.model}".rstrip() if drive else "")
    says += (
        f", {format_size(found.free_bytes)} free; reads {read / 1e9:.2f}, writes {write / 1e9:.2f} "
        f"GB/s, at once {read_beside / 1e9:.2f} and {write_beside / 1e9:.2f}"
    )
    if drive is not None:
        says += "; " + _wear(drive, figures)
    name = f"SSD {path}"
    if found.kind in MEMORY_KINDS:
        return Fact(
            name,
            WARNING,
            f"{KINDS[found.kind]}; {says}",
            f"give a folder on a drive instead of {path}",
            figures,
        )
    if found.kind in KINDS:
        change = f"{path} {KINDS[found.kind]}"
        return Fact(name, WARNING, says, change, figures)
    if indirect:
        change = f"take a file system with direct I/O (ext4, xfs) for {path}"
        says = f"no direct I/O ({indirect}): pages pass through the page cache; {says}"
        return Fact(name, WARNING, says, change, figures)
    return Fact(name, OK, says, figures=figures)


def _wear(drive: drives.Drive, figures: dict[str, Any]) -> str:
    """What is known of it, in words and in figures."""
    found = drives.health(drive)
    since = f"{format_decimal(drive.written_bytes)} written since the system started"
    figures |= {"drive": drive.name, "written_bytes_since_start": drive.written_bytes}
    if isinstance(found, str):
        return f"{since}; wear not known: {found}"
    figures |= {"used_percent": found.used_percent, "written_bytes": found.written_bytes}
    return (
        f"{found.used_percent} % of its endurance used, {format_decimal(found.written_bytes)} "
        f"written in its life"
    )


def pytorch() -> Fact:
    """Whether it can be imported, and is new enough."""
    try:
        import torch

        from ... import _torch_compat  # refuses old ones  # noqa: F401
    except Exception as error:  # whatever a half-installed library raises
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return Fact("torch", BAD, f"cannot be used: {why}", "pip install torch")
    cuda = torch.version.cuda
    kind = f"for CUDA {cuda}" if cuda else "without CUDA"
    figures = {"version": torch.__version__, "cuda": cuda}
    says = f"{torch.__version__}, {kind}"
    return Fact("torch", OK, says, figures=figures)


def gpu(wanted: str, root: Path = ROOT) -> Fact:
    """The device that would compute. `wanted`: of --device, "auto" as it is."""
    shown, driver = kernel.shows_gpus(root), kernel.gpu_driver(root)
    figures: dict[str, Any] = {"device": HOST, "driver": driver}
    if wanted == HOST:
        return Fact("device", OK, "the host, as asked for", figures=figures)
    name = "cuda:0" if wanted == "auto" else wanted
    if reason := _why_not(name):
        if wanted != "auto":
            change = "leave --device out, or mend what it says"
            return Fact("device", BAD, f"{name} cannot be used: {reason}", change, figures)
        if shown:
            return Fact("device", WARNING, "the host", f"have the GPU used: {reason}", figures)
        return Fact("device", OK, "the host: no GPU is seen", figures=figures)
    says = _core.device_description(name)
    figures |= {"device": name, "description": says}
    return Fact("device", OK, says + (f", driver {driver}" if driver else ""), figures=figures)


def _why_not(name: str) -> str:
    """As device.why_not(), also where torch cannot be imported."""
    if reason := _core.device_error(name):
        return reason
    try:
        from ..._config import device
    except Exception:  # which is a fact of its own
        return "torch cannot be imported"
    return device.why_not(name)
