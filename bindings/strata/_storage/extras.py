"""What a user puts into `extra`, as JSON that gives the same values back.

    plain = to_json(extra, tensors)              # its tensors go to the list
    extra = from_json(plain, tensors)

Format. Strings, numbers, booleans, None, lists, and dictionaries whose keys are strings are
themselves. Others are dictionaries with one key:

    {"strata.tensor": i}                         the ith of the snapshot's tensors
    {"strata.tuple": [values]}                   a tuple
    {"strata.items": [[key, value], ...]}        a dictionary with keys that are no strings

Pure functions.
"""

from __future__ import annotations

from typing import Any

import torch

from .._schema import FormError

TENSOR_KEY, TUPLE_KEY, ITEMS_KEY = "strata.tensor", "strata.tuple", "strata.items"
OURS = frozenset({TENSOR_KEY, TUPLE_KEY, ITEMS_KEY})


def to_json(value: Any, tensors: list[torch.Tensor] | None, where: str = "extra") -> Any:
    """Copies of tensors, as they are now, go to the list; None: there is no place for any. Raises
    TypeError for a key or a value that cannot be kept, with its place."""
    if isinstance(value, torch.Tensor):
        return _tensor(value, tensors, where)
    if isinstance(value, dict):
        return _dictionary(value, tensors, where)
    if isinstance(value, list | tuple):
        inside = [to_json(each, tensors, f"{where}[{i}]") for i, each in enumerate(value)]
        return {TUPLE_KEY: inside} if isinstance(value, tuple) else inside
    if value is not None and not isinstance(value, str | int | float):
        raise TypeError(
            f"{where} is of {type(value).__name__}, and extra keeps strings, numbers, booleans, "
            "None, lists, tuples and dictionaries of these, and a snapshot tensors: make it one of "
            "them"
        )
    return value


def _tensor(value: torch.Tensor, tensors: list[torch.Tensor] | None, where: str) -> dict[str, int]:
    if tensors is None:
        raise TypeError(
            f"{where} is a tensor, which strata.snapshot keeps and strata.save does not: give "
            ".tolist()"
        )
    if value.is_meta:
        raise TypeError(f"{where} is a tensor on the meta device, which has no values")
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        kind = "quantized" if value.is_quantized else value.layout
        kind = "nested" if value.is_nested else kind
        raise TypeError(f"{where} is a tensor that is {kind}: make it dense")
    tensors.append(value.detach().to("cpu", copy=True))
    return {TENSOR_KEY: len(tensors) - 1}


def _dictionary(
    value: dict[Any, Any], tensors: list[torch.Tensor] | None, where: str
) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str | int | float | None):
            raise TypeError(
                f"{where} has the key {key!r:.60}, and keys may be strings, numbers, booleans and "
                "None"
            )
        if key in OURS:
            raise TypeError(f"{where} has a key {key!r}, which stands for other values")
    if all(isinstance(key, str) for key in value):
        return {k: to_json(each, tensors, f"{where}[{k!r}]") for k, each in value.items()}
    return {
        ITEMS_KEY: [[k, to_json(each, tensors, f"{where}[{k!r}]")] for k, each in value.items()]
    }


def from_json(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse. Raises FormError where it contradicts the format."""
    try:
        return _from_json(value, tensors)
    except RecursionError as error:
        raise FormError("'extra' holds lists in lists without an end") from error


def _from_json(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_from_json(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    key, inside = next(iter(value.items())) if len(value) == 1 else ("", None)
    if key == TENSOR_KEY:
        if type(inside) is not int or not 0 <= inside < len(tensors):
            raise FormError(f"'extra' has no tensor {inside!r:.20}")
        return tensors[inside]
    if key == TUPLE_KEY and isinstance(inside, list):
        return tuple(_from_json(each, tensors) for each in inside)
    if key == ITEMS_KEY and isinstance(inside, list) and all(map(_is_item, inside)):
        return {name: _from_json(each, tensors) for name, each in inside}
    if key in OURS:
        raise FormError(f"'extra' has {key!r} of {inside!r:.20}")
    return {name: _from_json(each, tensors) for name, each in value.items()}


def _is_item(pair: Any) -> bool:
    return (
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str | int | float | None)
    )
