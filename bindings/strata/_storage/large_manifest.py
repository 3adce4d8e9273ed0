"""Manifests that grow with the model, written while another thread trains.

write_large_manifest(folder, manifest)          # as write_manifest()
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._core import Hasher
from .checkpoint_files import MANIFEST_NAME, STATE_VERSION
from .replacing import sync, write_whole

ENCODED_AT_ONCE = 64  # entries of a list: less than a millisecond


def write_large_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """As write_manifest(), but bit by bit, and other threads get their turn between two: what grows
    with the model takes a while."""
    manifest = {"version": STATE_VERSION} | manifest
    digest = Hasher()
    pieces = ["{"]
    for i, key in enumerate(sorted(manifest)):
        pieces.append(f"{', ' if i else ''}{json.dumps(key)}: ")
        pieces += _encoded(manifest[key])
    pieces.append("}")
    text = "".join(pieces)
    digest.update(text.encode())
    write_whole(folder / MANIFEST_NAME, f'{{"checksum": "{digest.hexdigest()}", {text[1:]}')
    sync(folder)


def _encoded(value: Any) -> Iterator[str]:
    if not isinstance(value, list) or len(value) <= ENCODED_AT_ONCE:
        yield json.dumps(value, sort_keys=True)
        return
    for first in range(0, len(value), ENCODED_AT_ONCE):
        part = json.dumps(value[first : first + ENCODED_AT_ONCE], sort_keys=True)
        yield f"{', ' if first else '['}{part[1:-1]}"
        give_way()
    yield "]"


def give_way() -> None:
    """Lets another thread have the interpreter that asks for it, sooner than it would."""
    time.sleep(0)
