"""Everybody's ways of saving a model, over wrapped ones: the same files, a tensor at a time."""

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from safetensors.torch import load_file, save, save_file
from small_models import build, gpt2, llama, tight
from strata._storage.saved_file import stream_file
from torch import nn

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


def same_files(left: Path, right: Path) -> bool:
    names = sorted(path.name for path in left.iterdir())
    assert names == sorted(path.name for path in right.iterdir())
    return all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


def test_files_are_those_of_safetensors_for_every_dtype(tmp_path: Path) -> None:
    tensors = {f"of {dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), '"é"': torch.ones(3)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    stream_file(tensors, tmp_path / "ours", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("make", [llama, gpt2])  # the second has tied weights
@pytest.mark.parametrize("shard", ["50GB", "30KB"])
def test_save_pretrained_writes_the_files_of_the_plain_model(
    core: ModuleType, tmp_path: Path, make: Callable[[], nn.Module], shard: str
) -> None:
    build(make).save_pretrained(tmp_path / "plain", max_shard_size=shard)
    model, _ = tight(build(make))
    model.save_pretrained(tmp_path / "wrapped", max_shard_size=shard)
    assert same_files(tmp_path / "plain", tmp_path / "wrapped")


def test_bytes_are_those_of_a_file(core: ModuleType) -> None:
    """Others than parameters, which lie in pages too: views, gradients, optimizer state."""
    plain, own = nn.Linear(8, 8), torch.ones(3)
    model, optimizer = tight(copy.deepcopy(plain))
    assert save({"own": own, **model.state_dict()}) == save({"own": own, **plain.state_dict()})
    model(torch.ones(2, 8)).sum().backward()
    weight = model.weight
    rows, grad = weight.detach()[2:4], weight.grad
    assert rows is not None
    assert grad is not None
    assert save({"a": rows, "b": grad}) == save({"a": plain.weight[2:4].clone(), "b": grad.clone()})
    optimizer.step()
    state = optimizer.state[weight]["exp_avg"]
    assert save({"a": state}, {"step": "1"}) == save({"a": state.clone()}, {"step": "1"})


def test_saving_holds_one_tensor_at_a_time(
    core: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = tight(nn.Sequential(*(nn.Linear(256, 256) for _ in range(12))))
    copies: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    numpy = torch.Tensor.numpy

    def counted(tensor: torch.Tensor) -> Any:
        copies.append(weakref.ref(tensor))
        alive.append(sum(made() is not None for made in copies))
        return numpy(tensor)

    monkeypatch.setattr(torch.Tensor, "numpy", counted)
    save_file(model.state_dict(), tmp_path / "model")
    monkeypatch.undo()
    assert len(alive) == 24
    assert max(alive) <= 2  # the last one, and the next
    saved = load_file(tmp_path / "model")
    assert all(torch.equal(saved[name], p.detach().clone()) for name, p in model.named_parameters())


def test_what_a_file_cannot_hold_is_refused_as_by_safetensors(
    core: ModuleType, tmp_path: Path
) -> None:
    model, _ = tight(build(gpt2))
    tied = dict(model.state_dict())
    with pytest.raises(RuntimeError, match="one tied parameter"):
        save_file(tied, tmp_path / "model")
    parameter = model.get_parameter("transformer.wte.weight").detach()
    with pytest.raises(ValueError, match="contiguous"):
        save_file({"turned": parameter.t()}, tmp_path / "model")
    with pytest.raises(ValueError, match="not a tensor"):
        save_file({"weight": parameter, "name": "x"}, tmp_path / "model")
    with pytest.raises(FileNotFoundError):
        save_file({"weight": parameter}, tmp_path / "missing" / "model")
    assert not list(tmp_path.iterdir())


def test_storages_tell_parameters_apart(core: ModuleType) -> None:
    model, _ = tight(build(gpt2))
    tied, head = model.transformer.wte.weight, model.lm_head.weight
    other = model.transformer.wpe.weight
    assert tied.untyped_storage() == head.detach()[2:].untyped_storage()
    assert tied.untyped_storage() != other.untyped_storage()
    assert tied.untyped_storage().nbytes() == len(tied.untyped_storage()) == tied.nbytes
    assert tied.storage().size() == tied.numel()
    assert tied.data_ptr() == head.detach().data_ptr() == tied.storage().data_ptr()
    assert tied.detach()[2:].data_ptr() - tied.data_ptr() == 2 * tied[0].nbytes
    assert tied.data_ptr() != other.data_ptr()
    with pytest.raises(RuntimeError, match="raw memory"):
        other.untyped_storage().tolist()
    plain = strata.unwrap(model)
    assert plain.lm_head.weight.untyped_storage().tolist()
