"""strata.save(wait=False) is at work for a third of the time at most, until somebody waits."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import strata
from strata._storage import checkpoint_files, pace
from strata._storage.pace import Pace
from test_checkpoint import Case, llama
from test_saving import expected, same, tensors
from test_snapshot import SSD, disk

__all__ = ["disk"]  # a fixture

LONG_S = 3600.0


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "PACED_BYTES", 1 << 10)


@pytest.fixture
def endless(little: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rest has no end."""
    monkeypatch.setattr(pace, "REST_RATIO", 1e9)
    monkeypatch.setattr(pace, "REST_MAX_S", LONG_S)


def chunks(count: int) -> Iterator[memoryview]:
    for _ in range(count):
        time.sleep(0.01)
        yield memoryview(bytes(1 << 10))


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.usefixtures("little")
def test_a_stream_rests_twice_as_long_as_it_works() -> None:
    paced = Pace()
    flushed = []
    begin = time.monotonic()
    for _ in paced(chunks(8), lambda: flushed.append(time.sleep(0.01))):
        pass
    seconds = time.monotonic() - begin
    assert len(flushed) == 8
    assert paced.rested_s >= 2 * 8 * 0.02 * 0.9
    assert paced.rested_s >= seconds / 2


@pytest.mark.usefixtures("endless")
def test_who_waits_ends_the_rests() -> None:
    paced = Pace()
    done = threading.Thread(target=lambda: list(paced(chunks(5))))
    done.start()
    done.join(0.2)
    assert done.is_alive()
    paced.hurry()
    done.join(300)
    assert not done.is_alive()


@pytest.mark.usefixtures("little")
def test_a_save_beside_training_is_paced(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = []
    flush = checkpoint_files.TensorWriter.flush
    monkeypatch.setattr(
        checkpoint_files.TensorWriter, "flush", lambda self: flushes.append(flush(self))
    )
    case = Case(disk, SSD, llama())
    case.train(1)
    held = expected(case)
    begin = time.monotonic()
    handle = strata.save(case.model, tmp_path / "c", wait=False)
    until(lambda: handle.complete)
    seconds = time.monotonic() - begin
    rested = case.state.snapshots.holder._pace.rested_s
    assert flushes
    assert 0 < rested < seconds
    assert same(tensors(tmp_path / "c"), held)
    flushes.clear()
    strata.save(case.model, tmp_path / "d")  # nobody trains meanwhile
    assert not flushes
    assert same(tensors(tmp_path / "d"), held)
    case.close()


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("waits", ["wait", "load", "save", "snapshots", "end"])
def test_whoever_waits_gets_it_at_once(tmp_path: Path, disk: Path, waits: str) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)
    held = expected(case)
    handle = strata.save(case.model, tmp_path / "c", wait=False)
    case.train(1)
    assert not handle.complete
    ways: dict[str, Callable[[], Any]] = {
        "wait": lambda: handle.wait(600),
        "load": lambda: strata.load(case.model, tmp_path / "c"),
        "save": lambda: strata.save(case.model, tmp_path / "d", wait=False).wait(600),
        "snapshots": lambda: strata.unwrap(case.model),
        "end": case.close,
    }
    ways[waits]()
    assert handle.complete
    assert same(tensors(tmp_path / "c"), held)
    case.close()


@pytest.mark.thorough
def test_the_end_of_a_program_ends_the_rests(tmp_path: Path, disk: Path) -> None:
    program = (
        "import strata; from pathlib import Path; from strata._storage import pace; "
        "from test_checkpoint import Case, llama; from test_snapshot import SSD; "
        f"pace.PACED_BYTES, pace.REST_RATIO, pace.REST_MAX_S = 1024, 1e9, {LONG_S}; "
        f"case = Case(Path({str(disk)!r}), SSD, llama()); case.train(1); "
        f"strata.save(case.model, {str(tmp_path / 'c')!r}, wait=False)"
    )
    child = os.fork()
    if child == 0:
        os.chdir(Path(__file__).parent)
        os.execv(sys.executable, [sys.executable, "-c", program])
    assert os.waitpid(child, 0)[1] == 0
    assert tensors(tmp_path / "c")
