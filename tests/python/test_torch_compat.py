"""Private names of torch live in one module, which refuses a torch that lacks one."""

import re
from pathlib import Path

import pytest
import torch
from strata import _torch_compat

PACKAGE = Path(_torch_compat.__file__).parent
# torch._C, torch.autograd._x, from torch._x import; not torch.__version__.
PRIVATE = re.compile(r"\btorch(?:\.\w+)*\._(?!_)\w+|from torch[\w.]* import .*\b_\w+")


def test_no_other_module_uses_a_private_name_of_torch():
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        if path != Path(_torch_compat.__file__)
        for line in path.read_text().splitlines()
        for name in PRIVATE.findall(line)
    }
    assert found == set()


def test_a_torch_that_lacks_a_name_is_refused_by_that_name():
    assert _torch_compat._private("_C._current_graph_task_id")() == -1
    with pytest.raises(ImportError, match=rf"needs PyTorch {_torch_compat.OLDEST} or newer") as no:
        _torch_compat._private("_C._no_such_name")
    assert f"{torch.__version__} has no torch._C._no_such_name" in str(no.value)


def test_the_package_asks_for_the_same_version():
    text = (PACKAGE.parents[1] / "pyproject.toml").read_text()
    assert f'"torch>={_torch_compat.OLDEST}"' in text
