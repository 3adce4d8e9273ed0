"""The parts of a run on a GPU, in order: what is built, tested and measured, and for how long at
most. A part that fails takes along only those that need it.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["ok", "failed", "too slow", "left out"]
BENCHES = (
    "copy",
    "map",
    "update-gpu",
    "vs-torch",
    "step-gpu",
    "capacity-gpu",
)  # the longest one last
PROGRAMS = ("benchmarks/device_copy", "benchmarks/device_update")
MINUTE = 60
LIMITS = {
    "copy": 10,
    "map": 10,
    "update-gpu": 10,
    "vs-torch": 60,
    "step-gpu": 90,
    "capacity-gpu": 300,
}
QUICK_LIMIT = 15
END_SECONDS = 10  # that a part has to end in when it is told to


@dataclass(frozen=True)
class Part:
    """A command, run in the root of the checkout."""

    name: str
    command: Sequence[str]
    minutes: float
    needs: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """How a part went."""

    part: str
    status: Status
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for."""

    python: str
    quick: bool
    tests: bool
    ssd_path: Path


def build_parts(root: Path, preset: str, targets: Sequence[str]) -> list[Part]:
    """Configures a build folder, which may have been configured without CUDA, and builds."""
    folder = f"build/{preset}"
    setup = ["meson", "setup", folder, "--native-file", f"tests/presets/{preset}.ini"]
    if (root / folder / "build.ninja").exists():
        setup = ["meson", "configure", folder]
    setup.append("-Dcuda=enabled")
    return [
        Part(f"configure {preset}", setup, 10),
        Part(f"build {preset}", ["ninja", "-C", folder, *targets], 60, [f"configure {preset}"]),
    ]


def all_parts(root: Path, wishes: Wishes, results: Path) -> list[Part]:
    """Everything, in the order in which it is run."""
    link = ["sh", "-c", "ln -sf ../../build/release/bindings/_core*.so bindings/strata/"]
    parts = [
        *build_parts(root, "release", ["module", *PROGRAMS]),
        Part("link", link, 1, ["build release"]),
        Part("import", [wishes.python, "-c", "import strata, torch"], 5, ["link"]),
    ]
    if wishes.tests:
        parts += build_parts(root, "debug", ["all"])
        suites = ["meson", "test", "-C", "build/debug", "--no-rebuild", "--print-errorlogs"]
        suites += ["--timeout-multiplier", "4"]  # the first use of a GPU takes seconds
        device = {"STRATA_TEST_DEVICE": "cuda"}
        parts.append(Part("C++ suites", suites, 60, ["build debug"], device))
        suites = [wishes.python, "-m", "pytest", "tests/python", "-q", "--device", "cuda"]
        parts.append(Part("Python suites", suites, 90, ["import"]))
    for name in BENCHES:
        command = [wishes.python, "-m", "benchmarks", name, "--device", "cuda"]
        command += ["--json", str(results / f"{name}.jsonl"), "--ssd-path", str(wishes.ssd_path)]
        command += ["--quick"] if wishes.quick else []
        parts.append(
            Part(
                f"bench {name}", command, QUICK_LIMIT if wishes.quick else LIMITS[name], ["import"]
            )
        )
    return parts


def run_part(part: Part, root: Path, env: Mapping[str, str], log: Path) -> Result:
    """Runs a part to its end, or to the end of its time; all that it prints goes to the log."""
    begin = time.monotonic()
    with log.open("w") as sink:
        print("$", *part.command, file=sink, flush=True)
        try:
            process = subprocess.Popen(
                part.command,
                cwd=root,
                env={**env, **part.variables},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Result(part.name, "failed", 0.0, str(error))
        try:
            code = process.wait(part.minutes * MINUTE)
        except subprocess.TimeoutExpired:
            end(process)
            note = f"not within {part.minutes:g} minutes"
            return Result(part.name, "too slow", time.monotonic() - begin, note)
        except BaseException:
            end(process)
            raise
    seconds = time.monotonic() - begin
    if code == 0:
        return Result(part.name, "ok", seconds)
    return Result(part.name, "failed", seconds, f"exit status {code}, see {log}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a part and whatever it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def run_all(
    parts: Sequence[Part], root: Path, env: Mapping[str, str], logs: Path
) -> Iterator[Result]:
    """Runs part after part. One that failed leaves out those that need it, and no others."""
    went_well: set[str] = set()
    for part in parts:
        missing = [name for name in part.needs if name not in went_well]
        if missing:
            yield Result(part.name, "left out", 0.0, f"needs: {', '.join(missing)}")
            continue
        log = logs / f"{part.name.replace(' ', '-').replace('+', 'p')}.log"
        result = run_part(part, root, env, log)
        if result.status == "ok":
            went_well.add(part.name)
        yield result
