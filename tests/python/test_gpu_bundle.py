"""Bundles for machines without network: what is refused, and that one is used by paths alone. The
packages here are made up; benchmarks/gpu/offline shows a whole run from a real one.
"""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import bundle, bundled, needs, runner
from benchmarks.gpu.bundled import Bundle, BundleError

HERE = needs.environment(runner.ROOT, sys.executable, None)
VERSION = list(sys.version_info[:2])
MANIFEST = {
    "format": bundled.FORMAT,
    "python": ".".join(map(str, VERSION)),
    "machine": bundled.machine()[0],
    "glibc": "2.17",
    "commit": "abc",
    "tree": "123",
    "cuda": None,
}


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def finish(folder, **changes):
    (folder / bundled.MANIFEST).unlink(missing_ok=True)
    files = {name: bundled.sha256(folder / name) for name in bundle.files_of(folder)}
    write(folder / bundled.MANIFEST, json.dumps({**MANIFEST, "files": files, **changes}))
    return folder


@pytest.fixture
def made(tmp_path):
    folder = tmp_path / "bundle"
    usr = folder / "system/usr"
    write(usr / "include/strata_made_up.h", "#define MADE_UP 7\n")
    write(usr / "lib/x86_64-linux-gnu/pkgconfig/made-up.pc", "prefix=${pcfiledir}/../../..\n")
    write(folder / "sources/jemalloc-5.3.0.tar.bz2", "packed")
    wheel = folder / "wheels/made_up-1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("made_up.py", "def main():\n    print('made up')\n")
        points = "[console_scripts]\nmade-up = made_up:main\n"
        packed.writestr("made_up-1.2.dist-info/entry_points.txt", points)
        packed.writestr("made_up-1.2.dist-info/METADATA", "Name: made-up\nVersion: 1.2\n")
        packed.writestr("made_up-1.2.data/scripts/program", "#!/bin/sh\necho program\n")
    return folder


def test_headers_libraries_and_tools_are_reached_by_paths(made):
    env = bundled.system_paths(finish(made), {**HERE, "LIBRARY_PATH": "/before"})
    assert needs.has_header("strata_made_up.h", env)
    assert not needs.has_header("strata_made_up.h", HERE)
    libraries = str(made / "system/usr/lib/x86_64-linux-gnu")
    assert env["LIBRARY_PATH"] == f"{libraries}:/before"
    assert env["LD_LIBRARY_PATH"].split(":")[0] == libraries
    assert f"{libraries}/pkgconfig" in env["PKG_CONFIG_PATH"].split(":")
    assert env["PATH"].split(":")[-1] == str(made / "system/usr/bin")  # the system's come first
    assert env["MESON_PACKAGE_CACHE_DIR"] == str(made / "sources")


def test_only_packages_that_the_interpreter_lacks_are_used(made, tmp_path):
    source = Bundle(finish(made))
    have = {"made-up": "1.0", "Python.h": ""}
    env = source.python_paths(HERE, sys.executable, have, tmp_path / "work")
    assert env == HERE
    env = source.python_paths(HERE, sys.executable, {"Python.h": ""}, tmp_path / "work")
    for command, said in (("made-up", "made up\n"), ("program", "program\n")):
        done = subprocess.run([command], env=env, capture_output=True, text=True, check=True)
        assert done.stdout == said
    assert not list((tmp_path / "work").glob("*.part*"))


def test_packages_that_are_too_old_and_missing_headers_are_taken_from_the_bundle(
    made, tmp_path, monkeypatch
):
    monkeypatch.setitem(bundled.OLDEST, "made-up", (1, 1))
    write(made / "headers/Python.h")
    source = Bundle(finish(made))
    env = source.python_paths(HERE, sys.executable, {"made-up": "1.0.9"}, tmp_path / "work")
    assert "made_up" in env["PYTHONPATH"].split(":")[0]
    assert env["CPLUS_INCLUDE_PATH"].split(":")[0] == str(made / "headers")


