"""A snapshot in the middle of an accumulation has the gradients that have landed, and what is known
of them; strata.load goes on from it bit for bit, whatever the budgets."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from strata._storage.checkpoint_files import CheckpointError, read_manifest, write_manifest
from strata._storage.snapshot_adopt import adopt
from strata._storage.snapshot_pages import copy_snapshot, slots_of
from strata._storage.snapshot_series import remove_snapshot, snapshots_of
from strata._storage.together import Together
from test_checkpoint import Case, llama
from test_snapshot import HOST, SSD, drive
from variants import quick_first

ALL_RESIDENT = {"device": "32MiB", "host": "32MiB", "ssd": "256MiB"}
SUMS: dict[str, Any] = {"gradient_accumulation_steps": 3}
CASES: list[tuple[dict[str, str], dict[str, Any]]] = [
    (SSD, {"dtype": torch.bfloat16}),
    (HOST, SUMS),
    (SSD, SUMS | {"dtype": torch.bfloat16}),
    (HOST, SUMS | {"update": strata.LockFree(max_staleness=0)}),
    (ALL_RESIDENT, {}),
    (SSD, {"state_dtype": "8bit"} | SUMS),
]


def backward(case: Case, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        tokens = torch.randint(0, 96, (2, 16))
        loss = case.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
    return losses


def windows(case: Case, first: int, count: int) -> list[float]:
    """Accumulations of three backward() calls each, of which the first has had some."""
    losses = []
    for window in range(count):
        losses += backward(case, 3 - first if window == 0 else 3)
        case.optimizer.step()
        losses.append(case.state.steps.last["norm"])
        case.optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("memory", "mode"), quick_first(CASES, 2))
@pytest.mark.parametrize("landed", quick_first([(1,), (3,)], 1))
def test_it_goes_on_in_the_middle_of_an_accumulation(
    tmp_path: Path, memory: dict[str, str], mode: dict[str, Any], landed: int
) -> None:
    case = Case(drive(tmp_path, "drive"), memory, llama(), **mode)
    windows(case, 0, 1)
    backward(case, landed)
    handle = strata.snapshot(case.model, tmp_path / "run")
    after = windows(case, landed, 2)
    handle.wait()
    expected = case.masters()
    case.close()
    for other, more in ((SSD, {"page_size": "64KiB"}), (HOST, {}), (ALL_RESIDENT, {})):
        again = Case(drive(tmp_path, "other"), other, llama(), **mode, **more)
        windows(again, 0, 1)  # it is loaded over something else
        backward(again, 1)
        strata.load(again.model, tmp_path / "run")
        assert windows(again, landed, 2) == after
        assert all(map(torch.equal, again.masters(), expected))
        again.close()


def test_snapshots_follow_each_other_within_an_accumulation(tmp_path: Path) -> None:
    case = Case(drive(tmp_path, "drive"), HOST, llama(), **SUMS)
    windows(case, 0, 1)
    backward(case, 1)
    first = strata.snapshot(case.model, tmp_path / "first")
    backward(case, 1)
    second = strata.snapshot(case.model, tmp_path / "second")
    after = windows(case, 2, 1)
    first.wait()
    second.wait()
    strata.load(case.model, tmp_path / "second")
    assert windows(case, 2, 1) == after
    strata.load(case.model, tmp_path / "first")
    backward(case, 1)
    assert windows(case, 2, 1) == after
    case.close()


def test_what_was_asked_of_a_gradient_goes_along(tmp_path: Path) -> None:
    """Scaled, clipped, replaced and zeroed gradients, and those that the user holds."""

    def change(case: Case) -> None:
        case.optimizer.zero_grad(set_to_none=False)
        backward(case, 1)
        first, second, third, fourth, *_ = case.model.parameters()
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.01)
        assert first.grad is not None
        first.grad *= 3
        second.grad = torch.full_like(second, 0.25)
        third.grad = None
        assert fourth.grad is not None
        fourth.grad.zero_()

    case = Case(drive(tmp_path, "drive"), SSD, llama(), dtype=torch.bfloat16)
    case.train(1)
    change(case)
    handle = strata.snapshot(case.model, tmp_path / "run")
    for parameter in case.model.parameters():  # behind it, so it is no part of it
        if parameter.grad is not None:
            parameter.grad /= 2
    handle.wait()
    strata.load(case.model, tmp_path / "run")
    grads = [None if p.grad is None else p.grad.clone() for p in case.model.parameters()]
    case.optimizer.step()
    case.optimizer.zero_grad()
    after, masters = case.train(2), case.masters()
    case.close()
    plain = Case(drive(tmp_path, "plain"), HOST, llama(), dtype=torch.bfloat16)
    strata.load(plain.model, tmp_path / "run")
    for parameter, expected in zip(plain.model.parameters(), grads, strict=True):
        if expected is None:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, expected)
    assert sum(g is None for g in grads) == 1
    assert torch.count_nonzero(grads[3]) == 0
    assert torch.equal(grads[1], torch.full_like(grads[1], 0.25))
    plain.optimizer.step()
    plain.optimizer.zero_grad()
    assert plain.train(2) == after
    assert all(map(torch.equal, plain.masters(), masters))
    plain.close()


def test_zero_grad_behind_a_snapshot_is_no_part_of_it(tmp_path: Path) -> None:
    case = Case(drive(tmp_path, "drive"), HOST, llama())
    case.train(1)
    backward(case, 1)
    expected = [p.grad.clone() for p in case.model.parameters() if p.grad is not None]
    strata.snapshot(case.model, tmp_path / "run")
    case.optimizer.zero_grad()
    assert all(p.grad is None for p in case.model.parameters())
    case.train(1)
    strata.snapshot(case.model, tmp_path / "other").wait()
    strata.load(case.model, tmp_path / "run")
    found = [p.grad.clone() for p in case.model.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, expected))
    strata.load(case.model, tmp_path / "other")
    assert all(p.grad is None for p in case.model.parameters())
    case.close()


def test_gradients_of_lagging_updates_go_along(tmp_path: Path) -> None:
    """What LockFree has merged, or holds back, is applied once, whatever the mode is later."""
    mode: dict[str, Any] = {"update": strata.LockFree(max_staleness=2), "workers": 1}

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    case = Case(drive(tmp_path, "drive"), SSD, llama(), optimizer=sgd, **mode)
    for _ in range(4):
        backward(case, 1)
        case.optimizer.step()
        case.optimizer.zero_grad()
    backward(case, 1)
    handle = strata.snapshot(case.model, tmp_path / "run")
    case.optimizer.step()
    case.optimizer.zero_grad()
    strata.synchronize(case.model)
    expected = case.masters()
    handle.wait()
    case.close()
    for how in (mode, SUMS, {"update": strata.LockFree(max_staleness=0)}):
        again = Case(drive(tmp_path, "other"), HOST, llama(), optimizer=sgd, **how)
        strata.load(again.model, tmp_path / "run")
        again.optimizer.step()
        strata.synchronize(again.model)
        assert all(map(torch.equal, again.masters(), expected))
        again.close()


def test_what_cannot_keep_them_is_refused(tmp_path: Path) -> None:
    disk = drive(tmp_path, "drive")
    half = Case(disk, SSD, llama(), update="in_backward")
    half.train(1)
    backward(half, 1)
    with pytest.raises(RuntimeError, match=r"optimizer.step\(\) first"):
        strata.snapshot(half.model, tmp_path / "half")
    half.optimizer.step()
    strata.snapshot(half.model, tmp_path / "half").wait()
    half.close()
    case = Case(disk, SSD, llama(), dtype=torch.bfloat16, **SUMS)
    backward(case, 1)
    strata.snapshot(case.model, tmp_path / "run").wait()
    case.close()
    for how, why in (({"update": "in_backward"}, "in_backward"), ({}, "gradient_accumulation")):
        other = Case(disk, SSD, llama(), dtype=torch.bfloat16, **how)
        before = other.masters()
        with pytest.raises(CheckpointError, match=why):
            strata.load(other.model, tmp_path / "run")
        assert all(map(torch.equal, other.masters(), before))
        other.train(1)
        other.close()


def test_copies_have_them_and_damage_is_noticed(tmp_path: Path) -> None:
    case = Case(drive(tmp_path, "drive"), SSD, llama(), **SUMS)
    backward(case, 2)
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    after = windows(case, 2, 1)
    copy_snapshot(folder, tmp_path / "copy" / folder.name)
    strata.load(case.model, tmp_path / "copy")
    assert windows(case, 2, 1) == after
    manifest = read_manifest(folder)
    before = case.masters()
    chunk = next(i for i, c in enumerate(manifest["chunks"]) if c["grad"] is not None)
    for damage in (
        lambda m: m["chunks"][chunk].update(grad=None),
        lambda m: m["chunks"][chunk]["grad"][2].__setitem__(0, None),
        lambda m: m["chunks"][chunk]["grad"].__setitem__(1, 1 << 40),
        lambda m: m["gradients"]["params"].clear(),
        lambda m: m["gradients"]["params"][0].__setitem__(3, [1.0] * 9),
        lambda m: m["gradients"].pop("float32"),
        lambda m: m.update(zeros=[1 << 40]),
        lambda m: m["chunks"][chunk]["runs"][0].__setitem__(5, [7, 1, 1.0]),
        lambda m: m["chunks"][chunk]["runs"][0].__setitem__(4, -1),
        lambda m: m["chunks"][chunk].update(rank=1),  # of one that was alone
    ):
        broken = json.loads(json.dumps(manifest))
        damage(broken)
        write_manifest(folder, broken)
        with pytest.raises(CheckpointError):
            strata.load(case.model, tmp_path / "run")
        assert all(map(torch.equal, case.masters(), before))
    case.close()


@pytest.mark.parametrize(
    "mode",
    quick_first([({"dtype": torch.bfloat16},), (SUMS,), ({"state_dtype": "8bit"} | SUMS,)], 1),
)
def test_gradients_land_again_where_the_pages_are_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: dict[str, Any]
) -> None:
    """The slots of gradients and of scales are held with those of pages, and let go with them."""
    caplog.set_level(logging.INFO, "strata")
    disk = drive(tmp_path, "drive")
    case = Case(disk, SSD, llama(), **mode)
    windows(case, 0, 1)
    backward(case, 1)
    strata.snapshot(case.model, tmp_path / "run").wait()
    after = windows(case, 1, 2)
    case.close()
    for memory in (SSD, HOST, SSD):
        again = Case(disk, memory, llama(), **mode)
        for _ in range(2):  # of another run; and back to it
            caplog.clear()
            strata.load(again.model, tmp_path / "run")
            assert "when they are needed" in caplog.text, caplog.text
            assert windows(again, 1, 2) == after
        strata.snapshot(again.model, tmp_path / "other", keep=1).wait()
        remove_snapshot(snapshots_of(tmp_path / "other")[0])
        again.close()
    last = Case(disk, SSD, llama(), **mode)
    strata.load(last.model, tmp_path / "run")
    remove_snapshot(snapshots_of(tmp_path / "run")[0])
    windows(last, 1, 2)
    strata.snapshot(last.model, tmp_path / "last").wait()
    pages = len(slots_of(read_manifest(snapshots_of(tmp_path / "last")[0])))
    assert last.state.session.stats()["slots_kept"] <= pages
    last.close()


def test_gradients_that_wait_for_their_update_are_read(tmp_path: Path) -> None:
    """The update is made as they are loaded, so the pages that it changes are no snapshot's."""
    case = Case(drive(tmp_path, "drive"), SSD, llama())
    backward(case, 1)
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    manifest = read_manifest(folder)
    manifest["chunks"][0]["runs"][0][5] = [0, 1, 1.0]
    why = adopt(
        case.state,
        manifest,
        folder,
        lambda first, count: torch.empty(0),
        Together.alone("strata.load()"),
    )
    assert "still to come" in why
    case.close()
