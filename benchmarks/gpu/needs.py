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

NVCC_MIN = (12, 4)
PYTHON_MIN, PYTHON_MAX = [3, 11], [3, 14]
# As they are imported.
PACKAGES = (
    *("torch", "transformers", "safetensors", "tokenizers", "numpy", "xxhash", "rich"),
    *("matplotlib", "pybind11"),
)
TEST_PACKAGES = ("pytest", "pytest_timeout")
COMMANDS = {"g++": "build-essential", "pkg-config": "pkg-config"}
PYTHON_COMMANDS = ("meson", "ninja")  # beside the interpreter, or anywhere
HEADERS = {
    "liburing.h": "liburing-dev",
    "libaio.h": "libaio-dev",
    "xxhash.h": "libxxhash-dev",
    "gtest/gtest.h": "libgtest-dev",
}
# Queues of the GPU that streams are spread over: those that share one wait for each other's heads.
# The driver's own number is 8, and there are more streams than that. The user's choice comes first.
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
JEMALLOC = ("subprojects/jemalloc-5.3.0", "subprojects/packagecache/jemalloc-5.3.0.tar.bz2")

# What the interpreter says of itself, of packages and of the GPU, as one line of JSON.
LOOK = """
import importlib.util, json, os, sys, sysconfig
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
header = os.path.join(sysconfig.get_path("include"), "Python.h")
found = {"version": list(sys.version_info[:2]), "missing": missing,
         "header": os.path.exists(header), "torch": "", "gpu": "", "why": ""}
if "torch" not in missing:
    import torch
    found["torch"] = torch.__version__
    try:
        found["gpu"] = torch.cuda.get_device_name(0)
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
    seen where one is named, streams have queues enough, and nobody asks the network for models.
    """
    path = [str(Path(python).parent), *os.environ.get("PATH", "").split(os.pathsep)]
    path += ["/usr/local/cuda/bin"]
    modules = os.pathsep.join([str(root / "bindings"), str(root)])
    return {
        **CONNECTIONS,
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": modules,
        "HF_HUB_OFFLINE": "1",
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}),
    }


def look(root: Path, python: str, env: Mapping[str, str], tests: bool) -> Found:
    """Looks at the machine with the variables of environment(). `tests`: they are to be run."""
    said = interpreter(python, [*PACKAGES, *(TEST_PACKAGES if tests else ())], env)
    driver = driver_version()
    nvcc = nvcc_version(env)
    missing = [
        *driver_needs(driver),
        *nvcc_needs(nvcc),
        *python_needs(python, said),
        *tool_needs(root, env),
    ]
    facts = {
        "gpu": said.get("gpu", ""),
        "driver": driver,
        "nvcc": ".".join(map(str, nvcc)) if nvcc else "",
        "torch": said.get("torch", ""),
        "python": ".".join(map(str, said.get("version", []))),
        "environment": {name: env[name] for name in CONNECTIONS},
    }
    return Found(missing, str(facts["gpu"]), facts)


def driver_version() -> str:
    """Of NVIDIA's driver; "" where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    found = re.search(r"\d{3,}\.\d+(\.\d+)?", text)
    return found[0] if found else ""


def driver_needs(version: str) -> Iterator[str]:
    """What is wrong with the driver."""
    if not version:
        yield (
            "NVIDIA's driver: nvidia-smi and /proc/driver/nvidia show none; install one, or start "
            "the container with the GPUs"
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


def python_needs(python: str, said: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the interpreter and its packages, PyTorch's view of the GPU among them."""
    if not said:
        yield f"a Python that runs: {python} does not; --python names another one"
        return
    if not PYTHON_MIN <= said["version"] <= PYTHON_MAX:
        yield f"Python 3.11 to 3.14: {python} is {'.'.join(map(str, said['version']))}"
    if not said["header"]:
        yield f"the headers of {python} (python3-dev)"
    for name in said["missing"]:
        yield f"the Python package {name.replace('_', '-')}, for {python} (requirements.txt)"
    if said["torch"] and not said["gpu"]:
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
        for header, package in HEADERS.items():
            if not has_header(header, env):
                yield f"{header} (Debian's {package})"
    if not any((root / place).exists() for place in JEMALLOC):
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
