"""What nvcc makes of the device's kernels: the operations that are written, correctly rounded.

The bits of a GPU are those of the CPU as long as nothing is fused, flushed or approximated on the
way. Whether it is can be read from the PTX, where there is no GPU to try it on.
"""

import json
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ROOT / "build/release/compile_commands.json"
FLOAT = re.compile(r"^\s+(?:@!?%p\d+ )?((\w+)(?:\.\w+)*\.f(?:32|64))\s", re.MULTILINE)
ARITHMETIC = {"add", "sub", "mul", "fma", "mad", "div", "sqrt", "rsqrt", "rcp", "ex2", "lg2"}

# GradScaling, if there is any.
SCALING = {"mul": 1, "div": 1}
# Of one element, with its moments in float32: as in adam.hpp and its like.
EXPECTED = {
    "AdamMathINS_4Vec1ELb1E": {"mul": 4, "sub": 1, "fma": 4, "sqrt": 1, "div": 1},
    "AdamMathINS_4Vec1ELb0E": {"mul": 3, "sub": 1, "fma": 5, "sqrt": 1, "div": 1},
    "SgdMathINS_4Vec1ELb0E": {"mul": 1, "fma": 2},
    "SgdMathINS_4Vec1ELb1E": {"mul": 2, "fma": 4},
    "LionMathINS_4Vec1E": {"mul": 2, "sub": 1, "fma": 3},
    "AdagradMathINS_4Vec1E": {"mul": 1, "add": 1, "fma": 3, "sqrt": 1, "div": 1},
}


def build_command() -> list[str]:
    """How the library was built; skips where it was not."""
    commands = json.loads(COMMANDS.read_text()) if COMMANDS.exists() else []
    for entry in commands:
        if entry["file"].endswith(".cu"):  # the kernels, or the library as one file
            return shlex.split(entry["command"])
    pytest.skip("strata was built without CUDA")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The PTX of every kernel, by its mangled name."""
    made = tmp_path_factory.mktemp("ptx") / "kernels.ptx"
    words = iter(build_command())
    command = []
    for word in words:
        if word in {"-o", "-MF", "-MQ", "-MT"}:
            next(words)
        elif word not in {"-c", "-MD", "-MMD"} and not word.startswith("-gencode"):
            command.append(word)
    command += ["-arch=compute_80", "-ptx", "-o", str(made)]
    subprocess.run(command, cwd=COMMANDS.parent, check=True, capture_output=True)
    bodies = made.read_text().split(".entry ")[1:]
    return {body.split("(")[0].strip(): body for body in bodies}


def operations(body: str) -> list[tuple[str, str]]:
    """All arithmetic on floats in it: each instruction, and its name without what qualifies it."""
    return [(whole, name) for whole, name in FLOAT.findall(body) if name in ARITHMETIC]


def test_every_operation_rounds_to_nearest(kernels: dict[str, str]) -> None:
    """Without .rn PTX leaves it to the assembler to fuse; .ftz loses subnormal numbers."""
    seen = {operation for body in kernels.values() for operation in operations(body)}
    assert {name for _, name in seen} >= {"add", "mul", "fma", "div", "sqrt"}
    assert [whole for whole, name in seen if whole[:-4] != f"{name}.rn"] == []


@pytest.mark.parametrize("rule", EXPECTED)
def test_an_update_has_the_operations_that_are_written(rule: str, kernels: dict[str, str]) -> None:
    """Per element: nvcc may repeat the whole, but neither fuse nor split."""
    checked = 0
    for kernel, body in kernels.items():
        if rule not in kernel or "MomentDtypeE0E" not in kernel or "FullMaster" in kernel:
            continue
        counts = Counter(name for _, name in operations(body))
        times = counts["fma"] // EXPECTED[rule]["fma"]
        assert times > 0
        expected = Counter(EXPECTED[rule]) + Counter(SCALING)
        assert counts == {name: times * count for name, count in expected.items()}, kernel
        checked += 1
    assert checked == 3  # float32, and bfloat16 with either gradient
