"""The core's copies of device memory, through its seam: what every core must do."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from strata import _core
from test_core import config, fill, masters, train

PAGE = 64 * 1024
SIZES = [1, 100, PAGE // 4, PAGE // 2 + 4, PAGE, 3 * PAGE + 8]  # bytes


def make(core: ModuleType, tmp_path: Path, **changes: Any) -> Any:
    paths = {"ssd_bytes": 64 << 20, "ssd_paths": [str(tmp_path)]}
    return core.Session(config(**paths, **changes))


def save(session: Any, tensor: torch.Tensor, to_ssd: bool) -> int:
    return int(session.save_activation(tensor.data_ptr(), tensor.nbytes, to_ssd, 1, stream=0))


@pytest.mark.parametrize("to_ssd", [False, True])
def test_bytes_come_back(core: ModuleType, to_ssd: bool, tmp_path: Path) -> None:
    session = make(core, tmp_path)
    session.adopt(activation_host_bytes=16 * PAGE, activation_ssd_bytes=16 * PAGE)
    sent = [torch.randint(256, (n,), dtype=torch.uint8) for n in SIZES]
    saves = [save(session, tensor, to_ssd) for tensor in sent]
    assert -1 not in saves
    expected = [tensor.clone() for tensor in sent]
    for tensor, number in zip(sent, saves, strict=True):
        assert session.activation_saved(number, True)
        tensor.zero_()
    for number in saves:
        session.stage_activation(number)
    for tensor, number in zip(sent, saves, strict=True):
        session.fetch_activation(number, tensor.data_ptr(), stream=0)
    for number in saves:
        assert session.activation_fetched(number, True)
        session.drop_activation(number)
    assert all(map(torch.equal, sent, expected))
    session.close()


def test_without_room_nothing_is_saved(core: ModuleType, tmp_path: Path) -> None:
    session = make(core, tmp_path)
    tensor = torch.zeros(3 * PAGE, dtype=torch.uint8)
    assert save(session, tensor, False) == -1
    session.adopt(activation_host_bytes=4 * PAGE, activation_ssd_bytes=0)
    first = save(session, tensor, False)
    assert first >= 0
    assert save(session, tensor, False) == -1
    assert save(session, tensor, True) == -1
    session.drop_activation(first)
    assert save(session, tensor, False) >= 0
    session.close()
    session.drop_activation(first)  # a closed session forgets quietly
    with pytest.raises(_core.StrataError):
        session.adopt(activation_host_bytes=PAGE, activation_ssd_bytes=0)


def test_training_goes_on_where_pages_make_room(tmp_path: Path) -> None:
    plain = _core.Session(config())
    fill(plain)
    train(plain, 1)
    train(plain, 2)
    session = make(_core, tmp_path, host_bytes=40 * PAGE)
    fill(session)
    train(session, 1)
    before = session.plan
    session.adopt(activation_host_bytes=8 * PAGE, activation_ssd_bytes=8 * PAGE)
    after = session.plan
    assert after["host_bytes"] <= 40 * PAGE
    assert after["ssd_bytes"] > before["ssd_bytes"]
    train(session, 2)
    assert all(map(torch.equal, masters(session), masters(plain)))
    assert session.stats()["activation_host_bytes"] == 8 * PAGE
    session.close()
