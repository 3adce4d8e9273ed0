"""torch.compile beside the hooks: the same bits, with a compiler that changes none."""

from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import adamw, build, tight
from stacks import Blocks, steps


@pytest.fixture(autouse=True)
def forgetful() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("core", ["real"], indirect=True)
@pytest.mark.parametrize("planned", [False, True])
def test_a_compiled_model_trains_alike(core: ModuleType, planned: bool) -> None:
    compiled = 0

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    losses = []
    for backend in (None, compiler):
        model = build(lambda: Blocks(count=2))
        if planned:  # five steps: recorded, timed, planned, measured again
            memory = {"device": "8MiB", "host": "64MiB"}
            model, optimizer = strata.wrap(model, adamw(model), memory=memory)
        else:
            model, optimizer = tight(model)
        run = model if backend is None else torch.compile(model, backend=backend)
        losses.append(steps(run, optimizer, 5))
        strata.unwrap(model)
    assert losses[0] == losses[1]
    assert compiled > 0
