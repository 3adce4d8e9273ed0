"""Weights in files that bitsandbytes has quantised: which they are, and their codes.

    found = ready_weights(names)              # {"layers.0.weight": Files(...)}, of all names there
    found["layers.0.weight"].shape(read)      # of the weight; the file has codes in another one
    found["layers.0.weight"].codes(read)      # ReadyCodes

Beside the codes of a weight W in 4 bits there are W.absmax, W.quant_map and a JSON object in
W.quant_state.bitsandbytes__nf4; where scales are quantised, too, W.nested_absmax and
W.nested_quant_map. Beside those of M.weight in 8 bits there are M.SCB, a scale of each row, and
M.weight_format. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from .._config.frozen import BLOCK
from .._config.managed import DTYPE_NAMES
from .._runtime.ready_codes import SCALE_BLOCK, ReadyCodes, values_of_codes

Read = Callable[[str], torch.Tensor]
STATE = ".quant_state.bitsandbytes__"
NF4_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Files:
    """The tensors that are a weight."""

    name: str  # of the codes
    others: frozenset[str]  # what is beside them
    state: str = ""  # which of them is the JSON object; "": 8 bits

    def shape(self, read: Read) -> tuple[int, ...]:
        """Of the weight. Raises ValueError where the files are damaged."""
        if not self.state:
            return tuple(read(self.name).shape)
        return tuple(self._state(read)["shape"])

    def codes(self, read: Read) -> ReadyCodes:
        """Raises ValueError where it is not what strata computes with, or damaged."""
        return self._int8(read) if not self.state else self._nf4(read)

    def _int8(self, read: Read) -> ReadyCodes:
        codes, rows = read(self.name), read(f"{self.name.removesuffix('weight')}SCB")
        self._require(codes.dtype == torch.int8 and codes.dim() == 2, "codes are not int8")
        self._require(rows.numel() == len(codes), "SCB has not one scale for each row")
        blocks = codes.shape[1] // BLOCK
        self._require(blocks * BLOCK == codes.shape[1], f"rows are no blocks of {BLOCK}")
        scales = rows.float().reshape(-1).repeat_interleave(blocks)
        self._finite(scales)
        flat = codes.contiguous().view(torch.uint8).reshape(-1)
        return ReadyCodes("int8", tuple(codes.shape), torch.float32, [flat, scales])

    def _nf4(self, read: Read) -> ReadyCodes:
        state = self._state(read)
        shape = tuple(state["shape"])
        numel = math.prod(shape)
        codes = read(self.name).reshape(-1)
        scales = read(f"{self.name}.absmax").reshape(-1)
        self._require(codes.dtype == torch.uint8, "codes are not uint8")
        self._require(2 * codes.numel() == numel, f"there are not {numel} codes")
        self._require(BLOCK * scales.numel() == numel, f"there is not a scale for each {BLOCK}")
        self._same(read(f"{self.name}.quant_map"), "nf4")
        if "nested_offset" not in state:
            self._require(scales.dtype == torch.float32, "scales are not float32")
            self._finite(scales)
            return ReadyCodes("nf4", shape, DTYPES[state["dtype"]], [codes, scales])
        self._same(read(f"{self.name}.nested_quant_map"), "scales")
        self._require(scales.dtype == torch.uint8, "codes of scales are not uint8")
        factors = read(f"{self.name}.nested_absmax").reshape(-1).float()
        groups = -(-scales.numel() // SCALE_BLOCK)
        self._require(factors.numel() == groups, f"there are not {groups} scales of scales")
        offsets = torch.full_like(factors, float(state["nested_offset"]))
        both = torch.stack([factors, offsets], dim=-1).reshape(-1)
        self._finite(both)
        return ReadyCodes("nf4-double", shape, DTYPES[state["dtype"]], [codes, scales, both])

    def _state(self, read: Read) -> dict[str, Any]:
        raw = read(self.state)
        self._require(raw.dtype == torch.uint8, "its state is not text")
        try:
            state = json.loads(bytes(raw.reshape(-1).tolist()))
            shape = [int(size) for size in state["shape"]]
            wanted = {"quant_type": "nf4", "blocksize": BLOCK}
            if "nested_offset" in state:
                wanted["nested_blocksize"] = SCALE_BLOCK
                state["nested_offset"] = float(state["nested_offset"])
            wrong = {key: state[key] for key, value in wanted.items() if state[key] != value}
            known = state["dtype"] in DTYPES
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._broken(f"its state cannot be read: {error!r:.100}") from error
        for key, value in wrong.items():
            raise self._broken(f"{key} is {value!r:.50}, and {wanted[key]!r} is what strata knows")
        self._require(known, f"it is of {state['dtype']!r:.50}")
        self._require(all(0 < size < 1 << 40 for size in shape), f"its shape is {shape!r:.100}")
        return dict(state)

    def _same(self, table: torch.Tensor, name: str) -> None:
        same = torch.equal(table.reshape(-1).float(), values_of_codes(name))
        self._require(same, "its codes stand for other values than bitsandbytes'")

    def _finite(self, scales: torch.Tensor) -> None:
        self._require(bool(scales.isfinite().all()), "a scale is not finite")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise self._broken(what)

    def _broken(self, what: str) -> ValueError:
        return ValueError(f"{self.name!r} is quantised, and cannot be read: {what}")


def ready_weights(names: Collection[str]) -> dict[str, Files]:
    """By name of the codes, of all that are quantised. Raises ValueError for codes of 4 bits that
    are no NF4, and where parts are missing."""
    there = set(names)
    found = {}
    for name in there:
        weight, state, kind = name.partition(STATE)
        if state:
            if kind != "nf4":
                raise ValueError(f"{weight!r} is quantised as {kind}: strata reads nf4 and int8")
            parts = {f"{weight}.{part}" for part in NF4_PARTS} & there
            if missing := {weight, f"{weight}.absmax", f"{weight}.quant_map"} - there:
                raise ValueError(f"{weight!r} is quantised, and {min(missing)!r} is not there")
            found[weight] = Files(weight, frozenset({name, *parts}), name)
        elif name.endswith(".SCB") and f"{name.removesuffix('SCB')}weight" in there:
            weight = f"{name.removesuffix('SCB')}weight"
            found[weight] = Files(weight, frozenset({name, f"{weight}_format"} & there))
    return found
