"""Builds strata with CUDA, tests it on the GPU, and takes the figures of a GPU.
Uses no network, and the Python environment that there is.

    benchmarks/gpu/run                   # everything: some hours
    benchmarks/gpu/run --quick           # shows that all of it runs: no figure means anything
    benchmarks/gpu/run --dry-run         # what would be done, and what is missing

A machine without network that lacks headers and packages gets them from a bundle; where commands
are cut off, the next one goes on where the last one stopped:

    benchmarks/gpu/run --bundle .bundle  # on a machine with network, without a GPU
    benchmarks/gpu/run --from .bundle --only build,copy --minutes 9 --out out

Exit status: 0 where every part went well, 1 where one did not, 2 where something is missing, 3
where there was no time for all: the same command again goes on.
"""

import argparse
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from . import bundle, bundled, needs, parts, running
from .bundled import Bundle, BundleError
from .keeper import Keeper
from .running import Clock

ROOT = Path(__file__).resolve().parents[2]
FAILED, MISSING, MORE = 1, 2, 3
WENT_WELL = {"ok", "done before"}
NO_TIME = {"cut off", "not begun"}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the environment (this one)"
    )
    parser.add_argument("--gpu", type=int, help="its number, from 0 (the first one)")
    parser.add_argument(
        "--device", choices=("cuda", "host"), default="cuda", help="host: what needs no GPU"
    )
    parser.add_argument("--only", metavar="PARTS", help="such as build,copy,cpp; --dry-run has all")
    parser.add_argument("--minutes", type=float, help="for all of it (as long as it takes)")
    parser.add_argument("--out", type=Path, help="folder of figures, logs and run.json")
    parser.add_argument("--again", action="store_true", help="also what went well before")
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="uses a bundle")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs")
    parser.add_argument("--skip-tests", action="store_true", help="builds and measures only")
    parser.add_argument("--dry-run", action="store_true", help="says what would be done")
    parser.add_argument(
        "--ssd-path", type=Path, default=ROOT / "build", help="folder on the disk to measure"
    )
    making = parser.add_argument_group("a bundle")
    making.add_argument(
        "--bundle", type=Path, metavar="DIR", help="makes one, and does nothing else"
    )
    making.add_argument("--for", dest="version", default="3.12", help="Python there (3.12)")
    making.add_argument("--headers-of", metavar="PYTHON", help="one of that version, with headers")
    options = parser.parse_args(arguments)
    if options.minutes is not None and options.minutes < 1:
        parser.error("--minutes: at least 1")
    if not re.fullmatch(r"3\.1[1-4]", options.version):
        parser.error("--for: 3.11, 3.12, 3.13 or 3.14")
    return options


def slug(gpu: str) -> str:
    """The name of a GPU as that of a folder: "NVIDIA H200" is "h200"."""
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return "-".join(word for word in words if word != "nvidia") or "gpu"


def main(arguments: Sequence[str]) -> int:
    """Looks, and runs everything unless something is missing."""
    options = parse(arguments)
    clock = Clock(options.minutes)
    try:
        if options.bundle is not None:
            target = bundle.Target(options.version, options.headers_of)
            bundle.make(options.bundle.absolute(), target, ROOT, say)
            return 0
        source = Bundle(options.source) if options.source else None
    except BundleError as error:
        print(f"missing: {error}", file=sys.stderr)
        return MISSING
    env, misfits, library = variables(options, source)
    wanted = needs.Wanted(
        tests=not options.skip_tests,
        gpu=options.device == "cuda",
        cuda=source.manifest["cuda"]["version"] if source and library else "",
    )
    found = needs.look(ROOT, options.python, env, wanted)
    missing = [*misfits, *found.missing]
    results, logs = places(options, found.gpu)
    wishes = parts.Wishes(
        python=options.python,
        quick=options.quick,
        tests=not options.skip_tests,
        ssd_path=options.ssd_path.absolute(),
        device=options.device,
        cuda="enabled" if wanted.gpu else "auto",
        cuda_library=library,
        environment=f"{found.facts.get('python')} {source.digest if source else ''}",
        xdist=bool(found.facts.get("xdist")),
    )
    plan = parts.all_parts(ROOT, wishes, results)
    try:
        plan = parts.choose(plan, options.only) if options.only else plan
    except ValueError as error:
        missing.append(str(error))
    if options.dry_run:
        print_plan(plan, results)
    for sentence in missing:
        print(f"missing: {sentence}", file=sys.stderr)
    if options.dry_run:
        return 0
    if missing:
        print("nothing was built; run this again when all of it is there", file=sys.stderr)
        return MISSING
    wishes.ssd_path.mkdir(parents=True, exist_ok=True)
    key = f"{bundled.tree_digest(ROOT)} {options.device} {options.quick}"
    keeper = Keeper(found.facts, key, results, logs)
    return run(plan, env, keeper, clock, options.again, bool(options.only))


