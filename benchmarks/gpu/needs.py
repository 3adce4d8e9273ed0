"""What a machine has to have before anything is built on it. Nothing is installed and no network is
used: what is missing is said, all of it at once.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bundled import numbers

NVCC_MIN = (12, 4)
PYTHON_MIN, PYTHON_MAX = [3, 11], [3, 14]
# As they are imported.
PACKAGES = (
    *("torch", "transformers", "safetensors", "tokenizers", "numpy", "rich"),
    *("matplotlib", "pybind11"),
)
TEST_PACKAGES = ("pytest", "pytest_timeout")
COMMANDS = {"g++": "build-essential", "make": "make", "pkg-config": "pkg-config"}
PYTHON_COMMANDS = ("meson", "ninja")  # beside the interpreter, or anywhere
# What they say to the linker, and the package.
HEADERS = {
    "liburing.h": ("uring", "liburing-dev"),
    "libaio.h": ("aio", "libaio-dev"),
    "xxhash.h": ("xxhash", "libxxhash-dev"),
    "gtest/gtest.h": ("gtest", "libgtest-dev"),
}
# The oldest driver for each CUDA: what is compiled with 12.4 runs on that of 12.0.
DRIVER_MIN = {12: 525, 13: 580}
DISK_MIN, MEMORY_MIN = 3 << 30, 3 << 30  # that building and testing take
BUNDLED = "; a bundle has it: --from, benchmarks/gpu/README.md"
# Variables that figures depend on, for the results.
TOLD = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
JEMALLOC = ("subprojects/jemalloc-5.3.0", "subprojects/packagecache/jemalloc-5.3.0.tar.bz2")

# What the interpreter says of itself, of packages and of the GPU, as one line of JSON.
LOOK = """
import importlib.metadata, importlib.util, json, os, sys, sysconfig
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
have = {d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
header = os.path.join(sysconfig.get_path("include"), "Python.h")
found = {"version": list(sys.version_info[:2]), "missing": missing,
         "header": os.path.exists(header), "have": have,
         "torch": "", "gpu": "", "capability": [], "why": ""}
if "torch" in set(sys.argv[1:]) - set(missing):
    import torch
    found["torch"] = torch.__version__
    try:
        found["gpu"] = torch.cuda.get_device_name(0)
        found["capability"] = torch.cuda.get_device_capability(0)
    except Exception as error:
        found["why"] = str(error).strip().splitlines()[0]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Found:
    """What the machine has, and what it has not."""

    missing: list[str]  # sentences: what, and what to do
    gpu: str
    facts: Mapping[str, Any]  # versions, for the results


def environment(root: Path, python: str, gpu: int | None) -> dict[str, str]:
    """Variables of everything that is run: the interpreter's tools come first, one GPU is to be
    seen where one is named, and nobody asks the network for models.
    """
    path = [str(Path(python).parent), *os.environ.get("PATH", "").split(os.pathsep)]
    path += ["/usr/local/cuda/bin"]
    modules = [str(root / "bindings"), str(root), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        "HF_HUB_OFFLINE": "1",
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}),
    }


@dataclass(frozen=True)
class Wanted:
    """What is to be done on the machine."""

    tests: bool
    gpu: bool = True  # False: what the host can do
    cuda: str = ""  # the version of a library for GPUs that is there already


def look(root: Path, python: str, env: Mapping[str, str], wanted: Wanted) -> Found:
    """Looks at the machine with the variables of environment()."""
    said = interpreter(python, [*PACKAGES, *(TEST_PACKAGES if wanted.tests else ())], env)
    driver = driver_version()
    nvcc = nvcc_version(env)
    missing = [*python_needs(python, said, env, wanted.gpu), *tool_needs(root, env), *room(root)]
    if wanted.gpu:
        cuda = numbers(wanted.cuda) or nvcc
        built = [] if wanted.cuda else list(nvcc_needs(nvcc))
        missing = [*driver_needs(driver, cuda), *built, *missing]
    facts = {
        "gpu": said.get("gpu", ""),
        "driver": driver,
        "nvcc": ".".join(map(str, nvcc)) if nvcc else "",
        "torch": said.get("torch", ""),
        "python": ".".join(map(str, said.get("version", []))),
        "environment": {name: env[name] for name in TOLD if name in env},
        "xdist": "pytest-xdist" in said.get("have", {}),
    }
    gpu = str(facts["gpu"]) if wanted.gpu else "host"
    return Found(missing, gpu, facts)


def room(root: Path) -> Iterator[str]:
    """What is wrong with the disk and the memory."""
    free = shutil.disk_usage(root).free
    if free < DISK_MIN:
        yield f"{DISK_MIN >> 30} GiB of disk at {root}: {free / (1 << 30):.1f} are free; make room"
    found = re.search(r"MemAvailable:\s+(\d+) kB", read("/proc/meminfo"))
    if found and int(found[1]) << 10 < MEMORY_MIN:
        available = int(found[1]) / (1 << 20)
        yield f"{MEMORY_MIN >> 30} GiB of memory to build: {available:.1f} are free; end something"


