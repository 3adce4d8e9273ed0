"""A bundle in use: everything that a machine may lack, in one folder that is reached by paths
alone. Nothing is installed. bundle.py makes one.

    bundle = Bundle(folder)                    # BundleError: it is damaged, or not a bundle
    env = system_paths(folder, env)            # headers, libraries, pkg-config, jemalloc's archive
    env = bundle.python_paths(env, python, have, work)   # packages that this interpreter lacks

In the folder:

    bundle.json                 what it is for, what is in it, and the SHA-256 of every file
    system/usr/...              Debian packages, unpacked
    wheels/*.whl                Python packages; those that are lacking are unpacked elsewhere
    headers/Python.h ...        of the interpreter, if the machine that made the bundle had them
    sources/jemalloc-5.3.0...   as Meson looks for it
    cuda/libstrata_cuda.so      for GPUs, if the machine that made the bundle had nvcc
"""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from configparser import ConfigParser
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "bundle.json"
AGAIN = "make it again with benchmarks/gpu/run --bundle"
# Where an older one will not do.
OLDEST = {"meson": (1, 4), "pybind11": (2, 13)}


class BundleError(RuntimeError):
    """A bundle that cannot be used; one line says why, and what to do."""


class Bundle:
    """A bundle whose files are all there, as they were when it was made."""

    def __init__(self, folder: Path) -> None:
        """Reads every file once."""
        self.folder = folder.resolve()
        try:
            self.manifest: Mapping[str, Any] = json.loads((folder / MANIFEST).read_text())
            files = self.manifest["files"]
        except (OSError, ValueError, KeyError) as error:
            raise BundleError(f"{folder} is no complete bundle ({error}): {AGAIN}") from None
        if self.manifest["format"] != FORMAT:
            raise BundleError(f"{folder} is a bundle of another version of this script: {AGAIN}")
        for name, digest in files.items():
            path = folder / name
            if not path.is_file():
                raise BundleError(f"{folder} lacks {name}: copy it again, or {AGAIN}")
            if sha256(path) != digest:
                raise BundleError(f"{path} is damaged: copy the bundle again, or {AGAIN}")

    @property
    def digest(self) -> str:
        """Other bundles have another one."""
        return sha256(self.folder / MANIFEST)[:16]

    def misfits(self, version: Sequence[int], machine: str, libc: str) -> Iterator[str]:
        """Why it is of no use to an interpreter, on a kind of processor, over a C library."""
        asked, python = self.manifest["python"], ".".join(map(str, version))
        if asked != python:
            yield f"a bundle for Python {python}: this one is for {asked}; {AGAIN} --for {python}"
        if self.manifest["machine"] != machine:
            yield (
                f"a bundle for {machine}: this one is for {self.manifest['machine']}; make it on "
                "a machine of that kind"
            )
        if numbers(libc) < numbers(self.manifest["glibc"]):
            yield (
                f"a bundle for glibc {libc or 'that this machine has'}: this one needs "
                f"{self.manifest['glibc']}; make it on an older distribution"
            )

    def python_paths(
        self, env: Mapping[str, str], python: str, have: Mapping[str, str], work: Path
    ) -> dict[str, str]:
        """Variables with the packages that an interpreter lacks (`have`: the versions of those that
        it has), unpacked into folders in `work`; and with its headers, if it lacks those."""
        changed = dict(env)
        if "Python.h" not in have:
            prepend(changed, "C_INCLUDE_PATH", [self.folder / "headers"])
            prepend(changed, "CPLUS_INCLUDE_PATH", [self.folder / "headers"])
        for wheel in sorted((self.folder / "wheels").glob("*.whl")):
            name = wheel.name.split("-")[0].lower().replace("_", "-")
            if name in have and numbers(have[name]) >= OLDEST.get(name, ()):
                continue
            folder = unpack(wheel, python, work / f"{self.digest}-{wheel.stem}")
            prepend(changed, "PYTHONPATH", [folder])
            prepend(changed, "PATH", [folder / "bin"])
        return changed

    def cuda_library(self, sources: str, capability: Sequence[int]) -> str:
        """The path of the library for GPUs, if it was made from these sources and runs on a GPU of
        this capability (none: there is no GPU to run it); "" otherwise."""
        cuda = self.manifest["cuda"]
        if cuda is None or cuda["sources"] != sources:
            return ""
        if capability and 10 * capability[0] + capability[1] < min(cuda["architectures"]):
            return ""
        return str(self.folder / "cuda/libstrata_cuda.so")


