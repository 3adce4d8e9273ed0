"""Makes a bundle: what a machine without network lacks to build and test strata, in one folder.
Needs Debian or Ubuntu, a network and pip, and no GPU; bundled.py says what is in the folder.

    make(folder, Target(python="3.12", headers_of=None, nvcc=True), root, print)

It is made in a folder beside the one that is asked for, which gets its name when it is complete.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import bundled
from .bundled import MANIFEST, BundleError, sha256

BYTES_MAX = 50 << 20
DEVELOPMENT = ("liburing-dev", "libaio-dev", "libxxhash-dev", "libgtest-dev", "pkg-config", "make")
# Of what those need in turn: the C library and its kin are on every machine.
TAKEN = re.compile(
    r"(liburing|libaio|libxxhash|libgtest|libgmock|pkg-config|pkgconf|libpkgconf|make$)"
)
# As requirements.txt pins them. torch, transformers and numpy are too large: the machine has them.
WHEELS = (
    *("pybind11", "meson", "ninja"),
    *("pytest", "pytest-timeout", "pytest-xdist", "execnet", "iniconfig", "pluggy", "packaging"),
    *("rich", "markdown-it-py", "mdurl", "pygments"),
    *("matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pillow", "pyparsing"),
    *("python-dateutil", "six"),
)
GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")
CUDA_ARCHITECTURE = 90


@dataclass(frozen=True)
class Target:
    """Whom the bundle is for."""

    python: str  # "3.12"
    headers_of: str | None = None  # an interpreter of that version that has its headers
    nvcc: bool = True  # compiles the library for GPUs, where nvcc is found


def make(folder: Path, target: Target, root: Path, say: Callable[[str], None]) -> None:
    """Makes a bundle, in the place of an earlier one. BundleError where something cannot be had."""
    if folder.exists() and not (folder / MANIFEST).exists() and any(folder.iterdir()):
        raise BundleError(f"{folder} holds something else than a bundle: name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        part, work = Path(scratch) / "bundle", Path(scratch) / "work"
        part.mkdir()
        work.mkdir()
        apt = apt_options(work)
        packages = take_packages(part, work, apt, say)
        take_jemalloc(part, work, apt, root, say)
        wheels = take_wheels(part, work, target.python, root, say)
        headers = take_headers(part, target, say)
        cuda = take_cuda(part, work, root, say) if target.nvcc else None
        manifest = {
            "format": bundled.FORMAT,
            "python": target.python,
            "machine": bundled.machine()[0],
            "glibc": glibc_of(part),
            "commit": output(["git", "-C", str(root), "describe", "--always", "--dirty=+"]),
            "tree": bundled.tree_digest(root),
            "packages": packages,
            "wheels": wheels,
            "headers": headers,
            "cuda": cuda,
            "files": {name: sha256(part / name) for name in files_of(part)},
        }
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        size = sum((part / name).stat().st_size for name in files_of(part))
        if size > BYTES_MAX:
            raise BundleError(f"the bundle has {size >> 20} MiB: more than {BYTES_MAX >> 20}")
        if folder.exists():
            os.rename(folder, Path(scratch) / "earlier")
        os.rename(part, folder)
    say(
        f"{folder}: {size / (1 << 20):.1f} MiB, for Python {target.python}, {manifest['machine']}, "
        f"glibc {manifest['glibc']} or newer"
    )


def files_of(folder: Path) -> Iterator[str]:
    """Names of all regular files in a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield str(path.relative_to(folder))


def run(command: Sequence[str | Path], what: str, **options: Any) -> str:
    """What a command prints. BundleError, with its last words, where it fails."""
    try:
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            **options,
        )
    except OSError as error:
        raise BundleError(f"{what}: {error}") from None
    if done.returncode != 0:
        words = (done.stdout + done.stderr).strip().splitlines() or ["no word"]
        said = next((line for line in words if "ERROR" in line), words[-1])
        raise BundleError(f"{what}: {Path(command[0]).name}: {said}")
    return done.stdout


def output(command: Sequence[str]) -> str:
    """What a command prints; "" where it fails."""
    try:
        return run(command, "").strip()
    except BundleError:
        return ""


