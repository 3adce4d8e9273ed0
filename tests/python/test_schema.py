"""Values are held against types, and what is wrong is said with its place."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
from strata import _core
from strata._profiling.calibrate import typical_costs
from strata._schema import Between, Count, Digest, Form, FormError, parsed


class Record(TypedDict):
    kind: Literal["master", "moment"]
    bytes: Count
    file: NotRequired[str]


class Entry(TypedDict):
    name: str
    records: Annotated[list[Record], Between(1, 2)]
    place: tuple[Count, str] | None
    factor: float
    digest: Digest


@dataclass(frozen=True)
class Owner:
    folder: str
    shapes: list[list[int]] = field(default_factory=list)
    pending: bool = False


ENTRY: dict[str, Any] = {
    "name": "a",
    "records": [{"kind": "master", "bytes": 4, "more": None}],
    "place": [1, "x"],
    "factor": 2,
    "digest": "0123456789abcdef",
    "beside": 3,
}


def test_what_fits_comes_back() -> None:
    assert Form(Entry).read(ENTRY) == ENTRY
    assert Form(Owner).read({"folder": "x", "shapes": [[1]]}) == Owner("x", [[1]])
    assert Form(dict[str, int]).read({"a": 1}) == {"a": 1}
    assert Form[Any]({"a": str}).read({"a": "b"}) == {"a": "b"}
    costs = typical_costs()
    assert Form(_core.Costs).read(costs.to_dict()) == costs


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": None}, "[0]: 'name' is None, and should be a text"),
        ({"records": []}, "[0]: 'records' is [], and should be a list of 1 to 2"),
        ({"records": [{"kind": "x", "bytes": 1}]}, "[0].records[0]: 'kind' is 'x', and should be"),
        ({"records": [{"kind": "master"}]}, "[0].records[0]: 'bytes' is missing"),
        (
            {"records": [{"kind": "master", "bytes": True}]},
            "'bytes' is True, and should be a whole",
        ),
        ({"records": [{"kind": "master", "bytes": -1}]}, "a whole number, 0 or more"),
        ({"records": [{"kind": "master", "bytes": 1 << 70}]}, "'bytes' is 1180591620717411303424"),
        ({"records": [3]}, "[0].records[0] is 3, and should be an object"),
        ({"place": [1]}, "[0]: 'place' is [1], and should be a list of 2"),
        ({"place": [1, 2]}, "[0].place[1] is 2, and should be a text"),
        ({"factor": "2"}, "'factor' is '2', and should be a number"),
        ({"digest": "0"}, "'digest' is '0', and should be 16 hexadecimal digits"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(FormError) as caught:
        Form(list[Entry]).read([ENTRY | change])
    assert says in str(caught.value)


def test_a_dataclass_has_no_place_for_more() -> None:
    for value, says in (
        ({"folder": "x", "more": 1}, "'more' is unknown"),
        ({}, "'folder' is missing"),
        ([], "it is [], and should be an object"),
    ):
        with pytest.raises(FormError, match=says.replace("[", r"\[")):
            Form(Owner).read(value)
    with pytest.raises(FormError, match="it is no Costs"):
        Form(_core.Costs).read({"upload_bytes_s": "fast"})


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"9" * 5000])
def test_what_is_no_json_is_said_to_be_none(text: bytes) -> None:
    with pytest.raises(FormError, match="cut off, or no JSON"):
        parsed(text)
