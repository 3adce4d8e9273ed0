"""Sizes and the names of tiers."""

import pytest
from strata._config.sizes import (
    format_count,
    format_size,
    parse_budgets,
    parse_size,
    parse_speed,
)
from strata._errors import nearest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("512B", 512),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("500MB", 500_000_000),
        ("1.5KiB", 1536),
        (" .5 TiB ", 1 << 39),
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_sizes(text: int | str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e3", "8 G i B", "1,5GiB"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "valid"), [("96", "96GiB"), ("1.5", "1.5GiB"), ("4194304", "4194304B")]
)
def test_a_number_in_words_needs_its_unit(text: str, valid: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' has no unit: write '{valid}'"):
        parse_size(text)
    assert parse_size(valid) > 0


@pytest.mark.parametrize(
    ("text", "bytes_s"), [("12GB/s", 12e9), ("1.5 GiB / s", 1.5 * 2**30), ("500B/s", 500)]
)
def test_speeds(text: str, bytes_s: float) -> None:
    assert parse_speed(text) == bytes_s


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("6", "write '6GB/s'"),
        ("6/s", "write '6GB/s'"),
        ("6GB", "write '6GB/s'"),
        ("12GB/h", "such as '6GB/s'"),
        ("12GX/s", "unknown unit 'GX'"),
        ("fast", "such as '6GB/s'"),
    ],
)
def test_what_is_not_a_speed(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_speed(text)


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


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 units"), (1, "1 unit"), (2, "2 units"), (1000, "1,000 units")]
)
def test_counts_agree_with_what_they_count(count: int, expected: str) -> None:
    assert format_count(count, "unit") == expected
