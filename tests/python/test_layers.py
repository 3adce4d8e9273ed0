"""The project obeys tests/layers.py and tests/mentions.py, and both see what is wrong."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


layers, mentions = _load("layers"), _load("mentions")


def test_includes_obey_the_layers():
    assert list(layers.include_breaches(ROOT)) == []


def test_files_and_functions_are_short():
    assert list(layers.size_breaches(ROOT)) == []


@pytest.mark.parametrize(
    ("path", "text", "breach"),
    [
        ("offload/a.hpp", '#include "optimizers/rule.hpp"\n', "offload may not know optimizers"),
        ("optimizers/a.hpp", '#include "offload/store.hpp"\n', "optimizers may not know offload"),
        ("memory/a.hpp", "#  include <engine/step.hpp>\n", "memory may not know engine"),
        ("engine/a.cpp", '#include "../memory/units.hpp"\n', "write it as"),
        ("engine/a.cpp", '#include "step.hpp"\n', "write it as"),
        ("bindings/a.cpp", "#include <torch/extension.h>\n", "libtorch"),
    ],
)
def test_a_wrong_include_is_seen(tmp_path, path, text, breach):
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_text(text)
    (found,) = layers.include_breaches(tmp_path)
    assert breach in found


def test_a_foreign_header_in_two_files_is_seen(tmp_path):
    (tmp_path / "offload").mkdir()
    (tmp_path / "offload" / "a.cpp").write_text("#include <liburing.h>\n")
    assert list(layers.include_breaches(tmp_path)) == []
    (tmp_path / "offload" / "b.cpp").write_text("#include <liburing.h>\n")
    (found,) = layers.include_breaches(tmp_path)
    assert "offload/a.cpp, offload/b.cpp" in found


def test_threads_take_no_signals():
    assert list(layers.thread_breaches(ROOT)) == []


@pytest.mark.parametrize(
    ("path", "text", "breaches"),
    [
        ("engine/a.hpp", "std::jthread pump_;\n", 1),
        ("bindings/a.py", 'threading.Thread(target=run, name="strata-a").start()\n', 1),
        ("memory/a.cpp", "std::thread::id here = std::this_thread::get_id();\n", 0),
        ("tests/a.cpp", "std::thread other(run);\n", 0),
    ],
)
def test_a_thread_that_takes_signals_is_seen(tmp_path, path, text, breaches):
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_text(text)
    assert len(list(layers.thread_breaches(tmp_path))) == breaches


def test_the_rooms_of_the_package_import_in_one_direction():
    assert list(layers.package_breaches(ROOT)) == []


@pytest.mark.parametrize(
    ("files", "breach"),
    [
        ({"_config/a.py": "from .._cli import main\n"}, "_config.a may not import _cli.main"),
        ({"_config/a.py": "def f():\n    from ..nn.b import c\n"}, ""),
        ({"_config/a.py": "if TYPE_CHECKING:\n    from .._cli.main import main\n"}, ""),
        (
            {"nn/a.py": "from .b import c\n", "nn/b.py": "from . import a\n"},
            "a cycle of imports: nn.a → nn.b → nn.a",
        ),
        ({"_new/a.py": "from .._errors import b\n"}, "_new has no place"),
    ],
)
def test_a_wrong_import_is_seen(tmp_path, files, breach):
    for name in ["_cli/main.py", "_errors.py", "nn/b.py", *files]:
        path = tmp_path / "bindings/strata" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, ""))
    found = list(layers.package_breaches(tmp_path))
    assert len(found) == bool(breach)
    assert all(breach in line for line in found)


def test_what_is_too_long_is_seen(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "long.py").write_text("def f():\n" + "    x = 1\n" * 70)
    (tmp_path / "tests" / "long.hpp").write_text("\n" * 401)
    assert sorted(layers.size_breaches(tmp_path)) == [
        "tests/long.hpp: 401 lines, at most 400",
        "tests/long.py: f: 71 lines, at most 70",
    ]


def test_what_comments_name_is_there():
    assert list(mentions.file_breaches(ROOT)) == []
    assert list(mentions.example_breaches(ROOT)) == []


@pytest.mark.parametrize(
    ("path", "text", "breach"),
    [
        ("memory/a.hpp", "// See b.hpp, for a.hpp says nothing.\n", "there is no b.hpp"),
        ("bindings/a.py", '"""Of memory/a.py."""\n', "there is no memory/a.py"),
        ("bindings/a.py", "x = 1  # as in b.py\n", "there is no b.py"),
        ("tests/a.py", '"""Does it.\n\n    x = gone(1)\n"""\n', "no gone"),
        ("tests/a.py", '"""Does it.\n\nx = here(Gone())\n"""\ndef here(): ...\n', "no Gone"),
        ("tests/a.py", '"""Does it.\n\nwith a.gone():\n    ...\n"""\n', "no a.gone"),
    ],
)
def test_what_is_not_there_is_seen(tmp_path, path, text, breach):
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_text(text)
    (found,) = [*mentions.file_breaches(tmp_path), *mentions.example_breaches(tmp_path)]
    assert breach in found
