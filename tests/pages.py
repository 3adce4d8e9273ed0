"""What README.md and the pages in docs/ show, as programs.

    for page in pages.all_pages(): ...
    output = pages.run(page, folder)             # raises AssertionError where a block fails
    missing = pages.unprinted(page, output)      # what the page shows, and nobody printed

A page's blocks of Python run one after the other in one process, as a reader would who types them
in. Blocks of "text" on such a page are what they print, numbers aside; "..." is something left out.
`python tests/pages.py PAGE` is the process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What stands in tests/loops' environment alone.
OF_LOOPS = re.compile(r"\b(accelerate|peft|trl|lightning|datasets|Trainer|TrainingArguments)\b")
NUMBER = re.compile(r"[\d.,]+(?:e-?\d+)?(?: ?(?:[KMGT]i?B|ns|µs|ms|s|min)\b)?")


def all_pages() -> list[Path]:
    """README.md and everything in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    """Its path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, kind: str) -> list[tuple[int, str]]:
    """The blocks of one kind: the lines ahead of each, and its text."""
    text = page.read_text(encoding="utf-8")
    found = [match for match in BLOCK.finditer(text) if match[1] == kind]
    return [(text[: match.start(2)].count("\n"), match[2]) for match in found]


def needs_loops(page: Path) -> bool:
    """Whether its programs take libraries that are in the environment of tests/loops alone."""
    return any(OF_LOOPS.search(text) for _, text in blocks(page, "python"))


def run(page: Path, folder: Path) -> str:
    """Runs a page in a folder. Returns what it printed and logged, the folder's name left out."""
    done = subprocess.run(
        [sys.executable, __file__, str(page)],
        cwd=folder,
        # Budgets on the pages are for the host as a device. Lines come at once, as in a terminal.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout.replace(f"{folder}/", "")


def unprinted(page: Path, output: str) -> list[str]:
    """What the page says is printed, and is not in `output`. Numbers may differ, and so may where
    lines are broken."""
    printed = _bare(output)
    shown = [text for _, text in blocks(page, "text")]
    return [part for text in shown for part in text.split("...") if _bare(part) not in printed]


def _bare(text: str) -> str:
    return NUMBER.sub("#", " ".join(text.split()))


def main() -> None:
    """Runs the page that is named, its blocks in one name space, on a machine that is not measured
    first."""
    from strata._profiling import calibrate

    page = Path(sys.argv[1])
    calibrate.costs = lambda *args, **more: calibrate.typical_costs()
    sys.argv = [str(page)]
    names = {"__name__": "__main__"}
    for line, text in blocks(page, "python"):
        exec(compile("\n" * line + text, str(page), "exec"), names)


if __name__ == "__main__":
    main()
