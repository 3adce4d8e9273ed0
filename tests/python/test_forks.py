"""A forked child that uses the model is stopped at once, and one that carries it ends cleanly."""

import copy
import gc
import io
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import build, tight
from stacks import Blocks, steps
from strata import _core
from strata._runtime.wrapped import wrapped
from strata._storage.checkpoint_files import read_manifest
from strata._storage.snapshots.pages import page_paths, slots_of
from strata._storage.snapshots.series import snapshots_of
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS_MAX = 30


class Parent:
    """What a child finds."""

    def __init__(self, **more: Any) -> None:
        self.model, self.optimizer = tight(build(lambda: Blocks(2)), **more)
        steps(self.model, self.optimizer, 1)
        self.parameter = self.model.get_parameter("head.weight")
        self.view = self.parameter.data
        self.loss = self.model(torch.randn(3, 48)).sum()


DOORS: dict[str, Callable[[Parent], Any]] = {
    "forward": lambda run: run.model(torch.randn(3, 48)),
    "evaluation": torch.no_grad()(lambda run: run.model(torch.randn(3, 48))),
    "a block alone": lambda run: run.model.blocks[0](torch.randn(3, 48)),
    "backward": lambda run: run.loss.backward(),
    "read": lambda run: run.parameter.norm(),
    "read of a view": lambda run: run.view + 1,
    "write": lambda run: run.parameter.data.mul_(2),
    "copy_": lambda run: run.parameter.data.copy_(torch.ones(48, 48)),
    "item": lambda run: run.parameter[0, 0].item(),
    "print": lambda run: repr(run.parameter),
    "step": lambda run: run.optimizer.step(),
    "zero_grad": lambda run: run.optimizer.zero_grad(),
    "state of the optimizer": lambda run: run.optimizer.state_dict(),
    "torch.save": lambda run: torch.save(run.model.state_dict(), io.BytesIO()),
    "load_state_dict": lambda run: run.model.load_state_dict(Blocks(2).state_dict()),
    "deepcopy": lambda run: copy.deepcopy(run.model),
    "save": lambda run: strata.save(run.model, "checkpoint"),
    "export": lambda run: strata.export_safetensors(run.model, "exported"),
    "report": lambda run: strata.report(run.model),
    "synchronize": lambda run: strata.synchronize(run.model),
    "unwrap": lambda run: strata.unwrap(run.model),
}


# Of a backward in a child, where autograd's own threads ran in the parent.
TORCH_REFUSES = "Unable to handle autograd's threading in combination with fork"


def in_child(work: Callable[[], str]) -> str:
    """What a forked child says. Fails where it does not end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, work().encode())
        except BaseException as error:  # pytest must not go on in the child
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    try:
        if not select.select([read], [], [], SECONDS_MAX)[0]:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the child hangs")
        with os.fdopen(read) as answer:
            return answer.read()
    finally:
        os.waitpid(child, 0)


@pytest.mark.parametrize("update", ["on_step", "in_backward", strata.LockFree(1)])
def test_whatever_a_child_does_with_the_model_raises(
    core: ModuleType, update: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Parent(update=update)

    def try_all() -> str:
        wrong = []
        for name, door in DOORS.items():
            try:
                door(run)
                wrong.append(f"{name}: nothing")
            except RuntimeError as error:  # StrataError, or what torch makes of it
                known = (f"was wrapped in process {os.getppid()}", TORCH_REFUSES)
                if not any(words in str(error) for words in known):
                    wrong.append(f"{name}: {error!r}")
            except BaseException as error:
                wrong.append(f"{name}: {error!r}")
        return "; ".join(wrong)

    assert in_child(try_all) == ""
    assert list(tmp_path.iterdir()) == []
    run.loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    steps(run.model, run.optimizer, 1)


def test_locks_that_were_held_while_forking(core: ModuleType) -> None:
    """By other threads of the parent's, which the child does not have."""
    run = Parent()
    swapping: Any = wrapped(run.model).hooks.swapping
    with swapping._lock:
        assert "wrapped in process" in in_child(lambda: DOORS["forward"](run))


class Carries(Dataset[torch.Tensor]):
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        assert len(list(self.model.parameters())) > 4
        return torch.full((48,), float(i))


def test_workers_may_carry_the_model(core: ModuleType) -> None:
    run = Parent()
    loader = DataLoader(
        Carries(run.model), batch_size=4, num_workers=1, multiprocessing_context="fork"
    )
    for batch in loader:
        run.model(batch).sum().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def made_with_threads(tmp_path: Path) -> list[Any]:
    """Objects of the core with threads of their own, by "threads" with those of an I/O engine."""
    memory = {"device": "64KiB", "host": "1MiB", "ssd": "8MiB"}
    options = {"memory": memory, "page_size": "64KiB", "ssd_path": tmp_path}
    model, _ = tight(build(lambda: Blocks(2)), **options)
    strata.snapshot(model, tmp_path / "snapshots").wait()
    (folder,) = snapshots_of(tmp_path / "snapshots")
    manifest = read_manifest(folder)
    paths = page_paths(manifest, folder)
    pages = _core.SavedPages(
        ["/"] * len(paths), paths, manifest["page_bytes"], slots_of(manifest), "threads"
    )
    probe = _core.SsdProbe([str(tmp_path)], 1 << 16, "threads", 1 << 18)
    return [pages, probe, _core.UpdateProbe(1, "bfloat16", 1 << 16, 1 << 18)]


def test_a_child_forgets_what_has_threads(tmp_path: Path) -> None:
    """They are the parent's: a child that ends them waits for ever."""
    made = made_with_threads(tmp_path)

    def drop() -> str:
        made.clear()
        gc.collect()
        return "dropped"

    assert in_child(drop) == "dropped"