def say(text: str) -> None:
    """To a person who waits."""
    print(text, file=sys.stderr, flush=True)


def listen() -> None:
    """From here on signals that ask for the end do what Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """See listen()."""
    raise KeyboardInterrupt


def variables(
    options: argparse.Namespace, source: Bundle | None
) -> tuple[dict[str, str], list[str], str]:
    """Of everything that is run; why a bundle is of no use here; its library for GPUs, if it is."""
    env = needs.environment(ROOT, options.python, options.gpu)
    if source is None:
        return env, [], ""
    said = needs.interpreter(options.python, ["torch"], env)
    if not said:
        return env, [], ""  # look() says so
    misfits = list(source.misfits(said["version"], *bundled.machine()))
    if misfits:
        return env, misfits, ""
    env = bundled.system_paths(source.folder, env)
    have = {**said["have"], **({"Python.h": ""} if said["header"] else {})}
    env = source.python_paths(env, options.python, have, ROOT / "build/gpu/wheels")
    if source.manifest["tree"] == bundled.tree_digest(ROOT):
        env["STRATA_COMMIT"] = source.manifest["commit"]
    return env, [], source.cuda_library(bundled.sources_digest(ROOT), said["capability"])


def places(options: argparse.Namespace, gpu: str) -> tuple[Path, Path]:
    """Where figures and logs go."""
    if options.out is not None:
        out = options.out.absolute()
        return out, out / "logs"
    work = ROOT / "build" / "gpu"
    results = work / "quick" if options.quick else ROOT / "benchmarks" / "results"
    if options.device == "host":
        results = work / "host"
    results /= slug(gpu)
    return results, work / "logs"


def run(
    plan: Sequence[parts.Part],
    env: Mapping[str, str],
    keeper: Keeper,
    clock: Clock,
    again: bool,
    only: bool,
) -> int:
    """Runs the parts and keeps what comes of them; the exit status of the run."""
    keeper.begin()
    done = {} if again else keeper.run_before()
    if only:  # what is asked for by its name is tried again, unless it went well
        done = {name: well for name, well in done.items() if well}
    went = []
    try:
        for result in running.run_all(plan, ROOT, env, keeper.logs, clock, done, keeper.make_way):
            went.append(result)
            keeper.keep(result)
    except KeyboardInterrupt:
        say("interrupted: what was done so far is kept, and the next run goes on from there")
        return FAILED
    keeper.tell(went)
    statuses = {result.status for result in went}
    if statuses & NO_TIME:
        return MORE
    return 0 if statuses <= WENT_WELL else FAILED


def print_plan(plan: Iterable[parts.Part], results: Path) -> None:
    """What would be run, ready to be run by hand."""
    for part in plan:
        variables = [f"{name}={value}" for name, value in part.variables.items()]
        print(f"{part.name} (about {part.minutes:g} minutes, at most {part.limit:g}):")
        for step in part.steps:
            print(f"  {' '.join([*variables, shlex.join(step)])}")
    print(f"figures: {results}")
