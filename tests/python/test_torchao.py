"""Weights that torchao has quantised as NF4Tensor, in files of torch.save() and in models, become
ours as the codes that they are. torchao is not needed: what stands for it here has its format."""

import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from safetensors.torch import save_file
from strata._runtime import coded
from strata._runtime.wrapped import wrapped
from strata._storage.checkpoint_files import CheckpointError
from strata._storage.torch_files import MODULES
from test_frozen import ROOMY, batches, freeze, train, wrap
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

BLOCK, GROUP = 64, 256
FORM = "nf4-torchao"
TABLE = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
         0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]  # fmt: skip


class NF4Tensor(torch.Tensor):
    """torchao's, as far as files and models know it."""

    def __new__(cls, shape: torch.Size, dtype: torch.dtype, **parts: Any) -> "NF4Tensor":
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # type: ignore[attr-defined]

    def __init__(self, shape: torch.Size, dtype: torch.dtype, **parts: Any) -> None:
        vars(self).update(parts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(str(func))
        old = args[0]
        parts = {k: v for k, v in vars(old).items() if k != "_is_param"}
        return NF4Tensor(old.shape, old.dtype, **parts)


def quantised(weight: torch.Tensor) -> NF4Tensor:
    """With everything in the weight's dtype, rounded after each operation."""
    blocks = weight.detach().reshape(-1, BLOCK)
    scales = blocks.abs().amax(1)
    mean = scales.mean()
    groups = (scales - mean).reshape(-1, GROUP)
    factors = 256 / (2 * groups.abs().amax(1))
    table = torch.tensor(TABLE, dtype=weight.dtype)
    codes = ((blocks / scales[:, None]).unsqueeze(-1) - table).abs().min(-1).indices
    both = codes.to(torch.uint8).reshape(-1, 2)
    scale_codes = (groups * factors[:, None]).round().clamp(-128, 127).to(torch.int8)
    return NF4Tensor(
        weight.shape,
        weight.dtype,
        block_size=BLOCK,
        n_blocks=len(blocks),
        scaler_block_size=GROUP,
        quantized_scalers=scale_codes.flatten(),
        quantization_factor=factors,
        scaler_mean=mean,
        quantized_data=both[:, 0] << 4 | both[:, 1],
        nf4=table,
    )


def values_of(found: Any) -> torch.Tensor:
    """What NF4Tensor.get_original_weight() computes."""
    scales = found.quantized_scalers.reshape(-1, GROUP) / found.quantization_factor[:, None]
    scales = scales.flatten().to(found.dtype) + found.scaler_mean
    codes = torch.stack([found.quantized_data >> 4, found.quantized_data & 15], -1)
    return (found.nf4[codes.long()].reshape(-1, BLOCK) * scales[:, None]).reshape(found.shape)


def llama(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    return freeze(LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes)))


def empty() -> nn.Module:
    with torch.device("meta"):
        return llama()


