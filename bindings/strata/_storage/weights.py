"""Materialises a model built on the meta device, one tensor at a time.

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights.load(model, write, weights="llama/", seed=0)       # write(name, float32 tensor)

The parameters stay on the meta device and keep their identity; their values go to `write`, so the
memory used beside the model is that of one module. Buffers become real in place.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .._config.managed import is_of_peft
from .._errors import listed
from . import initialise
from .stored import StoredTensor, stored_tensors, tiled_modules

Write = Callable[[str, torch.Tensor], None]

INDEX_NAME = "model.safetensors.index.json"
INIT = (
    "init"  # in the place of a path: the modules' own initialisers; a folder of that name: ./init
)


def load(
    model: nn.Module,
    write: Write,
    *,
    weights: str | Path | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> None:
    """Calls `write(name, tensor)` once for every parameter, with a contiguous float32 CPU tensor.

    `weights` is a safetensors file, or a folder of them (with the index that Transformers writes or
    without); None lets the modules initialise themselves from `seed`, on `device`. A tied parameter
    is written once, under its first name. A layer that is cut into tiles is read, and initialised,
    as a whole: the values are those of the plain model.

    Raises ValueError where the weights lack a tensor, hold one too many, or one of another shape.
    """
    if weights is None:
        _initialise(model, write, seed, device)
        initialise.buffers(model)
        return
    source = WeightFiles(weights)
    try:
        taken = _read_parameters(model, source, write)
        initialise.buffers(model, skip=taken)
    finally:
        source.close()


def check_values(model: nn.Module, weights: str | Path | None) -> None:
    """Raises ValueError where a model would train on values that nobody asked for.

    `weights` as wrap() takes it: None: the model has values; INIT: none of it has; or a path.
    """
    if weights not in (None, INIT) or not isinstance(model, nn.Module):
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    empty = sorted(repr(name) for name, tensor in named if tensor.is_meta)
    real = sorted(repr(name) for name, p in model.named_parameters() if not p.is_meta)
    if weights is None and empty and not real:
        raise ValueError(
            "the model is on the meta device and has no values: pass weights= with safetensors to "
            f'read, or weights="{INIT}" to begin with those of its own initialisers'
        )
    if weights is None and empty:
        raise ValueError(
            f"{listed(empty)} {_are(empty)} on the meta device, without values, and the rest of "
            "the model is not: give them values, or pass weights= with safetensors to read all from"
        )
    if weights == INIT and real:
        raise ValueError(
            f'weights="{INIT}" is for a model on the meta device, and {listed(real)} {_are(real)} '
            'not there: leave it out to keep their values, or pass weights="./init" for a folder '
            "of that name"
        )


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to a saved model: those that `state_dict` would hold."""
    result: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                result[f"{prefix}.{name}" if prefix else name] = value
    return result


class WeightFiles:
    """The tensors of a safetensors file, or of a folder of them, by name. Reads one at a time.

    Use from one thread. Holds the files open until close().
    """

    def __init__(self, path: str | Path) -> None:
        """Opens `path`. Raises FileNotFoundError or ValueError, naming the file."""
        self.path = Path(path)
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for file in _weight_files(self.path):
            try:
                opened = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
            self._files[file] = opened
            for name in list(opened.keys()):
                if name in self._file_of:
                    raise ValueError(f"{name!r} is both in {self._file_of[name]} and in {file}")
                self._file_of[name] = file

    def names(self) -> set[str]:
        """The names of all stored tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in the dtype of the file."""
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def close(self) -> None:
        """Closes the files. Tensors already read stay valid."""
        self._files.clear()


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _indexed_files(path)
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no weights at {path}")
    if (path / INDEX_NAME).is_file():
        return _indexed_files(path / INDEX_NAME)
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors file in {path}")
    return files


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
    files = [index.parent / name for name in names]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{index} names {file.name}, which is not there")
    return files


def _initialise(model: nn.Module, write: Write, seed: int, device: str | torch.device) -> None:
    """Writes first values, module by module."""
    # A tied parameter counts under its first name only.
    tensors = {tensor.name: tensor for tensor in stored_tensors(model)}
    for module_name in dict.fromkeys(name.rpartition(".")[0] for name in sorted(tensors)):
        with _untiled(model, module_name):
            values = initialise.parameters(model, module_name, seed, device)
        while values:
            name, value = values.popitem()
            tensor = tensors.get(f"{module_name}.{name}" if module_name else name)
            if tensor is not None:
                _write_parts(write, tensor, value)
            del value  # before the next module needs its memory
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # the first step has other sizes


@contextmanager
def _untiled(model: nn.Module, name: str) -> Iterator[None]:
    """The module of that name as it was before it was cut into tiles, without values."""
    tiled = tiled_modules(model).get(name)
    if tiled is None or not name:
        yield
        return
    parent, _, leaf = name.rpartition(".")
    modules = model.get_submodule(parent)._modules
    modules[leaf] = tiled.plain()
    try:
        yield
    finally:
        modules[leaf] = tiled


