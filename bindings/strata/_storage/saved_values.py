"""Values of the user's that JSON does not hold, as manifests have them: what torch.save() writes.

    text = to_text(value, "groups[0]['scale']")     # TypeError, with the place: it cannot be kept
    value = from_text(text)                         # ValueError: it is damaged

    plain = to_plain(value, where)                  # JSON where that gives the same value back,
    value = from_plain(plain)                       # else {"strata.saved": text}

Nothing is kept that torch.load(weights_only=True) would not read: what a checkpoint holds runs no
code. Pure functions.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import torch

from .extras import from_json, to_json

SAVED_KEY = "strata.saved"


def to_text(value: Any, where: str) -> str:
    """A copy of the value, as it is now."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickling runs the code of any class
        why = str(error).strip().partition("\n")[0]
        raise TypeError(
            f"{where} holds what no checkpoint can: torch.load(weights_only=True) would not read "
            f"it ({type(error).__name__}: {why:.200}). Make it of tensors, numbers, strings, "
            "lists, tuples and dictionaries"
        ) from error
    return base64.b64encode(file.getvalue()).decode()


def from_text(text: Any) -> Any:
    """The value, with tensors on the CPU."""
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files end in exceptions of every class
        raise ValueError(f"it is nothing that torch.save() wrote: {error!s:.80}") from error


def to_plain(value: Any, where: str) -> Any:
    """As JSON."""
    if not (isinstance(value, dict) and SAVED_KEY in value):
        try:
            return to_json(value, None, where)
        except TypeError:
            pass
    return {SAVED_KEY: to_text(value, where)}


def from_plain(plain: Any) -> Any:
    """The inverse. Raises ValueError."""
    if isinstance(plain, dict) and plain.keys() == {SAVED_KEY}:
        return from_text(plain[SAVED_KEY])
    return from_json(plain, [])