def state_dict(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """As of a model whose layers torchao has quantised."""
    return {
        name: quantised(value) if "_proj" in name else value.clone()
        for name, value in llama().to(dtype).state_dict().items()
    }


def in_memory() -> nn.Module:
    model = llama().to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.lm_head:
            module.weight = nn.Parameter(quantised(module.weight), requires_grad=False)
    return model


@pytest.fixture(params=MODULES, ids=["before", "now"])
def torchao(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Saves what it is given, with the class where torchao has it, or had it."""
    monkeypatch.setattr(NF4Tensor, "__module__", request.param)

    def save(path: Path, content: Any = None, **keywords: Any) -> Path:
        module = types.ModuleType(request.param)
        module.NF4Tensor = NF4Tensor  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            names = request.param.split(".")
            for depth in range(1, len(names)):
                patch.setitem(sys.modules, ".".join(names[:depth]), types.ModuleType(names[0]))
            patch.setitem(sys.modules, request.param, module)
            torch.save(state_dict() if content is None else content, path, **keywords)
        return path

    return save


def codes_in(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    state = wrapped(model)
    params = enumerate(state.config["params"])
    return {spec["name"]: coded.read(state, i) for i, spec in params if "stored" in spec}


def check(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Codes are there as they were, and all values are torchao's, to the bit."""
    state = wrapped(model)
    for name, (codes, scales, groups) in codes_in(model).items():
        found: Any = expected[name]
        assert torch.equal(codes, found.quantized_data), name
        assert torch.equal(scales.view(torch.int8), found.quantized_scalers), name
        assert torch.equal(groups[::2], found.quantization_factor.float()), name
    for index, name in enumerate(state.names):
        value = expected[name]
        plain = values_of(value) if isinstance(value, NF4Tensor) else value
        assert torch.equal(state.read(index), plain.float()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_come_as_they_are(
    tmp_path: Path, torchao: Callable[..., Path], dtype: torch.dtype
) -> None:
    expected = state_dict(dtype)
    file = torchao(tmp_path / "model.pt", expected)
    assert not set(MODULES) & sys.modules.keys()
    model, optimizer = wrap(empty(), FORM, weights=file, dtype=dtype)
    assert len(codes_in(model)) == 2 * 7
    check(model, expected)
    losses = train(model, optimizer, batches(2))
    dense, other = wrap(empty(), "as-is", weights=file, dtype=dtype)
    check(dense, expected)
    assert train(dense, other, batches(2)) == losses


def test_a_folder_has_them(tmp_path: Path, torchao: Callable[..., Path]) -> None:
    expected = state_dict()
    head = {"lm_head.weight": expected["lm_head.weight"]}
    rest = {name: value for name, value in expected.items() if name not in head}
    torchao(tmp_path / "a.bin", head)
    torchao(tmp_path / "b.bin", rest)
    places = {name: "a.bin" if name in head else "b.bin" for name in expected}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    check(wrap(empty(), FORM, weights=tmp_path)[0], expected)
    index.unlink()
    torchao(tmp_path / "pytorch_model.bin", expected)
    check(wrap(empty(), FORM, weights=tmp_path)[0], expected)


def test_a_model_in_memory_becomes_ours(torchao: Callable[..., Path]) -> None:
    expected = state_dict()
    model, optimizer = wrap(in_memory(), FORM)
    check(model, expected)
    losses = train(model, optimizer, batches(2))
    dense, other = wrap(in_memory(), "as-is")
    assert not codes_in(dense)
    assert train(dense, other, batches(2)) == losses
    plain = strata.unwrap(model)
    weight = plain.model.layers[1].mlp.up_proj.weight
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, values_of(expected["model.layers.1.mlp.up_proj.weight"]))


def test_a_model_that_is_refused_stays_as_it_was(
    torchao: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = in_memory()
    weights = [(p, dict(vars(p))) for p in model.parameters() if type(p) is NF4Tensor]
    with pytest.raises(ValueError, match="codes of nf4-torchao, and nf4 would round them once"):
        wrap(model, "nf4")
    with monkeypatch.context() as patch:
        patch.setattr("strata._opening.watch", late)  # when all parameters have moved
        with pytest.raises(RuntimeError, match="too late"):
            wrap(model, FORM)
    for parameter, parts in weights:
        assert type(parameter) is NF4Tensor
        assert vars(parameter) == parts
    check(wrap(model, FORM)[0], state_dict())


def late(*_: Any) -> None:
    raise RuntimeError("too late")


def test_checkpoints_and_snapshots_keep_whose_codes_they_are(
    tmp_path: Path, torchao: Callable[..., Path]
) -> None:
    (tmp_path / "drive").mkdir()
    small = {"memory": {**ROOMY, "ssd": "64MiB"}, "ssd_path": tmp_path / "drive"}
    file = torchao(tmp_path / "model.pt")
    model, optimizer = wrap(empty(), FORM, weights=file, **small)
    train(model, optimizer, batches(1))
    strata.save(model, tmp_path / "c")
    strata.snapshot(model, tmp_path / "s").wait()
    losses = train(model, optimizer, batches(3)[1:])
    strata.unwrap(model)
    for kept in ("c", "s"):
        other, optimizer = wrap(empty(), FORM, weights=file, **small)
        strata.load(other, tmp_path / kept)
        assert train(other, optimizer, batches(3)[1:]) == losses, kept
        strata.unwrap(other)
        wrong, _ = wrap(llama(), "nf4-double", **small)
        with pytest.raises(CheckpointError, match="rests as 'nf4-torchao', the model's as 'nf4-d"):
            strata.load(wrong, tmp_path / kept)
        strata.unwrap(wrong)


def test_what_would_change_values_is_refused(tmp_path: Path, torchao: Callable[..., Path]) -> None:
    file = torchao(tmp_path / "model.pt")
    with pytest.raises(ValueError, match="nf4-double would round them once more"):
        wrap(empty(), "nf4-double", weights=file)
    with pytest.raises(ValueError, match=r"pass dtype=torch\.bfloat16"):
        wrap(empty(), FORM, weights=file, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"its values are none: they are read and not made"):
        wrap(llama(), FORM)


def test_codes_are_not_trained(torchao: Callable[..., Path]) -> None:
    model = in_memory()
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"q_proj\.weight' .* cannot be trained: freeze it"):
        wrap(model, FORM)


PLACE = "model.layers.0.mlp.up_proj.weight"
DAMAGED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "no codes": ("quantized_data", lambda _: None, "it has no quantized_data"),
    "few codes": ("quantized_data", lambda t: t[:-1], "has 16383 numbers, not 16384"),
    "other codes": ("quantized_data", lambda t: t.int(), r"is torch\.int32, not torch\.uint8"),
    "few scales": ("quantized_scalers", lambda t: t[:-1], "quantized_scalers has 511 numbers"),
    "few factors": ("quantization_factor", lambda t: t[:1], "quantization_factor has 1 numbers"),
    "no factor": ("quantization_factor", lambda t: t * 0, "a scale is not finite"),
    "NaN": ("scaler_mean", lambda t: t * math.nan, "a scale is not finite"),
    "another table": ("nf4", lambda t: t.flip(0), "stand for other values than torchao's"),
    "blocks": ("block_size", lambda _: 32, "block_size is 32, and 64"),
    "groups": ("scaler_block_size", lambda _: 128, "scaler_block_size is 128, and 256"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_tensors_are_refused(
    tmp_path: Path, torchao: Callable[..., Path], what: str
) -> None:
    part, change, words = DAMAGED[what]
    content = state_dict()
    setattr(content[PLACE], part, change(getattr(content[PLACE], part)))
    with pytest.raises(ValueError, match=f"'{PLACE}' is an NF4Tensor of torchao, .*{words}"):
        wrap(empty(), FORM, weights=torchao(tmp_path / "model.pt", content))


class Executed:
    """What a file must not make when it is read."""

    made = False

    def __setstate__(self, _: Any) -> None:
        Executed.made = True


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-2000])
    return path


def test_damaged_files_are_refused(tmp_path: Path, torchao: Callable[..., Path]) -> None:
    executed = Executed()
    executed.some = 1  # type: ignore[attr-defined]
    old: dict[str, Any] = {"_use_new_zipfile_serialization": False}
    cases: list[tuple[Callable[[Path], Path], str]] = [
        (lambda p: cut(torchao(p)), r"is cut short, or of the form of torch\.save\(\) that ended"),
        (lambda p: torchao(p, {"w": torch.ones(2)}, **old), "is cut short, or of the form"),
        (lambda p: torchao(p, {"w": executed}), r"holds test_torchao\.Executed, which is not unp"),
        (lambda p: torchao(p, {"model": state_dict()}), "holds 'model', a dict: strata reads a st"),
        (lambda p: torchao(p, [torch.ones(2)]), r"holds a list: save a model's state_dict\(\)"),
    ]
    for i, (make, words) in enumerate(cases):
        with pytest.raises(ValueError, match=words):
            wrap(empty(), FORM, weights=make(tmp_path / f"{i}.pt"))
    assert not Executed.made


def test_what_torchao_writes_as_safetensors_is_refused_by_name(tmp_path: Path) -> None:
    said = {"_type": "Int4Tensor", "_data": {}, "_tensor_data_names": ["qdata"]}
    metadata = {PLACE: json.dumps(said), "tensor_names": json.dumps([PLACE])}
    name = PLACE.replace(".weight", "._weight_qdata")
    save_file({name: torch.zeros(2)}, tmp_path / "model.safetensors", metadata)
    with pytest.raises(ValueError, match=f"'{PLACE}' is quantised by torchao as 'Int4Tensor'"):
        wrap(empty(), FORM, weights=tmp_path)
