"""Traces as text files, so that a step recorded on one machine can be planned on another.

    save_trace(model, "step.trace.json")              # of a wrapped model that has trained a step
    save("step.trace.json", trace, Origin(model="LlamaForCausalLM", tokens=2048))
    found = load("step.trace.json")
    found.trace, found.origin.tokens
    mismatch(found.trace, [("model.embed_tokens", 8388608), ...])     # "" where it is of this model

Format, JSON:

    {"format": "strata trace", "version": 2,
     "origin": {"model": class name, "machine": where it was recorded, "tokens": of the step,
                "shapes": of the tensors that the model was called with},
     "parameters": elements of all units, "units_hash": sha256 of their names and elements,
     "moments": ..., "tail_seconds": ..., "tail_peak_bytes": ...,
     "units": TABLE, "uses": TABLE, "tensors": TABLE}

A TABLE is {"fields": [names], "rows": [[values], ...]}, its fields those of TracedUnit, Use and
SavedTensor in offload/planner/trace.hpp, which says what each means; seconds are seconds, sizes
bytes. What of a unit other ranks held is not written: the file says what there is, for any number
of them. Fields may stand in any order; none may be missing or unknown. The version changes whenever
a field does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import _core
from .._config import device, machine
from .._config.paths import AnyPath, as_path
from .._runtime.wrapped import wrapped
from .replacing import write_whole

if TYPE_CHECKING:
    from .._core import Trace

FORMAT = "strata trace"
VERSION = 2
COUNT_MAX = 1 << 60

TABLES: dict[str, dict[str, type]] = {
    "units": {n: k for n, k in _core.TracedUnit.fields.items() if not n.startswith("remote_")},
    "uses": _core.Use.fields,
    "tensors": _core.SavedTensor.fields,
}
SINGLE = {name: kind for name, kind in _core.Trace.fields.items() if kind is not object}


@dataclass(frozen=True)
class Origin:
    """Where a trace comes from; what is not known is empty."""

    model: str = ""
    machine: str = ""  # what computed: a processor or a GPU
    tokens: int = 0
    shapes: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class TraceFile:
    """What a file holds."""

    trace: Trace
    origin: Origin


def save(path: AnyPath, trace: Trace, origin: Origin | None = None) -> None:
    """Writes the file, complete or not at all. Raises ValueError for a trace that contradicts
    itself."""
    _check(trace)
    content = trace.to_dict()
    head = {
        "format": FORMAT,
        "version": VERSION,
        "origin": dataclasses.asdict(origin or Origin()),
        "parameters": sum(unit.elements for unit in trace.units),
        "units_hash": _units_hash(units_of(trace)),
        **{name: content[name] for name in SINGLE},
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name, fields in TABLES.items():
        rows = [json.dumps([row[key] for key in fields]) for row in content[name]]
        table = ",\n  ".join(rows)
        lines.append(
            f'{json.dumps(name)}: {{"fields": {json.dumps(list(fields))}, "rows": [\n  {table}]}}'
        )
    write_whole(as_path(path), "{" + ",\n".join(lines) + "}\n", durable=False)


def save_trace(model: nn.Module, path: AnyPath) -> None:
    """Saves the recorded step of a wrapped model, for `strata plan --trace`.

    Raises ValueError where none was recorded: strata.wrap() needs activations=, and a step has to
    have run.
    """
    state = wrapped(model)
    planning = state.planning
    if planning is None or planning.current is None or planning.current.trace is None:
        raise ValueError(
            "no step of this model was recorded: wrap it with activations='auto' and train one step"
        )
    computed_by = device.description(state.config["device"]) or machine.processor_name()
    shapes = [list(shape) for shape in planning.current.shape]
    # A batch of token ids is (sequences, tokens); of other models the tokens stay unknown.
    tokens = shapes[0][0] * shapes[0][1] if shapes and len(shapes[0]) == 2 else 0
    origin = Origin(type(model).__name__, computed_by, tokens, shapes)
    save(path, planning.current.trace, origin)


def load(path: AnyPath) -> TraceFile:
    """Reads and checks a file. Raises ValueError saying what is wrong with it, OSError where it
    cannot be read."""
    file = as_path(path)
    try:
        content = json.loads(file.read_text())
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a strata trace: it is not text") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is cut off, or not a strata trace: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{file} is not a strata trace: its format is not {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{file} is a strata trace of version {content.get('version')}; this strata reads "
            f"version {VERSION}: record it again"
        )
    try:
        return _parse(content)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _parse(content: dict[str, Any]) -> TraceFile:
    known = {"format", "version", "origin", "parameters", "units_hash", *SINGLE, *TABLES}
    if different := sorted(known ^ set(content)):
        missing = different[0] not in content
        raise ValueError(f"{different[0]!r} is {'missing' if missing else 'unknown'}")
    values: dict[str, Any] = {}
    for name, kind in SINGLE.items():
        values[name] = _checked(content[name], kind, name)
    for name, fields in TABLES.items():
        values[name] = _rows(content[name], fields, name)
    trace = _made(values)
    _check(trace)
    elements = sum(unit.elements for unit in trace.units)
    if content["parameters"] != elements:
        raise ValueError(f"it names {content['parameters']} parameters, its units have {elements}")
    if content["units_hash"] != _units_hash(units_of(trace)):
        raise ValueError("its units are not those that it was written with")
    return TraceFile(trace, _origin(content["origin"]))


def _made(values: dict[str, Any]) -> Trace:
    try:
        return _core.Trace(
            **{name: values[name] for name in SINGLE},
            units=[_core.TracedUnit(**row) for row in values["units"]],
            uses=[_core.Use(**row) for row in values["uses"]],
            tensors=[_core.SavedTensor(**row) for row in values["tensors"]],
        )
    except TypeError as error:
        raise ValueError(str(error)) from error


def _rows(table: Any, fields: Mapping[str, type], name: str) -> list[dict[str, Any]]:
    if not isinstance(table, dict) or set(table) != {"fields", "rows"}:
        raise ValueError(f"{name} is not a table of fields and rows")
    names, rows = table["fields"], table["rows"]
    if not isinstance(names, list) or sorted(map(str, names)) != sorted(fields):
        raise ValueError(f"{name} has the fields {names}, and should have {list(fields)}")
    if not isinstance(rows, list):
        raise ValueError(f"{name} has no rows")
    result = []
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(names):
            raise ValueError(f"row {i} of {name} has not {len(names)} values: {row}")
        where = f"of row {i} of {name}"
        result.append(
            {
                key: _checked(value, fields[key], f"{key} {where}")
                for key, value in zip(names, row, strict=True)
            }
        )
    return result


def _checked(value: Any, kind: type, name: str) -> Any:
    if kind is float and type(value) is int:
        value = float(min(value, COUNT_MAX + 1))
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}, not of type {kind.__name__}")
    if isinstance(value, int | float) and not 0 <= value <= COUNT_MAX:  # nor NaN
        raise ValueError(f"{name} is {value!r}, which cannot be")
    return value


def _origin(content: Any) -> Origin:
    if not isinstance(content, dict) or set(content) != {
        f.name for f in dataclasses.fields(Origin)
    }:
        raise ValueError(f"origin is {content!r}")
    for name, kind in (("model", str), ("machine", str), ("tokens", int)):
        _checked(content[name], kind, f"{name} of origin")
    return Origin(**content)


def _check(trace: Trace) -> None:
    """As the planner does, which refuses the same traces."""
    if problem := _core.check_trace(trace):
        raise ValueError(f"the trace contradicts itself: {problem}")


def units_of(trace: Trace) -> list[tuple[str, int]]:
    """The names of a trace's units and their elements."""
    return [(unit.name, unit.elements) for unit in trace.units]


def mismatch(trace: Trace, units: Sequence[tuple[str, int]]) -> str:
    """Why the trace is not of a model with these units (names and elements); "" where it is."""
    traced = units_of(trace)
    for mine, theirs in zip(traced, units, strict=False):
        if mine[0] != theirs[0]:
            return f"the trace has unit {mine[0]} where the model has {theirs[0]}"
        if mine[1] != theirs[1]:
            return f"unit {mine[0]} has {mine[1]} parameters in the trace, {theirs[1]} in the model"
    if len(traced) != len(units):
        return f"the trace has {len(traced)} units, the model {len(units)}"
    return ""


def _units_hash(units: Iterable[tuple[str, int]]) -> str:
    text = "\n".join(f"{elements} {name}" for name, elements in units)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