def read(path: str) -> str:
    """A file of the system; "" where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def driver_version() -> str:
    """Of NVIDIA's driver; "" where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    found = re.search(r"\d{3,}\.\d+(\.\d+)?", text)
    return found[0] if found else ""


def driver_needs(version: str, cuda: Sequence[int] = ()) -> Iterator[str]:
    """What is wrong with the driver, for a library that is made with some CUDA."""
    if not version:
        yield (
            "NVIDIA's driver: nvidia-smi and /proc/driver/nvidia show none; install one, or start "
            "the container with the GPUs"
        )
        return
    least = DRIVER_MIN.get(cuda[0], 0) if cuda else 0
    if int(version.split(".")[0]) < least:
        yield (
            f"NVIDIA's driver {least} or newer, for CUDA {'.'.join(map(str, cuda))}: this one is "
            f"{version}; update it, or build with an older toolkit"
        )


def nvcc_version(env: Mapping[str, str]) -> tuple[int, ...]:
    """Of the CUDA compiler; () where there is none."""
    command = shutil.which("nvcc", path=env["PATH"])
    found = re.search(r"release (\d+)\.(\d+)", output([command, "--version"])) if command else None
    return (int(found[1]), int(found[2])) if found else ()


def nvcc_needs(version: Sequence[int]) -> Iterator[str]:
    """What is wrong with the CUDA compiler."""
    least = ".".join(map(str, NVCC_MIN))
    if not version:
        yield f"nvcc {least} or newer (the CUDA toolkit): not in PATH, nor in /usr/local/cuda/bin"
    elif tuple(version) < NVCC_MIN:
        yield f"nvcc {least} or newer: this one is {'.'.join(map(str, version))}"


def interpreter(python: str, packages: Sequence[str], env: Mapping[str, str]) -> Mapping[str, Any]:
    """What it says, see LOOK; {} where it does not run."""
    lines = output([python, "-c", LOOK, *packages], env).splitlines()
    try:
        said: Mapping[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {}
    return said


def python_needs(
    python: str, said: Mapping[str, Any], env: Mapping[str, str], gpu: bool = True
) -> Iterator[str]:
    """What is wrong with the interpreter and its packages, PyTorch's view of the GPU among them."""
    if not said:
        yield f"a Python that runs: {python} does not; --python names another one"
        return
    if not PYTHON_MIN <= said["version"] <= PYTHON_MAX:
        yield f"Python 3.11 to 3.14: {python} is {'.'.join(map(str, said['version']))}"
    if not said["header"] and not has_header("Python.h", env):
        yield f"the headers of {python} (python3-dev)"
    for name in said["missing"]:
        package = name.replace("_", "-")
        yield f"the Python package {package}, for {python} (requirements.txt)"
    if gpu and said["torch"] and not said["gpu"]:
        yield f"a GPU that PyTorch {said['torch']} can use: {said['why']}"


def tool_needs(root: Path, env: Mapping[str, str]) -> Iterator[str]:
    """What is missing of compilers and libraries."""
    for command, package in COMMANDS.items():
        if shutil.which(command, path=env["PATH"]) is None:
            yield f"{command} (Debian's {package})"
    for command in PYTHON_COMMANDS:
        if shutil.which(command, path=env["PATH"]) is None:
            yield f"{command}, as a Python package or Debian's"
    if shutil.which("g++", path=env["PATH"]):
        for header, (library, package) in HEADERS.items():
            if not has_header(header, env):
                yield f"{header} (Debian's {package}){BUNDLED}"
            elif not has_library(library, env):
                yield f"lib{library} (Debian's {package}){BUNDLED}"
    places = [*(root / place for place in JEMALLOC)]
    if cache := env.get("MESON_PACKAGE_CACHE_DIR"):
        places.append(Path(cache) / Path(JEMALLOC[1]).name)
    if not any(place.exists() for place in places):
        yield f"jemalloc's sources, where there is no network: as {JEMALLOC[1]}"


def has_header(header: str, env: Mapping[str, str]) -> bool:
    """Whether the compiler finds it."""
    done = subprocess.run(
        ["g++", "-E", "-xc++", "-"],
        input=f"#include <{header}>\n",
        env=dict(env),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode == 0


def has_library(library: str, env: Mapping[str, str]) -> bool:
    """Whether the linker finds it."""
    done = subprocess.run(
        ["g++", "-shared", "-o", "/dev/null", f"-l{library}"],
        env=dict(env),
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def output(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """What a command prints; "" where it cannot be run or fails."""
    try:
        done = subprocess.run(
            command,
            env=None if env is None else dict(env),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
