"""`strata doctor`: every fact where it is good, bad, and not to be read; the order of what to
change; and the exit status."""

import argparse
import errno
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from strata import _core
from strata._cli import main as cli
from strata._cli.doctor import capacity, facts, run
from strata._cli.doctor.facts import BAD, OK, WARNING, Fact
from strata._cli.doctor.run import Change, Diagnosis
from strata._cli.options import doctor_parser
from strata._config import drives, kernel
from strata._config.machine import FileSystem
from strata._profiling.calibrate import Calibration, typical_costs

GIB = 1 << 30
COMMAND = [sys.executable, "-m", "strata", "doctor"]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

MACHINE = {
    "proc/sys/kernel/osrelease": "6.1.0-amd64\n",
    "proc/cpuinfo": "model name\t: Some CPU\nflags\t\t: fpu avx512_bf16\n",
    "proc/meminfo": f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/limits": "Max locked memory         8388608              8388608         bytes\n",
    "proc/self/status": "CapEff:\t0000000000000000\nSeccomp:\t2\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}


def made(folder: Path, **files: str) -> Path:
    """A folder that stands for /: MACHINE, with other files, and without those that are ""."""
    changed = {name.replace("__", "/"): text for name, text in files.items()}
    for name, text in {**MACHINE, **changed}.items():
        if text:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def options(**more: Any) -> argparse.Namespace:
    told = vars(doctor_parser("").parse([]))
    return argparse.Namespace(**{**told, "device": "host", **more})


def test_a_good_machine_has_nothing_to_change(tmp_path: Path) -> None:
    root = made(tmp_path, proc__self__status="CapEff:\t000001ffffffffff\n")
    assert facts.system(root).says.startswith("Linux 6.1.0-amd64, no container seen")
    assert facts.processor(root).verdict == OK
    assert "Some CPU" in facts.processor(root).says
    found = facts.memory(root)
    assert (found.verdict, found.says) == (OK, "12.0 GiB free of 16.0 GiB")
    assert facts.locked_memory(root) == Fact(
        "locked memory", OK, "as much as is wanted", figures={"locked_bytes_max": None}
    )
    assert facts.huge_pages(root).verdict == OK
    assert facts.io_uring(root, lambda: 0).verdict == OK


def test_nothing_there_to_be_read_is_a_fact_too(tmp_path: Path) -> None:
    found = list(facts.facts(options(), tmp_path))
    assert facts.memory(tmp_path).verdict == BAD
    assert "/proc/meminfo" in facts.memory(tmp_path).says
    assert facts.huge_pages(tmp_path) == Fact(
        "huge pages", WARNING, "this kernel has none", figures={"huge_pages": ""}
    )
    assert facts.locked_memory(tmp_path).verdict == OK
    names = ["system", "processor", "memory", "locked memory", "huge pages", "io_uring", "SSD"]
    assert [fact.name for fact in found] == [*names, "torch", "device"]


@pytest.mark.parametrize("text", ["MemTotal:", "MemTotal: x kB\nMemAvailable: 3 kB", "\xff"])
def test_a_broken_file_is_no_traceback(tmp_path: Path, text: str) -> None:
    assert facts.memory(made(tmp_path, proc__meminfo=text)).verdict == BAD


def test_memory_that_others_have_or_a_group_keeps(tmp_path: Path) -> None:
    used = made(tmp_path / "used", proc__meminfo=f"MemTotal: {8 << 20}\nMemAvailable: {2 << 20}\n")
    found = facts.memory(used)
    assert found.verdict == WARNING
    assert found.change == "end what else uses memory: 6.0 GiB are in use"
    group = made(
        tmp_path / "group",
        sys__fs__cgroup__memory_max="unused",
        **{
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{4 * GIB - (100 << 20)}\n",
        },
    )
    found = facts.memory(group)
    assert found.verdict == BAD
    assert "100.0 MiB free of 4.0 GiB, which a control group leaves of 16.0 GiB" in found.says
    assert found.figures["total_bytes"] == 4 * GIB


def test_processor_time_that_a_group_keeps(tmp_path: Path) -> None:
    root = made(tmp_path, **{"sys/fs/cgroup/cpu.max": "50000 100000\n"}, proc__cpuinfo="flags: a\n")
    found = facts.processor(root)
    assert found.verdict == WARNING
    assert "grants the time of 0.5" in found.says
    assert "workers=1" in found.change
    assert "float32 is faster" in found.says


def test_little_locked_memory_and_no_huge_pages(tmp_path: Path) -> None:
    root = made(tmp_path, sys__kernel__mm__transparent_hugepage__enabled="always madvise [never]\n")
    found = facts.locked_memory(root)
    assert (found.verdict, found.figures) == (WARNING, {"locked_bytes_max": 8 << 20})
    assert "--ulimit memlock=-1" in found.change
    assert facts.huge_pages(root).verdict == WARNING
    assert "madvise" in facts.huge_pages(root).change


@pytest.mark.parametrize(
    ("code", "files", "says"),
    [
        (errno.ENOSYS, {}, "the kernel (6.1.0-amd64) has none"),
        (errno.ENOMEM, {}, "ulimit -l"),
        (errno.EMFILE, {}, "Too many open files"),
        (errno.EPERM, {"proc/sys/kernel/io_uring_disabled": "2\n"}, "io_uring_disabled is 2"),
        (
            errno.EPERM,
            {"proc/sys/kernel/io_uring_disabled": "1\n", "proc/sys/kernel/io_uring_group": "7\n"},
            "not in group 7",
        ),
        (errno.EPERM, {"proc/sys/kernel/io_uring_disabled": "0\n"}, "seccomp"),
        (errno.EPERM, {".dockerenv": " "}, "as Docker does by default: start the container"),
        (errno.EPERM, {"run/.containerenv": " "}, "as Podman does"),
        (errno.EPERM, {"proc/self/cgroup": "0::/kubepods/pod1\n"}, "as kubepods does"),
        (errno.EPERM, {"run/systemd/container": "systemd-nspawn\n"}, "as systemd-nspawn does"),
        (errno.EPERM, {"proc/sys/kernel/osrelease": "5.15-microsoft-WSL2\n"}, "as WSL does"),
    ],
)
def test_why_io_uring_cannot_be_used(
    tmp_path: Path, code: int, files: dict[str, str], says: str
) -> None:
    found = facts.io_uring(made(tmp_path, **files), lambda: code)
    assert found.verdict == WARNING
    assert says in found.change


def test_io_uring_is_tried_as_the_core_does(tmp_path: Path) -> None:
    engine = _core.SsdProbe([str(tmp_path)], 1 << 20, "auto", 4 << 20).io_engine
    assert (kernel.why_no_io_uring() == "") == (engine == "io_uring")


# Drives -------------------------------------------------------------------------------------------


def test_a_folder_on_a_drive_is_measured(tmp_path: Path) -> None:
    (found,) = facts.ssds([str(tmp_path)], "auto")
    assert found.verdict in (OK, WARNING)  # a test may run on tmpfs or overlay
    assert found.figures["read_bytes_s"] > 0
    assert found.figures["write_bytes_s"] > 0
    assert found.figures["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/nowhere/at/all", "there is no such folder"),
        ("/proc/version", "it is no folder"),
        ("/proc", "cannot be used: "),
    ],
)
def test_a_folder_that_cannot_be_used(path: str, says: str) -> None:
    (found,) = facts.ssds([path], "auto")
    assert (found.name, found.verdict) == (f"SSD {path}", BAD)
    assert says in found.says
    assert path in found.change


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
    ],
)
def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, says: str
) -> None:
    def refuse(_path: str) -> str:
        raise error

    monkeypatch.setattr(drives, "why_not_direct", refuse)
    (found,) = facts.ssds([str(tmp_path)], "auto")
    assert (found.verdict, found.says) == (BAD, f"cannot be used: {says}")


