"""A file of torch.save() that holds a state dict, read as a safetensors file is.

    file = TorchFile(path)                  # ValueError: what it holds is no tensor
    file.keys(), file.get_tensor("w"), file.get_slice("w").get_shape()
    file.nf4                                # {"w": an NF4Tensor of torchao}

Nothing but tensors is unpickled (weights_only), and values stay in the file until they are read
(mmap). An NF4Tensor comes as a stand-in with the same attributes, so that torchao is not needed.
"""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._torch_compat import is_nf4
from .extra_state import is_extra_state

NF4 = "NF4Tensor"
# Where torchao has had the class.
MODULES = ("torchao.dtypes.nf4tensor", "torchao.quantization.quantize_.workflows.nf4.nf4_tensor")


def _refuse(_: Any, function: Any, *_args: Any, **_keywords: Any) -> Any:
    """Called by torch for every operation on a StandIn."""
    raise NotImplementedError(f"{function} of codes that are not read yet")


class StandIn(torch.Tensor):
    """An NF4Tensor of a file: it has a shape and attributes, and computes nothing."""

    __torch_dispatch__: Any = classmethod(_refuse)


@dataclass(frozen=True)
class Shaped:
    """What safe_open() calls a slice, as far as it is asked."""

    tensor: torch.Tensor

    def get_shape(self) -> list[int]:
        """Of the tensor, whose values stay in the file."""
        return list(self.tensor.shape)


class TorchFile:
    """Use from one thread. The file is held open by its tensors."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for what is no state dict of tensors."""
        found = _load(path)
        if not isinstance(found, dict):
            raise ValueError(f"{path} holds a {type(found).__name__}: save a model's state_dict()")
        self.nf4: dict[str, torch.Tensor] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self.extra_state: dict[str, Any] = {}  # of modules, by its name in a state dict
        for name, value in found.items():
            kind = type(value)
            if isinstance(name, str) and is_extra_state(name):
                self.extra_state[name] = value
                continue
            if (kind is StandIn or is_nf4(value)) and isinstance(name, str):
                self.nf4[name] = value
            elif kind not in (torch.Tensor, nn.Parameter) or not isinstance(name, str):
                raise ValueError(
                    f"{path} holds {name!r:.80}, a {kind.__name__}: strata reads a state_dict() of "
                    f"plain tensors, and of torchao's {NF4}"
                )
            self._tensors[name] = value

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        """One of the tensors, whose memory is the file's."""
        return self._tensors[name].detach()

    def get_slice(self, name: str) -> Shaped:
        """What has its shape."""
        return Shaped(self._tensors[name])


def is_torch_file(path: Path) -> bool:
    """Whether torch.save() wrote it, in the form of today or of before 1.6."""
    with open(path, "rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02")


def _load(path: Path) -> Any:
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is cut short, or of the form of torch.save() that ended with PyTorch 1.6: "
            "load it, and save its state_dict() once more"
        )
    allowed: list[Any] = [(StandIn, f"{module}.{NF4}") for module in MODULES]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds {_classes(path) or 'what is no tensor'}, which is not unpickled: strata "
            f"reads a state_dict() of plain tensors, and of torchao's {NF4}"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a readable file of torch.save(): {error}") from error


def _classes(path: Path) -> str:
    """Those that a file would have unpickled."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:
        return ""
    known = {f"{module}.{NF4}" for module in MODULES}
    return ", ".join(sorted(set(found) - known))
