"""The command line: `strata COMMAND`, also `python -m strata COMMAND`.

A command is a function from its arguments to the exit status, entered in COMMANDS.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .checkpoint_files import CheckpointError
from .errors import StrataError, nearest


def finetune(arguments: Sequence[str]) -> int:
    """Fine-tune a causal language model on text, inside memory budgets."""
    from . import finetune as training  # Transformers takes seconds
    from . import finetune_options as options

    parser = options.Parser(prog="strata finetune", description=finetune.__doc__)
    options.add_arguments(parser)
    return training.run(options.finish(parser, arguments))


def demo(arguments: Sequence[str]) -> int:
    """Train a 112 M-parameter Llama on Python's own library, in far less memory than it needs."""
    from .demo import run

    return run(arguments)


def report(arguments: Sequence[str]) -> int:
    """Show a saved report: as text, as a page with charts, as a trace for ui.perfetto.dev."""
    from . import html_report, perfetto
    from .report import Report

    parser = argparse.ArgumentParser(prog="strata report", description=report.__doc__)
    parser.add_argument("report", metavar="REPORT.json", help="what Report.save() wrote")
    parser.add_argument("--html", metavar="FILE", type=Path, help="one page that needs no network")
    parser.add_argument("--perfetto", metavar="FILE", type=Path, help="a trace of the last steps")
    options = parser.parse_args(arguments)
    found = Report.load(options.report)
    if options.html:
        options.html.write_text(html_report.page(found), encoding="utf-8")
    if options.perfetto:
        perfetto.write(found.records, options.perfetto)
    if not options.html and not options.perfetto:
        print(found)
    return 0


def plan(arguments: Sequence[str]) -> int:
    """Say how a recorded step would run on another machine, without running anything."""
    from .whatif import run

    return run(arguments, plan.__doc__)


def estimate(arguments: Sequence[str]) -> int:
    """Say whether a model fits and how fast it would train, before its weights are there."""
    from .estimate import run

    return run(arguments, estimate.__doc__)


def io_tune(arguments: Sequence[str]) -> int:
    """Measure this machine's links and disks, and remember them for planning."""
    from .io_tune import run

    return run(arguments, io_tune.__doc__)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "finetune": finetune,
    "demo": demo,
    "report": report,
    "plan": plan,
    "estimate": estimate,
    "io-tune": io_tune,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; 1 after an error, 2 for a wrong call."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    command = COMMANDS.get(arguments[0])
    if command is None:
        message = f"unknown command {arguments[0]!r}: {nearest(arguments[0], COMMANDS)}"
        print(f"strata: {message}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for library in ("httpx", "matplotlib", "transformers"):
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        return command(arguments[1:])
    except (StrataError, CheckpointError, ValueError, OSError) as error:
        if os.environ.get("STRATA_TRACEBACK"):
            raise
        print(f"strata: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("strata: interrupted", file=sys.stderr)
        return 130


def _usage() -> str:
    lines = [f"  {name:<10} {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: strata COMMAND [OPTIONS]", "", *lines, "", "strata COMMAND --help says more."]
    )
