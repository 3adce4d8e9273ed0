"""The command line itself: how soon it answers, what it imports, and how it ends."""

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import strata
from strata._cli import main as cli
from strata._cli.finetune.options import finetune_parser
from strata._cli.options import (
    Parser,
    doctor_parser,
    estimate_parser,
    io_tune_parser,
    plan_parser,
    report_parser,
    snapshots_parser,
)
from strata._errors import nearest_option

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
COMMAND = [sys.executable, "-m", "strata"]
HEAVY = ("torch", "numpy", "transformers", "matplotlib", "tqdm")


def refused(folder: Path) -> dict[str, str]:
    """An environment in which every heavy library fails to be imported."""
    for name in HEAVY:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')\n")
    return ENVIRONMENT | {"PYTHONPATH": f"{folder}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--help"], 0, "strata COMMAND --help"),
        (["--version"], 0, f"strata {strata.__version__}"),
        (["estimat"], 2, "did you mean 'estimate'?"),
        *(([name, "--help"], 0, f"usage: strata {name}") for name in cli.COMMANDS),
        (["finetune", "--device-memroy=1GiB"], 2, "did you mean '--device-memory'?"),
        (["estimate", "--memory", "device=96,host=1GiB"], 2, "'96' has no unit: write '96GiB'"),
        (["plan", "--ssd-read-speed", "6"], 2, "'6' is not a speed: write '6GB/s'"),
        (["plan", "--update-speed", "2"], 2, "'2' has no unit: write '2G'"),
        (["io-tune", "--ssd-path", "/nowhere"], 2, "/nowhere is not a folder"),
        (["report", "--htm=x", "y"], 2, "did you mean '--html'?"),
        (["finetune", "--model=x", "--data=x", "--split=1"], 2, "split must be at least 2"),
    ],
)
def test_help_and_wrong_calls_are_answered_without_heavy_imports(
    tmp_path: Path, arguments: list[str], status: int, says: str
) -> None:
    done = subprocess.run(
        [*COMMAND, *arguments], env=refused(tmp_path), capture_output=True, text=True
    )
    assert says in done.stdout + done.stderr
    assert done.returncode == status


def test_beginnings_of_options_are_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    told = ["estimate", "--model", "llama-10m", "--memory", "device=1GiB,host=1GiB"]
    with pytest.raises(SystemExit):
        cli.main([*told, "--update-spee", "2G"])
    assert "did you mean '--update-speed'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*told, "--update", "in-backward"])
    assert "did you mean 'in_backward'?" in capsys.readouterr().err


def test_public_names_are_there_and_no_module_takes_their_place() -> None:
    code = """
import sys, strata
assert not {"torch", "numpy"} & set(sys.modules)
from strata import LockFree
assert "torch" not in sys.modules and set(strata.__all__) <= set(dir(strata))
import strata.nn
for name in strata.__all__:
    public = getattr(strata, name)
    modules = ("checkpoint", "integrations", "nn", "optim", "__version__")
    assert name in modules or callable(public), name
try:
    strata.warp
except AttributeError as error:
    assert str(error) == "module 'strata' has no attribute 'warp'"
"""
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)
    folder = Path(strata.__file__).parent
    public = [path for path in folder.glob("[!_]*") if path.suffix in ("", ".py")]
    assert {path.stem for path in public} == {"checkpoint", "integrations", "nn", "optim"}


def test_the_version_is_the_one_that_was_built() -> None:
    root = Path(__file__).parents[2]
    assert f"version: '{strata.__version__}'" in (root / "meson.build").read_text()
    assert 'dynamic = ["version"]' in (root / "pyproject.toml").read_text()


def test_no_requirement_is_listed_twice() -> None:
    root = Path(__file__).parents[2]
    lines = (root / "requirements.txt").read_text().splitlines()
    names = [line.partition("==")[0] for line in lines if line and line[0] != "#"]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("arguments", [["--help"], ["finetune", "--help"]])
def test_a_reader_that_goes_away_is_no_error(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, *arguments], env=ENVIRONMENT, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode in (0, cli.BROKEN_PIPE)  # argparse says nothing of it by itself


def test_ctrl_c_while_libraries_are_imported_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import time\n"
        "print('importing', flush=True)\n"
        "try:\n    time.sleep(60)\n"
        "except BaseException as error:\n    raise ImportError('half a library') from error\n"
    )
    path = f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
    told = ["estimate", "--model", "llama-10m", "--memory", "device=1GiB,host=1GiB"]
    child = subprocess.Popen(
        [*COMMAND, *told],
        env=ENVIRONMENT | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "importing\n"
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=300)
    assert said == ""
    assert child.returncode == -signal.SIGINT


def test_signals_are_as_they_were_after_an_import() -> None:
    def handler(*_: object) -> None: ...

    before = signal.getsignal(signal.SIGINT)
    with cli.importing():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before
    try:
        signal.signal(signal.SIGINT, handler)
        with cli.importing():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def parsers() -> Iterator[Parser]:
    for make in (finetune_parser, plan_parser, estimate_parser, io_tune_parser):
        yield make(None)