MOUNTED = "mount -t tmpfs -o size=1m none {folder} && "


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (MOUNTED + "mount -o remount,ro {folder} && ", "Read-only file system"),
        (MOUNTED + "head -c 1M /dev/zero > {folder}/full; ", "space"),
        (MOUNTED, "needs"),  # too small for the file that is measured
    ],
)
def test_a_real_disk_that_is_full_or_read_only(tmp_path: Path, prepare: str, says: str) -> None:
    # In name spaces of its own, so that nothing stays mounted.
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    try:
        allowed = subprocess.run([*inside, MOUNTED.format(folder=tmp_path) + "true"], check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if allowed.returncode:
        pytest.skip("this user may not mount in a name space of its own")
    code = (
        "import sys; from strata._cli.doctor import facts; "
        "(found,) = facts.ssds(sys.argv[1:], 'auto'); print(found.verdict, found.says)"
    )
    script = prepare.format(folder=tmp_path) + f'"$0" -c "{code}" {tmp_path}'
    done = subprocess.run(
        [*inside, script, sys.executable], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.stdout.startswith("bad "), done.stderr
    assert says in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("kind", "verdict", "says"),
    [
        ("ext4", OK, ""),
        ("tmpfs", WARNING, "counts as host memory"),
        ("nfs4", WARNING, "network"),
        ("overlay", WARNING, "volume"),
        ("btrfs", WARNING, "chattr"),
    ],
)
def test_kinds_of_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, verdict: str, says: str
) -> None:
    system = FileSystem(kind, "/", 9 * GIB, 5 * GIB)
    monkeypatch.setattr(facts.machine, "file_system", lambda *_: system)
    monkeypatch.setattr(facts, "disk_speeds", lambda *_: (2e9, 1e9, 8e8, 7e8))
    monkeypatch.setattr(drives, "drive_of", lambda *_: None)
    monkeypatch.setattr(drives, "why_not_direct", lambda _: "")
    (found,) = facts.ssds([str(tmp_path)], "auto")
    assert found.verdict == verdict
    assert says in found.says + found.change
    assert "5.0 GiB free; reads 2.00, writes 1.00 GB/s, at once 0.80 and 0.70" in found.says
    monkeypatch.setattr(drives, "why_not_direct", lambda _: "Invalid argument")
    (found,) = facts.ssds([str(tmp_path)], "auto")
    assert found.verdict == WARNING
    assert found.figures["direct"] is False