def take_packages(
    part: Path, work: Path, apt: Sequence[str], say: Callable[[str], None]
) -> dict[str, str]:
    """Unpacks the Debian packages, and returns their versions. The system's own lists of packages
    may be old or empty: lists are fetched into a folder of their own, with those of sources."""
    say("fetching Debian packages")
    run(["apt-get", *apt, "update"], "lists of packages cannot be fetched")
    everything = ["-o", f"Dir::State::status={work / 'nothing'}", "--no-install-recommends"]
    (work / "nothing").touch()
    plan = run(
        ["apt-get", *apt, *everything, "-s", "install", *DEVELOPMENT], "a library is missing"
    )
    names = [name for name in re.findall(r"^Inst (\S+)", plan, re.M) if TAKEN.match(name)]
    run(["apt-get", *apt, "download", *names], "a package cannot be fetched", cwd=work)
    versions = {}
    for package in sorted(work.glob("*.deb")):
        run(["dpkg-deb", "-x", package, part / "system"], f"{package.name} cannot be unpacked")
        name, version = run(["dpkg-deb", "-W", package], f"{package.name} is damaged").split()
        versions[name] = version
    for useless in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info"):
        shutil.rmtree(part / "system" / useless, ignore_errors=True)
    lib = part / "system/lib"  # where it is apart from usr/lib
    if lib.is_dir():
        shutil.copytree(lib, part / "system/usr/lib", symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(lib)
    make_movable(part / "system/usr")
    return versions


def apt_options(work: Path) -> list[str]:
    """Of an apt-get that keeps what it learns in `work`."""
    sources = work / "sources"
    (work / "lists/partial").mkdir(parents=True)
    sources.mkdir()
    etc = Path("/etc/apt")
    for path in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]:
        if path.suffix in (".list", ".sources") and path.is_file():
            text = path.read_text()
            text = re.sub(r"^Types:.*", "Types: deb deb-src", text, flags=re.M)
            twice = re.sub(r"^deb ", "deb-src ", text, flags=re.M) if path.suffix == ".list" else ""
            (sources / path.name).write_text(text + "\n" + twice)
    settings = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": sources,
        "Dir::State::Lists": work / "lists",
        "APT::Sandbox::User": "root",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Debug::NoLocking": "true",
    }
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]


def make_movable(usr: Path) -> None:
    """Lets links and pkg-config's files point into the folder that they are in."""
    for path in usr.rglob("*.pc"):
        up = "/".join([".."] * len(path.parent.relative_to(usr).parts))
        text = path.read_text().replace("/usr", "${pcfiledir}/" + up)
        path.write_text(text)
    for path in usr.rglob("*"):
        if path.is_symlink() and os.readlink(path).startswith("/"):
            target = usr.parent / os.readlink(path).lstrip("/")
            path.unlink()
            path.symlink_to(os.path.relpath(target, path.parent))
    command = usr / "bin/pkg-config"
    if not command.exists():
        command.unlink(missing_ok=True)
        command.symlink_to("pkgconf")


def take_jemalloc(
    part: Path, work: Path, apt: Sequence[str], root: Path, say: Callable[[str], None]
) -> None:
    """The archive that the wrap file asks for: from the checkout, or from the distribution."""
    wrap = (root / "subprojects/jemalloc.wrap").read_text()
    name, digest = (
        re.findall(rf"^{key} = (.*)$", wrap, re.M)[0] for key in ("source_filename", "source_hash")
    )
    (part / "sources").mkdir()
    found = root / "subprojects/packagecache" / name
    if not found.exists():
        say("fetching jemalloc's sources")
        run(
            ["apt-get", *apt, "source", "--download-only", "jemalloc"],
            "jemalloc's sources cannot be fetched",
            cwd=work,
        )
        found = next(iter(work.glob("jemalloc_*.orig.tar.bz2")), found)
    if not found.exists() or sha256(found) != digest:
        raise BundleError(f"jemalloc's archive, {name}, is not to be had: put it at {found}")
    shutil.copyfile(found, part / "sources" / name)


def take_wheels(
    part: Path, work: Path, python: str, root: Path, say: Callable[[str], None]
) -> list[str]:
    """Fetches the packages for the other interpreter."""
    say(f"fetching wheels for Python {python}")
    pins = (root / "requirements.txt").read_text()
    pinned = {line.split("==")[0]: line for line in pins.splitlines() if "==" in line}
    kind = bundled.machine()[0]
    platforms = [f"manylinux_2_{minor}_{kind}" for minor in range(17, 40)]
    platforms += [f"manylinux{name}_{kind}" for name in ("2014", "2010", "1")]
    target = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    target += [word for platform in platforms for word in ("--platform", platform)]
    (part / "wheels").mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", *target]
    wanted = [pinned.get(name, name) for name in WHEELS]
    run([*command, "-d", part / "wheels", *wanted], f"a wheel for Python {python} is missing")
    return sorted(path.name for path in (part / "wheels").glob("*.whl"))


