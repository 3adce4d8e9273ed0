"""Units that rest on the device, chosen by the plan: the same bits as anywhere else, and they make
way for a larger batch. On the real core: the double keeps nothing anywhere.
"""

from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from small_models import MODELS, VOCABULARY, adamw, assert_same, build, train
from strata._errors import StrataError
from strata._profiling import calibrate
from strata._runtime.wrapped import wrapped
from torch import nn

STEPS = 8
MODES: dict[str, Any] = {
    "on_step": {},
    "in_backward": {"update": "in_backward"},
    "lock_free": {"update": strata.LockFree(max_staleness=0)},
}


def start(memory: dict[str, str], **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(MODELS["llama"])
    return strata.wrap(model, adamw(model), memory=memory, page_size="64KiB", **more)


def resting(model: nn.Module) -> int:
    """How many units rest on the device."""
    units = wrapped(model).session.plan["units"]
    return sum(unit["on_device"] for unit in units)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk takes is most of a step, however busy the machine is."""
    measured = calibrate.costs

    def costs(*args: Any) -> Any:
        return measured(*args).replace(read_bytes_s=1e6, write_bytes_s=1e6)

    monkeypatch.setattr(calibrate, "costs", costs)


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("mode", MODES)
def test_they_spare_the_disk_and_give_the_same_bits(tmp_path: Path, mode: str) -> None:
    model, optimizer = start({"device": "64MiB", "host": "64MiB"}, **MODES[mode])
    expected = train(model, optimizer, STEPS)
    plain = strata.unwrap(model)
    # Host memory holds a part of it: what the disk would have to serve rests on the device.
    model, optimizer = start(
        {"device": "64MiB", "host": "1280KiB", "ssd": "64MiB"}, ssd_path=tmp_path, **MODES[mode]
    )
    assert train(model, optimizer, STEPS) == expected
    assert resting(model) > 0
    report = strata.report(model)
    assert {"device"} <= {row.states for row in report.planned}
    strata.unwrap(model)
    assert_same(model, plain)


def test_what_has_no_room_elsewhere_starts_there(tmp_path: Path) -> None:
    model, optimizer = start({"device": "64MiB", "host": "64MiB"})
    expected = train(model, optimizer, STEPS)
    needed = wrapped(model).session.plan["host_bytes"]
    strata.unwrap(model)
    little = f"{needed // 2 // 1024}KiB"
    with pytest.raises(StrataError, match="would do"):
        start({"device": "1MiB", "host": little})
    model, optimizer = start({"device": "64MiB", "host": little})
    assert resting(model) > 0
    assert train(model, optimizer, STEPS) == expected
    assert resting(model) > 0
    # What was saved there is found by a session that has room elsewhere.
    strata.save(model, tmp_path / "saved")
    after = train(model, optimizer, 2)
    strata.unwrap(model)
    model, optimizer = start({"device": "64MiB", "host": "64MiB"})
    strata.load(model, tmp_path / "saved")
    assert train(model, optimizer, 2) == after
    strata.unwrap(model)


@pytest.mark.usefixtures("slow_disk")
def test_a_larger_batch_brings_them_back_while_it_is_recorded(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        torch.manual_seed(3)
        losses = []
        for length in [8] * 5 + [32] * 5 + [8] * 2:
            tokens = torch.randint(0, VOCABULARY, (2, length))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            counts.append(resting(model))
        return losses

    counts: list[int] = []
    model, optimizer = start({"device": "64MiB", "host": "64MiB"}, activations=None)
    expected = run(model, optimizer)
    strata.unwrap(model)
    counts.clear()
    model, optimizer = start({"device": "64MiB", "host": "1MiB", "ssd": "64MiB"}, ssd_path=tmp_path)
    assert run(model, optimizer) == expected
    assert counts[4] > 0, counts
    assert counts[5] == 0, "nobody knew what it would need"
    assert counts[-1] > 0
    strata.unwrap(model)
