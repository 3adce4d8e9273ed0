"""Weights that bitsandbytes has quantised are read as the codes that they are."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from safetensors.torch import load_file, save_file
from strata._runtime import coded
from strata._runtime.ready_codes import values_of_codes
from strata._runtime.wrapped import wrapped
from test_frozen import batches, freeze, llama, train, wrap
from torch import nn

BLOCK = 64
FORMS = ("int8", "nf4", "nf4-double")


def in_file(form: str, shape: torch.Size, stored: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """As bitsandbytes names it, without the name of the layer."""
    if form == "int8":
        codes, scales = stored
        rows = scales.reshape(shape[0], -1)
        return {
            "weight": codes.view(torch.int8).reshape(shape),
            "SCB": rows[:, 0].clone(),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": "bfloat16",
        "shape": list(shape),
    }
    tensors = {
        "weight": stored[0].reshape(-1, 1),
        "weight.absmax": stored[1],
        "weight.quant_map": values_of_codes("nf4").clone(),
    }
    if form == "nf4-double":
        factors, offsets = stored[2].reshape(-1, 2).T
        tensors |= {
            "weight.nested_absmax": factors.contiguous(),
            "weight.nested_quant_map": values_of_codes("scales").clone(),
        }
        state |= {
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": offsets[0].item(),
        }
    text = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors


class Made:
    """A file, and what it is to become."""

    def __init__(self, path: Path, form: str) -> None:
        self.path = path / "model.safetensors"
        model, optimizer = wrap(freeze(llama()), form)
        state = wrapped(model)
        self.codes: dict[str, list[torch.Tensor]] = {}
        self.values: dict[str, torch.Tensor] = {}
        tensors = {}
        for index, name in enumerate(state.names):
            value = state.read(index)
            self.values[name] = value
            if state.config["params"][index].get("stored") is None:
                tensors[name] = value.to(torch.bfloat16)
                continue
            self.codes[name] = coded.read(state, index)
            parts = in_file(form, value.shape, self.codes[name])
            tensors |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
        save_file(tensors, self.path)
        self.losses = train(model, optimizer, batches(2))
        strata.unwrap(model)

    def change(self, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Of the first layer that has such a tensor; None: it is missing."""
        tensors = load_file(self.path)
        place = min(key for key in tensors if key.endswith(name))
        old = tensors.pop(place)
        if change is not None:
            tensors[place] = change(old)
        save_file(tensors, self.path)


def empty() -> nn.Module:
    with torch.device("meta"):
        return freeze(llama())


def read(made: Made, frozen: str, **more: Any) -> tuple[nn.Module, Any]:
    return wrap(empty(), frozen, weights=made.path, **more)


@pytest.mark.parametrize("form", FORMS)
def test_codes_come_as_they_are(tmp_path: Path, form: str) -> None:
    made = Made(tmp_path, form)
    model, optimizer = read(made, form)
    state = wrapped(model)
    assert made.codes
    for name, codes in made.codes.items():
        found = coded.read(state, state.names.index(name))
        assert all(map(torch.equal, found, codes)), name
    assert train(model, optimizer, batches(2)) == made.losses
    strata.unwrap(model)


@pytest.mark.parametrize(
    ("form", "frozen"), [*((f, "as-is") for f in FORMS), ("nf4-double", "nf4")]
)
def test_other_forms_have_the_same_values(tmp_path: Path, form: str, frozen: str) -> None:
    made = Made(tmp_path, form)
    model, optimizer = read(made, frozen)
    state = wrapped(model)
    for index, name in enumerate(state.names):
        assert torch.equal(state.read(index), made.values[name]), name
    assert train(model, optimizer, batches(2)) == made.losses
    strata.unwrap(model)


def test_adapters_come_beside_codes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = Made(tmp_path, "nf4")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with torch.device("meta"):
        model = peft.get_peft_model(llama(), config)
    model, _ = wrap(model, "nf4", weights=made.path)
    state = wrapped(model)
    for name, codes in made.codes.items():
        layer = name.removesuffix(".weight")
        inner = f"base_model.model.{layer}" + (".base_layer" if "q_proj" in name else "")
        found = coded.read(state, state.names.index(f"{inner}.weight"))
        assert all(map(torch.equal, found, codes)), name
    strata.unwrap(model)


@pytest.mark.parametrize(
    ("form", "frozen", "more", "words"),
    [
        (
            "nf4",
            "nf4-double",
            {},
            "would round them once more: frozen='nf4' takes them as they are",
        ),
        ("int8", "nf4", {}, "codes of int8"),
        ("nf4", "nf4", {"dtype": torch.float16}, r"pass dtype=torch\.bfloat16"),
    ],
)
def test_what_would_change_values_is_refused(
    tmp_path: Path, form: str, frozen: str, more: dict[str, Any], words: str
) -> None:
    made = Made(tmp_path, form)
    with pytest.raises(ValueError, match=words):
        read(made, frozen, **more)


def text(**changed: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A state with other values."""

    def change(old: torch.Tensor) -> torch.Tensor:
        state = json.loads(bytes(old.tolist())) | changed
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


STATE = "q_proj.weight.quant_state.bitsandbytes__nf4"
DAMAGED: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = {
    "no map": ("q_proj.weight.quant_map", None, "quant_map' is not there"),
    "no scales": ("q_proj.weight.absmax", None, "absmax' is not there"),
    "no codes": ("q_proj.weight", None, "is not there"),
    "another map": ("q_proj.weight.quant_map", lambda t: t.flip(0), "stand for other values"),
    "few codes": ("q_proj.weight", lambda t: t[:-1].clone(), "there are not 16384 codes"),
    "few scales": ("q_proj.weight.absmax", lambda t: t[:-1].clone(), "a scale for each 64"),
    "NaN": ("q_proj.weight.absmax", lambda t: t * math.nan, "a scale is not finite"),
    "no JSON": (STATE, lambda t: t[:-1].clone(), "its state cannot be read"),
    "no object": (STATE, lambda t: t[:0].clone(), "its state cannot be read"),
    "blocks": (STATE, text(blocksize=128), "blocksize is 128"),
    "dtype": (STATE, text(dtype="int8"), "it is of 'int8'"),
    "shape": (STATE, text(shape=[128, -128]), "its shape is"),
    "another shape": (STATE, text(shape=[64, 256]), r"\(64, 256\)"),
    "huge": (STATE, text(shape=[1 << 50, 1]), "its shape is"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_files_are_refused(tmp_path: Path, what: str) -> None:
    name, change, words = DAMAGED[what]
    made = Made(tmp_path, "nf4")
    made.change(name, change)
    with pytest.raises(ValueError, match=words):
        read(made, "nf4")


def test_four_bit_floats_are_refused(tmp_path: Path) -> None:
    made = Made(tmp_path, "nf4")
    tensors = load_file(made.path)
    save_file({k.replace("__nf4", "__fp4"): t for k, t in tensors.items()}, made.path)
    with pytest.raises(ValueError, match="quantised as fp4: strata reads nf4 and int8"):
        read(made, "nf4")
