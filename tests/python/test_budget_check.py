"""Budgets larger than the machine, file systems that are no plain disk, what wears a drive out, and
what the processor can do.
"""

import argparse
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import adamw, build, llama
from strata._cli import main as cli
from strata._cli import planner
from strata._cli.finetune import run as finetune
from strata._config import device, machine
from strata._config.machine import FileSystem
from strata._config.sizes import format_duration, format_rate, write_size
from strata._planning import budget_check
from strata._report.report_text import like, wear_lines
from torch import nn

GIB = 1 << 30


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[FileSystem]:
    """24 GiB of memory, 18 of them free; what lies under every folder can be changed."""
    found = [FileSystem("ext4", "/mnt", 100 * GIB, 77 * GIB)]
    monkeypatch.setattr(machine, "host_bytes", lambda: 24 * GIB)
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 18 * GIB)
    monkeypatch.setattr(machine, "file_system", lambda path: found[0])
    return found


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ({"host": 900 * GIB}, "host budget of 900.0 GiB: this machine has 24.0 GiB, 18.0 GiB of"),
        ({"device": 12 * GIB, "host": 13 * GIB}, "host and device budgets, which share its memory"),
        ({"ssd": 900 << 40}, "ssd budget on /mnt of 900.0 TiB: this machine has 100.0 GiB, 77.0"),
    ],
)
@pytest.mark.usefixtures("disk")
def test_what_cannot_be_is_refused_with_the_numbers(memory: dict[str, int], says: str) -> None:
    with pytest.raises(strata.StrataError, match=says):
        budget_check.check(memory, "host", ["/"])
    (said,) = budget_check.remarks(memory, "host", ["/"])
    assert said.startswith("on this machine it would be refused: ")


@pytest.mark.usefixtures("disk")
def test_what_is_not_free_is_warned_of() -> None:
    (said,) = budget_check.check({"host": 20 * GIB}, "host", [])
    assert said == "host budget of 20.0 GiB: only 18.0 GiB of 24.0 GiB are free now"
    (said,) = budget_check.check({"ssd": 90 * GIB}, "host", ["/"])
    assert "only 77.0 GiB of 100.0 GiB" in said
    assert budget_check.check({"device": 80 * GIB, "host": 8 * GIB}, "cuda:0", ["/"]) == []


def test_a_tmpfs_counts_as_memory(disk: list[FileSystem]) -> None:
    disk[0] = FileSystem("tmpfs", "/dev/shm", 50 * GIB, 50 * GIB)
    with pytest.raises(strata.StrataError, match="host and ssd budgets, which share its memory"):
        budget_check.check({"host": 8 * GIB, "ssd": 17 * GIB}, "cuda:0", ["/"])
    (said,) = budget_check.check({"host": 1 * GIB, "ssd": 1 * GIB}, "cuda:0", ["/"])
    assert said == "/ is memory: what rests there counts as host memory"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("btrfs", "chattr +C"),
        ("zfs", "zfs_arc_max"),
        ("9p", "/mnt/c is under WSL"),
        ("drvfs", "Windows folder"),
        ("overlay", "container"),
        ("nfs4", "network"),
        ("ext4", ""),
        ("xfs", ""),
    ],
)
def test_other_file_systems_get_a_word(disk: list[FileSystem], kind: str, says: str) -> None:
    disk[0] = FileSystem(kind, "/mnt", 100 * GIB, 77 * GIB)
    said = budget_check.check({}, "host", ["/"])
    assert says in "".join(said)
    assert bool(said) == bool(says)


