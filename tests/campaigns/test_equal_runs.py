"""The same training under combinations of budgets, page sizes, I/O engines, workers, forms of a
frozen base, activations, tiles and ranks ends with the same bits; and one snapshot gives the same
bits under each of them.

STRATA_COMBINATIONS=all runs every combination.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import strata
import torch
from campaign import SEED, sampled
from equal_runs import PAGES, PLACES, Setting, llama, opened, state_of, train, trained
from rank_server import Ranks

ENGINES = ("io_uring", "libaio", "threads", "memory")
WORKERS = (1, 2, 3)
FORMS = ("nf4", "nf4-double", "int8")
MODES = ("on_step", "in_backward", "lock-free:0")
STEPS = 3
ROOM = {"ssd": 32}  # for snapshots, in bytes for each parameter


def differing(settings: list[Setting], folder: Path, steps: int) -> list[Setting]:
    """Those whose losses or state differ from the first one's."""
    first = trained(settings[0], folder, SEED, steps)
    return [each for each in settings[1:] if trained(each, folder, SEED, steps) != first]


def test_budgets_pages_engines_and_workers(tmp_path: Path) -> None:
    every = [Setting(*each) for each in itertools.product(PLACES, PAGES, ENGINES, WORKERS)]
    assert differing([every[0], *sampled(every, 6)], tmp_path, 20) == []


def test_float32_is_near_plain_pytorch(tmp_path: Path) -> None:
    setting = Setting("ssd", workers=2, dtype=torch.float32)
    plain = llama(setting, SEED)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    losses = train(plain, adamw, 20, SEED)
    with opened(setting, tmp_path, SEED) as (model, optimizer):
        assert train(model, optimizer, 20, SEED) == pytest.approx(losses, rel=1e-6)
        for name, value in model.state_dict().items():
            expected = plain.state_dict()[name]
            assert (value - expected).norm() <= 1e-6 * expected.norm(), name


# Tiles may change last bits, so whole layers and tiles are compared each with their own.
@pytest.mark.parametrize(("form", "tiles"), list(itertools.product(FORMS, (1, 2))))
def test_adapters_over_codes(tmp_path: Path, form: str, tiles: int) -> None:
    like = Setting(frozen=form, tiles=tiles)
    every = [
        replace(like, place=place, page_size=page, activations=activations)
        for place, page, activations in itertools.product(
            PLACES, PAGES, (None, "swap", "recompute")
        )
    ]
    assert differing([every[0], *sampled(every, 2)], tmp_path, 10) == []


def test_a_snapshot_under_any_setting(tmp_path: Path) -> None:
    places = list(itertools.product(PLACES, PAGES))
    updates = ("on_step", "in_backward", "lock-free:1")
    savers = [Setting(*each) for each in places]
    loaders = [
        Setting(place, page, update=update, tiles=tiles)
        for (place, page), update, tiles in itertools.product(places, updates, (1, 4))
    ]
    for number, saver in enumerate(sampled(savers, 2)):
        series = tmp_path / f"run-{number}"
        with opened(saver, tmp_path, SEED, ROOM) as (model, optimizer):
            train(model, optimizer, STEPS, SEED)
            strata.snapshot(model, series).wait()
            state, losses = state_of(model), train(model, optimizer, STEPS, SEED)
        for loader in sampled(loaders, 4):
            with opened(loader, tmp_path, SEED, ROOM) as (model, optimizer):
                strata.load(model, series)
                found = state_of(model)
                assert found.keys() == state.keys()
                for name, values in found.items():
                    assert torch.equal(values, state[name]), (saver, loader, name)
                if loader.tiles == 1 and loader.update != "lock-free:1":
                    assert train(model, optimizer, STEPS, SEED) == losses, (saver, loader)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks(ranks: Ranks, count: int) -> None:
    expected = {}
    for place, page, update in sampled(list(itertools.product(PLACES, PAGES, MODES)), 3):
        setting = asdict(Setting(place, page, update=update))
        del setting["dtype"]
        more = {"of": count, "seed": SEED, "steps": STEPS, **setting}
        if update not in expected:  # of one process with the micro-batches of all
            (expected[update],) = ranks.run("equal_runs.digests", 1, **more)
        assert set(ranks.run("equal_runs.digests", count, **more)) == {expected[update]}, more
