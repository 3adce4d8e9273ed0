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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from torch import nn

from .. import _core
from .._config import device, machine
from .._config.paths import AnyPath, as_path
from .._runtime.wrapped import wrapped
from .._schema import Between, Count, Form, FormError, parsed
from .replacing import write_whole

if TYPE_CHECKING:
    from .._core import Trace

FORMAT = "strata trace"
VERSION = 2
COUNT_MAX = 1 << 60

STRUCTS: dict[str, Any] = {
    "units": _core.TracedUnit,
    "uses": _core.Use,
    "tensors": _core.SavedTensor,
}
TABLES: dict[str, dict[str, type]] = {
    name: {key: kind for key, kind in struct.fields.items() if not key.startswith("remote_")}
    for name, struct in STRUCTS.items()
}
SINGLE = [name for name, kind in _core.Trace.fields.items() if kind is not object]
Amount = Annotated[int, Between(0, COUNT_MAX)]
Seconds = Annotated[float, Between(0, COUNT_MAX)]
VALUES: dict[type, Any] = {int: Amount, float: Seconds, str: str, bool: bool}
ROWS: dict[str, Form[Any]] = {
    name: Form({key: VALUES[kind] for key, kind in fields.items()})
    for name, fields in TABLES.items()
}


@dataclass(frozen=True)
class Origin:
    """Where a trace comes from; what is not known is empty."""

    model: str = ""
    machine: str = ""  # what computed: a processor or a GPU
    tokens: int = 0
    shapes: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Table:
    """Rows of values, each in the order of the fields."""

    fields: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Content:
    """All of a file."""

    format: str
    version: int
    origin: Origin
    parameters: Count
    units_hash: str
    moments: Amount
    tail_seconds: Seconds
    tail_peak_bytes: Amount
    units: Table
    uses: Table
    tensors: Table


CONTENT = Form(Content)


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
    raw = file.read_bytes()
    try:
        content = parsed(raw)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise FormError(f"its format is not {FORMAT!r}")
    except FormError as error:
        raise ValueError(f"{file} is not a strata trace: {error}") from error
    if content.get("version") != VERSION:
        raise ValueError(
            f"{file} is a strata trace of version {content.get('version')}; this strata reads "
            f"version {VERSION}: record it again"
        )
    try:
        return _trace_of(CONTENT.read(content))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _trace_of(content: Content) -> TraceFile:
    tables: dict[str, Any] = {name: _rows(getattr(content, name), name) for name in TABLES}
    trace = _core.Trace(**{name: getattr(content, name) for name in SINGLE}, **tables)
    _check(trace)
    elements = sum(unit.elements for unit in trace.units)
    if content.parameters != elements:
        raise ValueError(f"it names {content.parameters} parameters, its units have {elements}")
    if content.units_hash != _units_hash(units_of(trace)):
        raise ValueError("its units are not those that it was written with")
    return TraceFile(trace, content.origin)


def _rows(table: Table, name: str) -> list[Any]:
    """The planner's structs of a table."""
    fields = TABLES[name]
    if sorted(table.fields) != sorted(fields):
        raise ValueError(f"{name} has the fields {table.fields}, and should have {list(fields)}")
    found = []
    for i, row in enumerate(table.rows):
        if len(row) != len(fields):
            raise ValueError(f"row {i} of {name} has not {len(fields)} values: {row}")
        try:
            values = ROWS[name].read(dict(zip(table.fields, row, strict=True)))
            found.append(STRUCTS[name](**values))
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {i} of {name}: {error}") from error
    return found


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
