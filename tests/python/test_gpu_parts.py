"""How parts of benchmarks/gpu/run are run: what is left out, cut off or done before, what is kept,
and that nothing stays behind. Parts here are commands of a moment; on a GPU they take minutes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import strata._core

from benchmarks.gpu import needs, parts, runner, running
from benchmarks.gpu.keeper import Keeper
from benchmarks.gpu.parts import Part
from benchmarks.gpu.running import Clock, Result

HERE = needs.environment(runner.ROOT, sys.executable, None)


def run_part(part, root, log, minutes=None):
    return running.run_part(part, root, HERE, log, Clock(minutes))


def test_in_a_fresh_clone_the_module_is_found_where_it_was_built(tmp_path):
    clone = tmp_path / "clone"
    source = f"file://{runner.ROOT}"
    clone_it = ["git", "clone", "-q", "--depth=1", source, str(clone)]
    if shutil.which("git") is None or subprocess.run(clone_it, check=False).returncode != 0:
        pytest.skip("no checkout of git to clone")
    link = Part("link", [parts.link_step()], 1, 1)
    package, built = clone / "bindings/strata", clone / parts.BUILD / "bindings"
    assert run_part(link, clone, tmp_path / "log").status == "failed"
    assert not list(package.glob("_core*.so"))  # nothing that a later run takes for the module
    built.mkdir(parents=True)
    (built / Path(strata._core.__file__).name).symlink_to(Path(strata._core.__file__).resolve())
    for _ in range(2):
        assert run_part(link, clone, tmp_path / "log").status == "ok"
    look = "import strata._core as c, sys; assert c.__file__.startswith(sys.argv[1]), c.__file__"
    env = needs.environment(clone, sys.executable, None)
    subprocess.run([sys.executable, "-c", look, str(clone)], env=env, check=True)


def run_all(plan, folder, clock=None, done=None):
    return list(running.run_all(plan, folder, HERE, folder, clock or Clock(None), done or {}))


def shell(name, text, minutes=1, **options):
    return Part(name, [["sh", "-c", text]], minutes, options.pop("limit", 1), **options)


def test_a_part_that_fails_takes_along_those_that_need_it_alone(tmp_path):
    plan = [
        Part("bad", [["true"], ["sh", "-c", "echo told; exit 3"], ["touch", "never"]], 1, 1),
        Part("needs bad", [["true"]], 1, 1, ["bad"]),
        Part("needs that", [["true"]], 1, 1, ["needs bad"]),
        Part("absent", [["/no/such/command"]], 1, 1),
        shell("good", "echo $COLOUR", variables={"COLOUR": "red"}),
    ]
    done = run_all(plan, tmp_path)
    assert [r.status for r in done] == ["failed", "left out", "left out", "failed", "ok"]
    assert "exit status 3" in done[0].note
    assert done[1].note == "needs: bad"
    assert "told" in (tmp_path / "bad.log").read_text()
    assert "No such file" in (tmp_path / "absent.log").read_text()
    assert "red" in (tmp_path / "good.log").read_text()
    assert not (tmp_path / "never").exists()


def gone(pid_file):
    pid = int(pid_file.read_text())
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


# One process in the part's session, and one that left it.
STAYS = "sleep 60 & echo $! >{0}/pid; setsid sh -c 'echo $$ >{0}/far; exec sleep 60' & "


def test_a_part_that_takes_too_long_is_ended_with_all_it_started(tmp_path):
    begin = time.monotonic()
    slow = shell("slow", STAYS.format(tmp_path) + "wait", limit=0.01)
    assert run_part(slow, tmp_path, tmp_path / "log").status == "too slow"
    assert time.monotonic() - begin < 20
    assert gone(tmp_path / "pid")
    assert gone(tmp_path / "far")


def test_what_a_part_leaves_running_ends_with_it(tmp_path):
    part = shell("leaves", STAYS.format(tmp_path) + f"until [ -s {tmp_path}/far ]; do :; done")
    assert run_part(part, tmp_path, tmp_path / "log").status == "ok"
    assert gone(tmp_path / "pid")
    assert gone(tmp_path / "far")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_ended_leaves_no_process(tmp_path, number):
    code = (
        "import sys\nfrom pathlib import Path\nfrom benchmarks.gpu import running, runner\n"
        "from benchmarks.gpu.parts import Part\nimport os\n"
        "runner.listen()\nhere = Path(sys.argv[1])\n"
        "part = Part('slow', [['sh', '-c', sys.argv[2]]], 1, 1)\n"
        "running.run_part(part, here, os.environ, here / 'log', running.Clock(None))"
    )
    text = STAYS.format(tmp_path) + "wait"
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), text], env=HERE, stderr=subprocess.DEVNULL
    )
    while not all((tmp_path / name).exists() for name in ("pid", "far")):
        time.sleep(0.02)
    time.sleep(0.1)  # until the numbers are written
    run.send_signal(number)
    run.wait(300)
    assert gone(tmp_path / "pid")
    assert gone(tmp_path / "far")


def test_a_part_that_cannot_end_in_time_is_not_begun_and_says_so(tmp_path):
    plan = [
        shell("long", "touch long", minutes=8),
        shell("short", "touch short"),
        shell("needs long", "true", needs=["long"]),
    ]
    done = run_all(plan, tmp_path, Clock(5))
    assert [r.status for r in done] == ["not begun", "ok", "left out"]
    assert re.fullmatch(r"takes up to 8 minutes, 4\.\d are left", done[0].note)
    assert not (tmp_path / "long").exists()


def test_a_part_that_goes_on_is_cut_off_at_the_end_of_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "MINUTES_MIN", 0.0)
    monkeypatch.setattr(running, "SPARE_SECONDS", 0.0)
    goes_on = shell("build", "echo once >>count; sleep 60", minutes=9, goes_on=True)
    (result,) = run_all([goes_on], tmp_path, Clock(0.01))
    assert (result.status, result.note) == ("cut off", "the next run goes on with it")
    assert (tmp_path / "count").read_text() == "once\n"


def test_a_part_that_took_all_the_time_is_too_slow(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "SPARE_SECONDS", 0.0)
    plan = [shell("slow", "sleep 60", minutes=0.001), shell("other", "true")]
    done = run_all(plan, tmp_path, Clock(0.02))
    assert [r.status for r in done] == ["too slow", "not begun"]


def test_what_was_run_before_is_not_run_again_but_for_what_sees_for_itself(tmp_path):
    plan = [
        shell("build", "echo once >>built", always=True),
        shell("suite", "touch again", needs=["build"]),
        shell("bad", "touch again"),
        shell("bench", "true", needs=["suite"]),
    ]
    done = run_all(plan, tmp_path, done={"build": False, "suite": True, "bad": False})
    assert [r.status for r in done] == ["ok", "done before", "failed before", "ok"]
    assert not (tmp_path / "again").exists()
    assert (tmp_path / "built").exists()


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["ok", "done before"], 0),
        (["ok", "failed before"], 1),
        (["failed", "left out"], 1),
        (["failed", "not begun"], 3),
        (["cut off", "left out"], 3),
    ],
)
def test_the_exit_status_says_whether_to_go_on(tmp_path, monkeypatch, statuses, code):
    went = [Result(f"part {i}", status, 0.0) for i, status in enumerate(statuses)]
    monkeypatch.setattr(running, "run_all", lambda *_: iter(went))
    assert runner.run([], HERE, keeper_of(tmp_path), Clock(None), again=False, only=False) == code


def keeper_of(folder, key="k"):
    keeper = Keeper({"gpu": "NVIDIA H200"}, key, folder / "out", folder / "out/logs")
    keeper.begin()
    return keeper


def test_results_are_kept_after_every_part(tmp_path, capsys):
    keeper = keeper_of(tmp_path)
    figure = {
        "bench": "copy",
        "metric": "in",
        "value": 96.0,
        "unit": "%",
        "target": 95,
        "better": "higher",
    }
    lines = [figure, {**figure, "metric": "out", "value": 90.0}, {**figure, "target": None}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"bench": "co'  # it was cut off there
    (keeper.results / "copy.jsonl").write_text(text)
    went = [Result("copy", "ok", 1.0), Result("map", "failed", 1.0, "exit status 1")]
    for result in went:
        keeper.keep(result)
    kept = json.loads((keeper.results / "run.json").read_text())
    assert kept["machine"]["gpu"] == "NVIDIA H200"
    assert [part["status"] for part in kept["parts"]] == ["ok", "failed"]
    keeper.tell(went)
    out = capsys.readouterr().out
    assert "reached   copy in: 96 %, at least 95" in out
    assert "missed    copy out: 90 %, at least 95" in out


def test_a_later_run_knows_what_went_well_and_keeps_figures(tmp_path):
    keeper = keeper_of(tmp_path)
    for name, status in (("copy", "ok"), ("map", "cut off"), ("cpp", "failed")):
        keeper.keep(Result(name, status, 1.0))
    keeper.keep(Result("copy", "done before", 0.0))
    later = keeper_of(tmp_path)
    assert later.run_before() == {"copy": True, "cpp": False}
    assert keeper_of(tmp_path, "other sources").run_before() == {}
    part = shell("map", "true", figures=later.results / "map.jsonl")
    for text in ("half", "more"):
        part.figures.write_text(text)
        later.make_way(part)
    kept = sorted((later.results / "earlier").iterdir())
    assert [path.read_text() for path in kept] == ["half", "more"]


def test_a_part_is_told_of_ctrl_c_also_where_the_run_is_in_the_background(tmp_path):
    look = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    ignored = f"trap '' INT; exec {sys.executable} {running.GUARD} 0 {sys.executable} -c '{look}'"
    life, ours = os.pipe()
    done = subprocess.run(["sh", "-c", ignored], stdin=life, check=False)
    os.close(life)
    os.close(ours)
    assert done.returncode == 0
