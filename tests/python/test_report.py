"""What a report says: from what a wrapped model knows, as text, and as a file."""

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import strata
from made_up import LIMITED, PAGE, UNITS, Planning, bare_report, lags, records, report
from small_models import build, llama, tight, train
from strata._hooks import land_hook
from strata._report.report_text import plan_line
from strata._report.reports import Report, Wear
from strata._runtime.wrapped import wrapped


def test_the_text_tells_speed_stalls_wear_and_plan() -> None:
    text = str(report())
    speed = "1.00 s a step (over 7.00 s), 0.95 s predicted, lower bound 0.80 s (computation), 80 %"
    assert speed in text
    assert LIMITED in text
    assert "Llama <3>; strata finetune --steps=3; a processor" in text
    assert "waiting for layers.0 from ssd" in text
    assert "a day at this rate, 100 TB in" in text
    assert "device to host" in text
    assert "swap to ssd" in text
    assert "backward of" in text
    for unit in UNITS:
        assert unit in text


def test_the_line_of_a_plan_counts_one_and_many() -> None:
    def unit(activation: str, slices: int = 1, on_device: bool = False) -> Any:
        return SimpleNamespace(activation=activation, slices=slices, on_device=on_device)

    plan = SimpleNamespace(
        units=[unit("keep", on_device=True), unit("swap_host"), unit("swap_host"), unit("keep", 2)],
        peaks={"device": SimpleNamespace(bytes=3 << 20)},
        param_device_bytes=1 << 20,
        resting_device_bytes=1 << 19,
    )
    paper: Any = SimpleNamespace(plan=plan, simulate=lambda: SimpleNamespace(step_seconds=2.0))
    bound: Any = SimpleNamespace(seconds=1.0, what="ssd")
    assert plan_line(paper, bound) == (
        "1 unit keeps, 2 units swap to host, 1 unit keeps in 2 slices; device peak 3.0 MiB, of it "
        "1.0 MiB for parameters and 512.0 KiB for 1 whole unit; 2.00 s a step predicted, 50% of "
        "the bound (ssd)"
    )


def test_the_text_counts_errors_of_the_disk_that_passed() -> None:
    assert "3 errors of the SSD that passed" in str(report(stats={"io_errors": 3}))
    assert "errors of the SSD" not in str(report())


def test_values_of_other_types_are_refused(tmp_path: Path) -> None:
    report().save(path := tmp_path / "report.json")
    whole = json.loads(path.read_text())
    for key, value in {"steps": "3", "tiers": {"host": 1}, "records": [{}], "wear": []}.items():
        path.write_text(json.dumps(whole | {key: value}))
        with pytest.raises(ValueError, match="damaged"):
            Report.load(path)


def test_units_of_one_kind_share_a_line() -> None:
    rows = report().planned
    many = [rows[0].__class__(**{**vars(rows[2]), "unit": f"layers.{i}"}) for i in range(12)]
    text = str(report(planned=many))
    assert "layers.0 … layers.11 (12)" in text
    assert "layers.5" not in text


def test_without_a_plan_the_text_is_what_is_counted() -> None:
    text = str(bare_report())
    assert "waited for pages of" in text
    assert "predicted" not in text
    assert "planned" not in text


def test_the_text_tells_how_far_updates_lagged() -> None:
    rows = [line.split() for line in str(report(lags=lags(40))).splitlines()]
    first = rows.index(
        ["unit", "forwards,", "newest", "1", "old", "merged", "gradients", "update", "waits"]
    )
    assert rows[first + 1] == ["layers.0", "1", "2", "2", "1"], "what was waited for comes first"
    assert rows[first + 9][:2] == ["all", "units"]
    assert rows[first + 9][2:] == ["42", "78", str(2 * sum(range(40))), "1"]
    assert "update waits" not in str(report())


def test_it_is_the_same_from_a_file(tmp_path: Path) -> None:
    for whole in (report(), report(lags=lags()), bare_report()):
        whole.save(tmp_path / "report.json")
        assert Report.load(tmp_path / "report.json") == whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no report"),
        ("[]", "is no report of this version"),
        ('{"format": "strata report 1"}', "is no report of this version"),
        ('{"format": "strata report 2"}', "damaged"),
        ('{"format": "strata report 2", "tiers": 5}', "damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Report.load(path)


def test_wear_is_what_a_drive_is_sold_by() -> None:
    wear = Wear.of(10e9, 10.0)  # a GB a second
    assert wear is not None
    assert wear.tb_per_day == pytest.approx(86.4)
    assert wear.days_per_100_tb == pytest.approx(100 / 86.4)
    assert Wear.of(0, 10.0) is None


def test_a_plan_fills_the_report(core: ModuleType) -> None:
    model, optimizer = tight(build(llama))
    train(model, optimizer, 1)
    wrapped(model).planning = Planning()  # type: ignore[assignment]
    wrapped(model).log.records.extend(records())
    made = strata.report(model)
    assert made.measured_seconds == pytest.approx(1.0)
    assert made.predicted_seconds == 0.95
    assert made.percent_of_bound == pytest.approx(80.0)
    assert [row.activation for row in made.planned] == [
        "swap_host", "swap_ssd", "recompute", "keep",
    ]  # fmt: skip
    assert [row.grads for row in made.planned] == ["host", "mixed", "host", "host"]
    assert [row.states for row in made.planned] == ["host", "ssd", "host", "host"]
    assert made.planned[2].slices == 4
    assert made.peaks["device"].where == f"backward of {UNITS[3]}"
    assert made.ssd_written_per_step == 3 * PAGE
    assert made.wear is not None
    assert len(made.records) == 2


def test_a_real_step_fills_the_report(
    core: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(land_hook, "owns_memory", lambda grad: False)  # gradients are copied
    model, optimizer = tight(build(llama))
    train(model, optimizer, 3)
    made = strata.report(model)
    assert [record.step for record in made.records] == [1, 2]
    uses = [(use.unit, use.backward) for use in made.records[-1].uses]
    units = range(len(wrapped(model).units))
    assert (
        uses == [*((u, False) for u in units), *((u, True) for u in reversed(units))][: len(uses)]
    )
    assert made.measured_seconds is not None
    assert made.measured_seconds > 0
    assert made.link_bytes_per_step["host to device"] > 0
    assert made.predicted_seconds is None
    assert made.wear is None, "nothing is on the SSD"
    assert all(unit in [u.name for u in wrapped(model).units] for unit in made.stalls["copy"])
    assert made.model.endswith("M parameters")
    assert made.command
    assert "processors" in made.machine
    if core is strata._core:  # what its counters say, and what its timeline says
        strata.synchronize(model)
        moved = strata.report(model).link_bytes["device to host"]
        assert moved == 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    made.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 3
    assert Report.load(tmp_path / "report.json") == made