def take_headers(part: Path, target: Target, say: Callable[[str], None]) -> str:
    """Copies the headers of an interpreter of the version that is asked for, if there is one here,
    and returns its version."""
    ours = ".".join(map(str, sys.version_info[:2]))
    python = target.headers_of or (sys.executable if ours == target.python else None)
    python = python or shutil.which(f"python{target.python}")
    code = (
        "import json, platform, sysconfig as s; print(json.dumps([platform.python_version(), "
        "s.get_path('include'), s.get_config_h_filename()]))"
    )
    said = output([python, "-c", code]) if python else ""
    version, include, config = json.loads(said) if said else ("", "", "")
    if not version.startswith(f"{target.python}.") or not Path(include, "Python.h").exists():
        if target.headers_of:
            raise BundleError(f"{python} is no Python {target.python} with headers (python3-dev)")
        say(f"no headers of Python {target.python}: none here has them, see --headers-of")
        return ""
    shutil.copytree(include, part / "headers", ignore=shutil.ignore_patterns("numpy", "pybind11"))
    shutil.copyfile(config, part / "headers/pyconfig.h")  # Debian's lies elsewhere
    return str(version)


def take_cuda(
    part: Path, work: Path, root: Path, say: Callable[[str], None]
) -> Mapping[str, Any] | None:
    """Compiles the library for GPUs with the bundle's own headers, where nvcc is found."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    found = re.search(r"release (\d+\.\d+)", output([nvcc, "--version"])) if nvcc else None
    if not nvcc or not found:
        say("no library for GPUs: nvcc is not in PATH; the other machine needs it")
        return None
    say(f"compiling the library for GPUs with nvcc {found[1]}")
    env = {**os.environ, "PATH": os.pathsep.join([os.environ["PATH"], str(Path(nvcc).parent)])}
    env = bundled.system_paths(part, env)
    env = {**env, **tools(work, env)}
    build, native = work / "build", root / "tests/presets/release.ini"
    options = ["-Dcuda=enabled", f"-Dgpu_archs={CUDA_ARCHITECTURE}", "-Dtests=false"]
    # A tree of its own: the checkout's jemalloc is left alone.
    copy = work / "tree"
    shutil.copytree(
        root,
        copy,
        symlinks=True,
        ignore=shutil.ignore_patterns(
            ".git", ".venv", "build", "jemalloc-*", f"{part.parent.name}", "*.so", ".bundle"
        ),
    )
    run(
        ["meson", "setup", build, copy, "--native-file", native, *options],
        "the library for GPUs cannot be configured",
        env=env,
    )
    library = "bindings/libstrata_cuda.so"
    run(["ninja", "-C", build, library], "the library for GPUs cannot be compiled", env=env)
    (part / "cuda").mkdir()
    run(["strip", "-o", part / "cuda/libstrata_cuda.so", build / library], "strip")
    return {
        "version": found[1],
        "sources": bundled.sources_digest(root),
        "architectures": [CUDA_ARCHITECTURE],
    }


def tools(work: Path, env: Mapping[str, str]) -> dict[str, str]:
    """A PATH with Meson, ninja and pybind11: this interpreter's, or an environment made for it."""
    own = Path(sys.executable).parent
    names = ("meson", "ninja", "pybind11-config")
    if all((own / name).exists() for name in names):
        return {"PATH": os.pathsep.join([str(own), env["PATH"]])}
    venv = work / "venv"
    run([sys.executable, "-m", "venv", venv], "an environment cannot be made")
    packages = ["meson>=1.4", "ninja", "pybind11>=2.13"]
    run([venv / "bin/python", "-m", "pip", "install", "-q", *packages], "Meson cannot be fetched")
    return {"PATH": os.pathsep.join([str(venv / "bin"), env["PATH"]])}


def glibc_of(part: Path) -> str:
    """The newest version of the C library that anything in a folder asks for."""
    found = {(2, 17)}
    for name in files_of(part):
        data = (part / name).read_bytes()
        if data.startswith((b"\x7fELF", b"!<arch>")):
            found |= {(int(a), int(b)) for a, b in GLIBC.findall(data)}
    return ".".join(map(str, max(found)))
