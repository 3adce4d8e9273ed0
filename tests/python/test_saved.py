"""What the recorder is told of saved tensors."""

from types import ModuleType
from typing import Any

import pytest
import torch
from small_models import build, tight
from stacks import Blocks, blocks
from strata._runtime.wrapped import wrapped
from swapped_models import set_mode
from torch import nn
from torch.utils.checkpoint import checkpoint


class Heard:
    """A recorder's part in saving: numbers from 0."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved: list[tuple[int, tuple[int, ...]]] = []  # unit, shape
        self.used: list[int] = []
        recorder = wrapped(model).recorder
        monkeypatch.setattr(recorder, "recording", True)
        monkeypatch.setattr(recorder, "saved", self._save)
        monkeypatch.setattr(recorder, "used", self.used.append)

    def _save(self, unit: int, tensor: torch.Tensor) -> int:
        self.saved.append((unit, tuple(tensor.shape)))
        return len(self.saved) - 1


# By unit: embed, four blocks, head. A block saves its input, and what goes into and out of GELU.
SHAPES = [(0, (3, 48))]
SHAPES += [(u, shape) for u in range(1, 5) for shape in ((3, 48), (3, 96), (3, 96))]
SHAPES += [(5, (3, 48))]


@pytest.mark.parametrize("mode", ["keep", "swap_host"])
def test_every_saved_tensor_and_every_use(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    model, _ = tight(build(Blocks))
    set_mode(model, mode)
    heard = Heard(model, monkeypatch)
    model(torch.randn(3, 48)).sum().backward()
    assert heard.saved == SHAPES
    assert sorted(heard.used) == list(range(len(SHAPES)))
    assert heard.used[0] == len(SHAPES) - 1  # the last one is wanted first


def test_tensors_that_checkpoint_drops(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told of once, in the forward proper, and as used when checkpoint gives them back."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x

    model, _ = tight(build(blocks(run)))
    heard = Heard(model, monkeypatch)
    model(torch.randn(3, 48)).sum().backward()
    assert heard.saved == SHAPES
    assert sorted(heard.used) == list(range(len(SHAPES)))


def test_nothing_is_told_unasked(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tight(build(Blocks))
    heard = Heard(model, monkeypatch)
    monkeypatch.setattr(wrapped(model).recorder, "recording", False)
    model(torch.randn(3, 48)).sum().backward()
    assert not heard.saved
    assert not heard.used
