"""A snapshot is of the model that was wrapped: what was taken out of it, or added, since the last
one is named before anything is kept."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from strata._storage.registrations import Contents
from strata._storage.snapshots.series import snapshots_of
from test_checkpoint import Case, llama
from test_snapshot import SSD, disk
from torch import nn

__all__ = ["disk"]  # a fixture


def model() -> nn.Module:
    made = llama()
    made.register_buffer("seen", torch.arange(3))
    return made


def remove_parameter(model: Any) -> Callable[[], None]:
    weight = model.lm_head.weight
    del model.lm_head.weight
    return lambda: model.lm_head.register_parameter("weight", weight)


def remove_module(model: Any) -> Callable[[], None]:
    layer = model.model.layers[2]
    del model.model.layers[2]
    return lambda: model.model.layers.append(layer)


def exchange_parameter(model: Any) -> Callable[[], None]:
    """Past the hooks of torch, as its own conversions do."""
    weight = model.lm_head.weight
    model.lm_head._parameters["weight"] = nn.Parameter(torch.zeros(96, 48))
    return lambda: model.lm_head._parameters.update(weight=weight)


def add_parameter(model: Any) -> Callable[[], None]:
    model.model.norm._parameters["bias"] = nn.Parameter(torch.zeros(48))
    return lambda: model.model.norm._parameters.pop("bias")


def remove_buffer(model: Any) -> Callable[[], None]:
    seen = model.seen
    del model.seen
    return lambda: model.register_buffer("seen", seen)


def empty_buffer(model: Any) -> Callable[[], None]:
    seen = model.seen
    model._buffers["seen"] = None
    return lambda: model._buffers.update(seen=seen)


def add_buffer(model: Any) -> Callable[[], None]:
    model.register_buffer("more", torch.zeros(2))
    return lambda: delattr(model, "more")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (remove_parameter, "parameter 'lm_head.weight'"),
        (remove_module, "parameter 'model.layers.2.input_layernorm.weight'"),
        (exchange_parameter, "parameter 'lm_head.weight'"),
        (add_parameter, "parameter 'model.norm.bias'"),
        (remove_buffer, "buffer 'seen' was removed"),
        (empty_buffer, "buffer 'seen' was removed"),
        (add_buffer, "buffer 'more' was added"),
    ],
)
def test_what_has_changed_is_named(tmp_path: Path, disk: Path, change: Any, name: str) -> None:
    case = Case(disk, SSD, model())
    case.train(1)
    first = strata.snapshot(case.model, tmp_path / "run").wait()
    undo = change(case.model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=name):
            strata.snapshot(case.model, tmp_path / "run")
    assert snapshots_of(tmp_path / "run") == [first]
    undo()
    case.train(1)
    second = strata.snapshot(case.model, tmp_path / "run").wait()
    assert snapshots_of(tmp_path / "run") == [first, second]
    case.close()


def test_what_is_no_part_of_the_state_may_change(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, model())
    case.train(1)
    strata.snapshot(case.model, tmp_path / "run").wait()
    case.model.register_buffer("scratch", torch.zeros(2), persistent=False)
    case.model.lm_head.hobby = nn.Identity()
    case.model.seen = torch.arange(3) + 1
    case.train(1)
    strata.snapshot(case.model, tmp_path / "run").wait()
    del case.model.lm_head.hobby, case.model.scratch
    strata.snapshot(case.model, tmp_path / "other").wait()
    case.model.seen.zero_()
    strata.load(case.model, tmp_path / "other")
    assert case.model.seen.tolist() == [1, 2, 3]
    case.close()


def test_the_glance_takes_no_time() -> None:
    wide = nn.Sequential(*(nn.Linear(2, 2) for _ in range(250)))
    contents = Contents(wide)
    seconds = []
    for _ in range(100):
        begin = time.perf_counter()
        assert contents.unchanged()
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.0005, "of a millisecond that the call may take"
