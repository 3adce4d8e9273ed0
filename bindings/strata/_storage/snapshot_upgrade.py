"""Snapshots of older formats, which snapshot_files.py describes.

    upgrade(manifest)           # now it is as one of this format

Pure functions.
"""

from __future__ import annotations

from typing import Any

from .checkpoint_files import CheckpointError
from .snapshot_files import FORMAT, all_chunks


def upgrade(manifest: dict[str, Any]) -> None:
    """Gives a manifest of an older format what this one has. Raises as it contradicts itself."""
    if isinstance(manifest["scales"], list):
        _place_scales(manifest)
    for chunk in manifest["chunks"]:
        chunk.setdefault("scale_page", None)
    manifest.setdefault("copies", [])
    if manifest["snapshot"] == 1:
        _add_steps(manifest)
    if manifest["snapshot"] < FORMAT:
        _drop_gradients(manifest)


def _place_scales(manifest: dict[str, Any]) -> None:
    """Of format 2: each chunk says in which page its scales are."""
    pages, size = manifest["scales"], manifest["page_bytes"]
    if size <= 0:
        raise ValueError(f"pages of {size} bytes")
    for chunk in manifest["chunks"]:
        places = [divmod(first, size) for first in chunk["scales"]]
        if not places:
            continue
        page = places[0][0]
        if page < 0 or any(other != page for other, _ in places):
            raise ValueError("scales of a chunk lie in two pages")
        chunk |= {"scale_page": pages[page], "scales": [first for _, first in places]}
    manifest["scales"] = None


def _add_steps(manifest: dict[str, Any]) -> None:
    """Of format 1."""
    steps = [entry["step"] for entry in manifest["params"]]
    for chunk in manifest["chunks"]:
        for run in chunk["runs"]:
            run.append(steps[manifest["parts"][run[0]][0]])


def _drop_gradients(manifest: dict[str, Any]) -> None:
    """Of formats up to 8, which could have some."""
    if manifest.get("gradients") is not None:
        raise CheckpointError(
            "this snapshot was taken between backward() and step() by an older strata, and this "
            "one keeps no gradients: load one that was taken after step()"
        )
    for chunk in all_chunks(manifest):
        chunk["runs"] = [run[:5] for run in chunk["runs"]]