def system_paths(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Variables with a bundle's headers and libraries before those of the system, and its tools
    behind."""
    usr = folder / "system/usr"
    libraries = [path for path in sorted((usr / "lib").glob("*-linux-gnu")) if path.is_dir()]
    configs = [usr / "share/pkgconfig", *(path / "pkgconfig" for path in libraries)]
    changed = dict(env)
    # As for the system's: no warnings of them.
    for name in ("C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"):
        prepend(changed, name, [usr / "include"])
    for name in ("LIBRARY_PATH", "LD_LIBRARY_PATH"):
        prepend(changed, name, libraries)
    prepend(changed, "PKG_CONFIG_PATH", configs)
    changed["PATH"] = os.pathsep.join([env["PATH"], str(usr / "bin")])
    changed["MESON_PACKAGE_CACHE_DIR"] = str(folder / "sources")
    return changed


def unpack(wheel: Path, python: str, folder: Path) -> Path:
    """A package in a folder of its own, with its commands in bin/. It gets its name when it is
    complete."""
    if folder.exists():
        return folder
    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(part)
    for data in part.glob("*.data"):
        for kind in data.iterdir():
            place = {"scripts": part / "bin", "purelib": part, "platlib": part}.get(kind.name)
            if place:
                shutil.copytree(kind, place, dirs_exist_ok=True)
    for path in (part / "bin").glob("*"):
        path.chmod(0o755)
    for points in part.glob("*.dist-info/entry_points.txt"):
        write_commands(points, python, part)
    os.rename(part, folder)
    return folder


def write_commands(points: Path, python: str, folder: Path) -> None:
    """Every command of a package, as a script for an interpreter."""
    parser = ConfigParser(delimiters="=")
    parser.read(points)
    commands = parser.items("console_scripts") if "console_scripts" in parser else []
    for name, where in commands:
        module, _, function = where.partition(":")
        path = folder / "bin" / name
        if path.exists():  # the program itself, as ninja's
            continue
        path.parent.mkdir(exist_ok=True)
        # To the shell a command, and to Python a string: a shebang has no room for long paths.
        path.write_text(
            f"#!/bin/sh\n'''exec' {shlex.quote(python)} \"$0\" \"$@\"\n' '''\n"
            f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        path.chmod(0o755)


def prepend(env: dict[str, str], name: str, paths: Sequence[Path]) -> None:
    """Puts folders first."""
    old = [env[name]] if env.get(name) else []
    env[name] = os.pathsep.join([*map(str, paths), *old])


def sources_digest(root: Path) -> str:
    """Of everything that the library for GPUs is made from."""
    digest = hashlib.sha256()
    for folder in ("memory", "optimizers"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".hpp", ".cpp", ".cu"):
                name = path.relative_to(root).as_posix()
                digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def tree_digest(root: Path) -> str:
    """Of all sources: says what was measured where there is no git."""
    digest = hashlib.sha256()
    suffixes = (".hpp", ".cpp", ".cu", ".py", ".build", ".ini")
    for folder in ("bindings", "engine", "memory", "offload", "optimizers", "benchmarks", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes:
                digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def numbers(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" as (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def sha256(path: Path) -> str:
    """Of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def machine() -> tuple[str, str]:
    """The kind of processor, and the version of the C library."""
    return platform.machine(), platform.libc_ver()[1]
