"""What a manifest must say before anything is loaded by it: all its fields are held against the
format, the file of tensors and the model, in one place.

    check(manifest, wanted, path)           # raises one CheckpointError that lists what is wrong

A manifest with a right checksum may still be another program's, or that of a bug. Pure functions.
"""

import math
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from .._config.choices import DTYPES
from .._errors import listed
from .._optim.groups import FOLLOWED, HARMLESS, UNSUPPORTED
from .._runtime.coded import GROUP, same_groups
from ..nn.tiles import tile_rows
from . import extras, rng
from .checkpoint_files import CheckpointError, sizes_of
from .saved_values import from_plain

LISTED_MAX = 4  # problems spelled out in one error
STEPS_MAX = 1 << 53
DIGEST = re.compile(r"[0-9a-f]{16}")

# Options of classes that strata knows. Any other key of a parameter group is the user's, or that of
# a scheduler: it is loaded as it is, as torch does.
OPTIONS = FOLLOWED | HARMLESS | frozenset(UNSUPPORTED)


def check(manifest: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raises CheckpointError unless the manifest can be loaded into the model, to the last byte.
    `wanted`: the manifest of the model as it is now, without steps, checksums, "rng" and "extra".
    """
    if problems := _unsound(manifest):
        raise CheckpointError(f"{where} is a damaged checkpoint: {_list(problems)}")
    if problems := misfits(manifest, wanted):
        raise CheckpointError(f"{where} is a checkpoint of another model: {_list(problems)}")
    cuts = [_cut_of(entry) for entry in manifest["params"]]
    check_cuts(cuts, wanted["params"], where)
    if problem := _misplaced(manifest, wanted):
        raise CheckpointError(f"{where} is a damaged checkpoint: {problem}")


def check_cuts(cuts: list[list[int]], wanted: list[dict[str, Any]], where: str) -> None:
    """Raises CheckpointError where codes have other groups of scales than the model's. `cuts`: of
    each of its tensors, how many elements each part had. See ../_runtime/coded.py, Note [Cuts]."""
    found = []
    for entry, theirs in zip(wanted, cuts, strict=True):
        if "stored" not in entry or same_groups(entry["stored"], _cut_of(entry), theirs):
            continue
        here, there = in_tiles(entry["tiles"]), in_tiles(len(theirs))
        found.append(f"{entry['name']!r}, {here} here and {there} there")
    if found:
        raise CheckpointError(
            f"{where} has codes of layers that the model cuts otherwise, within groups of {GROUP} "
            f"elements that share a scale: {listed(found)}; call strata.checkpoint.tile_as(model, "
            "path) ahead of strata.wrap() to cut them as there, and give a device budget that "
            "holds what is whole there"
        )


def _cut_of(entry: dict[str, Any]) -> list[int]:
    """Elements of each part of a tensor."""
    if (tiles := entry["tiles"]) == 1:
        return [math.prod(entry["shape"])]
    return [rows * math.prod(entry["shape"][1:]) for rows in tile_rows(entry["shape"][0], tiles)]


def in_tiles(count: int) -> str:
    """How a layer is cut, in words."""
    return "whole" if count == 1 else f"in {count} tiles"


def merged(
    group: dict[str, Any], saved: dict[str, Any], options: Collection[str]
) -> dict[str, Any]:
    """A parameter group with what was saved: `options` of the class, in the types that it has, and
    keys of the user's, as they were. Raises ValueError where one of these is damaged."""
    known = {key: value for key, value in saved.items() if key in options}
    tuples = {k: tuple(v) for k, v in known.items() if isinstance(group.get(k), tuple)}
    more = saved.keys() - OPTIONS - {*options, "params"}
    return group | known | tuples | {k: from_plain(saved[k]) for k in saved if k in more}


def _unsound(manifest: dict[str, Any]) -> list[str]:
    """How the manifest contradicts the format, whatever the model."""
    kinds: dict[str, type] = {"params": list, "buffers": list, "groups": list}
    kinds |= {"rng": dict, "extra": dict, "extra_state": dict}
    problems = [
        f"{key!r} is missing, or no {'list' if kind is list else 'object'}"
        for key, kind in kinds.items()
        if not isinstance(manifest.get(key), kind)
    ]
    if problems:
        return problems
    for section in ("params", "buffers"):
        for i, entry in enumerate(manifest[section]):
            found = _unsound_entry(entry, trained=section == "params")
            problems += [f"{section}[{i}]: {problem}" for problem in found]
    problems += [
        f"groups[{i}] is no object"
        for i, group in enumerate(manifest["groups"])
        if not isinstance(group, dict)
    ]
    if not _is_count(step := manifest.get("step", "")) or step > STEPS_MAX:
        problems.append(f"'step' is {step!r:.60}")
    others = manifest.get("others", [])  # ranks
    if not isinstance(others, list) or not all(map(_is_rank, others)):
        return [*problems, "'others' has no random states of ranks"]
    for said in (manifest, *others):
        problems += extras.problems(said["extra"], 0)
        problems += [f"rng: {problem}" for problem in rng.problems(said["rng"])]
    return problems


def _is_rank(other: Any) -> bool:
    return isinstance(other, dict) and all(
        isinstance(other.get(key), dict) for key in ("rng", "extra")
    )


def _unsound_entry(entry: Any, trained: bool) -> list[str]:
    """Of one parameter (`trained`) or buffer: fields that are missing or of another type."""
    if not isinstance(entry, dict):
        return ["it is no object"]
    checks: dict[str, Callable[[Any], bool]] = {
        "name": lambda value: isinstance(value, str),
        "shape": lambda value: isinstance(value, list) and all(map(_is_count, value)),
        "tensors": lambda value: (
            isinstance(value, list) and bool(value) and all(isinstance(r, dict) for r in value)
        ),
    }
    if trained:
        checks |= {
            "dtype": lambda value: value in DTYPES,
            "trainable": lambda value: isinstance(value, bool),
            "step": lambda value: _is_count(value) and value <= STEPS_MAX,
            "tiles": lambda value: _fits_rows(value, entry.get("shape")),
        }
    return [
        f"{key!r} is {entry.get(key)!r:.60}"
        for key, is_sound in checks.items()
        if not is_sound(entry.get(key))
    ]


def misfits(manifest: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """How a sound manifest differs from that of the model."""
    ours, theirs = (
        {entry["name"]: entry for entry in [*each["params"], *each["buffers"]]}
        for each in (wanted, manifest)
    )
    problems = []
    for name in (n for n in ours if n in theirs):
        shape, kinds = theirs[name]["shape"], _kinds(theirs[name])
        if shape != ours[name]["shape"]:
            problems.append(f"{name!r} has shape {shape}, the model's has {ours[name]['shape']}")
        elif kinds != (needed := _kinds(ours[name])):
            problems.append(f"{name!r} is stored as {kinds}, the model needs {needed}")
        elif theirs[name].get("stored") != ours[name].get("stored"):
            problems.append(
                f"{name!r} rests as {theirs[name].get('stored')!r:.20}, the model's as "
                f"{ours[name].get('stored')!r}"
            )
        elif ours[name].get("trainable"):
            group = theirs[name].get("group")
            if group != ours[name]["group"]:
                problems.append(
                    f"{name!r} was in parameter group {group!r:.20}, and the optimizer has it in "
                    f"{ours[name]['group']}"
                )
    problems += [f"{name!r} is not in the checkpoint" for name in ours if name not in theirs]
    problems += [f"{name!r} is not in the model" for name in theirs if name not in ours]
    order, found = (
        [[entry["name"] for entry in each[key]] for key in ("params", "buffers")]
        for each in (wanted, manifest)
    )
    if not problems and found != order:
        problems.append("its parameters are in another order, or there twice")
    if len(manifest["groups"]) != len(wanted["groups"]):
        problems.append(
            f"it has {len(manifest['groups'])} parameter groups, the optimizer has "
            f"{len(wanted['groups'])}"
        )
        return problems
    for i, (group, saved) in enumerate(zip(wanted["groups"], manifest["groups"], strict=True)):
        found_here = _misfits_of_group(group, saved, wanted["options"])
        problems += [f"groups[{i}]: {problem}" for problem in found_here]
    return problems


def _misplaced(manifest: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first tensor that does not lie where one of its shape and dtype does; "": there is none.
    REQUIRES: the manifest fits the model."""
    found: list[tuple[str, dict[str, Any]]] = []
    for section in ("params", "buffers"):
        for entry, needed in zip(manifest[section], wanted[section], strict=True):
            for record, ours in zip(entry["tensors"], needed["tensors"], strict=True):
                what = f"{record['kind']} of {entry['name']!r}"
                found.append((what, record))
                if not _is_count(size := record.get("bytes")) or size != ours["bytes"]:
                    return f"'bytes' of {what} is {size!r:.60}, not {ours['bytes']}"
                digest = record.get("xxh3_64")
                if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
                    return f"{what} has the checksum {digest!r:.60}"
    if problem := _misplaced_in_files(found, sizes_of(manifest, Path())):
        return problem
    if not _is_count(manifest["bytes"]) or manifest["bytes"] != wanted["bytes"]:
        return f"its tensors have {wanted['bytes']} bytes, 'bytes' is {manifest['bytes']!r:.60}"
    return ""


def _misplaced_in_files(found: list[tuple[str, dict[str, Any]]], sizes: dict[str, Any]) -> str:
    """The tensors of a file lie one behind the other, up to its end. REQUIRES: sizes of tensors."""
    for what, record in found:
        if not isinstance(record.get("file"), str) or record["file"] not in sizes:
            return f"{what} lies in {record.get('file')!r:.60}, which is no file of it"
        offset = record.get("offset")
        if not _is_count(offset) or offset + record["bytes"] > sizes[record["file"]]:
            return f"'offset' of {what} is {offset!r:.60}"
    end: dict[str, int] = {}
    for what, record in sorted(found, key=lambda pair: (pair[1]["offset"], pair[1]["bytes"])):
        expected = end.get(record["file"], record["offset"])
        if record["offset"] != expected:
            return f"'offset' of {what} is {record['offset']}, not {expected}"
        end[record["file"]] = expected + record["bytes"]
    for name, size in sizes.items():
        if end.get(name) != size:
            return f"the tensors in {name} end at 'offset' {end.get(name)}, and it has {size} bytes"
    return ""


def _misfits_of_group(
    group: dict[str, Any], saved: dict[str, Any], options: Collection[str]
) -> list[str]:
    """Hyperparameters that the optimizer has not, lacks, or has in another type."""
    # Versions of torch differ in options that are off.
    more = [k for k in saved if k not in options and k in OPTIONS | {"params"} and saved[k]]
    less = [k for k in options if k not in saved and group.get(k)]
    problems = [f"{key!r} is no option of the optimizer" for key in more]
    problems += [f"{key!r} is missing" for key in less]
    problems += [
        f"{key!r} is {saved[key]!r:.60}, the optimizer's is {group.get(key)!r:.60}"
        for key in options
        if key in saved and not _fits(saved[key], group.get(key))
    ]
    return problems


def _fits(saved: Any, ours: Any) -> bool:
    """Whether a saved hyperparameter may take the place of one."""
    if ours is None or isinstance(ours, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(ours, int | float):
        if not isinstance(saved, int | float) or isinstance(saved, bool):
            return False
        return saved == ours or abs(saved) <= sys.float_info.max  # a number, and finite
    if isinstance(ours, tuple | list):
        return (
            isinstance(saved, list)
            and len(saved) == len(ours)
            and all(_fits(value, own) for value, own in zip(saved, ours, strict=True))
        )
    return type(saved) is type(ours)


def _kinds(entry: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(record.get("kind"), record.get("dtype")) for record in entry["tensors"]]


def _fits_rows(tiles: Any, shape: Any) -> bool:
    """Whether a tensor may be in so many tiles."""
    rows = shape[0] if isinstance(shape, list) and shape and _is_count(shape[0]) else 1
    return is_tiles(tiles) and tiles <= max(rows, 1)


def is_tiles(value: Any) -> bool:
    """Whether a layer may have so many."""
    return _is_count(value) and value > 0


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _list(problems: list[str]) -> str:
    return listed(problems, LISTED_MAX, "; ")
