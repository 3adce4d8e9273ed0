"""What is frozen belongs to the machine: each has all of it, in training and in snapshots. What
ranks do is in rank_snapshots.py and rank_promises.py; rank_server.py starts them."""

from pathlib import Path
from typing import Any, NoReturn

import pytest
import test_machine_snapshots as machine_snapshots
from rank_saves import Kinds
from rank_server import Ranks
from strata._cli import main as cli
from strata._storage.checkpoint_files import CheckpointError, read_manifest
from strata._storage.manifests import SNAPSHOT, sound
from strata._storage.snapshots.check import check_chunks, check_form
from strata._storage.snapshots.format import all_chunks, chunks_for
from strata._storage.snapshots.pages import slots_of
from strata._storage.stored import stored_tensors
from test_machine_snapshots import EACH, TWICE, alone, own
from test_rank_saves import each
from test_ranks import same
from variants import thorough

disks = machine_snapshots.disks  # a fixture


def refuse(why: str) -> NoReturn:
    raise CheckpointError(why)


def is_sound(manifest: dict[str, Any]) -> bool:
    """Whether a manifest has its form, and does not contradict itself in what is in no page."""
    try:
        check_form(sound(SNAPSHOT, manifest, "it"), refuse)
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize("form", ["as-is", "nf4"])
@pytest.mark.parametrize("machines", [EACH, thorough(TWICE)])
def test_no_more_crosses_than_what_trains(ranks: Ranks, machines: str, form: str) -> None:
    found = ranks.run("rank_promises.crosses_of_frozen", machines, form=form)
    trained, pages, frozen = (found[0][of] for of in ("trained", "pages", "frozen"))
    most = pages + len(machines) * trained + (16 << 10)  # which they say to each other
    assert trained <= sum(each(found, "sent")) < most
    assert frozen > 2 * most


@pytest.mark.parametrize("machines", [EACH, thorough(TWICE)])
def test_a_snapshot_has_it_once_for_each_machine(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], machines: str
) -> None:
    taken = ranks.run("rank_snapshots.takes_kinds", machines, series=own(tmp_path), **disks)
    manifest = read_manifest(tmp_path / "a" / "run" / "step-000002")
    owners = [[manifest["machines"][c["rank"]] for c in chunks_for(manifest, rank)]
              for rank in range(len(machines))]  # fmt: skip
    copied = [number for number, _ in manifest["copies"]]
    assert copied
    for number, chunk in enumerate(manifest["chunks"]):
        found = {owner[number] for owner in owners}
        assert found == (set("ab") if number in copied else {machines[chunk["rank"]]})
    for rank in range(len(machines)):
        held = [page[0] for chunk in all_chunks(manifest) if chunk["rank"] == rank
                for page in chunk["param"][2]]  # fmt: skip
        assert set(held) <= {slot for slot, *_ in slots_of(manifest, rank)}
    # 1. On the same machines each goes on from its own.
    found = ranks.run("rank_snapshots.loads_kinds", machines, series=own(tmp_path), **disks)
    assert each(found, "adopted") == [True] * len(machines)
    assert same(each(found, "hash")) == taken[0]["hash"]
    # 2. Others read it, from where one has it.
    others = {"ba": disks} if machines == EACH else {}
    for who, options in {**others, 1: alone(disks), 3: alone(disks)}.items():
        series = own(tmp_path) if who == "ba" else str(tmp_path / "a" / "run")
        found = ranks.run("rank_snapshots.loads_kinds", who, series=series, **options)
        assert not any(each(found, "adopted"))
        assert same(each(found, "hash")) == taken[0]["hash"]
    # 3. A copy of the snapshot has it once.
    to = tmp_path / "copy"
    assert cli.main(["snapshots", "copy", str(tmp_path / "a" / "run"), str(to)]) == 0
    assert "copies" not in read_manifest(to)
    found = ranks.run("rank_snapshots.loads_kinds", 1, series=str(to), **alone(disks))
    assert found[0]["hash"] == taken[0]["hash"]


def test_copies_that_make_no_sense_are_refused(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any]
) -> None:
    ranks.run("rank_snapshots.takes_kinds", EACH, series=own(tmp_path), **disks)
    manifest = read_manifest(tmp_path / "a" / "run" / "step-000002")
    assert is_sound(manifest)
    number, chunk = manifest["copies"][0]
    trained = next(i for i, c in enumerate(manifest["chunks"]) if c["exp_avg"] is not None)
    for copies in (
        None,
        [[number]],
        [[str(number), chunk]],
        [[-1, chunk]],
        [[len(manifest["chunks"]), chunk]],
        [[number, chunk | {"rank": 2}]],
        [[number, chunk | {"rank": 0}]],
        [[number, chunk], [number, chunk]],
    ):
        assert not is_sound(manifest | {"copies": copies}), copies
    one = {key: manifest[key] for key in manifest if key not in ("ranks", "others", "machines")}
    one["chunks"] = [{k: c[k] for k in c if k != "rank"} for c in manifest["chunks"]]
    assert is_sound(one | {"copies": []})
    assert not is_sound(one | {"copies": [[number, chunk | {"rank": 0}]]})
    assert not is_sound(manifest | {"copies": [[number, 5]]})
    tensors = stored_tensors(Kinds())
    check_chunks(manifest, tensors, refuse)
    for place, other in (
        (trained, manifest["chunks"][trained] | {"rank": 1}),
        (number, chunk | {"runs": []}),
        (number, chunk | {"param": manifest["chunks"][trained]["param"]}),
    ):
        with pytest.raises(CheckpointError):
            check_chunks(manifest | {"copies": [[place, other]]}, tensors, refuse)
