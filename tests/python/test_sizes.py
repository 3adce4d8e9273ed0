"""Sizes and the names of tiers."""

import pytest
from strata.errors import nearest
from strata.sizes import format_size, parse_budgets, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("512B", 512),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("500MB", 500_000_000),
        ("1.5KiB", 1536),
        (" .5 TiB ", 1 << 39),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: int | str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e3", "8 G i B", "1,5GiB"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_unknown_units_name_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown unit 'GIBB'.*'GiB'"):
        parse_size("8GIBB")
    with pytest.raises(ValueError, match="negative"):
        parse_size(-1)
    with pytest.raises(TypeError, match="8GiB"):
        parse_size(1.5)  # type: ignore[arg-type]


def test_unknown_tiers_name_the_nearest() -> None:
    assert parse_budgets({"device": "1KiB", "ssd": 5}) == {"device": 1024, "ssd": 5}
    with pytest.raises(ValueError, match=r"unknown tier 'hots'.*'host'"):
        parse_budgets({"hots": 1})
    with pytest.raises(ValueError, match=r"valid: 'device', 'host', 'ssd'"):
        parse_budgets({"zzz": 1})


def test_nearest_and_format() -> None:
    assert nearest("memroy", ["memory", "dtype"]) == "did you mean 'memory'?"
    assert [format_size(n) for n in (0, 1023, 1536, 1 << 31)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "2.0 GiB",
    ]
    assert format_size(5 << 40) == "5.0 TiB"
