"""Config is described once: its stub, and errors for what is missing or wrong, come from there."""

from typing import Any

import pytest
import stubs
from strata import _core
from test_core import GROUP, config


def test_the_stub_has_the_fields_that_the_core_reads() -> None:
    assert stubs.STUB.read_text() == stubs.stub(), "python tests/stubs.py writes it anew"


@pytest.mark.parametrize("field", ["params", "page_bytes", "update", "moment_dtype"])
def test_a_missing_field_is_named(field: str) -> None:
    given = config()
    del given[field]
    with pytest.raises(TypeError, match=rf"Config\(\) needs {field}"):
        _core.plan(given)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"pages": 1}, TypeError, "Config has no pages"),
        ({"workers": "two"}, TypeError, "Config.workers cannot be 'two'"),
        ({"update": "later"}, ValueError, "unknown update mode later"),
        ({"groups": [GROUP | {"rule": "adam2"}]}, ValueError, "unknown rule adam2"),
        ({"groups": [GROUP | {"lr": None}]}, TypeError, "GroupSpec.lr cannot be None"),
        ({"ranks": {"rank": 0}}, TypeError, r"Ranks\(\) needs count"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        _core.plan(config(**changes))


def test_what_may_be_left_out_has_the_value_of_the_core() -> None:
    spelled_out = {"snapshots": 0, "device": "host", "apart": [], "together": []}
    assert _core.plan(config()) == _core.plan(config(**spelled_out))


@pytest.mark.parametrize(
    ("moments", "in_backward", "accumulated"), [("float32", 12, 16), ("bfloat16", 8, 12)]
)
def test_a_parameter_costs_what_the_layout_says(
    moments: str, in_backward: int, accumulated: int
) -> None:
    """engine/layout.hpp, Note [What a parameter costs]."""
    alone = _core.element_bytes("bfloat16", moments, sums=False)
    assert sum(alone.values()) - alone["grad"] == in_backward
    assert sum(_core.element_bytes("bfloat16", moments, sums=True).values()) == accumulated
