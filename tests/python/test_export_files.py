"""An export loads as the old one or as the new one, whatever happens to the process that writes it,
and takes nothing away that is not an export's."""

import errno
import os
from pathlib import Path

import pytest
import torch
from killed import survives
from safetensors import safe_open
from safetensors.torch import save_file
from strata._storage import export as files
from strata._storage import replacing
from strata._storage.weights import INDEX_NAME, WeightFiles
from variants import thorough

NAMES = [f"layer{i}" for i in range(4)]


def put(path: Path, generation: int, shards: int) -> None:
    """Exports tensors whose every value says which generation they are of."""
    with files.replace_export(path) as folder:
        where = {}
        for i in range(shards):
            name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            name = files.SINGLE_NAME if shards == 1 else name
            mine = NAMES[i::shards]
            files.save_shard({n: torch.full((3,), float(generation)) for n in mine}, folder / name)
            where |= dict.fromkeys(mine, name)
        (folder / "config.json").write_text(str(generation))
        if shards > 1:
            files.write_index(folder, where, 48)


def get(path: Path) -> int:
    """The generation that strata reads there, and that Transformers would."""
    single = path / files.SINGLE_NAME
    seen = [_generation(path)]
    if single.exists():  # Transformers looks here first
        seen.append(_generation(single))
    assert seen[0] == seen[-1]
    return seen[0]


def _generation(path: Path) -> int:
    source = WeightFiles(path)
    values = {v for name in sorted(source.names()) for v in source.read(name).tolist()}
    assert source.names() == set(NAMES)
    source.close()
    (value,) = values
    return int(value)


def names(path: Path) -> set[str]:
    return {p.name for p in path.iterdir()}


SINGLE = {files.SINGLE_NAME, "config.json"}
TWO = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
TWO |= {INDEX_NAME, "config.json"}


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2])
def test_an_export_takes_the_place_of_another(tmp_path: Path, before: int, after: int) -> None:
    put(tmp_path, 1, before)
    put(tmp_path, 2, after)
    assert get(tmp_path) == 2
    assert names(tmp_path) == (SINGLE if after == 1 else TWO)
    assert (tmp_path / "config.json").read_text() == "2"


@pytest.mark.parametrize(("before", "after"), [(2, 2), thorough(1, 2), thorough(2, 1), (1, 1)])
def test_it_is_the_old_or_the_new_one_at_any_kill(tmp_path: Path, before: int, after: int) -> None:
    put(tmp_path, 0, before)
    for operation in range(1, 200, 2):
        done = survives(lambda: put(tmp_path, operation, after), operation)  # noqa: B023
        single, index = tmp_path / files.SINGLE_NAME, tmp_path / INDEX_NAME
        if single.exists() and index.exists():  # loaders differ in which one they take
            assert {_generation(single), _generation(index)} <= set(range(operation + 1))
        else:
            assert get(tmp_path) in range(operation + 1)
        if done:
            break
        put(tmp_path, operation, before)
        assert get(tmp_path) == operation
    else:
        pytest.fail("the child never got by")
    assert get(tmp_path) == operation
    put(tmp_path, 201, 2)
    marked = [p for p in tmp_path.iterdir() if (p / replacing.MARKER_NAME).exists()]
    assert marked == []


def test_without_hard_links_the_old_and_the_new_never_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    put(tmp_path, 0, 2)
    for operation in range(1, 200, 2):
        done = survives(lambda: put(tmp_path, operation, 2), operation)  # noqa: B023
        if (tmp_path / INDEX_NAME).exists():
            assert get(tmp_path) in (operation, operation - 1)
        if done:
            break
        put(tmp_path, operation + 1, 2)
    assert get(tmp_path) == operation
    assert names(tmp_path) >= TWO


def test_other_files_stay(tmp_path: Path) -> None:
    put(tmp_path, 1, 3)
    mine = ["model-backup.safetensors", "model.safetensors.old", "adapter.safetensors", "notes"]
    for name in mine:
        (tmp_path / name).write_bytes((tmp_path / "model-00001-of-00003.safetensors").read_bytes())
    put(tmp_path, 2, 2)
    assert names(tmp_path) == TWO | set(mine)


@pytest.mark.parametrize("name", [files.SINGLE_NAME, "model-00001-of-00002.safetensors"])
def test_weights_that_we_did_not_export_are_not_replaced(tmp_path: Path, name: str) -> None:
    save_file({"mine": torch.ones(2)}, tmp_path / name, metadata={"format": "pt"})
    (tmp_path / INDEX_NAME).write_text('{"metadata": {}, "weight_map": {}}')
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for left in (2, 1):
        with pytest.raises(FileExistsError, match="was not written by strata"):
            put(tmp_path, 1, 2)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
        if left == 2:
            (tmp_path / INDEX_NAME).unlink()
            del before[INDEX_NAME]


@pytest.mark.parametrize("name", files.CONFIG_NAMES)
def test_config_files_beside_weights_of_others_are_not_replaced(tmp_path: Path, name: str) -> None:
    for mine in (name, "pytorch_model.bin"):
        (tmp_path / mine).write_text("mine")
    with pytest.raises(FileExistsError, match=f"{name} belongs to no export .* move it away"):
        put(tmp_path, 1, 2)
    assert names(tmp_path) == {name, "pytorch_model.bin"}
    assert (tmp_path / name).read_text() == "mine"
    (tmp_path / name).unlink()
    for generation in (1, 2):
        put(tmp_path, generation, 2)
        assert get(tmp_path) == generation


@pytest.mark.parametrize("shards", [thorough(1), 2])
@pytest.mark.parametrize("links", [True, False])
def test_a_first_export_that_was_killed_does_not_refuse_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    for operation in range(1, 200, 2):
        path = tmp_path / str(operation)
        path.mkdir()
        done = survives(lambda: put(path, 0, shards), operation)  # noqa: B023
        put(path, 1, shards)
        assert get(path) == 1
        if done:
            return
    pytest.fail("the child never got by")


def test_a_failed_export_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1, 2)
    with pytest.raises(KeyboardInterrupt), files.replace_export(tmp_path):
        raise KeyboardInterrupt
    assert get(tmp_path) == 1
    assert names(tmp_path) == TWO
    # In the middle of giving final names: the new one is there, under the names of its work folder.
    replace, calls = os.replace, []

    def fail(source: Path, target: Path) -> None:
        calls.append(target)
        if Path(target) == tmp_path / INDEX_NAME and calls.count(target) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            put(tmp_path, 2, 2)
    assert get(tmp_path) == 2
    put(tmp_path, 3, 2)
    assert get(tmp_path) == 3
    assert names(tmp_path) == TWO


def test_a_link_to_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for generation in (1, 2):
        put(tmp_path / "out", generation, 2)
        assert get(tmp_path / "disk") == generation
    assert (tmp_path / "out").is_symlink()


def test_shards_say_whose_they_are(tmp_path: Path) -> None:
    put(tmp_path, 1, 1)
    with safe_open(tmp_path / files.SINGLE_NAME, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", files.MARK: "1"}
