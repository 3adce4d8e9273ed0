"""Calibration: what it measures, what it remembers, and what it does where it cannot."""

import json
import logging

import pytest
import torch
from made_up import every_speed
from strata import _core
from strata._profiling import calibrate, probes
from strata._profiling.calibrate import Calibration, Setup

PAGE = 64 << 10


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    """Sizes and times that are quick, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probes, "ALONE_SECONDS", 0.005)
    monkeypatch.setattr(probes, "TOGETHER_SECONDS", 0.005)
    monkeypatch.setattr(calibrate, "SSD_BYTES", 64 * PAGE)
    monkeypatch.setattr(calibrate, "COPY_BYTES", 16 * PAGE)
    monkeypatch.setattr(calibrate, "UPDATE_BYTES", 16 * PAGE)
    monkeypatch.setattr(probes, "FEED_FORWARD", 64)
    monkeypatch.setattr(probes, "PRODUCT", (64, 128, 256))
    monkeypatch.setattr(probes, "SHORTEST_SECONDS", 0.005)


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.fixture
def counted(monkeypatch):
    """What was asked to be measured; made-up values in place of those of the machine."""
    calls = []

    def measure(setup):
        calls.append(setup)
        return Calibration(every_speed(len(calls)), 1e9, 1e9)

    monkeypatch.setattr(calibrate, "measure", measure)
    return calls


def only_file():
    (file,) = calibrate.cache_folder().iterdir()
    return file


def test_every_lane_is_measured_alone_and_beside_the_others(disk):
    found = calibrate.measure(Setup(1, PAGE, [str(disk)], "threads"))
    assert found.typical == []
    others = ("slow", "landing_waits", "updates_first")
    assert all(v > 0 for name, v in found.costs.to_dict().items() if name not in others)
    slow = found.costs.slow
    for lane in probes.LANES:
        beside = set(slow[lane])
        assert beside == set(probes.LANES) - {lane}
        assert all(0 < part <= 1 for part in slow[lane].values())
    assert found.flops_s > 1e6


def test_a_slow_processor_gets_less_to_compute(monkeypatch):
    """One that takes 5 ms for each token, or row."""
    now = [0.0]

    def work(count):
        now[0] += 5e-3 * count

    monkeypatch.setattr(probes.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(probes.Compute, "_once", lambda self: work(self.tokens))
    monkeypatch.setattr(probes.torch, "mm", lambda a, b: work(len(a)))
    compute = probes.Compute("bfloat16", torch.device("cpu"))
    assert compute.tokens == 4  # 20 ms
    assert compute.run(0.1) == pytest.approx(6 * 3 * 768 * 64 / 5e-3)
    begin = now[0]
    flops = probes.matmul_flops("bfloat16", torch.device("cpu"))
    assert flops == pytest.approx(2 * 128 * 256 / 5e-3)
    assert now[0] - begin < 0.3


def test_nothing_is_left_on_the_disk(disk):
    calibrate.measure(Setup(1, PAGE, [str(disk)], "threads"))
    assert list(disk.iterdir()) == []


def test_without_a_disk_its_lanes_have_no_speed():
    costs = calibrate.costs(Setup(2, PAGE, [], "auto"))
    assert costs.read_bytes_s == costs.write_bytes_s == 0
    assert costs.slow["compute"]["read"] == 1


def test_random_numbers_of_the_user_stay_as_they_are():
    torch.manual_seed(3)
    calibrate.measure(Setup(1, PAGE))
    after = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(4))


def test_a_second_call_remembers(disk, counted):
    first = calibrate.costs(Setup(1, PAGE, [str(disk)], "threads"))
    assert calibrate.costs(Setup(1, PAGE, [str(disk)], "threads")) == first
    assert len(counted) == 1
    calibrate.costs(Setup(1, PAGE, [str(disk)], "threads"), refresh=True)
    assert len(counted) == 2


def test_folders_of_one_disk_share_what_is_known(disk, counted):
    (disk / "other").mkdir()
    calibrate.costs(Setup(1, PAGE, [str(disk)], "threads"))
    calibrate.costs(Setup(1, PAGE, [str(disk / "other")], "threads"))
    assert len(counted) == 1


@pytest.mark.parametrize("change", [{"workers": 2}, {"page_bytes": 2 * PAGE}, {"dtype": "float32"}])
def test_another_setup_is_measured_anew(change, counted):
    setup = {"workers": 1, "page_bytes": PAGE}
    calibrate.calibration(Setup(**setup))
    calibrate.calibration(Setup(**{**setup, **change}))
    assert len(counted) == 2


def _set(path, value):
    def change(text):
        stored = json.loads(text)
        place = stored
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        return json.dumps(stored)

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: "null",
        _set(["key", "version"], 0),
        _set(["calibration", "costs", "slow", "warp"], {}),
        _set(["calibration", "costs", "upload_bytes_s"], "fast"),
        _set(["calibration", "costs", "upload_bytes_s"], -1.0),
        _set(["calibration", "costs"], {}),
        _set(["calibration", "more"], 1),
    ],
)
def test_a_damaged_file_is_measured_again_and_replaced(damage, counted):
    calibrate.costs(Setup(1, PAGE, [], "auto"))
    file = only_file()
    file.write_text(damage(file.read_text()))
    again = calibrate.costs(Setup(1, PAGE, [], "auto"))
    assert len(counted) == 2
    assert _core.Costs(**json.loads(only_file().read_text())["calibration"]["costs"]) == again


def test_a_cache_folder_that_cannot_be_made_is_logged(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, "strata"):
        costs = calibrate.costs(Setup(1, PAGE, [], "auto"))
    assert costs.upload_bytes_s > 0
    assert costs.decode_bytes_s > 0
    assert "is not remembered" in caplog.text


def test_a_disk_that_cannot_be_measured_is_taken_to_be_a_modest_one(tmp_path, caplog):
    costs = calibrate.costs(Setup(1, PAGE, [str(tmp_path)], "nonsense"))
    assert costs.read_bytes_s == calibrate.TYPICAL["read"]
    assert costs.upload_bytes_s != calibrate.TYPICAL["upload"]
    assert "cannot measure read and write" in caplog.text
    assert not calibrate.cache_folder().exists()  # perhaps it can be, next time


def test_a_lane_that_fails_beside_another_is_raised():
    def broken(seconds):
        raise _core.StrataError("the disk is gone")

    with pytest.raises(_core.StrataError, match="the disk is gone"):
        probes.together(lambda seconds: 1.0, broken)


def test_probes_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="sideways"):
        _core.CopyProbe(PAGE, 4 * PAGE, "host").run("sideways", 0.001)
    with pytest.raises(ValueError, match="int8"):
        _core.UpdateProbe(1, "int8", PAGE, PAGE, 1)
