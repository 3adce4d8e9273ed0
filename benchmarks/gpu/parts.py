"""The parts of a run on a GPU, in order: what is built, tested and measured, and for how long at
most. A part that fails takes along only those that need it.
"""

import ast
import difflib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Minutes of each bench on the GPU that it was made for, and those after which it is ended anywhere;
# the longest one last.
MINUTES = {"copy": 3, "update-gpu": 3, "vs-torch": 8, "step-gpu": 8, "capacity-gpu": 6}
LIMITS = {"copy": 10, "update-gpu": 10, "vs-torch": 60, "step-gpu": 90, "capacity-gpu": 300}
FIRST_BENCHES = ("copy", "update-gpu")  # before the tests: they say most in the least time
# Steps of models that are large for a host, which shows only that they run.
NEEDS_GPU = ("vs-torch", "step-gpu", "capacity-gpu")
PROGRAM = "benchmarks/device_update"
QUICK_MINUTES = 3
PYTHON_PARTS = 6  # of the Python suites on a host: each takes less than MINUTES_OF_TESTS
MINUTES_OF_TESTS = 4
HOST = "host"
KEY = "gpu-key"  # in a build folder: what it was configured for
BUILD = "build/release"


@dataclass(frozen=True)
class Part:
    """Commands, run one after the other in the root of the checkout."""

    name: str
    steps: Sequence[Sequence[str]]
    minutes: float  # that it needs: with less it is not started
    limit: float  # minutes, after which it is ended
    needs: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    group: str = ""  # another name to choose it by
    goes_on: bool = False  # where it was cut off; so it is started with little time, too
    always: bool = False  # also where it went well before: it sees itself what is left to do
    figures: Path | None = None  # the file that it writes line by line


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for."""

    python: str
    quick: bool
    tests: bool
    ssd_path: Path
    device: str = "cuda"  # or HOST
    cuda: str = "enabled"  # Meson's option
    cuda_library: str = ""  # one that was built before
    environment: str = ""  # whatever else a build folder depends on
    xdist: bool = True  # whether pytest can run several tests at a time


def all_parts(root: Path, wishes: Wishes, results: Path) -> list[Part]:
    """Everything, in the order in which it is run."""
    measured = {name: bench_part(name, wishes, results) for name in MINUTES}
    first = [measured.pop(name) for name in FIRST_BENCHES]
    tests = [*cpp_parts(wishes), *python_parts(root, wishes)] if wishes.tests else []
    return [build_part(root, wishes), *first, *tests, *measured.values()]


def build_part(root: Path, wishes: Wishes) -> Part:
    """Up to a strata that can be imported and the program of a bench."""
    look = "import strata._core, torch"
    if wishes.device != HOST:
        look += "\nfrom strata._config.device import why_not"
        look += "\nif why := why_not('cuda:0'): raise SystemExit(why)"
    steps = [
        *configure_steps(root, wishes),
        ["ninja", "-C", BUILD, "module", PROGRAM],
        link_step(),
        [wishes.python, "-c", look],
    ]
    return Part("build", steps, 1, 60, goes_on=True, always=True)


def configure_steps(root: Path, wishes: Wishes) -> list[list[str]]:
    """Of a build folder, unless it is there as it has to be. Half of one, or one for another
    Python, is made anew."""
    options = [f"-Dcuda={wishes.cuda}", f"-Dgpu_library={wishes.cuda_library}"]
    text = "\n".join([wishes.python, wishes.environment, *options])
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = root / BUILD
    if (folder / "build.ninja").exists() and read(folder / KEY).strip() == key:
        return []
    preset = ["--native-file", "tests/presets/release.ini"]
    return [
        ["rm", "-rf", BUILD],
        ["meson", "setup", BUILD, *preset, *options],
        ["sh", "-c", f"echo {key} >{BUILD}/{KEY}"],
    ]


def link_step() -> list[str]:
    """The module, in the package. The pattern is looked for where the link is to be."""
    module = f"../../{BUILD}/bindings/_core*.so"
    return ["sh", "-c", f"cd bindings/strata && ls {module} && ln -sf {module} ."]


def cpp_parts(wishes: Wishes) -> list[Part]:
    """The C++ suites: those over every device, and the others."""
    ninja = [["ninja", "-C", BUILD, "all"]]
    build = Part("build-tests", ninja, 1, 60, ["build"], goes_on=True, always=True)
    suites = ["meson", "test", "-C", BUILD, "--no-rebuild", "--print-errorlogs", "--verbose"]
    suites += ["--timeout-multiplier", "4"]  # the first use of a GPU takes seconds
    device = {} if wishes.device == HOST else {"STRATA_TEST_DEVICE": "cuda"}
    chosen = {"cpp-device": ["--suite", "device"], "cpp-host": ["--no-suite", "device"]}
    return [build] + [
        Part(name, [[*suites, *which]], MINUTES_OF_TESTS, 60, ["build-tests"], device, "cpp")
        for name, which in chosen.items()
    ]


def python_parts(root: Path, wishes: Wishes) -> list[Part]:
    """The Python suites: on a GPU one part for each that runs there, else all in equal parts."""
    command = [wishes.python, "-m", "pytest", "-v", "--core", "real", "-p", "no:cacheprovider"]
    folder = root / "tests/python"
    if wishes.device == HOST:
        cores = min(8, len(os.sched_getaffinity(0)))
        chosen = {
            f"python-{i + 1}": [f"tests/python/{path.name}" for path in files]
            for i, files in enumerate(equal_shares(folder.glob("test_*.py"), PYTHON_PARTS))
        }
    else:
        cores = 1  # tests on a GPU ask how much of its memory is free
        command += ["--device", wishes.device]
        chosen = {
            f"python-{name.removeprefix('test_')}": [f"tests/python/{name}.py"]
            for name in suites_on_device(folder / "conftest.py")
        }
    command += ["-n", str(cores)] if wishes.xdist and cores > 1 else []
    return [
        Part(name, [[*command, *files]], MINUTES_OF_TESTS, 90, ["build"], {}, "python")
        for name, files in chosen.items()
    ]


def equal_shares(files: Iterable[Path], count: int) -> list[list[Path]]:
    """Files, in shares of about as many bytes."""
    shares: list[list[Path]] = [[] for _ in range(count)]
    sizes = [0] * count
    for path in sorted(files, key=lambda path: (-path.stat().st_size, path.name)):
        least = sizes.index(min(sizes))
        shares[least].append(path)
        sizes[least] += path.stat().st_size
    return [share for share in shares if share]


def suites_on_device(conftest: Path) -> list[str]:
    """Those that --device chooses, as tests/python/conftest.py names them."""
    for node in ast.parse(conftest.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ON_DEVICE":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise AssertionError(f"{conftest} has no ON_DEVICE")


def bench_part(name: str, wishes: Wishes, results: Path) -> Part:
    """A bench, whose figures come line by line."""
    figures = results / f"{name}.jsonl"
    command = [wishes.python, "-m", "benchmarks", name, "--device", wishes.device]
    command += ["--json", str(figures), "--ssd-path", str(wishes.ssd_path)]
    quick = wishes.quick or (wishes.device == HOST and name in NEEDS_GPU)
    command += ["--quick"] if quick else []
    goes_on = name == "capacity-gpu" and not quick
    command += ["--resume", str(results / f"{name}.attempts")] if goes_on else []
    return Part(
        name,
        [command],
        QUICK_MINUTES if quick else MINUTES[name],
        5 * QUICK_MINUTES if quick else LIMITS[name],
        ["build"],
        group="bench",
        goes_on=goes_on,
        figures=figures,
    )


def choose(parts: Sequence[Part], only: str) -> list[Part]:
    """The parts that are named, by themselves or their groups, and what they need. ValueError where
    a name is none."""
    known = {part.name: part for part in parts}
    wanted: set[str] = set()
    for name in filter(None, (word.strip() for word in only.split(","))):
        found = {part.name for part in parts if name in (part.name, part.group)}
        if not found:
            words = [*known, *{part.group for part in parts if part.group}]
            near = difflib.get_close_matches(name, words, n=1, cutoff=0.0)[0]
            raise ValueError(f"there is no part {name!r}; did you mean {near!r}?")
        wanted |= found
    needed = list(wanted)
    while needed:
        more = set(known[needed.pop()].needs) - wanted
        wanted |= more
        needed += more
    return [part for part in parts if part.name in wanted]


def read(path: Path) -> str:
    """A small file; "" where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
