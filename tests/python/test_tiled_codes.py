"""Codes of layers in tiles: files give them back where the model has the same groups of scales, and
are refused, before anything is changed, where tiles would share a group."""

import math
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from safetensors.torch import save_file
from strata import StrataError
from strata._runtime import coded
from strata._runtime.coded import GROUP, piece, same_groups
from strata._runtime.ready_codes import ReadyCodes
from strata._runtime.wrapped import wrapped
from strata._storage.checkpoint_files import CheckpointError, TensorReader
from strata._storage.manifests import read_checkpoint
from strata._storage.shards import Shard, ShardWriter, Wanted
from test_frozen import wrap
from torch import nn

COLUMNS = 256
ROWS_OF_GROUP = GROUP // COLUMNS
KINDS = ("save", "snapshot")
# Rows, tiles there, tiles here.
ON_BORDERS = [(1024, 1, 4), (1024, 4, 1), (1024, 4, 2), (192, 1, 3), (192, 3, 1), (90, 2, 2)]
BETWEEN = [(192, 1, 2), (192, 2, 1), (192, 3, 2), (90, 1, 4), (90, 4, 1)]
# 1.4 groups, in halves of 0.7: as many groups, of other elements.
SAME_SIZE = [(90, 1, 2), (90, 2, 1)]


def cut_model(folder: Path, rows: int, tiles: int, seed: int, **more: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(COLUMNS, rows, bias=False), nn.Linear(rows, 4))
    model[0].weight.requires_grad_(False)
    if tiles > 1:
        strata.nn.tile(model, "0", tiles)
    folder.mkdir(exist_ok=True)
    memory = {"device": "4MiB", "host": "8MiB", "ssd": "64MiB"}
    keywords = {"memory": memory, "ssd_path": folder, "page_size": "64KiB", **more}
    return wrap(model, lambda name, _: "nf4-double" if name[:1] == "0" else None, **keywords)[0]


def write(kind: str, model: nn.Module, path: Path) -> None:
    if kind == "snapshot":
        strata.snapshot(model, path).wait()
    else:
        strata.save(model, path)


def codes_of(model: nn.Module) -> list[torch.Tensor]:
    """Of the first layer, part behind part."""
    state = wrapped(model)
    parts = [coded.read(state, i) for i, s in enumerate(state.config["params"]) if "stored" in s]
    return [torch.cat(of_kind) for of_kind in zip(*parts, strict=True)]


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "there", "here"), ON_BORDERS)
def test_tiles_on_borders_of_groups_have_the_same_codes(
    tmp_path: Path, kind: str, rows: int, there: int, here: int
) -> None:
    model = cut_model(tmp_path / "a", rows, there, seed=0)
    expected, values = codes_of(model), values_of(model)
    write(kind, model, tmp_path / "c")
    other = cut_model(tmp_path / "b", rows, here, seed=1, page_size="128KiB")
    assert not torch.equal(codes_of(other)[0], expected[0])
    strata.load(other, tmp_path / "c")
    assert all(map(torch.equal, codes_of(other), expected))
    for name, value in values_of(other).items():
        assert torch.equal(value, values[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "there", "here"), BETWEEN + SAME_SIZE)
def test_tiles_that_would_share_a_group_are_refused(
    tmp_path: Path, kind: str, rows: int, there: int, here: int
) -> None:
    model = cut_model(tmp_path / "a", rows, there, seed=0)
    expected = codes_of(model)
    write(kind, model, tmp_path / "c")
    other = cut_model(tmp_path / "b", rows, here, seed=1)
    codes, values = codes_of(other), values_of(other)
    cut = [f"in {count} tiles" if count > 1 else "whole" for count in (here, there)]
    with pytest.raises(CheckpointError) as refused:
        strata.load(other, tmp_path / "c")
    assert f"'0.weight', {cut[0]} here and {cut[1]} there" in str(refused.value)
    assert "strata.checkpoint.tile_as(model, path) ahead of strata.wrap()" in str(refused.value)
    # Nothing has changed, and the model works.
    assert all(map(torch.equal, codes_of(other), codes))
    assert all(map(torch.equal, values_of(other).values(), values.values()))
    other(torch.ones(1, COLUMNS, dtype=torch.bfloat16)).float().sum().backward()
    strata.unwrap(other)
    # What the message says helps.
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(COLUMNS, rows, bias=False), nn.Linear(rows, 4))
    assert strata.checkpoint.tile_as(plain, tmp_path / "c") == ({"0": there} if there > 1 else {})
    again = cut_model(tmp_path / "d", rows, there, seed=2)
    strata.load(again, tmp_path / "c")
    assert all(map(torch.equal, codes_of(again), expected))