def _write_parts(write: Write, tensor: StoredTensor, value: torch.Tensor) -> None:
    """Writes a tensor as the parameters that it is made of."""
    for name, part in tensor.split(value):
        write(name, part)


def _read_parameters(model: nn.Module, source: WeightFiles, write: Write) -> frozenset[str]:
    """Writes the parameters and sets the buffers that `source` has. Returns the names of those."""
    tensors = stored_tensors(model)
    alias_of = {tensor.name: tensor.names for tensor in tensors}
    buffers = dict(model.named_buffers())
    persistent = set(persistent_buffers(model)) & set(buffers)

    known = {alias for names in alias_of.values() for alias in names} | set(buffers)
    stored = _translate(model, source.names(), known)
    kept = _values_of_adapters(model).keys() - stored.keys()
    tensors = [tensor for tensor in tensors if tensor.name not in kept]
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    found = {name: [a for a in alias_of[name] if a in stored] for name in shapes}
    expected = shapes | {name: tuple(b.shape) for name, b in buffers.items() if name in persistent}
    for name in persistent:
        found[name] = [name] if name in stored else []
    _check(model, source, stored, found, known, expected)

    for name in kept:
        write(name, model.get_parameter(name).detach().to(torch.float32).contiguous())
    for tensor in tensors:
        value = _read_tied(source, found[tensor.name], stored).to(torch.float32).contiguous()
        _write_parts(write, tensor, value)
    for name in persistent:
        if buffers[name].is_meta:
            value = source.read(stored[name]).to(buffers[name].dtype).clone()
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = value
    return frozenset(persistent)


def _read_tied(source: WeightFiles, aliases: list[str], stored: dict[str, str]) -> torch.Tensor:
    """A parameter that is stored under one or several of its names."""
    value = source.read(stored[aliases[0]])
    for other in aliases[1:]:
        if not torch.equal(value, source.read(stored[other])):
            raise ValueError(
                f"{aliases[0]!r} and {other!r} are one tied parameter of the model, but their "
                f"tensors in {source.path} differ"
            )
    return value


def _translate(model: nn.Module, stored: set[str], names: set[str]) -> dict[str, str]:
    """The model's name of each stored tensor → the stored name.

    A folder may hold the tensors of a base model that this one wraps under `base_model_prefix`, or
    the other way round; or those of a model that had no adapters yet.
    """
    prefix = getattr(model, "base_model_prefix", "")
    adapted = _names_without_adapters(model, names)
    result: dict[str, str] = {}
    for name in sorted(stored):
        candidates = [name]
        if prefix:
            candidates += [f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
        candidates += [adapted[c] for c in candidates if c in adapted]
        known = next((c for c in candidates if c in names), name)
        if known in result:
            raise ValueError(f"both {result[known]!r} and {name!r} stand for {known!r}")
        result[known] = name
    return result


def _names_without_adapters(model: nn.Module, names: set[str]) -> dict[str, str]:
    """The name of a tensor before PEFT wrapped the model or the layer → its name now."""
    if not any(is_of_peft(module) for module in model.modules()):
        return {}
    root = "base_model.model." if is_of_peft(model) else ""
    now = {name: name.removeprefix(root).replace(".base_layer.", ".") for name in names}
    return {before: name for name, before in now.items() if before != name}


def _values_of_adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that PEFT has added, as far as they have values."""
    added: dict[str, nn.Parameter] = {}
    for path, layer in model.named_modules():
        if is_of_peft(layer) and hasattr(layer, "base_layer"):
            for name, parameter in layer.named_parameters(prefix=path):
                if not name.startswith(f"{path}.base_layer.") and not parameter.is_meta:
                    added[name] = parameter
    return added


def _check(
    model: nn.Module,
    source: WeightFiles,
    stored: dict[str, str],
    found: dict[str, list[str]],
    known: set[str],
    expected: dict[str, tuple[int, ...]],
) -> None:
    """Raises one ValueError for everything that does not fit."""
    ignored = [
        re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    missing = [f"{name!r} {shape}" for name, shape in expected.items() if not found[name]]
    extra = [
        f"{stored[name]!r} {source.shape(stored[name])}"
        for name in stored
        if name not in known and not any(p.search(stored[name]) for p in ignored)
    ]
    shaped = [
        f"{stored[alias]!r} is {source.shape(stored[alias])}, "
        f"the model's {name!r} is {expected[name]}"
        for name, aliases in found.items()
        for alias in aliases
        if source.shape(stored[alias]) != expected[name]
    ]
    problems = []
    if missing:
        problems.append(f"missing: {listed(sorted(missing))}")
    if extra:
        problems.append(f"not in the model: {listed(sorted(extra))}")
    if shaped:
        problems.append(f"of another shape: {listed(sorted(shaped))}")
    if problems:
        raise ValueError(
            f"the tensors of {source.path} do not fit the model; " + "; ".join(problems)
        )


def _are(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"
