"""What a checkpoint says is held against the format, the file and the model before anything is
changed, and what it says is then what is loaded."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strata
import torch
from strata._runtime.wrapped import wrapped
from strata._storage import checkpoint_files as files
from strata._storage import rng
from strata._storage.stored import persistent_buffers
from torch import nn

MEMORY = {"device": "1MiB", "host": "8MiB"}


class Odd(nn.Module):
    """Buffers of every kind that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("complex", torch.tensor([1 + 2j, 3 - 4j]).conj())
        self.register_buffer("rows", torch.arange(3.0).expand(2, 3))
        self.register_buffer("small", torch.arange(3).to(torch.float8_e4m3fn))
        self.register_buffer("none", None)
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.first(x))


@pytest.fixture
def model() -> Iterator[Any]:
    torch.manual_seed(0)
    model = Odd()
    groups = [
        {"params": list(model.first.parameters()), "name": "trained"},
        {"params": list(model.frozen.parameters()), "weight_decay": 0.0, "name": "frozen"},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    model, optimizer = strata.wrap(model, optimizer, memory=MEMORY)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    yield model
    wrapped(model).close()


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a checkpoint restores, as values that can be compared."""
    state = wrapped(model)
    trained = [i for i, spec in enumerate(state.config["params"]) if spec["trainable"]]
    return {
        "masters": [state.read(i).tolist() for i in range(len(state.params))],
        "moments": [state.read(i, k).tolist() for i in trained for k in ("moment1", "moment2")],
        "steps": [state.session.param_step(i) for i in range(len(state.params))],
        "buffers": {
            name: value.resolve_conj().to(torch.complex64).tolist()
            for name, value in persistent_buffers(model).items()
        },
        "groups": [
            {k: v for k, v in group.items() if k != "params"}
            for group in state.optimizer.param_groups
        ],
        "rng": rng.capture(),
    }


def spoil(model: nn.Module) -> None:
    """Makes everything another value."""
    state = wrapped(model)
    for i in range(len(state.params)):
        state.write(i, state.read(i) + 1)
        state.session.set_param_step(i, 77)
    for buffer in model.buffers():
        buffer.view(-1)[:1].zero_() if buffer.numel() and buffer.is_contiguous() else None
    for group in state.optimizer.param_groups:
        group["lr"] = 9.0
    torch.rand(5), random.random(), np.random.rand()


def test_buffers_of_every_kind_continue(model: Any, tmp_path: Path) -> None:
    strata.save(model, tmp_path / "c")
    before = everything(model)
    with torch.no_grad():
        for name in ("scalar", "flags", "turned", "complex"):
            getattr(model, name).zero_()
        model.rows[:1] = 0
        model.small.copy_(torch.zeros(3))
    spoil(model)
    strata.load(model, tmp_path / "c")
    assert everything(model) == before


def rewrite(folder: Path, manifest: dict[str, Any]) -> None:
    """Puts a manifest there, with the checksum that fits it."""
    manifest = {key: value for key, value in manifest.items() if key != "checksum"}
    files.write_manifest(folder, manifest)


def refuses(model: Any, path: Path, match: str) -> None:
    before = everything(model)
    with pytest.raises(files.CheckpointError, match=match):
        strata.load(model, path)
    assert everything(model) == before


CHANGES = {
    "short record": (("params", 0, "tensors", 1, "bytes"), 4, "'bytes' of moment1 of 'first.w"),
    "long record": (("params", 0, "tensors", 0, "bytes"), 1 << 40, "'bytes' of master"),
    "overlap": (("params", 0, "tensors", 1, "offset"), 0, "'offset' of moment2"),
    "outside": (("params", 1, "tensors", 0, "offset"), 1 << 40, "'offset' of master of 'first.b"),
    "negative": (("params", 0, "tensors", 0, "offset"), -4, "'offset'"),
    "a truth": (("params", 0, "tensors", 0, "offset"), False, "'offset'"),
    "step": (("params", 0, "step"), -1, "'step' is -1"),
    "step text": (("params", 0, "step"), "3", "'step' is '3'"),
    "step large": (("params", 0, "step"), 1 << 70, "'step'"),
    "shape": (("params", 0, "shape"), [4, 6], "has shape"),
    "shape of fractions": (("params", 0, "shape"), [6.0, 4.0], r"shape\[0\] is 6.0"),
    "kind": (("params", 0, "tensors", 1, "kind"), "moment2", "is stored as"),
    "dtype": (("params", 0, "tensors", 0, "dtype"), "int32", "is stored as"),
    "no dtype": (("params", 0, "tensors", 0, "dtype"), "nn", "master"),
    "digest": (("params", 0, "tensors", 0, "xxh3_64"), "0", "'xxh3_64' is '0', and should"),
    "no tensors": (("params", 0, "tensors"), [], "'tensors'"),
    "buffer": (("buffers", 1, "tensors", 0, "dtype"), "float64", "'scalar'"),
    "bytes": (("bytes",), None, "None"),
    "lr text": (("groups", 0, "lr"), "0.1", "'lr' is '0.1'"),
    "lr truth": (("groups", 0, "lr"), True, "'lr'"),
    "lr huge": (("groups", 0, "lr"), 10**400, "'lr' is 1000"),
    "lr infinite": (("groups", 0, "lr"), float("inf"), "'lr'"),
    "betas": (("groups", 0, "betas"), [0.9], "'betas'"),
    "beta": (("groups", 0, "betas"), [0.9, "x"], "'betas'"),
    "params": (("groups", 0, "params"), [1], "'params' is no option"),
    "momentum": (("groups", 0, "momentum"), 0.9, "'momentum' is no option"),
    "group": (("groups", 0), 3, r"groups\[0\]"),
    "groups": (("groups",), [], "0 parameter groups"),
    "extra": (("extra",), [], "'extra'"),
    "rng": (("rng", "torch"), "AAAA", "'torch' is no state"),
    "rng numpy": (("rng", "numpy", 2), 10**6, "'numpy' is no state"),
    "rng python": (("rng", "python"), [3, [1], None], "'python' is no state"),
    "rng cuda": (("rng", "cuda"), ["AAAA"], "'cuda' is no state"),
}  # fmt: skip


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    strata.save(model, tmp_path / "c", extra={"batch": 3})
    return tmp_path / "c"


def changed(manifest: dict[str, Any], keys: tuple[Any, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(manifest)
    place: Any = result
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return result


def test_every_field_is_held_against_what_it_must_be(model: Any, saved: Path) -> None:
    manifest = json.loads((saved / files.MANIFEST_NAME).read_text())
    spoil(model)
    for name, (keys, value, match) in CHANGES.items():
        rewrite(saved, changed(manifest, keys, value))
        try:
            refuses(model, saved, match)
        except BaseException as error:
            raise AssertionError(name) from error
    rewrite(saved, manifest)
    assert strata.load(model, saved) == {"batch": 3}


def test_options_that_are_off_may_differ(model: Any, saved: Path) -> None:
    """Other versions of torch have more of them, which are kept as keys of the user's are."""
    manifest = json.loads((saved / files.MANIFEST_NAME).read_text())
    for group in manifest["groups"]:
        del group["maximize"]
        group |= {"from_the_future": None, "initial_lr": 0.5}
    rewrite(saved, manifest)
    strata.load(model, saved)
    group = wrapped(model).optimizer.param_groups[0]
    assert group["initial_lr"] == 0.5
    assert group["maximize"] is False
    assert group["from_the_future"] is None


def test_what_json_cannot_hold_is_refused_before_anything_is_written(
    model: Any, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="set"):
        strata.save(model, tmp_path / "c", extra={"seen": {1, 2}})
    with pytest.raises(TypeError, match="extra must be a dictionary"):
        strata.save(model, tmp_path / "c", extra=[1])  # type: ignore[arg-type]
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(files.CheckpointError, match=r"'sparse' is torch\.sparse"):
        strata.save(model, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to everything in a manifest; of long lists the first two."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    if isinstance(value, list):
        for i, inner in enumerate(value[:2]):
            yield from places(inner, (*at, i))


VALUES: list[Any] = [None, True, -1, 0, 3, 1 << 70, 0.5, float("nan"), "", "lr", [], [1, "x"], {}]


def test_a_changed_manifest_is_refused_or_loaded_as_it_says(model: Any, saved: Path) -> None:
    manifest = json.loads((saved / files.MANIFEST_NAME).read_text())
    del manifest["checksum"]
    spoil(model)
    spoiled = everything(model)
    chance = random.Random(0)
    everywhere = list(places(manifest))
    refused = 0
    for _ in range(150):
        keys = chance.choice(everywhere)
        mutant = changed(manifest, keys, chance.choice(VALUES))
        if chance.random() < 0.2:
            place: Any = mutant
            for key in keys[:-1]:
                place = place[key]
            del place[keys[-1]]
        rewrite(saved, {"version": None} | mutant)
        rng.restore(spoiled["rng"])
        try:
            strata.load(model, saved)
        except files.CheckpointError:
            refused += 1
            assert everything(model) == spoiled, keys
            continue
        found = everything(model)
        assert found["steps"] == [entry["step"] for entry in mutant["params"]], keys
        assert json.loads(json.dumps(found["rng"])) == mutant["rng"], keys
        for group, said in zip(found["groups"], mutant["groups"], strict=True):
            told = {key: value for key, value in group.items() if key in said}
            texts = [json.dumps(each, sort_keys=True) for each in (told, said)]  # NaN is NaN
            assert texts[0] == texts[1], keys
        rewrite(saved, manifest)
        strata.load(model, saved)
        spoil(model)
        spoiled = everything(model)
    assert 100 < refused < 150