def test_which_cuts_have_the_same_groups() -> None:
    whole = 6 * GROUP + 64
    cuts: list[tuple[list[int], list[int], bool]] = [
        ([whole], [whole], True),
        ([2 * GROUP, whole - 2 * GROUP], [whole], True),
        ([GROUP, 2 * GROUP, whole - 3 * GROUP], [3 * GROUP, whole - 3 * GROUP], True),
        ([GROUP + 64, whole - GROUP - 64], [whole], False),
        # The same border between groups in both, and one more where groups of it begin.
        ([GROUP + 64, whole - GROUP - 64], [GROUP, 64, whole - GROUP - 64], True),
        ([GROUP + 64, whole - GROUP - 64], [GROUP + 64, GROUP, whole - 2 * GROUP - 64], True),
        ([GROUP + 64, whole - GROUP - 64], [2 * GROUP, whole - 2 * GROUP], False),
    ]
    for one, other, same in cuts:
        for form in coded.DOUBLE:
            assert same_groups(form, one, other) == same, (one, other)
            assert same_groups(form, other, one) == same, (one, other)
        assert same_groups("nf4", one, other)  # each block has its scale


def test_codes_of_a_file_are_split_by_the_same_rule() -> None:
    shape = (90, COLUMNS)
    numel = math.prod(shape)
    sizes = [(dtype, count) for _, dtype, count in coded.kinds("nf4-double", numel)]
    parts = [torch.zeros(count, dtype=getattr(torch, dtype)) for dtype, count in sizes]
    ready = ReadyCodes("nf4-double", shape, torch.bfloat16, parts)
    tiles = [(ROWS_OF_GROUP, COLUMNS), (90 - ROWS_OF_GROUP, COLUMNS)]
    assert [codes.shape for codes in ready.split(tiles)] == tiles
    with pytest.raises(ValueError, match="would share scales"):
        list(ready.split([(45, COLUMNS), (45, COLUMNS)]))
    with pytest.raises(ValueError, match="share a scale with those before them"):
        piece("nf4-double", parts, 64, 64)
    with pytest.raises(ValueError, match=r"are asked for, and there are"):
        piece("nf4-double", parts, GROUP, GROUP)


@pytest.mark.parametrize(("first", "count"), [(0, 65), (60, 5), (65, 0), (-1, 2), (1 << 40, 1)])
def test_nothing_is_read_beyond_a_record(tmp_path: Path, first: int, count: int) -> None:
    model = cut_model(tmp_path / "a", 192, 1, seed=0)
    strata.save(model, tmp_path / "c")
    manifest = read_checkpoint(tmp_path / "c")
    sizes = {entry["file"]: entry["bytes"] for entry in manifest["files"]}
    with TensorReader(tmp_path / "c", sizes) as file:
        record = manifest["params"][0]["tensors"][0]
        short = record | {"bytes": 64}  # others lie behind it
        assert b"".join(bytes(chunk) for chunk in file.chunks(short, 60, 4))
        with pytest.raises(CheckpointError, match="are asked for, and it has 64"):
            next(file.chunks(short, first, count))


def test_nothing_is_written_beyond_a_record(tmp_path: Path) -> None:
    wanted = Wanted("a", "codes", "uint8", (8,), 8, 0, False)
    with ShardWriter(tmp_path / "parameters-00001.safetensors", Shard("x", (wanted,))) as file:
        before = file.bytes
        with pytest.raises(RuntimeError, match="more than its 8 bytes"):
            file.write(wanted, [memoryview(bytes(8)), memoryview(bytes(1))])
        assert file.bytes == before + 8


def streamed(path: Path, rows: int, tiles: int) -> nn.Module:
    """The model of seed 0, read from a file."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(COLUMNS, rows, bias=False), nn.Linear(rows, 4))
    save_file(plain.state_dict(), path)
    with torch.device("meta"):
        return cut_model(path.parent / "drive", rows, tiles, seed=0, weights=path)


@pytest.mark.parametrize("way", ["in memory", "streamed"])
@pytest.mark.parametrize(("rows", "tiles"), [(1024, 4), (192, 3), (256, 2)])
def test_tiles_on_borders_have_the_codes_of_the_whole(
    tmp_path: Path, way: str, rows: int, tiles: int
) -> None:
    whole = cut_model(tmp_path / "a", rows, 1, seed=0)
    if way == "in memory":
        cut = cut_model(tmp_path / "b", rows, tiles, seed=0)
    else:
        cut = streamed(tmp_path / "w.safetensors", rows, tiles)
    assert len([s for s in wrapped(cut).config["params"] if "stored" in s]) == tiles
    assert all(map(torch.equal, codes_of(cut), codes_of(whole)))


def test_a_tile_that_is_not_finite_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLUMNS, 192, bias=False), nn.Linear(192, 4))
    model[0].weight.requires_grad_(False)[100, 0] = math.nan
    strata.nn.tile(model, "0", 3)
    with pytest.raises(StrataError, match=r"0\.tiles\.1\.weight has a value that is infinite or"):
        wrap(model, lambda name, _: "nf4-double" if name[:1] == "0" else None)
