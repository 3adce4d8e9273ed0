"""What there is to know of the drive behind a folder, and of its wear."""

import json
import os
from pathlib import Path

from strata._config import drives
from strata._config.drives import Drive, Health


def test_direct_io_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    assert drives.why_not_direct(tmp_path) in ("", "Invalid argument")
    assert list(tmp_path.iterdir()) == []


def test_the_drive_behind_a_partition(tmp_path: Path) -> None:
    number = os.stat(tmp_path).st_dev
    drive, part = tmp_path / "sys/devices/nvme0n1", tmp_path / "sys/devices/nvme0n1/nvme0n1p2"
    (drive / "device").mkdir(parents=True)
    part.mkdir()
    (part / "partition").write_text("2\n")
    (drive / "device/model").write_text("Some SSD 2TB  \n")
    (drive / "stat").write_text("1 2 3 4 5 6 2000 8 9\n")
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    named = tmp_path / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    named.symlink_to(part)
    assert drives.drive_of(tmp_path, tmp_path) == Drive("nvme0n1", "Some SSD 2TB", 2000 * 512)
    assert drives.drive_of(tmp_path, tmp_path / "nowhere") is None


def test_wear_is_what_the_drive_tells() -> None:
    drive = Drive("nvme0n1", "", 5 * 10**12)
    log = {"percentage_used": 4, "data_units_written": 200_000_000}
    told = json.dumps({"nvme_smart_health_information_log": log})
    assert drives.health(drive, lambda _: told) == Health(4, 102_400_000_000_000)
    for text in ("", "{}", "[]", '{"nvme_smart_health_information_log": 3}'):
        assert "wear" in str(drives.health(drive, lambda _, text=text: text))

    def missing(_device: str) -> str:
        raise FileNotFoundError("smartctl is not installed")

    assert drives.health(drive, missing) == "smartctl is not installed"
