"""The command line: `strata COMMAND`, also `python -m strata COMMAND`.

A command is a function from its arguments to the exit status, entered in COMMANDS. It parses first
and imports what it needs behind that: help and wrong calls are answered without torch.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._config.launched import leads, rank_name

BROKEN_PIPE = 141  # the exit statuses that shells use: of a reader that went away
INTERRUPTED = 130  # of Ctrl-C


@contextmanager
def importing() -> Iterator[None]:
    """Around imports that take seconds: Ctrl-C ends the process at once. A KeyboardInterrupt inside
    of an import would leave a traceback, or whatever a library makes of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # somebody else's, or ignored
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def finetune(arguments: Sequence[str]) -> int:
    """Fine-tune a causal language model on text, inside memory budgets."""
    from .finetune import options

    return _train(options.parse(arguments, finetune.__doc__))


def demo(arguments: Sequence[str]) -> int:
    """Train a Llama of over 100 M parameters, in far less memory than it needs."""
    from .finetune import demo, options

    chosen = options.parse(arguments, demo.__doc__, demo.preset())
    demo.write_tales()
    return _train(chosen)


def _train(options: Any) -> int:
    with importing():
        from .finetune import run
    return run.run(options)


def report(arguments: Sequence[str]) -> int:
    """Show a saved report: as text, as a page with charts, as a trace for ui.perfetto.dev."""
    from .._report.reports import Report
    from .._storage.replacing import write_text
    from .options import report_parser

    parser = report_parser(report.__doc__)
    options = parser.parse_args(arguments)
    if message := _same_files(
        {"the report": Path(options.report), "--html": options.html, "--perfetto": options.perfetto}
    ):
        parser.error(message)
    found = Report.load(options.report)
    if options.html:
        with importing():
            from .._report import html_report
        write_text(options.html, html_report.page(found))
    if options.perfetto:
        from .._report import perfetto

        perfetto.write(found.records, options.perfetto)
    if not options.html and not options.perfetto:
        print(found)
    return 0


def _same_files(named: dict[str, Path | None]) -> str:
    """What is said where one file would take the place of another. Empty where none does."""
    seen: dict[Path, str] = {}
    for name, path in named.items():
        if path is None:
            continue
        if (other := seen.setdefault(path.resolve(), name)) != name:
            return f"{name} {path} would take the place of {other}: give another file"
    return ""


def plan(arguments: Sequence[str]) -> int:
    """Say how a recorded step would run on another machine, without running anything."""
    from .options import plan_parser

    options = plan_parser(plan.__doc__).parse(arguments)
    with importing():
        from . import planner
    return planner.run(options)


def estimate(arguments: Sequence[str]) -> int:
    """Say whether a model fits and how fast it would train, before its weights are there."""
    from .options import estimate_parser

    options = estimate_parser(estimate.__doc__).parse(arguments)
    with importing():
        from . import estimate as counting
    return counting.run(options)


def io_tune(arguments: Sequence[str]) -> int:
    """Measure this machine's links and disks, and remember them for planning."""
    from .options import io_tune_parser

    options = io_tune_parser(io_tune.__doc__).parse(arguments)
    with importing():
        from . import io_tune as tuning
    return tuning.run(options)


def doctor(arguments: Sequence[str]) -> int:
    """Say whether training would work on this machine, and what to change first."""
    from .options import doctor_parser

    options = doctor_parser(doctor.__doc__).parse(arguments)
    with importing():
        from .doctor import run
    return run.run(options)


def snapshots(arguments: Sequence[str]) -> int:
    """List, copy and remove the snapshots of a run, with what they have on every drive."""
    from .options import snapshots_parser

    parser = snapshots_parser(snapshots.__doc__)
    options = parser.parse_args(arguments)
    if options.action == "rm" and not options.snapshots and not options.lost:
        parser.error("name the folders of snapshots, or --lost and a drive")
    with importing():
        from . import snapshots as looking_after
    return looking_after.run(options)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "finetune": finetune,
    "demo": demo,
    "report": report,
    "plan": plan,
    "estimate": estimate,
    "io-tune": io_tune,
    "doctor": doctor,
    "snapshots": snapshots,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; 1 after an error, 2 for a wrong call."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has seen enough
        _discard_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print(f"strata: {rank_name()}interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from .._core import __version__

        print(f"strata {__version__}")
        return 0
    from .._errors import StrataError, import_failure, nearest

    command = COMMANDS.get(arguments[0])
    if command is None:
        message = f"unknown command {arguments[0]!r}: {nearest(arguments[0], COMMANDS)}"
        print(f"strata: {message}", file=sys.stderr)
        return 2
    import logging

    from .._storage.checkpoint_files import CheckpointError

    follows = not leads()  # of several ranks the first tells what all of them do
    logging.basicConfig(
        level=logging.WARNING if follows else logging.INFO,
        format=f"{rank_name() if follows else ''}%(message)s",
    )
    for library in ("accelerate", "datasets", "httpx", "matplotlib", "peft", "transformers"):
        logging.getLogger(library).setLevel(logging.ERROR if follows else logging.WARNING)
    try:
        return command(arguments[1:])
    except BrokenPipeError:
        raise
    except (StrataError, CheckpointError, ValueError, OSError, ImportError) as error:
        if os.environ.get("STRATA_TRACEBACK"):
            raise
        says = import_failure(error) if isinstance(error, ImportError) else error
        print(f"strata: {rank_name()}{says}", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """Sends what is still buffered nowhere, also what Python flushes when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _usage() -> str:
    lines = [f"  {name:<10} {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: strata COMMAND [OPTIONS]",
            "       strata --version",
            "",
            *lines,
            "",
            "strata COMMAND --help says more.",
        ]
    )
