"""`extra` comes back as it was, from snapshots and from saved checkpoints; what cannot is refused
when it is asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strata
import torch
from strata._schema import FormError
from strata._storage import extras
from strata._storage.checkpoint_files import read_manifest, write_manifest
from test_checkpoint import Case, llama
from test_snapshot import SSD, disk

__all__ = ["disk"]  # a fixture

VALUES: dict[str, Any] = {
    "milestones": {2: 1, 4: 1},
    "mixed": {1: "a", 2.5: "b", None: "c", "1": "d"},
    "flags": {True: 1, False: 0},
    "deep": [{7: {"inner": {8: (1, (2, [3]))}}}],
    "tuple": (1, "two", None),
    "empty": [(), [], {}],
    "plain": {"a": [1, 2.5, True, None]},
}


def alike(one: Any, other: Any) -> bool:
    """Equal, with the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        keys = [{(type(key), key) for key in each} for each in (one, other)]
        return keys[0] == keys[1] and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def test_keys_and_tuples_come_back(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    strata.snapshot(case.model, tmp_path / "run", extra=VALUES).wait()
    strata.save(case.model, tmp_path / "c", extra=VALUES)
    for path in (tmp_path / "run", tmp_path / "c"):
        assert alike(strata.load(case.model, path), VALUES)
    tensors = {3: (torch.arange(3), torch.arange(6)[::3][:1])}
    strata.snapshot(case.model, tmp_path / "run", extra=tensors).wait()  # type: ignore[arg-type]
    found: Any = strata.load(case.model, tmp_path / "run")
    assert [t.tolist() for t in found[3]] == [[0, 1, 2], [0]]
    case.close()


def test_a_scheduler_goes_on_to_the_same_rates(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(case.optimizer, [2, 4], gamma=0.1)

    def rates() -> list[float]:
        found = []
        for _ in range(4):
            case.train(1)
            scheduler.step()
            found.append(case.optimizer.param_groups[0]["lr"])
        return found

    state = {"scheduler": scheduler.state_dict()}
    strata.snapshot(case.model, tmp_path / "run", extra=state).wait()
    strata.save(case.model, tmp_path / "c", extra=state)
    expected = rates()
    for path in (tmp_path / "run", tmp_path / "c"):
        scheduler.load_state_dict(strata.load(case.model, path)["scheduler"])
        assert rates() == expected
    case.close()


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({(1, 2): 3}, r"the key \(1, 2\)"),
        ({"deep": [{b"x": 1}]}, "the key b'x'"),
        ({"strata.items": []}, "stands for"),
        ({"a": [0, {"b": {1}}]}, r"extra\['a'\]\[1\]\['b'\] is of set"),
        ({"seen": np.int64(3)}, r"extra\['seen'\] is of int64"),
        ({"bias": torch.empty(2, device="meta")}, r"extra\['bias'\] is a tensor"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    tmp_path: Path, disk: Path, extra: dict[str, Any], match: str
) -> None:
    case = Case(disk, SSD, llama())
    with pytest.raises(TypeError, match=match):
        strata.snapshot(case.model, tmp_path / "run", extra=extra)
    with pytest.raises(TypeError, match=match):
        strata.save(case.model, tmp_path / "c", extra=extra)
    case.close()


def test_tensors_that_are_not_dense_are_refused(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    dense = torch.arange(6.0).reshape(2, 3)
    for odd, kind in (
        (dense.to_sparse(), "sparse"),
        (torch.quantize_per_tensor(dense, 0.1, 0, torch.quint8), "quantized"),
        (torch.nested.nested_tensor([dense[0], dense[1, :2]]), "nested"),
    ):
        with pytest.raises(TypeError, match=f"{kind}.*make it dense"):
            strata.snapshot(case.model, tmp_path / "run", extra={"odd": odd})
    case.close()


def test_damaged_ones_are_refused(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    strata.save(case.model, tmp_path / "c")
    whole = read_manifest(tmp_path / "c")
    write_manifest(tmp_path / "c", whole | {"extra": {"2": [1]}})
    assert strata.load(case.model, tmp_path / "c") == {"2": [1]}
    for bad in ({"strata.tensor": 0}, {"strata.tuple": 1}, {"strata.items": [[1, 2, 3]]}):
        write_manifest(tmp_path / "c", whole | {"extra": {"a": [bad]}})
        with pytest.raises(strata.checkpoint.CheckpointError, match="is a damaged checkpoint"):
            strata.load(case.model, tmp_path / "c")
    plain, values = {"a": {"strata.tuple": [{"strata.tensor": 1}]}}, [torch.ones(1)]
    with pytest.raises(FormError, match="has no tensor 1"):
        extras.from_json(plain, values)
    assert extras.from_json(plain, values * 2) == {"a": (values[0],)}
    case.close()
