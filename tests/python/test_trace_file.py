"""Trace files: what was written comes back, and everything else is refused by name."""

import copy
import json
import re
from types import SimpleNamespace

import pytest
import strata
from strata import _core
from strata._storage import trace_file
from strata._storage.trace_file import Origin, load, mismatch, save
from torch import nn

TRACE = _core.Trace(
    uses=[
        _core.Use(
            unit=unit,
            backward=backward,
            enter=2 * i,
            leave=2 * i + 1,
            seconds=0.125 * i,
            gap_seconds=1e-6,
            live_bytes=100,
            peak_bytes=300 + i,
            gap_peak_bytes=120,
        )
        for i, (unit, backward) in enumerate([(0, False), (1, False), (1, True), (0, True)])
    ],
    moments=8,
    units=[
        _core.TracedUnit(
            name=name,
            elements=elements,
            param_bytes=4096,
            grad_bytes=4096,
            state_bytes=16384,
            chunks=1,
            slices_max=4,
            may_swap=True,
            may_recompute=name != "head",
            traced="recompute_host" if name == "head" else "recompute",
            slices_traced=2,
        )
        for name, elements in (("layers.0", 2000), ("head", 70))
    ],
    tensors=[
        _core.SavedTensor(unit=0, bytes=64, born=0, last_used=3, input=True),
        _core.SavedTensor(unit=1, bytes=32, born=1, last_used=2, input=False),
    ],
    tail_seconds=0.5,
    tail_peak_bytes=10,
)
ORIGIN = Origin("Toy", "a machine", 16, [[2, 8]])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "step.trace.json"
    save(path, TRACE, ORIGIN)
    return path


def test_what_was_written_comes_back(file):
    found = load(file)
    assert found.trace == TRACE
    assert found.origin == ORIGIN
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_a_row_is_a_line(file):
    assert "  [0, 64, 0, 3, true],\n" in file.read_text()


def test_every_prefix_is_refused(file):
    text = file.read_text()
    for end in range(0, len(text) - 2, 7):
        file.write_text(text[:end])
        with pytest.raises(ValueError, match="is not a strata trace: it is cut off"):
            load(file)


def test_other_files_are_refused(file):
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a strata trace"):
        load(file)
    for text in ("[]", "3", '{"format": "another"}'):
        file.write_text(text)
        with pytest.raises(ValueError, match="is not a strata trace"):
            load(file)
    with pytest.raises(FileNotFoundError):
        load(file.with_name("missing"))


def damaged(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(version=3), "of version 3; this strata reads version 2"),
        (lambda c: c.pop("moments"), "'moments' is missing"),
        (lambda c: c.update(more=1), "'more' is unknown"),
        (lambda c: c.update(moments="8"), "'moments' is '8', and should be a whole number"),
        (
            lambda c: c.update(tail_seconds=-1.0),
            "'tail_seconds' is -1.0, and should be",
        ),
        (lambda c: c.update(tail_seconds=float("nan")), "'tail_seconds' is nan"),
        (lambda c: c.update(moments=7), "use 3: it is left after the last moment (layers.0)"),
        (lambda c: c.update(parameters=1), "it names 1 parameters, its units have 2070"),
        (lambda c: c["units"]["rows"][0].__setitem__(0, "x"), "not those that it was written with"),
        (lambda c: c["units"]["rows"][0].__setitem__(9, "burn"), "unknown activation burn"),
        (lambda c: c["uses"]["rows"][1].__setitem__(0, 2), "use 1: there is no such unit"),
        (lambda c: c["uses"]["rows"][1].__setitem__(0, True), "row 1 of uses: 'unit' is True"),
        (lambda c: c["uses"]["rows"][1].pop(), "row 1 of uses has not 9 values"),
        (lambda c: c["uses"]["rows"].reverse(), "use 1: it is not in order of enter (head)"),
        (lambda c: c["uses"]["fields"].pop(), "uses has the fields"),
        (lambda c: c["uses"].pop("rows"), "uses: 'rows' is missing"),
        (
            lambda c: c["tensors"]["rows"][0].__setitem__(3, 4),
            "saved tensor 0: the use that read it does not exist",
        ),
        (
            lambda c: c["tensors"]["rows"][0].__setitem__(2, 1),
            "it was not saved by a forward of its unit",
        ),
        (lambda c: c.update(origin={"tokens": "x"}), "origin: 'tokens' is 'x'"),
    ],
)
def test_what_is_wrong_is_named(file, change, says):
    damaged(file, change)
    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        load(file)
    assert str(file) in str(refused.value)


def test_fields_may_stand_in_any_order(file):
    def turn(content):
        table = content["tensors"]
        table["fields"].reverse()
        for row in table["rows"]:
            row.reverse()

    assert load(damaged(file, turn)).trace == TRACE


def test_a_contradicting_trace_is_not_written(tmp_path):
    broken = copy.deepcopy(TRACE)
    broken.uses[2].leave = 99
    with pytest.raises(ValueError, match="use 2: it is left after the last moment"):
        save(tmp_path / "x", broken)
    assert list(tmp_path.iterdir()) == []


def test_the_model_of_a_trace_is_told_from_others():
    units = trace_file.units_of(TRACE)
    assert mismatch(TRACE, units) == ""
    assert "2000 parameters in the trace, 9 in the model" in mismatch(TRACE, [("layers.0", 9)])
    assert "where the model has tail" in mismatch(TRACE, [units[0], ("tail", 70)])
    assert mismatch(TRACE, units[:1]) == "the trace has 2 units, the model 1"
    assert mismatch(TRACE, []) == "the trace has 2 units, the model 0"


def planned(monkeypatch, current):
    """Makes every model one whose planning has this class of batches."""
    planning = None if current is None else SimpleNamespace(current=current)
    state = SimpleNamespace(planning=planning, config={"device": "host"})
    monkeypatch.setattr(trace_file, "wrapped", lambda model: state)


def test_the_step_of_a_wrapped_model_is_saved_with_its_origin(monkeypatch, tmp_path):
    planned(monkeypatch, SimpleNamespace(trace=TRACE, shape=((2, 8), (2, 8))))
    strata.save_trace(nn.Linear(2, 2), tmp_path / "x")
    found = load(tmp_path / "x")
    assert found.trace == TRACE
    assert (found.origin.model, found.origin.tokens) == ("Linear", 16)
    assert found.origin.shapes == [[2, 8], [2, 8]]
    assert found.origin.machine


@pytest.mark.parametrize("current", [None, SimpleNamespace(trace=None, shape=())])
def test_a_model_without_a_recorded_step_has_none_to_save(monkeypatch, tmp_path, current):
    planned(monkeypatch, current)
    with pytest.raises(ValueError, match="activations='auto' and train one step"):
        strata.save_trace(nn.Linear(2, 2), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_plain_model_has_no_trace(tmp_path):
    with pytest.raises(ValueError, match="is not wrapped"):
        strata.save_trace(nn.Linear(2, 2), tmp_path / "x")
