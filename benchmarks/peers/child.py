"""A side of a comparison in a process of its own, so that sides with different environments, and
with memory to be compared, can still take turns.

A line goes in, a command; a line of JSON comes back, its answer.

    child = Child([python, "-m", "benchmarks.peers.training", ...], env)   # waits until it is ready
    child.ask("step")                                                     # {"seconds": 1.8, ...}
    child.close()

In the child: serve({"step": step, "peak": peak}).
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from ..common import BenchError

Answer = Mapping[str, Any]


class Child:
    """The parent's end."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._name = " ".join(command[1:4])
        # What libraries print must not fill a pipe that nobody reads.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() closes it)
        self._process = subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )
        try:
            self._answer()  # ready
        except BaseException:
            self.close()
            raise

    def ask(self, command: str) -> Answer:
        """Sends a command and waits for its answer. BenchError where the child died of it."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it is gone; what it said last tells why
            self._process.stdin.write(command + "\n")
        return self._answer()

    def close(self) -> None:
        """Lets the child end, and waits for it. Twice is once."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.close()

    def _answer(self) -> Answer:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if line:
            answer: Answer = json.loads(line)
            return answer
        code = self._process.wait()
        self._log.seek(0)
        tail = "\n".join(self._log.read().splitlines()[-15:])
        raise BenchError(f"{self._name} ended with {code}:\n{tail}")


def claim_stdout() -> TextIO:
    """The stream for answers. From here on print() goes to stderr, also that of libraries; call it
    before they are imported.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, commands: Mapping[str, Callable[[], Answer]]) -> None:
    """Says that it is ready and answers commands until there are no more."""
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        print(json.dumps(commands[line.strip()]()), file=answers)


def memory_peak() -> Answer:
    """The most memory that this process ever had resident."""
    with open("/proc/self/status") as status:
        kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return {"bytes": kib * 1024}