def test_the_mount_that_is_seen_is_the_last_and_longest(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    mounts = tmp_path / "proc" / "self" / "mountinfo"
    mounts.parent.mkdir(parents=True)
    escaped = str(folder).replace(" ", r"\040")
    mounts.write_text(
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        f"30 27 0:44 / {escaped} rw shared:1 master:2 - tmpfs tmpfs rw\n"
        f"31 27 0:45 / {escaped} rw - btrfs /dev/sda rw\n"
        f"32 27 0:46 / {escaped}c rw - zfs pool rw\n"
    )
    found = machine.file_system(folder, tmp_path)
    assert (found.kind, found.mount) == ("btrfs", str(folder))
    assert 0 < found.free_bytes <= found.total_bytes
    assert machine.file_system(tmp_path, tmp_path).kind == "ext4"


def made_root(folder: Path, files: dict[str, str]) -> Path:
    """A folder that stands for / where /proc and /sys are read."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


MEMINFO = "MemTotal:  100000 kB\nMemAvailable:  80000 kB\n"


def test_control_groups_limit_what_there_is_in_all(tmp_path: Path) -> None:
    for version, (line, limit, used) in {
        "2": ("0::/a/b", "a/memory.max", "a/memory.current"),
        "1": (
            "4:memory:/a/b",
            "memory/a/memory.limit_in_bytes",
            "memory/a/memory.usage_in_bytes",
        ),
    }.items():
        files = {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": f"{line}\n",
            f"sys/fs/cgroup/{limit}": "50000000\n",
            f"sys/fs/cgroup/{used}": "20000000\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "20000000\n",
        }
        root = made_root(tmp_path / version, files)
        assert machine.host_bytes(root) == 50_000_000
        assert machine.free_host_bytes(root) == 30_000_000
    root = made_root(tmp_path / "none", {"proc/meminfo": MEMINFO})
    assert (machine.host_bytes(root), machine.free_host_bytes(root)) == (102400000, 81920000)


def test_control_groups_limit_processor_time(tmp_path: Path) -> None:
    group = {"proc/self/cgroup": "0::/a/b\n"}
    second = {"sys/fs/cgroup/a/cpu.max": "150000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 9\n"}
    assert machine.processor_quota(made_root(tmp_path / "2", group | second)) == 1.5
    first = {
        "proc/self/cgroup": "7:cpu,cpuacct:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert machine.processor_quota(made_root(tmp_path / "1", first)) is None
    assert machine.processor_quota(tmp_path / "nowhere") is None


def test_wrap_refuses_at_once_and_leaves_the_model(tmp_path: Path) -> None:
    for memory in ({"host": "900TiB"}, {"ssd": "900000TiB"}):
        model = build(llama)
        for function in (strata.plan, strata.wrap):
            with pytest.raises(strata.StrataError, match="this machine has"):
                function(model, adamw(model), memory=memory, ssd_path=tmp_path)
        assert not any(module.__dict__.get("_strata") for module in model.modules())


def test_wrap_warns_of_what_is_not_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 3 << 20)
    model = build(llama)
    with caplog.at_level(logging.WARNING, "strata"):
        strata.plan(model, adamw(model), memory={"device": "2MiB", "host": "8MiB"})
    (said,) = caplog.records
    assert "10.0 MiB: only 3.0 MiB of" in said.getMessage()


# Endurance ----------------------------------------------------------------------------------------


def test_a_7b_model_at_12_bytes_a_step_wears_a_drive_of_600_tb_out_in_7100_steps() -> None:
    said = wear_lines(7e9 * 12, 600 * 10**12, steps=200, step_seconds=60.0)
    assert said == [
        "84 GB a step are written to the SSD, 121 TB a day, 16.8 TB in 200 steps",
        "a drive of 600 TB endurance is worn out in 7,100 steps (4.96 days)",
    ]
    assert len(wear_lines(84e9, 600 * 10**12, 357)) == 2  # 4.998 %
    assert wear_lines(84e9, 600 * 10**12, 358)[2] == (
        "warning: this run takes 5 % of the drive's endurance"
    )
    assert wear_lines(84e9, 10 * 10**12, 500)[2] == (
        "warning: this run takes 420 % of the drive's endurance"
    )
    assert wear_lines(84e9, 10**10, 1) == [
        "84 GB a step are written to the SSD, 84 GB in 1 step",
        "a drive of 10 GB endurance is worn out in less than a step",
        "warning: this run takes 840 % of the drive's endurance",
    ]
    assert wear_lines(84e9) == ["84 GB a step are written to the SSD"]
    assert wear_lines(0, 600 * 10**12, 358) == []


def test_durations_and_sizes_for_options() -> None:
    assert [format_duration(s) for s in (3.21, 150, 60 * 200, 86400 * 3, 2.84e9, 2.84e12)] == [
        "3.21 s", "2.5 minutes", "3.33 hours", "3 days", "90 years", "89,994 years",
    ]  # fmt: skip
    assert [write_size(n) for n in (1, 5 << 20, (5 << 20) + 1, (10 << 30) + 1)] == [
        "1MiB", "5MiB", "6MiB", "11GiB",
    ]  # fmt: skip


def test_speeds_that_are_low_are_told_too() -> None:
    assert [format_rate(x, "tokens") for x in (5124.6, 9.96, 1.25, 0.57, 2048 / 21948272)] == [
        "5,125 tokens a second", "10 tokens a second", "1.2 tokens a second",
        "2,052 tokens an hour", "8.1 tokens a day",
    ]  # fmt: skip


def test_times_beside_each_other_are_told_in_one_unit() -> None:
    for seconds, told, other in (
        (0.25, "250 ms", "10 ms"),
        (3599.0, "3,599 s", "0 s"),
        (3600.0, "60.0 minutes", "0.0 minutes"),
        (9000.0, "2.50 hours", "0.00 hours"),
        (21948272.0, "254 days", "0 days"),
        (2.84e12, "89,994 years", "0 years"),
    ):
        assert (like(seconds)(seconds), like(seconds)(0.01)) == (told, other)


def test_a_gpu_keeps_room_for_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda name: 8 * GIB)
    memory = {"device": 8 * GIB - (256 << 20), "host": 1 << 20, "ssd": 0}
    told = argparse.Namespace(device="cuda:0", ssd_path=[], memory=memory)
    (said,) = planner.remarks(told)
    assert "CUDA's context and kernels take about 896.0 MiB" in said
    assert "7.1 GiB is safe" in said
    memory["device"] = 7 * GIB
    assert planner.remarks(told) == []


# Processors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ({"avx2", "fma"}, "float32"),
        ({"avx512f", "avx512bw", "avx512vl"}, "float32"),
        ({"avx512f", "avx512_bf16"}, "bfloat16"),
        ({"amx_bf16", "amx_tile"}, "bfloat16"),
        ({"asimd", "bf16"}, "bfloat16"),
        ({"asimd"}, "float32"),
        (set(), "float32"),
    ],
)
def test_the_dtype_is_decided_by_what_the_processor_has(flags: set[str], dtype: str) -> None:
    assert finetune.usual_dtype("host", flags) == dtype
    assert finetune.usual_dtype("cuda:0", flags) == "bfloat16"


def test_flags_are_those_of_linux(tmp_path: Path) -> None:
    assert machine.processor_flags(tmp_path) == set()
    text = "model name\t: X\nflags\t\t: fpu avx512_bf16\n\nflags\t: fpu\n"
    assert machine.processor_flags(made_root(tmp_path, {"proc/cpuinfo": text})) == {
        "fpu",
        "avx512_bf16",
    }
    text = "Features\t: fp asimd bf16\nCPU part\t: 0xd40\n"
    assert machine.has_bfloat16(
        machine.processor_flags(made_root(tmp_path, {"proc/cpuinfo": text}))
    )


# What commands say --------------------------------------------------------------------------------


def test_io_tune_names_the_file_system(
    disk: list[FileSystem], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from strata._cli import io_tune

    disk[0] = FileSystem("btrfs", "/mnt", 100 * GIB, 77 * GIB)
    monkeypatch.setattr(io_tune, "sweep", lambda *_: "")
    monkeypatch.setattr(io_tune, "calibration", lambda *_, **__: None)
    monkeypatch.setattr(io_tune, "lanes_table", lambda *_: "")
    assert cli.main(["io-tune", "--ssd-path", "/", "--device", "host"]) == 0
    assert "btrfs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "flags", "slow"),
    [
        (torch.bfloat16, {"avx2"}, True),
        (torch.bfloat16, {"avx2", "avx512_bf16"}, False),
        (torch.float32, {"avx2"}, False),
    ],
)
def test_a_dtype_that_the_processor_lacks_is_said_with_what_to_do(
    dtype: torch.dtype,
    flags: set[str],
    slow: bool,
    core: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(machine, "processor_flags", lambda: flags)
    model = nn.Linear(4, 4)
    strata.wrap(model, torch.optim.AdamW(model.parameters()), dtype=dtype, device="host")
    strata.unwrap(model)
    assert ("Pass dtype=torch.float32" in caplog.text) == slow
