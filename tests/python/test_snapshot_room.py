"""The room that snapshots take is part of the SSD's budget: planned, told, and refused up front."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from strata._cli import main as cli
from strata._storage.snapshots import series
from test_checkpoint import Case, llama
from test_snapshot import SSD, drive

MEMORY = {"device": "512KiB", "host": "4MiB"}


def wrap(path: Path, memory: dict[str, str], **how: Any) -> Case:
    return Case(path, memory, llama(), **how)


def enough(error: BaseException) -> int:
    found = re.search(r'ssd="(\d+)MiB" would do', str(error))
    assert found is not None, error
    return int(found[1])


@pytest.mark.parametrize("host", ["4MiB", "32MiB"], ids=["tight", "all in host memory"])
def test_what_does_not_fit_is_refused_with_what_would_do(tmp_path: Path, host: str) -> None:
    little = {**MEMORY, "host": host, "ssd": "1MiB"}
    with pytest.raises(strata.StrataError, match="snapshots need") as refused:
        wrap(tmp_path, little, snapshots=2)
    assert "free)" in str(refused.value)
    assert refused.value.snapshot_bytes > 0, "it is still told in numbers"
    least = enough(refused.value)
    with pytest.raises(strata.StrataError, match="snapshots need"):
        wrap(tmp_path, {**little, "ssd": f"{least - 1}MiB"}, snapshots=2)
    case = wrap(tmp_path, {**little, "ssd": f"{least}MiB"}, snapshots=2)
    room = case.state.session.stats()["ssd_bytes"]
    for _ in range(5):
        case.train(1)
        strata.snapshot(case.model, tmp_path / "run", keep=2)
    case.state.snapshots.finish()
    assert case.state.session.stats()["ssd_bytes"] == room, "there was room from the start"
    assert room <= least << 20
    case.close()


def test_one_that_is_being_removed_takes_no_more_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest has gone, and its links not yet: the next one begins meanwhile."""
    removed, begun = threading.Event(), threading.Event()
    remove_links = series.remove_links

    def slow(drives: list[str], identity: str) -> None:
        removed.set()
        assert begun.wait(300)
        remove_links(drives, identity)

    case = wrap(tmp_path, {**MEMORY, "ssd": "64MiB"}, snapshots=1)
    strata.snapshot(case.model, tmp_path / "run", keep=1).wait()
    room = case.state.session.stats()["ssd_bytes"]
    monkeypatch.setattr(series, "remove_links", slow)
    case.train(1)
    second = strata.snapshot(case.model, tmp_path / "run", keep=1)
    assert removed.wait(300)
    case.train(1)
    try:
        third = strata.snapshot(case.model, tmp_path / "run", keep=1)
    finally:
        begun.set()
    second.wait()
    third.wait()
    assert case.state.session.stats()["ssd_bytes"] == room
    case.close()


def test_activations_leave_the_room_alone(tmp_path: Path) -> None:
    """A plan that swapped to the room of snapshots would be refused when it is adopted."""
    case = wrap(tmp_path, {**MEMORY, "ssd": "64MiB"}, snapshots=1)
    kept = case.state.session.plan["snapshot_bytes"]
    assert kept > 0
    assert case.state.session.step_budgets(1 << 20).ssd_bytes == (64 << 20) - kept
    case.close()
    later = wrap(tmp_path, {**MEMORY, "ssd": "64MiB"})
    assert later.state.session.step_budgets(1 << 20).ssd_bytes == 64 << 20
    later.train(1)
    strata.snapshot(later.model, tmp_path / "run", keep=1).wait()
    assert later.state.session.step_budgets(1 << 20).ssd_bytes == (64 << 20) - kept
    later.close()


def test_the_plan_says_it(tmp_path: Path) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"memory": SSD, "ssd_path": tmp_path}
    without = strata.plan(model, optimizer, **options)
    plans = [strata.plan(model, optimizer, snapshots=n, **options) for n in (1, 2)]
    rooms = [plan.plan["snapshot_bytes"] for plan in plans]
    assert without.plan["snapshot_bytes"] == 0
    assert "snapshots" not in str(without)
    assert rooms[1] * 2 == rooms[0] * 3, "so many, and the one that is taken"
    assert plans[0].plan["ssd_bytes"] == without.plan["ssd_bytes"] + rooms[0]
    assert "of the SSD are set aside for snapshots" in str(plans[0])


def test_a_budget_that_is_chosen_has_the_room(tmp_path: Path) -> None:
    model = llama()
    model, _ = strata.wrap(
        model,
        torch.optim.AdamW(model.parameters()),
        memory=MEMORY,
        ssd_path=tmp_path,
        snapshots=3,
    )
    for _ in range(2):
        strata.snapshot(model, tmp_path / "run", keep=3).wait()
    strata.unwrap(model)


def test_nonsense_is_refused(tmp_path: Path) -> None:
    for snapshots, match in ((-1, "from 0 to"), (True, "from 0 to"), ("2", "whole number")):
        with pytest.raises((ValueError, TypeError), match=match):
            wrap(tmp_path, SSD, snapshots=snapshots)
    with pytest.raises(ValueError, match="give ssd_path="):
        wrap(tmp_path, MEMORY, snapshots=2)


def test_an_estimate_counts_the_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speeds = ["--ssd-read-speed=1GB/s", "--ssd-write-speed=1GB/s", "--sequence=64"]
    estimate = ["estimate", "--model=llama-10m", *speeds, "--snapshots=2"]
    assert cli.main([*estimate, "--memory=device=1GiB,host=1GiB,ssd=10MiB"]) == 1
    said = capsys.readouterr()
    least = enough(AssertionError(said.out + said.err))
    assert cli.main([*estimate, f"--memory=device=1GiB,host=1GiB,ssd={least}MiB"]) == 0
    assert "set aside for snapshots" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main([*estimate, "--memory=device=1GiB,host=1GiB"])
    assert "give ssd= in --memory as well" in capsys.readouterr().err


def test_finetune_refuses_before_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line\n" * 1000)
    run = [
        "finetune", "--model=llama-10m", f"--data={text}", f"--output={tmp_path / 'out'}",
        "--device-memory=256MiB", "--host-memory=256MiB", "--sequence=64", "--snapshot-every=5",
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        cli.main(run)
    assert "--snapshot-every needs --ssd-path" in capsys.readouterr().err
    path = [f"--ssd-path={drive(tmp_path, 'drive')}", "--ssd-memory=10MiB"]
    assert cli.main([*run, *path]) == 1
    said = capsys.readouterr()
    assert "snapshots need" in said.out + said.err
    assert "would do" in said.out + said.err
    assert not (tmp_path / "out" / "data").exists()
