"""Which values a wrapped model begins with: its own, those of a file, or first ones, if asked."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from small_models import adamw, assert_same, build, llama, tight, train
from torch import nn


def test_meta_model_initialises_itself(core: ModuleType) -> None:
    with torch.device("meta"):
        model = llama()
    inner = adamw(model)
    model, optimizer = tight(model, inner, weights="init", seed=3)
    assert type(model.lm_head.weight).__name__ == "PagedParameter"
    assert 0 < model.lm_head.weight.std().item() < 0.1
    first = train(model, optimizer)
    with torch.device("meta"):
        other = llama()
    other, optimizer = tight(other, weights="init", seed=3)
    assert train(other, optimizer) == first


def test_values_that_nobody_asked_for_are_refused(core: ModuleType, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(ValueError, match=r'weights= with .* weights="init"'):
        tight(model)
    assert all(p.is_meta for p in model.parameters())
    # Only a part of it: neither its own values nor first ones.
    partly = build(llama)
    partly.lm_head.weight = nn.Parameter(torch.empty_like(partly.lm_head.weight, device="meta"))
    with pytest.raises(ValueError, match=r"'lm_head.weight' is on the meta device"):
        tight(partly)
    with pytest.raises(ValueError, match=r"is for a model on the meta device, and 'model\."):
        tight(partly, weights="init")
    # A folder that is called so is a path like others.
    save_file(dict(build(llama, seed=8).state_dict()), tmp_path / "init")
    partly, _ = tight(partly, weights=tmp_path / "init")
    assert_same(partly, build(llama, seed=8))


def test_a_buffer_without_values_is_refused(core: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean = torch.empty(4, device="meta")
    with pytest.raises(ValueError, match=r"'1.running_mean' is on the meta device"):
        tight(model)


def test_weights_from_a_file(core: ModuleType, tmp_path: Path) -> None:
    source = build(llama, seed=8)
    save_file(dict(source.state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = llama()
    model, _ = tight(model, weights=str(tmp_path))
    assert_same(model, source)
    real, _ = tight(build(llama), weights=tmp_path / "model.safetensors")
    assert_same(real, source)