@pytest.mark.parametrize("value", ["abc", "-1", "nan", "\u0661"])
def test_no_refusal_shows_the_name_of_a_function(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [(p, a.option_strings[0]) for p in parsers() for a in p._actions if a.type is not None]
    assert len(typed) > 20
    for parser, option in typed:
        with contextlib.suppress(SystemExit):
            parser.parse_args([f"{option}={value}"])
        said = capsys.readouterr().err
        assert not re.search(r"invalid \w+ value", said), said


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_the_planner_is_asked_for_what_wrap_would_do(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    what = ["--trace=x"] if command == "plan" else ["--model=llama-10m"]
    told = [command, *what, "--memory=device=1GiB,host=1GiB"]
    for more, says in (
        (["--split=1"], "split must be at least 2, or left out, not 1"),
        (["--split=2", "--activations=keep"], "activations='keep' rules out"),
        (["--split=2", "--activations=swap"], "activations='swap' rules out"),
    ):
        with pytest.raises(SystemExit) as refused:
            cli.main([*told, *more])
        assert refused.value.code == 2
        assert says in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ["estimate", "--model", str(tmp_path), "--memory=device=1GiB,host=1GiB"]
    assert cli.main(told) == 1
    said = capsys.readouterr().err
    assert said == f"strata: {tmp_path} has no config.json: it is not a save_pretrained folder\n"
    told[2] = "gigantic"
    assert cli.main(told) == 1
    assert capsys.readouterr().err.count("llama-1b") == 1


CLI = Path(cli.__file__).parent
# Files of the command line, and the commands that may say what stands in them.
SAID_BY = {
    "finetune/": ("finetune",),
    "models.py": ("finetune", "estimate"),
    "lora.py": ("finetune", "estimate"),
    "planner.py": ("plan", "estimate"),
    "estimate.py": ("estimate",),
    "sharing.py": ("plan", "estimate"),
    "io_tune.py": ("io-tune",),
    "snapshots.py": ("snapshots",),
    "doctor/": ("doctor",),
    "../_config/choices.py": ("finetune", "estimate"),
}
OPTION = r"(?<![\w-])--[a-z]+(?:-[a-z]+)*(?![-\w\0])"
ELSEWHERE = {
    "--ulimit",  # of a container
    "--nproc-per-node",  # of torchrun
    "--help",
    "--trust-remote-code",  # models.py asks whether the command has it
    "--vocabulary",  # which only finetune passes on
}


def options_of(command: str) -> set[str]:
    """All that a command takes."""
    makers = {
        "finetune": finetune_parser,
        "plan": plan_parser, "estimate": estimate_parser, "io-tune": io_tune_parser,
        "doctor": doctor_parser, "snapshots": snapshots_parser,
        "report": report_parser,
    }  # fmt: skip
    parsers = [makers[command](None)]
    found: set[str] = set()
    while parsers:
        for action in parsers.pop()._actions:
            found |= set(action.option_strings)
            if isinstance(action.choices, dict):
                parsers += action.choices.values()
    return found


def words_of(file: Path) -> Iterator[str]:
    """The texts of a file that are no docstrings."""
    tree = ast.parse(file.read_text())
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
            yield "".join(map(str, parts))
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        ):
            yield node.value


def test_no_message_names_an_option_that_its_command_has_not() -> None:
    seen = 0
    for name, commands in SAID_BY.items():
        place = CLI / name
        for file in sorted(place.glob("*.py")) if place.is_dir() else [place]:
            for text in words_of(file):
                told = re.search(r"strata ([a-z-]+) ", text)
                of = (told[1],) if told and told[1] in cli.COMMANDS else commands
                for option in set(re.findall(OPTION, text)) - ELSEWHERE:
                    seen += 1
                    for command in of:
                        assert option in options_of(command), f"{command}: {text}"
    assert seen > 20


def test_an_option_that_is_not_near_is_not_offered() -> None:
    options = ["--workers", "--batch", "--device-memory"]
    assert nearest_option("--tokens", options, "strata x").endswith("strata x --help lists all")
    assert nearest_option("--batch-size", options, "x").endswith("did you mean '--batch'?")
    assert nearest_option("--device-memroy", options, "x").endswith("'--device-memory'?")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--lora", "r=0"], "--lora: r: '0' is not a positive whole number"),
        (["--lora", "r=4,r=5"], "gives r twice"),
        (["--lora", "r=4,alpha=0"], "switches the adapters off"),
        (["--lora", "r=4,dropout=1"], "is not a share below 1"),
        (["--lora", "r=4,targets=a+"], "is not a list such as"),
        (["--frozen", "nf4"], "give --lora r=8 as well"),
        (["--snapshots", "2"], "give ssd= in --memory as well"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_counted(
    more: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "strata._cli.estimate", None)
    with pytest.raises(SystemExit):
        cli.main(["estimate", "--model=llama-10m", "--memory=device=1GiB,host=1GiB", *more])
    assert says in capsys.readouterr().err


def test_a_configuration_that_no_model_can_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    told = ["estimate", f"--model={file}", "--memory=device=1GiB,host=1GiB"]
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 257}
    for wrong in ({"num_hidden_layers": -2}, {"num_hidden_layers": 0}, {"vocab_size": -1}):
        file.write_text(json.dumps({"model_type": "llama"} | sizes | wrong))
        assert cli.main(told) == 1
        ((name, value),) = wrong.items()
        assert f"{name} is {value}, and has to be 1 at least" in capsys.readouterr().err
    file.write_text(json.dumps({"model_type": "mystery", "auto_map": {"AutoConfig": "c.C"}}))
    assert cli.main(told) == 1
    assert "--trust-remote-code" not in capsys.readouterr().err


def test_a_report_is_not_replaced_by_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    file.write_text("{}")
    for more in (["--html", file], ["--perfetto", file], ["--html", "x", "--perfetto", "x"]):
        with pytest.raises(SystemExit):
            cli.main(["report", str(file), *map(str, more)])
        assert "would take the place of" in capsys.readouterr().err
    assert file.read_text() == "{}"
