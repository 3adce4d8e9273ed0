"""What a manifest must say, beside its types (manifests.py), before anything is loaded by it: it is
held against the files and the model.

    check(manifest, wanted, path)           # raises one CheckpointError that lists what is wrong

Pure functions.
"""

import math
import re
import sys
from collections.abc import Collection
from typing import Any

from .._errors import listed
from .._optim.groups import FOLLOWED, HARMLESS, UNSUPPORTED
from .._runtime.coded import GROUP, same_groups
from ..nn.tiles import tile_rows
from .checkpoint_files import CheckpointError
from .saved_values import from_plain

LISTED_MAX = 4  # problems spelled out in one error
STEPS_MAX = 1 << 53
DIGEST = re.compile(r"[0-9a-f]{16}")

# Options of classes that strata knows. Any other key of a parameter group is the user's, or that of
# a scheduler: it is loaded as it is, as torch does.
OPTIONS = FOLLOWED | HARMLESS | frozenset(UNSUPPORTED)


def check(manifest: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raises CheckpointError unless the manifest can be loaded into the model, to the last byte.
    REQUIRES: it has the form of manifests.py. `wanted`: the manifest of the model as it is now,
    without steps, checksums, "rng" and "extra"."""
    if problems := misfits(manifest, wanted):
        raise CheckpointError(f"{where} {another(manifest, wanted, _list(problems))}")
    cuts = [_cut_of(entry) for entry in manifest["params"]]
    check_cuts(cuts, wanted["params"], where)
    if problem := _misplaced(manifest, wanted):
        raise CheckpointError(f"{where} is a damaged checkpoint: {problem}")


def another(manifest: dict[str, Any], wanted: dict[str, Any], problems: str) -> str:
    """What a manifest with these problems is of, and what to do."""
    if misfits(_of_model(manifest), _of_model(wanted)):
        return f"is of another model: {problems}"
    return (
        f"was saved with another optimizer: {problems}. To go on from its weights alone, load it "
        'with that optimizer, call strata.export_safetensors(model, "out") and wrap with '
        'weights="out"'
    )


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
        elif theirs[name].get("tiles", 1) > max([1, *shape[:1]]):
            problems.append(f"{name!r} was cut into {theirs[name]['tiles']} tiles, and has {shape}")
        elif theirs[name].get("stored") != ours[name].get("stored"):
            problems.append(
                f"{name!r} rests as {theirs[name].get('stored')!r:.20}, the model's as "
                f"{ours[name].get('stored')!r}"
            )
        elif ours[name].get("trainable"):
            group = theirs[name]["group"]
            if group != ours[name]["group"]:
                problems.append(
                    f"{name!r} was in parameter group {group}, and the optimizer has it in "
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


def _of_model(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says of the model, and nothing of its optimizer."""
    params = [
        {name: entry[name] for name in ("name", "shape", "stored") if name in entry}
        | {"tensors": []}
        for entry in manifest["params"]
    ]
    return {"params": params, "buffers": manifest["buffers"], "groups": []}


def _misplaced(manifest: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first tensor that has not the bytes of its shape and dtype, or does not lie behind
    another one, or at the end of a file; "": there is none. REQUIRES: the manifest fits the model.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for section in ("params", "buffers"):
        for entry, needed in zip(manifest[section], wanted[section], strict=True):
            for record, ours in zip(entry["tensors"], needed["tensors"], strict=True):
                what = f"{record['kind']} of {entry['name']!r}"
                found.append((what, record))
                if record["bytes"] != ours["bytes"]:
                    return f"'bytes' of {what} is {record['bytes']}, not {ours['bytes']}"
    sizes = {entry["file"]: entry["bytes"] for entry in manifest["files"]}
    for what, record in found:
        if record["file"] not in sizes:
            return f"{what} lies in {record['file']!r}, which is no file of it"
        if record["offset"] + record["bytes"] > sizes[record["file"]]:
            return f"'offset' of {what} is {record['offset']}"
    end: dict[str, int] = {}
    for what, record in sorted(found, key=lambda pair: (pair[1]["offset"], pair[1]["bytes"])):
        file, offset = record["file"], record["offset"]
        if (expected := end.get(file, offset)) != offset:
            return f"'offset' of {what} is {offset}, not {expected}"
        end[file] = offset + record["bytes"]
    for name, size in sizes.items():
        if end.get(name) != size:
            return f"the tensors in {name} end at 'offset' {end.get(name)}, and it has {size} bytes"
    if manifest["bytes"] != wanted["bytes"]:
        return f"its tensors have {wanted['bytes']} bytes, 'bytes' is {manifest['bytes']}"
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
    return [(record["kind"], record["dtype"]) for record in entry["tensors"]]


def _list(problems: list[str]) -> str:
    return listed(problems, LISTED_MAX, "; ")