def test_a_package_that_is_half_unpacked_is_not_taken_for_good(made, tmp_path, monkeypatch):
    (wheel,) = (finish(made) / "wheels").iterdir()
    folder = tmp_path / "work/made-up"

    def full(self, path):
        write(Path(path) / "made_up.py", "half")
        raise OSError("no space left on device")

    with monkeypatch.context() as context:
        context.setattr(zipfile.ZipFile, "extractall", full)
        with pytest.raises(OSError, match="no space"):
            bundled.unpack(wheel, sys.executable, folder)
    assert not folder.exists()
    assert "main" in (bundled.unpack(wheel, sys.executable, folder) / "made_up.py").read_text()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: (f / "bundle.json").unlink(), "is no complete bundle"),
        (lambda f: (f / "bundle.json").write_text("{"), "is no complete bundle"),
        (lambda f: finish(f, format=0), "of another version of this script"),
        (lambda f: (f / "sources/jemalloc-5.3.0.tar.bz2").unlink(), "lacks sources/jemalloc"),
        (lambda f: write(f / "sources/jemalloc-5.3.0.tar.bz2", "x"), "is damaged"),
    ],
)
def test_a_bundle_that_is_not_whole_is_refused(made, change, says, capsys):
    change(finish(made))
    assert runner.main(["--from", str(made), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("missing: ")
    assert says in line
    assert "--bundle" in line


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"python": "3.10"}, "this one is for 3.10"),
        ({"machine": "riscv64"}, "this one is for riscv64"),
        ({"glibc": "9.9"}, "this one needs 9.9"),
    ],
)
def test_a_bundle_for_another_machine_is_refused_in_a_line(made, change, says, capsys):
    assert list(Bundle(finish(made)).misfits(VERSION, *bundled.machine())) == []
    (line,) = Bundle(finish(made, **change)).misfits(VERSION, *bundled.machine())
    assert says in line


def test_a_library_for_gpus_is_used_with_its_own_sources_and_on_gpus_that_it_is_for(made):
    digest = bundled.sources_digest(runner.ROOT)
    cuda = {"version": "13.0", "sources": digest, "architectures": [90]}
    source = Bundle(finish(made, cuda=cuda))
    for capability in ([], [9, 0], [10, 0]):
        assert source.cuda_library(digest, capability) == str(made / "cuda/libstrata_cuda.so")
    assert source.cuda_library(digest, [8, 9]) == ""  # PTX is for newer ones
    assert source.cuda_library("other", [9, 0]) == ""
    assert Bundle(finish(made)).cuda_library(digest, [9, 0]) == ""


def test_what_is_unpacked_can_be_moved(tmp_path):
    usr = tmp_path / "usr"
    write(usr / "lib/x/pkgconfig/a.pc", "prefix=/usr\nlibdir=/usr/lib/x\n")
    write(usr / "bin/pkgconf")
    (usr / "bin/pkg-config").symlink_to("/usr/bin/pkgconf")
    write(usr / "lib/x/liba.so.1", "library")
    (usr / "lib/x/liba.so").symlink_to("/usr/lib/x/liba.so.1")
    bundle.make_movable(usr)
    text = (usr / "lib/x/pkgconfig/a.pc").read_text()
    assert text == "prefix=${pcfiledir}/../../..\nlibdir=${pcfiledir}/../../../lib/x\n"
    assert os.readlink(usr / "lib/x/liba.so") == "liba.so.1"
    assert os.readlink(usr / "bin/pkg-config") == "pkgconf"


def test_the_oldest_c_library_is_read_off_the_files(tmp_path):
    write(tmp_path / "text", "GLIBC_9.9")
    (tmp_path / "lib.so").write_bytes(b"\x7fELF..GLIBC_2.4..GLIBC_2.34..GLIBC_2.5")
    assert bundle.glibc_of(tmp_path) == "2.34"


def test_a_bundle_that_cannot_be_made_leaves_the_earlier_one(made, monkeypatch, capsys):
    finish(made)

    def no_network(*_):
        raise BundleError("lists of packages cannot be fetched")

    monkeypatch.setattr(bundle, "take_packages", no_network)
    assert runner.main(["--bundle", str(made)]) == 2
    assert capsys.readouterr().err == "missing: lists of packages cannot be fetched\n"
    Bundle(made)  # is whole
    assert [path.name for path in made.parent.iterdir()] == ["bundle"]


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    write(tmp_path / "thesis.txt")
    assert runner.main(["--bundle", str(tmp_path)]) == 2
    assert "holds something else than a bundle" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()


def test_a_damaged_archive_of_jemalloc_is_refused(tmp_path):
    wrap = runner.ROOT / "subprojects/jemalloc.wrap"
    write(tmp_path / "root/subprojects/jemalloc.wrap", wrap.read_text())
    archive = tmp_path / "root/subprojects/packagecache/jemalloc-5.3.0.tar.bz2"
    write(archive, "half of it")
    part = tmp_path / "part"
    part.mkdir()
    with pytest.raises(BundleError, match=r"jemalloc-5.3.0.tar.bz2, is not to be had"):
        bundle.take_jemalloc(part, tmp_path, [], tmp_path / "root", print)
    assert hashlib.sha256(b"half of it").hexdigest() == bundled.sha256(archive)


def test_a_library_is_of_every_source_in_every_folder(tmp_path: Path) -> None:
    source = tmp_path / "memory/cuda/device.cpp"
    source.parent.mkdir(parents=True)
    source.write_text("// one")
    before = bundled.sources_digest(tmp_path)
    source.write_text("// two")
    assert bundled.sources_digest(tmp_path) != before
