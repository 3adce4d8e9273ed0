"""Materialises a model built on the meta device, one tensor at a time.

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights.load(model, write, weights="llama/", seed=0)       # write(name, float32 tensor)

The parameters stay on the meta device and keep their identity; their values go to `write`, so the
memory used beside the model is that of one module. Buffers become real in place.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .._config.choices import INIT
from .._config.paths import AnyPath, as_path
from .._config.sizes import format_count
from .._errors import listed
from .._runtime.ready_codes import ReadyCodes
from . import initialise
from .adapters import AdapterLayers, Write
from .extra_state import is_extra_state, misplaced, set_extra_state
from .matching import Match
from .ready_files import Files, ready_weights
from .stored import base_name, stored_tensors, tiled_modules
from .torch_files import TorchFile, is_torch_file
from .torchao_tensors import codes_of, refuse_others

INDEX_NAME = "model.safetensors.index.json"
# In a folder, the first that is there says what its weights are: of safetensors files, and where
# there are none.
NAMES = (INDEX_NAME, "model.safetensors")
TORCH_NAMES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file


def load(
    model: nn.Module,
    write: Write,
    *,
    weights: AnyPath | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> None:
    """Calls `write(name, tensor)` once for every parameter, with a contiguous float32 CPU tensor,
    or with the codes of one that is quantised in the files.

    `weights` is a safetensors file, or one of torch.save() with a state dict, or a folder of them
    (with the index that Transformers writes or without); None lets the modules initialise
    themselves from `seed`, on `device`. A tied parameter is written once, under its first name. A
    layer that is cut into tiles is read, and initialised, as a whole: the values are those of the
    plain model. Files of a model of Transformers are as its save_pretrained() writes them; those of
    a model with adapters of PEFT, of the model inside: PEFT initialises the adapters then, from
    `seed`.

    Raises ValueError where the weights lack a tensor, hold one too many, or one of another shape.
    """
    layers = AdapterLayers(model, write, seed)
    if weights is None:
        _initialise(model, layers, seed, device)
        layers.finish()
        initialise.buffers(model)
        return
    source = WeightFiles(weights)
    taken = set()
    try:
        if problem := misplaced(model, source.extra_state):
            raise ValueError(f"{source.path} holds one too many: {problem}")
        for wanted, value in Match(model, source).read():
            if wanted.tensor is not None:
                layers.put(wanted.tensor, value)
                continue
            assert isinstance(value, torch.Tensor)  # no buffer is quantised
            taken.add(wanted.name)
            _set_buffer(model, wanted.name, value)
        layers.finish()
        initialise.buffers(model, skip=frozenset(taken))
        set_extra_state(model, source.extra_state)
    finally:
        source.close()


def check_values(model: nn.Module, weights: AnyPath | None) -> None:
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


def said_of(weights: AnyPath | None, seed: int, device: str | torch.device) -> dict[str, str]:
    """What a rank says of where values come from, by what it is called: for people, and another
    where they are others. Files are looked at, and not read. Raises as WeightFiles."""
    if weights is None:
        return {"weights": "not given"}
    drawn = {"seed": str(seed), "init_device": torch.device(device).type}
    if weights == INIT:
        return {"weights": INIT} | drawn
    sizes, samples = [], hashlib.sha256()
    for path in _weight_files(as_path(weights, "weights")):
        with path.open("rb") as file:
            sizes.append(os.fstat(file.fileno()).st_size)
            for i in range(SAMPLES):
                samples.update(os.pread(file.fileno(), SAMPLE_BYTES, sizes[-1] * i // SAMPLES))
    what = f"{format_count(len(sizes), 'file')}, {sum(sizes)} bytes, {samples.hexdigest()[:12]}"
    return {"weights": what} | drawn  # adapters are drawn, too


class WeightFiles:
    """The tensors of a file, or of a folder of them, by name. Reads one at a time.

    Use from one thread. Holds the files open until close().
    """

    def __init__(self, path: AnyPath) -> None:
        """Opens `path`. Raises FileNotFoundError or ValueError, naming the file."""
        self.path = as_path(path, "weights")
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        self.extra_state: dict[str, Any] = {}  # of modules, by its name in a state dict
        for file in _weight_files(self.path):
            self._files[file] = opened = _open(file)
            self.extra_state |= getattr(opened, "extra_state", {})
            for name in list(opened.keys()):
                if is_extra_state(name):
                    self.extra_state[name] = opened.get_tensor(name)
                    continue
                if name in self._file_of:
                    raise ValueError(f"{name!r} is both in {self._file_of[name]} and in {file}")
                self._file_of[name] = file
        self._ready: dict[str, Files] = ready_weights(self._file_of)
        self._nf4 = {n: t for f in self._files.values() for n, t in getattr(f, "nf4", {}).items()}

    def names(self) -> set[str]:
        """The names of all stored tensors, without what lies beside codes."""
        beside = {name for files in self._ready.values() for name in files.others}
        return self._file_of.keys() - beside

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""
        if (files := self._ready.get(name)) is not None and files.state:
            return files.shape(self._raw)
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def like(self, name: str) -> torch.Tensor:
        """One of the same shape, on the meta device."""
        return torch.empty(self.shape(name), device="meta")

    def is_ready(self, name: str) -> bool:
        """Whether it is quantised."""
        return name in self._ready or name in self._nf4

    def ready(self, name: str) -> ReadyCodes | None:
        """The codes of one that is quantised; None: it is not."""
        if name in self._nf4:
            return codes_of(name, self._nf4[name])
        files = self._ready.get(name)
        return None if files is None else files.codes(self._raw)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in the dtype of the file; of codes what they stand for."""
        ready = self.ready(name)
        return self._raw(name) if ready is None else ready.dense()

    def _raw(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def close(self) -> None:
        """Closes the files. Tensors already read stay valid."""
        self._files.clear()
        self._nf4.clear()


def _open(file: Path) -> Any:
    """What has keys(), get_tensor() and get_slice(). Raises ValueError for what cannot be read, and
    for weights that are quantised in a way that strata does not know."""
    try:
        if is_torch_file(file):
            return TorchFile(file)
        opened = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
    refuse_others(opened.metadata())
    return opened


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _indexed_files(path)
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no weights at {path}")
    files = sorted(path.glob("*.safetensors"))
    for name in NAMES if files or (path / INDEX_NAME).is_file() else TORCH_NAMES:
        if (path / name).is_file():
            return _weight_files(path / name)
    if files:
        return files
    raise FileNotFoundError(f"no *.safetensors file in {path}, and no pytorch_model.bin")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of weights: {error!r:.200}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{index} names {name!r:.80}, which is no file below its folder")
    files = [index.parent / name for name in names]
    for file in files:
        if not _is_file(file):
            raise FileNotFoundError(f"{index} names {file.name!r:.80}, which is not there")
    return files


def _is_file(path: Path) -> bool:
    """Also of a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _set_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Gives a buffer on the meta device its values."""
    owner, _, leaf = name.rpartition(".")
    buffers = model.get_submodule(owner)._buffers
    buffer = buffers[leaf]
    if buffer is not None and buffer.is_meta:
        buffers[leaf] = value.to(buffer.dtype).clone()


def _initialise(
    model: nn.Module, layers: AdapterLayers, seed: int, device: str | torch.device
) -> None:
    """Puts first values, module by module; not those of adapters."""
    # A tied parameter counts under its first name only.
    tensors = {t.name: t for t in stored_tensors(model) if base_name(model, t.name) is not None}
    for module_name in dict.fromkeys(name.rpartition(".")[0] for name in sorted(tensors)):
        with _untiled(model, module_name):
            values = initialise.parameters(model, module_name, seed, device)
        while values:
            name, value = values.popitem()
            tensor = tensors.get(f"{module_name}.{name}" if module_name else name)
            if tensor is not None:
                layers.put(tensor, value)
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


def _are(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"
