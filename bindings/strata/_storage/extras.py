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

from collections.abc import Iterator
from typing import Any

import torch

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
    """The inverse. REQUIRES: problems() finds none."""
    if isinstance(value, list):
        return [from_json(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TENSOR_KEY}:
        return tensors[value[TENSOR_KEY]]
    if value.keys() == {TUPLE_KEY}:
        return tuple(from_json(each, tensors) for each in value[TUPLE_KEY])
    if value.keys() == {ITEMS_KEY}:
        return {key: from_json(each, tensors) for key, each in value[ITEMS_KEY]}
    return {key: from_json(each, tensors) for key, each in value.items()}


def problems(value: Any, count: int) -> Iterator[str]:
    """How it contradicts the format. `count`: of tensors."""
    if isinstance(value, list):
        for each in value:
            yield from problems(each, count)
    elif isinstance(value, dict):
        inside: Any = list(value.values())
        if value.keys() == {TENSOR_KEY}:
            place, inside = value[TENSOR_KEY], []
            if type(place) is not int or not 0 <= place < count:
                yield f"extra has no tensor {place!r:.20}"
        elif value.keys() == {TUPLE_KEY}:
            inside = value[TUPLE_KEY]
            if not isinstance(inside, list):
                yield f"extra has a tuple that is {inside!r:.20}"
                return
        elif value.keys() == {ITEMS_KEY}:
            pairs = value[ITEMS_KEY]
            if not isinstance(pairs, list) or not all(map(_is_item, pairs)):
                yield f"extra has items that are {pairs!r:.20}"
                return
            inside = [each for _, each in pairs]
        yield from problems(inside, count)


def _is_item(pair: Any) -> bool:
    return (
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str | int | float | None)
    )
