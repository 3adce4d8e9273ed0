"""torch.compile beside the hooks: the same bits, with a compiler that changes none."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import adamw, build, tight
from stacks import Blocks, steps
from strata._torch_compat import captures_graphs, compiler, graph_task
from torch import nn


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


class Dropped(Blocks):
    """A stack whose blocks draw random numbers."""

    def __init__(self) -> None:
        super().__init__(count=2)
        for block in self.blocks:
            block.append(nn.Dropout(0.25))


@dataclass
class Counting:
    """A compiler that changes nothing, and counts where its graphs run."""

    forward: int = 0
    backward: int = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        def run(*values: Any) -> Any:
            if graph_task() == -1:
                self.forward += 1
            else:
                self.backward += 1
            return graph.forward(*values)

        return run


def trained(
    backend: Any, activations: Any, make: Callable[[], nn.Module] = Dropped, **options: Any
) -> list[float]:
    """Losses of seven steps, most of which follow a plan."""
    torch._dynamo.reset()
    model = build(make)
    memory = {"device": "8MiB", "host": "64MiB"}
    model, optimizer = strata.wrap(
        model, adamw(model), memory=memory, activations=activations, **options
    )
    run = model if backend is None else torch.compile(model, backend=backend)
    losses = steps(run, optimizer, 7)
    strata.unwrap(model)
    return losses


@pytest.mark.parametrize("core", ["real"], indirect=True)
@pytest.mark.parametrize("split", [None, 3])
def test_recomputed_units_run_compiled_both_times(core: ModuleType, split: int | None) -> None:
    counting = Counting()
    compiled = trained(counting, "recompute", split=split)
    assert compiled == trained(None, "recompute", split=split)
    units, steps_behind_the_recorded_one = 4, 4
    assert counting.backward >= units * (split or 1) * steps_behind_the_recorded_one
    assert counting.forward >= counting.backward


class Masked(nn.Module):
    """Its output tells which elements it has dropped, and so what its gradient has to be."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(48) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * self.weight, 0.5).tanh()


@pytest.mark.parametrize("core", ["real"], indirect=True)
@pytest.mark.thorough
def test_fused_units_draw_the_same_numbers_again(core: ModuleType) -> None:
    torch._dynamo.reset()
    model = build(lambda: nn.Sequential(nn.Linear(48, 48), Masked()))
    memory = {"device": "8MiB", "host": "64MiB"}
    model, optimizer = strata.wrap(model, adamw(model), memory=memory, activations="recompute")
    run = torch.compile(model, backend="inductor")
    for _ in range(4):
        given: list[torch.Tensor] = []
        handle = model[0].register_forward_hook(lambda m, args, out, g=given: g.append(out))
        y = run(torch.randn(8, 48))
        handle.remove()
        y.sum().backward()
        y, x = y.detach(), given[0].detach()
        wanted = torch.where(y != 0, (1 - y * y) * 2 * x, torch.zeros(())).sum(0)
        torch.testing.assert_close(strata.gather_grad(model[1].weight), wanted)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("core", ["real"], indirect=True)
def test_recomputed_units_give_what_kept_ones_give_when_fused(core: ModuleType) -> None:
    kept = trained("inductor", "keep", make=Blocks)
    assert trained("inductor", "recompute", make=Blocks) == pytest.approx(kept, rel=1e-6)


class Numbered(nn.Module):
    """A block with a number of its own, which is given one tensor several times."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number
        self.attend = nn.MultiheadAttention(48, 2)
        self.mix = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor, y: torch.Tensor, more: Any) -> torch.Tensor:
        x = x + self.number * self.attend(x, x, more[0], need_weights=False)[0]
        return x * self.mix(y).sigmoid()


def numbered() -> Blocks:
    def run(self: Blocks, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, x, more=[x])
        return x

    model = Blocks(count=1)
    model.blocks = nn.ModuleList(Numbered(0.1 * i) for i in range(3))
    model.run = run
    return model


@pytest.mark.parametrize("core", ["real"], indirect=True)
@pytest.mark.parametrize("backend", [None, "aot_eager_decomp_partition"])
def test_both_runs_see_the_same_objects_and_run_the_same_graph(
    core: ModuleType, backend: str | None
) -> None:
    expected = trained(None, "keep", make=numbered)
    assert trained(backend, "recompute", make=numbered) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("core", ["real"], indirect=True)
@pytest.mark.parametrize("asked", [{"mode": "reduce-overhead"}, {"backend": "cudagraphs"}, {}])
def test_compilers_that_make_cuda_graphs_are_told_from_others(
    core: ModuleType, asked: dict[str, str]
) -> None:
    found = []

    @torch.compiler.disable(recursive=False)
    def look() -> None:
        found.append(compiler())

    def run(x: torch.Tensor) -> torch.Tensor:
        look()
        return x + 1

    torch.compile(run, **asked)(torch.ones(3))  # type: ignore[call-overload]
    assert captures_graphs(found[0]) == bool(asked)


@pytest.mark.parametrize("core", ["real"], indirect=True)
def test_recomputed_units_stay_out_of_cuda_graphs(
    core: ModuleType,
) -> None:
    counting = Counting()
    counting.__name__ = "cudagraphs"  # as torch's own backend is called
    assert trained(counting, "recompute") == trained(None, "recompute")
    assert counting.backward == 0
