"""--resume: which options may change, which make another run, and what a run is told by."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from finetune_runs import arguments, lines, wrong
from strata._cli import main as cli
from strata._cli.finetune.identity import IDENTITY
from strata._cli.finetune.options import Options, parse
from transformers import get_cosine_with_min_lr_schedule_with_warmup as cosine

# Options that change where a run lives, how long it is, and what is shown of it: not what it is.
FREE = {
    *("data", "trust_remote_code", "device", "device_memory", "host_memory", "ssd_memory"),
    *("ssd_path", "ssd_endurance", "page_size", "io_engine", "workers", "activations", "split"),
    *("steps", "output", "eval_every", "eval_windows", "save_every", "snapshot_every"),
    *("report_to", "prompt", "generate", "progress", "config", "resume", "overwrite"),
}
# Another value of each option of a run's identity.
OTHERS = {
    "model": "llama-25m", "data_limit": "1MB", "held_out": "0.3", "sequence": "64",
    "vocabulary": "300", "lora": "r=4", "dtype": "float32", "state_dtype": "8bit",
    "frozen": "nf4", "batch": "3", "accumulation": "5", "lr": "0.5", "warmup": "7",
    "update": "lock-free:1", "weight_decay": "0.5", "max_grad_norm": "9", "seed": "5",
}  # fmt: skip


@pytest.fixture
def remembered(tmp_path: Path) -> Path:
    """The output of a run, as far as options are told by it."""
    told = {"model": "llama-10m", "data": ["a"], "lr": 1e-3, "dtype": "bfloat16", "lora": "r=8"}
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(told))
    return tmp_path


def test_every_option_either_belongs_to_a_run_or_may_change() -> None:
    assert IDENTITY.keys() == OTHERS.keys()
    assert IDENTITY.keys() | FREE == Options().flat().keys()
    assert not IDENTITY.keys() & FREE


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_run_is_cannot_change(
    remembered: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = f"--{name.replace('_', '-')}"
    again = ["finetune", "--resume", f"--output={remembered}", f"{option}={OTHERS[name]}"]
    said = wrong(capsys, again)
    assert f"cannot resume the run in {remembered}: {option} was " in said
    assert "--overwrite in place of --resume starts anew" in said


def test_other_words_for_the_same_are_no_difference(remembered: Path) -> None:
    told = ["--resume", f"--output={remembered}", "--lora=r=8,alpha=16", "--lr=0.001"]
    options = parse([*told, "--dtype=auto", "--update=on_step"], None)
    assert (options.training.lr, options.memory.dtype) == (1e-3, "bfloat16")


def test_every_switch_of_a_file_can_be_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "o.yaml"
    switches = [name for name, value in Options().flat().items() if isinstance(value, bool)]
    assert len(switches) >= 4
    for name in switches:
        for value in (True, False):
            if name == "resume" and value:
                continue  # there is no run
            file.write_text(f"model: a\ndata: [b]\n{name}: {str(not value).lower()}\n")
            flag = ("--" if value else "--no-") + name.replace("_", "-")
            told = [f"--config={file}", f"--output={tmp_path / 'none'}", flag]
            assert parse(told, None).flat()[name] is value
    file.write_text("model: a\ndata: [b]\nno-progress: true\n")
    assert not parse([f"--config={file}"], None).results.progress
    for text, says in (
        ("resume: true", "there is no run"),
        ("overwrite: 1", "overwrite takes true or false, not 1"),
        ("steps: true", "steps takes a value, not True"),
        ("config: other.yaml", "cannot name another"),
    ):
        file.write_text(text)
        assert says in wrong(capsys, ["finetune", f"--config={file}", f"--output={tmp_path}/x"])


def changed(file: Path) -> None:
    file.write_text(file.read_text() + "one line more\n")


def test_a_run_goes_on_with_its_own_data_or_not_at_all(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(place, steps=4, **{"save-every": 4, "eval-every": 0})) == 0
    again = ["finetune", "--resume", f"--output={place / 'out'}"]
    assert "has made 4 already" in wrong(capsys, [*again, "--steps=3"])
    shutil.copytree(place / "text", place / "copied")
    changed(place / "copied" / "3.txt")
    said = wrong(capsys, [*again, "--steps=8", f"--data={place / 'copied'}"])
    assert "copied/3.txt is new or changed" in said
    assert "leave --data out to go on with the run's own copy" in said
    (place / "copied" / "3.txt").unlink()
    said = wrong(capsys, [*again, "--steps=8", f"--data={place / 'copied'}"])
    assert "text/3.txt is missing or changed" in said
    assert "no data at /nowhere" in wrong(capsys, [*again, "--data=/nowhere"])
    config = place / "tiny" / "config.json"
    before = config.read_text()
    config.write_text(json.dumps(json.loads(before) | {"rope_theta": 5}))
    assert "config.json of --model changed" in wrong(capsys, again)
    config.write_text(before)
    assert yaml.safe_load((place / "out" / "options.yaml").read_text())["steps"] == 4

    # The same files elsewhere are the same data; later files are not looked at unless they are
    # named. The rates are those of the longer schedule.
    (place / "text").rename(place / "moved")
    assert cli.main([*again, "--steps=7", f"--data={place / 'moved'}"]) == 0
    changed(place / "moved" / "0.txt")
    assert cli.main([*again, "--steps=8"]) == 0
    rates = {r["step"]: r["learning_rate"] for r in lines(place / "out") if "loss" in r}
    for steps, trained in ((7, (5, 6, 7)), (8, (8,))):
        expected = scheduled(steps)
        assert [rates[s] for s in trained] == pytest.approx([expected[s - 1] for s in trained])
    for lost in ("held_out/data-00000-of-00001.arrow", "facts.json"):
        (place / "out" / "data" / lost).unlink()
        assert f"the run has lost {place / 'out' / 'data' / lost}" in wrong(capsys, again)


def scheduled(steps: int) -> list[float]:
    """The rates of a run of so many steps."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.003)
    schedule: Any = cosine(optimizer, steps // 10, steps, min_lr_rate=0.1)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates
