"""benchmarks/gpu/run: what it asks of a machine, and how it goes on where a part fails. The parts
here are commands of a moment; on a GPU they take hours.
"""

import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.__main__ import OF_DEVICE
from benchmarks.gpu import needs, parts, runner
from benchmarks.gpu.parts import Part

HERE = needs.environment(runner.ROOT, sys.executable, None)
NOTHING = needs.Found([], "NVIDIA H200", {"gpu": "NVIDIA H200", "driver": "580.1"})


def wishes(**changes):
    return parts.Wishes(
        **{"python": "py", "quick": False, "tests": True, "ssd_path": Path("/d")} | changes
    )


def test_a_dry_run_prints_the_plan_and_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(needs, "look", lambda *_: needs.Found(["a driver"], "", {}))
    monkeypatch.setattr(parts, "run_all", None)
    assert runner.main(["--dry-run", "--python", "/py"]) == 0
    out, err = capsys.readouterr()
    assert "STRATA_TEST_DEVICE=cuda meson test -C build/debug" in out
    assert "/py -m pytest tests/python -q --device cuda" in out
    assert "-Dcuda=enabled" in out
    assert err == "missing: a driver\n"


def test_where_something_is_missing_all_of_it_is_said_and_nothing_is_built(monkeypatch, capsys):
    monkeypatch.setattr(needs, "look", lambda *_: needs.Found(["a driver", "nvcc"], "", {}))
    monkeypatch.setattr(parts, "run_all", None)
    assert runner.main([]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[:2] == ["missing: a driver", "missing: nvcc"]
    assert "nothing was built" in err


@pytest.mark.skipif(bool(needs.driver_version()), reason="this machine has a driver")
def test_a_machine_without_a_gpu_is_refused_at_once():
    command = [str(runner.ROOT / "benchmarks/gpu/run"), "--python", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "missing: NVIDIA's driver" in done.stderr
    assert "missing: a GPU that PyTorch" in done.stderr
    assert "Python package" not in done.stderr  # the environment of the tests has them


def test_an_interpreter_that_lacks_packages_is_told_which():
    said = {
        "version": [3, 10],
        "missing": ["torch", "pytest_timeout"],
        "header": False,
        "torch": "",
    }
    sentences = " | ".join(needs.python_needs("py", said))
    for part in ("Python 3.11 to 3.14: py is 3.10", "headers of py", "pytest-timeout", "torch"):
        assert part in sentences
    assert list(needs.python_needs("py", {})) == [
        "a Python that runs: py does not; --python names another one"
    ]
    good = {"version": [3, 12], "missing": [], "header": True, "torch": "2.9", "gpu": "H200"}
    assert list(needs.python_needs("py", good)) == []


def test_the_interpreter_is_asked_once_for_all_of_it():
    said = needs.interpreter(sys.executable, ["json", "no_such_package", "torch"], HERE)
    assert said["missing"] == ["no_such_package"]
    assert said["torch"]
    assert said["version"] == list(sys.version_info[:2])
    assert needs.interpreter("/no/such/python", [], HERE) == {}


@pytest.mark.parametrize(("version", "wrong"), [((12, 3), 1), ((12, 4), 0), ((13, 0), 0), ((), 1)])
def test_an_old_compiler_is_refused(version, wrong):
    assert len(list(needs.nvcc_needs(version))) == wrong


@pytest.mark.parametrize("asked", [None, "8"])
def test_streams_have_queues_enough_and_the_results_say_so(monkeypatch, asked):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    if asked is not None:
        monkeypatch.setenv(name, asked)
    env = needs.environment(runner.ROOT, sys.executable, None)
    assert env[name] == (asked or "32")
    monkeypatch.setattr(needs, "interpreter", lambda *_: {})
    monkeypatch.setattr(needs, "has_header", lambda *_: True)
    assert needs.look(runner.ROOT, "py", env, False).facts["environment"] == {name: env[name]}


def test_every_bench_of_a_device_is_run():
    assert set(OF_DEVICE) == set(parts.BENCHES) == set(parts.LIMITS)
    plan = parts.all_parts(runner.ROOT, wishes(), Path("/results"))
    names = [part.name for part in plan]
    assert len(names) == len(set(names))
    assert [name for name in names if "suites" in name] == ["C++ suites", "Python suites"]
    for part in plan:
        assert set(part.needs) <= set(names[: names.index(part.name)])
    measured = [part.command for part in plan if part.name.startswith("bench ")]
    assert all("--quick" not in command for command in measured)
    short = parts.all_parts(runner.ROOT, wishes(quick=True, tests=False), Path("/results"))
    assert not [part for part in short if "suites" in part.name or "debug" in part.name]
    assert all("--quick" in part.command for part in short if part.name.startswith("bench "))


def test_a_folder_that_is_configured_is_not_set_up_again(tmp_path):
    first = parts.build_parts(tmp_path, "release", [])[0]
    assert first.command[:2] == ["meson", "setup"]
    folder = tmp_path / "build/release"
    folder.mkdir(parents=True)
    (folder / "build.ninja").touch()
    again = parts.build_parts(tmp_path, "release", [])[0]
    assert again.command == ["meson", "configure", "build/release", "-Dcuda=enabled"]


def test_a_part_that_fails_takes_along_those_that_need_it_alone(tmp_path):
    plan = [
        Part("bad", ["sh", "-c", "echo told; exit 3"], 1),
        Part("needs bad", ["true"], 1, ["bad"]),
        Part("needs that", ["true"], 1, ["needs bad"]),
        Part("absent", ["/no/such/command"], 1),
        Part("good", ["sh", "-c", "echo $COLOUR"], 1, variables={"COLOUR": "red"}),
    ]
    done = list(parts.run_all(plan, tmp_path, HERE, tmp_path))
    assert [r.status for r in done] == ["failed", "left out", "left out", "failed", "ok"]
    assert "exit status 3" in done[0].note
    assert done[1].note == "needs: bad"
    assert "told" in (tmp_path / "bad.log").read_text()
    assert "red" in (tmp_path / "good.log").read_text()


def test_a_part_that_takes_too_long_is_ended_with_all_it_started(tmp_path):
    leaves = f"sleep 60 & echo $! > {tmp_path}/pid; wait"
    begin = time.monotonic()
    result = parts.run_part(
        Part("slow", ["sh", "-c", leaves], 0.01), tmp_path, HERE, tmp_path / "l"
    )
    assert result.status == "too slow"
    assert time.monotonic() - begin < 20
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):  # its parent is gone: somebody else takes note that it ended
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.05)
    pytest.fail("what the part started is still running")


def test_results_are_kept_and_packed_behind_every_part(tmp_path, capsys):
    results = tmp_path / "results"
    keeper = runner.Keeper(NOTHING, results, tmp_path / "logs", tmp_path / "h200.tar.gz")
    results.mkdir()
    (results / "old.jsonl").write_text("of an earlier run")
    keeper.begin()
    assert not (results / "old.jsonl").exists()
    figure = {
        "bench": "copy",
        "metric": "in",
        "value": 96.0,
        "unit": "%",
        "target": 95,
        "better": "higher",
    }
    lines = [figure, {**figure, "metric": "out", "value": 90.0}, {**figure, "target": None}]
    (results / "copy.jsonl").write_text("\n".join(map(json.dumps, lines)))
    keeper.keep(parts.Result("bench copy", "ok", 1.0))
    assert keeper.all_well
    keeper.keep(parts.Result("bench map", "failed", 1.0, "exit status 1"))
    assert not keeper.all_well
    kept = json.loads((results / "run.json").read_text())
    assert kept["machine"]["gpu"] == "NVIDIA H200"
    assert [part["status"] for part in kept["parts"]] == ["ok", "failed"]
    with tarfile.open(tmp_path / "h200.tar.gz") as packed:
        assert {"results/copy.jsonl", "results/run.json"} <= set(packed.getnames())
    keeper.tell()
    out = capsys.readouterr().out
    assert "reached   copy in: 96 %, at least 95" in out
    assert "missed    copy out: 90 %, at least 95" in out


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), ("", "gpu")],
)
def test_results_lie_under_the_name_of_the_gpu(gpu, folder):
    assert runner.slug(gpu) == folder
