"""Runs ranks, as processes that have imported torch already.

with Ranks() as ranks:
    results = ranks.run("losses", 2, steps=3)       # of rank_scenarios.losses, by rank
    results = ranks.run("losses", "aabb", steps=3)  # likewise, two on each of two machines
    run = ranks.start("endless", 2)                 # ... .pids, to send signals to
    outcomes = run.wait()                           # .value, .code, .error, .seconds, by rank

A server imports everything once and forks the ranks of each run, so a run takes a fraction of a
second to begin. What a rank ends with, an exception too, it ends with as any Python process does;
but a quick one leaves once its threads have ended and what is registered for the exit has run. The
interpreter would then take down each module that the server imported, which takes longer than most
scenarios and copies all that ranks share.

Ranks meet as those of torchrun do, over a store that outlives them. A file would not do: a rank
that is killed while it writes leaves half a record, which torch's FileStore never ends reading.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import distributed

TIMEOUT_S = 600.0
SAYS_S = 0.5  # what it takes to say where it hangs
_codes: list[int] = []  # what this rank ends with, if it leaves quickly


@dataclass
class Outcome:
    """How a rank ended."""

    value: Any  # what its scenario returned; None: it did not
    code: int  # of the process; negative: the signal that ended it
    output: str  # all that it printed
    seconds: float  # from the start of the run to the end of the process


class Run:
    """Ranks that have been started."""

    def __init__(self, server: Ranks, folder: Path, pids: list[int]) -> None:
        self.folder, self.pids = folder, pids
        self._server, self._began = server, time.monotonic()

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> float:
        """Sends a rank a signal. Returns when, in seconds from the start."""
        os.kill(self.pids[rank], signal_number)
        return time.monotonic() - self._began

    def await_mark(self, name: str, timeout: float = 300.0) -> None:
        """Returns when a rank has made the file `name` in its folder."""
        self._await((self.folder / name).exists, name, timeout)

    def await_words(self, words: str, timeout: float = 300.0) -> None:
        """Returns when ranks have printed them."""
        self._await(lambda: words in self.outputs(), words, timeout)

    def _await(self, there: Callable[[], bool], what: str, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not there():
            assert time.monotonic() < end, f"no {what!r}: {self.outputs()}"
            time.sleep(0.005)

    def outputs(self) -> str:
        """All that ranks have printed so far."""
        return "\n".join(p.read_text() for p in sorted(self.folder.glob("rank-*.log")))

    def codes(self) -> list[tuple[int, float]] | None:
        """How each rank ended, and when; None: not all have."""
        path = self.folder / "codes.json"
        return json.loads(path.read_text()) if path.exists() else None

    def wait(self, timeout: float = TIMEOUT_S) -> list[Outcome]:
        """Returns when all have ended. Those that hang say where they are, and are killed."""
        end = self._began + timeout
        while (codes := self.codes()) is None:
            self._server.check()
            if time.monotonic() > end:
                for number in (signal.SIGUSR2, signal.SIGKILL):
                    for pid in self.pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, number)
                    time.sleep(SAYS_S)
                raise AssertionError(f"ranks hang: {self.outputs()}")
            time.sleep(0.01)
        outcomes = []
        for rank, (code, seconds) in enumerate(codes):
            result = self.folder / f"rank-{rank}.json"
            value = json.loads(result.read_text()) if result.exists() else None
            output = (self.folder / f"rank-{rank}.log").read_text()
            outcomes.append(Outcome(value, code, output, seconds))
        return outcomes


class Ranks:
    """The server, and what was started by it. `quick`: how ranks end, see above."""

    def __init__(self, quick: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rank-tests-")
        self.temporary = Path(self._folder.name) / "tmp"  # where ranks make theirs
        self.temporary.mkdir()
        self._runs = 0
        self._store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = os.environ | {
            "TMPDIR": str(self.temporary),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("XDG_RUNTIME_DIR", None)
        self._server = subprocess.Popen(
            [sys.executable, __file__, *(["quick"] if quick else [])],
            stdin=subprocess.PIPE,
            env=environment,
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        del self._store
        self._folder.cleanup()

    def start(self, scenario: str, ranks: int | str, **arguments: Any) -> Run:
        """Starts `ranks` processes; one alone is no rank, as without torchrun. A text has a letter
        for the machine of each, which does not share memory with the others; "{machine}" in an
        argument becomes it. `scenario`: a function of rank_scenarios.py, or with its module ahead
        of it, as "rank_saves.saves"."""
        machines = ranks if isinstance(ranks, str) else ""
        count = len(machines) if isinstance(ranks, str) else ranks
        folder = Path(self._folder.name) / f"run-{self._runs}"
        folder.mkdir()
        self._runs += 1
        order = {"scenario": scenario, "ranks": count, "folder": str(folder), "machines": machines}
        order |= {"port": self._store.port}
        assert self._server.stdin is not None
        self._server.stdin.write((json.dumps(order | {"with": arguments}) + "\n").encode())
        self._server.stdin.flush()
        pids = folder / "pids.json"
        end = time.monotonic() + TIMEOUT_S
        while not pids.exists():
            assert time.monotonic() < end
            self.check()
            time.sleep(0.005)
        return Run(self, folder, json.loads(pids.read_text()))

    def check(self) -> None:
        """Fails where the server has ended: nobody would see ranks end."""
        assert self._server.poll() is None, "the server of the ranks has ended: see its traceback"

    def run(self, scenario: str, ranks: int | str, **arguments: Any) -> list[Any]:
        """What the scenario returned on each rank, all of which ended well."""
        outcomes = self.start(scenario, ranks, **arguments).wait()
        printed = "\n".join(outcome.output for outcome in outcomes)
        assert all(outcome.code == 0 for outcome in outcomes), printed
        return [outcome.value for outcome in outcomes]


def _write(path: Path, value: Any) -> None:
    """At once: whoever sees the file sees all of it."""
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").rename(path)


def _leave_quickly() -> None:
    """Called by Python at the exit, after everything that strata has registered for it."""
    for code in _codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _be_rank(order: dict[str, Any], rank: int) -> None:
    try:
        _run_scenario(order, rank)
    except Exception:  # SystemExit and Ctrl-C end a process in ways of their own
        _codes.append(1)
        raise
    _codes.append(0)


def _run_scenario(order: dict[str, Any], rank: int) -> None:
    import rank_scenarios
    import torch

    folder = Path(order["folder"])
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.register(signal.SIGUSR2)  # where each thread is
    torch.set_num_threads(1)
    if order["machines"]:
        machine = os.environ["STRATA_MACHINE"] = order["machines"][rank]
        order["with"] = json.loads(json.dumps(order["with"]).replace("{machine}", machine))
    run = rank_scenarios.Rank(rank, order["ranks"], folder, order["port"])
    if order["ranks"] > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(order["ranks"])}
        if order["with"].pop("meet", True):
            run.join("gloo")
    module, _, name = order["scenario"].rpartition(".")
    scenarios = importlib.import_module(module or "rank_scenarios")
    value = getattr(scenarios, name)(run, **order["with"])
    _write(folder / f"rank-{rank}.json", value)


def _serve(quick: bool) -> None:
    if quick:
        atexit.register(_leave_quickly)  # what is registered first runs last
    # For all ranks: what torch imports with the first optimizer takes longer than most runs.
    import rank_scenarios  # noqa: F401
    import strata._api  # noqa: F401
    import torch._dynamo  # noqa: F401

    # Else each rank looks at all of this at its end, and copies what it shares with the others.
    gc.collect()
    gc.freeze()

    children: dict[int, tuple[dict[str, Any], int, float]] = {}
    codes: dict[str, dict[int, tuple[int, float]]] = {}
    # A child that ends wakes the loop below, where it is seen to: handlers could interrupt each
    # other.
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    orders = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(children, codes)
        if 0 not in ready:
            continue
        if not (read := os.read(0, 1 << 16)):
            return
        *lines, orders = (orders + read).split(b"\n")
        for line in lines:
            order = json.loads(line)
            began, pids = time.monotonic(), []
            for rank in range(order["ranks"]):
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(woken)
                    os.close(wakes)
                    _be_rank(order, rank)
                    return
                children[pid] = (order, rank, began)
                pids.append(pid)
            _write(Path(order["folder"]) / "pids.json", pids)


def _reap(
    children: dict[int, tuple[dict[str, Any], int, float]],
    codes: dict[str, dict[int, tuple[int, float]]],
) -> None:
    """Takes those out that have ended. Writes how, where it was the last one of its run."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        order, rank, began = children.pop(pid)
        of = codes.setdefault(order["folder"], {})
        of[rank] = (os.waitstatus_to_exitcode(status), time.monotonic() - began)
        if len(of) == order["ranks"]:
            _write(Path(order["folder"]) / "codes.json", [of[r] for r in sorted(of)])


if __name__ == "__main__":
    _serve(quick=sys.argv[1:] == ["quick"])
