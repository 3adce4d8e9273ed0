"""What of a snapshot is in no page: buffers, hyperparameters, randomness, extras, and names of
parameters.

    context = take_context(state, contents, extra)  # as it is now
    write_state(file, manifest, context)            # later, on a thread
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch

from .._core import adds_in_float32
from .._optim.groups import moments_of
from .._runtime.wrapped import Wrapped
from . import rng
from .checkpoint import (
    buffer_entries,
    check_dense,
    dtype_name,
    model_layout,
    plain_groups,
    raw_bytes,
)
from .checkpoint_files import Record, TensorWriter
from .extra_state import take_extra_state
from .extras import to_json
from .registrations import Contents
from .snapshot_files import FORMAT
from .snapshot_gradients import divisor
from .stored import StoredTensor, stored_tensors


@dataclass
class Context:
    """What is in no page, as it was when the snapshot was asked for."""

    manifest: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    tensors: list[torch.Tensor]
    empty_steps: dict[str, int]  # by name, of parameters without elements: no page says it


@dataclass
class Form:
    """What is the same for every snapshot of a model, as manifests have it."""

    params: list[dict[str, Any]]
    parts: list[list[int]]


def take_context(state: Wrapped, contents: Contents, extra: dict[str, Any]) -> Context:
    """Takes what is in no page. Its time does not depend on the parameters, nor on their number."""
    tensors: list[torch.Tensor] = []
    buffers = {name: module._buffers[key] for name, module, key in contents.buffers}
    values = {name: value for name, value in buffers.items() if value is not None}
    check_dense(values)
    manifest: dict[str, Any] = {
        "snapshot": FORMAT,
        "step": state.steps_before + state.steps.count,
        "time": time.time_ns(),
        "moment_dtype": state.config["moment_dtype"],
        "buffers": buffer_entries(values),
        "groups": plain_groups(state),
        "extra_state": take_extra_state(contents.extra_places),
        "rng": rng.capture(),
        "extra": to_json(extra, tensors),
        "gradients": None,
        "zeros": sorted(state.gradients.hand_over_held()),
        "sums": {"float32": adds_in_float32(state.config), "divisor": divisor(state)},
    }
    json.dumps(manifest)  # raises now, and not on the thread
    copies = {name: value.detach().to("cpu", copy=True) for name, value in values.items()}
    empty_steps = {
        spec["name"]: state.session.param_step(i)
        for i, spec in enumerate(state.config["params"])
        if spec["numel"] == 0
    }
    return Context(manifest, copies, tensors, empty_steps)


def form_of(state: Wrapped) -> Form:
    params = model_layout(state)["params"]
    for tensor, entry in zip(stored_tensors(state.model), params, strict=True):
        entry |= {"step": 0, "rule": rule_of(state, tensor)}
    return Form(params, parts_of(state))


def rule_of(state: Wrapped, tensor: StoredTensor) -> str:
    """Whose moments are kept of the tensor."""
    group = state.config["groups"][state.config["params"][tensor.parts[0]]["group"]]
    return group["rule"] if moments_of(group) else "sgd"


def parts_of(state: Wrapped) -> list[list[int]]:
    """By parameter: its tensor, and its first element there."""
    parts: list[list[int]] = [[] for _ in state.config["params"]]
    for place, tensor in enumerate(stored_tensors(state.model)):
        first = 0
        for part, numel in zip(tensor.parts, tensor.part_numels, strict=True):
            parts[part] = [place, first]
            first += numel
    return parts


def write_state(file: TensorWriter, manifest: dict[str, Any], context: Context) -> None:
    def append(kind: str, value: torch.Tensor) -> Record:
        return file.append(kind, dtype_name(value.dtype), raw_bytes(value))

    for entry in manifest["buffers"]:
        entry["tensors"] = [append("buffer", context.buffers[entry["name"]])]
    manifest["tensors"] = write_tensors(file, context)


def write_tensors(file: TensorWriter, context: Context) -> list[Record]:
    """Those of `extra`; as the manifest has them."""
    return [
        file.append("extra", dtype_name(value.dtype), raw_bytes(value))
        | {"shape": list(value.shape)}
        for value in context.tensors
    ]