def test_endurance_follows_from_what_is_used_up() -> None:
    used = Fact("SSD a", OK, "", figures={"path": "a", "used_percent": 4, "written_bytes": 100})
    assert run._endurance([used, used]) == 5000
    unused = Fact("SSD b", OK, "", figures={"path": "b", "used_percent": 0, "written_bytes": 100})
    assert run._endurance([used, unused]) is None
    assert run._endurance([Fact("SSD", OK, "")]) is None


# Devices, and torch -------------------------------------------------------------------------------


def test_a_gpu_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "device_error", lambda name: "the driver is too old")
    assert facts.gpu("auto", tmp_path).says == "the host: no GPU is seen"
    found = facts.gpu("cuda:1", tmp_path)
    assert (found.verdict, found.says) == (BAD, "cuda:1 cannot be used: the driver is too old")
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n"
    root = made(tmp_path, dev__nvidiactl=" ", proc__driver__nvidia__version=version)
    found = facts.gpu("auto", root)
    assert found.verdict == WARNING
    assert found.change == "have the GPU used: the driver is too old"
    assert found.figures == {"device": "host", "driver": "550.54.15"}
    monkeypatch.setattr(facts, "_why_not", lambda name: "")
    monkeypatch.setattr(_core, "device_description", lambda name: "GPU 0 (Some GPU)")
    found = facts.gpu("auto", root)
    assert (found.verdict, found.says) == (OK, "GPU 0 (Some GPU), driver 550.54.15")


