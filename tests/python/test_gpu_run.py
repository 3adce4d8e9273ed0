"""benchmarks/gpu/run: what it asks of a machine, and which parts it has for one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import capacity_gpu
from benchmarks.__main__ import OF_DEVICE
from benchmarks.gpu import needs, parts, runner, running

HERE = needs.environment(runner.ROOT, sys.executable, None)
NOTHING = needs.Found([], "NVIDIA H200", {"gpu": "NVIDIA H200", "driver": "580.1"})


def wishes(**changes):
    return parts.Wishes(
        **{"python": "py", "quick": False, "tests": True, "ssd_path": Path("/d")} | changes
    )


def test_a_dry_run_prints_the_plan_and_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(needs, "look", lambda *_: needs.Found(["a driver"], "", {}))
    monkeypatch.setattr(running, "run_all", None)
    assert runner.main(["--dry-run", "--python", "/py"]) == 0
    out, err = capsys.readouterr()
    assert "STRATA_TEST_DEVICE=cuda meson test -C build/release" in out
    assert re.search(r"/py -m pytest .*--device cuda tests/python/test_golden.py", out)
    assert "-Dcuda=enabled" in out
    assert err == "missing: a driver\n"


def test_where_something_is_missing_all_of_it_is_said_and_nothing_is_built(monkeypatch, capsys):
    monkeypatch.setattr(needs, "look", lambda *_: needs.Found(["a driver", "nvcc"], "", {}))
    monkeypatch.setattr(running, "run_all", None)
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


def test_an_interpreter_that_lacks_packages_is_told_which(monkeypatch):
    said = {
        "version": [3, 10],
        "missing": ["torch", "pytest_timeout"],
        "header": False,
        "torch": "",
    }
    monkeypatch.setattr(needs, "has_header", lambda *_: False)
    sentences = " | ".join(needs.python_needs("py", said, HERE))
    for part in ("Python 3.11 to 3.14: py is 3.10", "headers of py", "pytest-timeout", "torch"):
        assert part in sentences
    assert list(needs.python_needs("py", {}, HERE)) == [
        "a Python that runs: py does not; --python names another one"
    ]
    good = {"version": [3, 12], "missing": [], "header": True, "torch": "2.9", "gpu": "H200"}
    assert list(needs.python_needs("py", good, HERE)) == []


def test_the_interpreter_is_asked_once_for_all_of_it():
    said = needs.interpreter(sys.executable, ["json", "no_such_package", "torch"], HERE)
    assert said["missing"] == ["no_such_package"]
    assert said["torch"]
    assert said["version"] == list(sys.version_info[:2])
    assert needs.interpreter("/no/such/python", [], HERE) == {}


@pytest.mark.parametrize(("version", "wrong"), [((12, 3), 1), ((12, 4), 0), ((13, 0), 0), ((), 1)])
def test_an_old_compiler_is_refused(version, wrong):
    assert len(list(needs.nvcc_needs(version))) == wrong


@pytest.mark.parametrize(
    ("driver", "cuda", "wrong"),
    [
        ("535.1", (13, 0), "580 or newer, for CUDA 13.0"),
        ("580.1", (13, 0), ""),
        ("535.1", (12, 4), ""),
    ],
)
def test_a_driver_that_is_too_old_is_refused(driver, cuda, wrong):
    said = " ".join(needs.driver_needs(driver, cuda))
    assert wrong in said
    assert bool(wrong) == bool(said)


def test_too_little_disk_and_memory_are_refused_in_a_line_each(tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "DISK_MIN", 1 << 60)
    monkeypatch.setattr(needs, "MEMORY_MIN", 1 << 60)
    disk, memory = needs.room(tmp_path)
    assert f"of disk at {tmp_path}" in disk
    assert "of memory to build" in memory


def test_a_header_without_its_library_is_missing_too(monkeypatch):
    monkeypatch.setattr(needs, "has_header", lambda *_: True)
    assert not needs.has_library("no_such_library", HERE)
    assert needs.has_library("pthread", HERE)
    monkeypatch.setattr(needs, "has_library", lambda name, env: name != "aio")
    (sentence,) = (line for line in needs.tool_needs(runner.ROOT, HERE) if "aio" in line)
    assert sentence.startswith("libaio (Debian's libaio-dev); a bundle has it")


@pytest.mark.parametrize("asked", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}])
def test_results_say_which_variables_figures_depend_on(monkeypatch, asked):
    for name in needs.TOLD:
        monkeypatch.delenv(name, raising=False)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    env = needs.environment(runner.ROOT, sys.executable, None)
    monkeypatch.setattr(needs, "interpreter", lambda *_: {})
    for name_of in ("has_header", "has_library"):
        monkeypatch.setattr(needs, name_of, lambda *_: True)
    facts = needs.look(runner.ROOT, "py", env, needs.Wanted(tests=False)).facts
    assert facts["environment"] == asked


def test_every_bench_of_a_device_is_run():
    assert set(OF_DEVICE) == set(parts.LIMITS) == set(parts.MINUTES)
    plan = parts.all_parts(runner.ROOT, wishes(), Path("/results"))
    names = [part.name for part in plan]
    assert len(names) == len(set(names))
    assert [name for name in names if name in OF_DEVICE] == list(parts.MINUTES)
    for part in plan:
        assert set(part.needs) <= set(names[: names.index(part.name)])
    assert not [part for part in plan if part.group == "bench" and "--quick" in part.steps[0]]
    short = parts.all_parts(runner.ROOT, wishes(quick=True, tests=False), Path("/results"))
    assert {part.group or part.name for part in short} == {"build", "bench"}
    assert all("--quick" in part.steps[0] for part in short if part.group == "bench")


def test_a_build_folder_is_made_anew_unless_it_is_complete_and_for_the_same(tmp_path):
    def made_anew(**changes):
        return bool(parts.configure_steps(tmp_path, wishes(**changes)))

    remove, setup, keep = parts.configure_steps(tmp_path, wishes())
    assert remove == ["rm", "-rf", parts.BUILD]
    assert setup[:3] == ["meson", "setup", parts.BUILD]
    folder = tmp_path / parts.BUILD
    folder.mkdir(parents=True)
    subprocess.run(keep, cwd=tmp_path, check=True)
    assert made_anew()  # Meson was ended before it had written what ninja reads
    (folder / "build.ninja").touch()
    assert not made_anew()
    assert made_anew(python="another")
    assert made_anew(environment="3.13")
    assert made_anew(cuda_library="/bundle/libstrata_cuda.so")


def test_parts_are_chosen_by_name_and_group_and_bring_what_they_need():
    plan = parts.all_parts(runner.ROOT, wishes(), Path("/results"))
    assert [p.name for p in parts.choose(plan, "copy, vs-torch")] == ["build", "copy", "vs-torch"]
    chosen = [p.name for p in parts.choose(plan, "cpp")]
    assert chosen == ["build", "build-tests", "cpp-device", "cpp-host"]
    assert "python-golden" in [p.name for p in parts.choose(plan, "python")]
    with pytest.raises(ValueError, match="no part 'copi'; did you mean 'copy'"):
        parts.choose(plan, "copi")


def test_on_a_host_all_suites_run_in_equal_parts_and_benches_of_a_gpu_are_quick():
    plan = parts.all_parts(runner.ROOT, wishes(device="host"), Path("/results"))
    suites = [part for part in plan if part.group == "python"]
    files = [w for p in suites for w in p.steps[0] if w.startswith("tests/python/")]
    here = {f"tests/python/{p.name}" for p in Path(__file__).parent.glob("test_*.py")}
    assert len(files) == len(here)
    assert set(files) == here
    quick = {p.name for p in plan if p.group == "bench" and "--quick" in p.steps[0]}
    assert quick == set(parts.NEEDS_GPU)
    assert not any("STRATA_TEST_DEVICE" in part.variables for part in plan)


def test_no_part_needs_more_than_a_command_of_nine_minutes():
    for device in ("cuda", "host"):
        for part in parts.all_parts(runner.ROOT, wishes(device=device), Path("/results")):
            assert part.minutes <= 8, part.name


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), ("", "gpu")],
)
def test_results_lie_under_the_name_of_the_gpu(gpu, folder):
    assert runner.slug(gpu) == folder


def test_a_search_that_was_cut_off_goes_on(tmp_path):
    path, tried = tmp_path / "attempts", []

    def attempt(layers):
        tried.append(layers)
        return layers < 80

    shape = {"hidden": 256, "seed": 0}
    first = capacity_gpu.Attempts(path, shape)
    assert [first.ask(n, attempt) for n in (97, 79)] == [False, True]
    with path.open("a") as file:
        file.write('{"shape": ')  # the run was ended there
    again = capacity_gpu.Attempts(path, shape)
    assert [again.ask(n, attempt) for n in (97, 79, 88)] == [False, True, False]
    assert tried == [97, 79, 88]
    assert capacity_gpu.Attempts(path, {**shape, "hidden": 512}).ask(97, lambda n: True)