def test_without_torch_everything_else_is_told(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: not found')\n")
    for name in ("numpy", "transformers", "matplotlib", "tqdm"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')\n")
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
    done = subprocess.run(
        [*COMMAND, "--ssd-path", str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "bad      torch: cannot be used: ImportError: libcudart.so.12: not found" in done.stdout
    assert "GB/s" in done.stdout
    assert "budgets and models are not known: torch cannot be used" in done.stdout
    assert " 1. pip install torch" in done.stdout
    assert "training would not work: torch: " in " ".join(done.stdout.split())
    assert done.stderr == ""


# All together -------------------------------------------------------------------------------------


def test_changes_come_in_order_of_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        Fact("torch", OK, ""),
        Fact("device", OK, "", figures={"device": "host"}),
        Fact("io_uring", WARNING, "", "allow io_uring"),
        Fact("SSD /a", BAD, "is full", "free space"),
    ]
    gains = [Change("little", 0.2), Change("much", 3.0), Change("hardly", 0.01)]
    monkeypatch.setattr(run, "facts", lambda *_: told)
    monkeypatch.setattr(run, "_look_ahead", lambda *_: gains)
    found = run.diagnose(options())
    assert [c.says for c in found.changes] == ["free space", "much", "little", "allow io_uring"]
    assert found.why_not == ["SSD /a: is full"]

    def fails(*_: Any) -> list[Change]:
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(run, "_look_ahead", fails)
    found = run.diagnose(options())
    assert found.why_no_capacity == "No module named 'transformers'"
    assert "budgets and models are not known: No module named" in str(found)


def test_the_exit_status_says_whether_training_would_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Diagnosis([Fact("memory", OK, "enough")])
    monkeypatch.setattr(run, "diagnose", lambda *_: good)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("\ntraining would work\n")
    room = {"device": GIB, "host": GIB, "ssd": 0}
    bad = Diagnosis([Fact("memory", BAD, "none")], room)
    monkeypatch.setattr(run, "diagnose", lambda *_: bad)
    assert cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["works"] is False
    assert found["why_not"][0] == "memory: none"
    assert "not even" in found["why_not"][1]
    assert found["budgets"] == room


def test_the_ladder_has_no_gaps() -> None:
    counts = [capacity.parameter_count(shape) for shape in capacity.SHAPES]
    assert max(b / a for a, b in itertools.pairwise(counts)) < 2


@pytest.mark.thorough
def test_nothing_fits_into_nothing() -> None:
    room = {"device": 1 << 20, "host": 1 << 20, "ssd": 0}
    speeds = Calibration(typical_costs(), 1e12, 1e11)
    assert capacity.largest(room, speeds, options(), "host") is None
    # The smallest of the ladder rests in these bytes, and its step does not fit.
    room["host"] = 14 * capacity.parameter_count(capacity.SHAPES[0])
    assert capacity.largest(room, speeds, options(), "host") is None


def test_budgets_are_those_of_wrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity.machine, "free_host_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(capacity.machine, "free_disk_bytes", lambda paths: len(paths) * 100 * GIB)
    assert capacity.budgets("host", []) == {"device": 2 * GIB, "host": 6 * GIB, "ssd": 0}
    kind = ["tmpfs"]
    system = lambda _: FileSystem(kind[0], "/", GIB, GIB)  # noqa: E731
    monkeypatch.setattr(capacity.machine, "file_system", system)
    assert capacity.budgets("host", [str(tmp_path)])["ssd"] == 0
    kind[0] = "xfs"
    assert capacity.budgets("host", [str(tmp_path)])["ssd"] == 90 * GIB
    monkeypatch.setattr(capacity.device, "free_bytes", lambda _: 100 * GIB)
    assert capacity.budgets("cuda:0", []) == {"device": 80 * GIB, "host": 8 * GIB, "ssd": 0}


@pytest.mark.thorough
def test_this_machine(tmp_path: Path) -> None:
    told = ["--ssd-path", str(tmp_path), "--sequence", "128", "--json", "--ssd-endurance", "600TB"]
    done = subprocess.run([*COMMAND, *told], env=ENVIRONMENT, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["works"] else 1)
    assert found["works"], found["why_not"]
    assert found["largest"]["parameters"] > 10e6
    assert found["largest"]["tokens_per_second"] > 0
    assert set(found["budgets"]) == {"device", "host", "ssd"}
    gains = [change["gain"] for change in found["changes"] if change["gain"]]
    assert gains == sorted(gains, reverse=True)
    names = {fact["name"] for fact in found["facts"]}
    assert {"system", "memory", "io_uring", f"SSD {tmp_path}", "torch", "device"} <= names
    if found["largest"]["ssd_bytes_per_step"]:
        assert any("a day" in line for line in found["wear"])
