"""CUDA graphs: what is refused, and what of them is handled with care.

On the host, doubles stand for the driver's answer and for memory of a graph, which is written again
while gradients are on their way. With --device cuda torch captures for itself.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import fake_core
import pytest
import strata
import strata._activations.swapping
import strata._hooks.land_hook
import strata._runtime.streams
import strata._runtime.wrapped as wrapped_module
import torch
from small_models import adamw, assert_same, batch, build, llama, tight, train
from stacks import Blocks, steps
from strata._runtime.lander import Lander
from strata._runtime.wrapped import wrapped
from torch import nn

HOST = torch.device("cpu")


class Capture:
    """Whether the stream that is current is captured, as the driver would say."""

    def __init__(self) -> None:
        self.on = False

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *error: Any) -> None:
        self.on = False


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    state = Capture()
    for module in (strata._runtime.streams, strata._activations.swapping):
        monkeypatch.setattr(module, "capturing", lambda device: state.on)
    return state


# Refused ------------------------------------------------------------------------------------------

ENTRANCES: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "model": (lambda model, x: model(x), "around the model"),
    "unit": (lambda model, x: model.blocks[0](x), r"around blocks\.0"),
    "parameter": (lambda model, x: model.head.weight.sum(), "around what strata does"),
    "write": (lambda model, x: model.head.weight.data.mul_(2.0), "around what strata does"),
}


@pytest.mark.host_only
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_capture_around_a_unit_is_refused_before_anything_happens(
    core: ModuleType, capture: Capture, entrance: str
) -> None:
    plain = build(Blocks)
    expected = steps(plain, adamw(plain), 2)
    model, optimizer = tight(build(Blocks))
    enter, words = ENTRANCES[entrance]
    with capture, torch.no_grad(), pytest.raises(strata.StrataError, match=words) as refused:
        enter(model, torch.randn(3, 48))
    assert "mode='reduce-overhead'" in str(refused.value)
    if core is fake_core:
        session: Any = wrapped(model).session
        assert session.streams == []
    state = wrapped(model)
    assert not any(state.session.entered(unit.index) for unit in state.units)
    # Nothing is left behind.
    assert steps(model, optimizer, 2) == pytest.approx(expected, rel=1e-6)
    assert_same(strata.unwrap(model), plain, 1e-5)


@pytest.mark.host_only
def test_a_captured_backward_is_refused_too(core: ModuleType, capture: Capture) -> None:
    model, optimizer = tight(build(Blocks))
    loss = model(torch.randn(3, 48)).square().mean()
    with capture, pytest.raises(strata.StrataError, match="cannot be captured"):
        loss.backward()
    assert len(steps(model, optimizer, 2)) == 2
    strata.unwrap(model)


@pytest.mark.host_only
@pytest.mark.parametrize("core", ["fake"], indirect=True)
def test_what_a_unit_captures_of_its_inside_is_kept_and_not_swapped(
    core: ModuleType, capture: Capture
) -> None:
    class Inside(nn.Linear):
        captures = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            with capture if self.captures else nullcontext():  # of what has no parameters
                return torch.tanh(torch.exp(out))

    saves = []
    for Inside.captures in (False, True):
        model = build(lambda: nn.Sequential(*(Inside(64, 64) for _ in range(3))))
        memory = {"device": "8MiB", "host": "64MiB"}
        model, optimizer = strata.wrap(model, adamw(model), memory=memory, activations="swap")
        for _ in range(6):
            model(torch.randn(64, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session: Any = wrapped(model).session
        saves.append(session.saves_made)
        strata.unwrap(model)
    assert 0 < saves[1] < saves[0]


def test_modules_that_are_graphs_already_are_refused(core: ModuleType) -> None:
    def new_fwd(x: torch.Tensor) -> torch.Tensor:
        return x

    new_fwd.__module__ = torch.cuda.make_graphed_callables.__module__
    model = build(Blocks)
    model.blocks[1].forward = new_fwd  # type: ignore[index, union-attr]
    with pytest.raises(strata.StrataError, match=r"blocks\.1 was made a CUDA graph"):
        strata.wrap(model, adamw(model), memory={"device": "8MiB", "host": "64MiB"})
    assert all(type(p) is nn.Parameter for p in model.parameters())


# Memory of graphs ---------------------------------------------------------------------------------


class Pool:
    """Memory of a graph, which gradients come in: every backward writes to the same place, and a
    forward makes what was there garbage. `owned`: as a replay hands it out, else as a warm-up does.
    """

    def __init__(self, owned: bool, like: torch.Tensor) -> None:
        self.memory = torch.zeros_like(like)
        self.owned = owned

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        self.memory.copy_(value)
        if not self.owned:
            return self.memory.detach()
        storage = torch._C._construct_storage_from_data_pointer(  # type: ignore[attr-defined]
            self.memory.data_ptr(), HOST, self.memory.nbytes
        )
        return torch.empty(0).set_(storage, 0, self.memory.shape)  # type: ignore[arg-type]


class Graphed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, pool: Pool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.pool = pool
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, ctx.pool.gradient(grads[0].t() @ x), None


class GraphedLinear(nn.Linear):
    def __init__(self, owned: bool) -> None:
        super().__init__(48, 48, bias=False)
        self.pool = Pool(owned, self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.pool.owned:
            self.pool.memory.fill_(float("nan"))
        result: torch.Tensor = Graphed.apply(x, self.weight, self.pool)
        return result


class Slow:
    """A session that takes gradients late."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_session"], name)

    def land_gradient(self, *args: Any, **more: Any) -> None:
        time.sleep(0.02)
        self._session.land_gradient(*args, **more)


@pytest.mark.host_only
@pytest.mark.parametrize("owned", [True, False])
def test_gradients_in_a_graphs_memory_land_as_they_were(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, owned: bool
) -> None:
    """Each backward of a step writes to the same place, and the last one's gradient is late."""
    results = []
    for aside in (False, True):
        if aside:
            monkeypatch.setattr(wrapped_module, "Inline", lambda: Lander(HOST, 1 << 20))
            monkeypatch.setattr(
                strata._hooks.land_hook,
                "owned_by_graph",
                lambda t: not t.untyped_storage().resizable(),
            )
            # A copy protects what a replay hands out, and nobody has to wait.
            monkeypatch.setattr(strata._hooks.hooks, "graphs_in_use", lambda: not owned)
        model = build(lambda: nn.Sequential(*(GraphedLinear(owned) for _ in range(3))))
        model, optimizer = tight(model, gradient_accumulation_steps=3)
        state = wrapped(model)
        if aside:
            state.session = Slow(state.session)  # type: ignore[assignment]
        results.append((steps(model, optimizer, 2, backwards=3), strata.unwrap(model)))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


@pytest.mark.host_only
@pytest.mark.parametrize("core", ["fake"], indirect=True)
def test_activations_in_a_graphs_memory_are_kept(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = []
    for owned in (False, True):
        monkeypatch.setattr(
            strata._activations.swapping, "owned_by_graph", lambda t, owned=owned: owned
        )
        model, optimizer = strata.wrap(
            (model := build(llama)),
            adamw(model),
            memory={"device": "8MiB", "host": "8MiB"},
            activations="swap",
        )
        train(model, optimizer, steps=6)
        session: Any = wrapped(model).session
        saves.append(session.saves_made)
        strata.unwrap(model)
    assert saves[0] > 0
    assert saves[1] == 0


def test_only_memory_of_no_allocator_is_a_graphs(capture: Capture) -> None:
    assert not strata._runtime.streams.owned_by_graph(
        torch.ones(4)
    )  # on the host there are no graphs
    assert not strata._runtime.streams.capturing(HOST)


# On a GPU -----------------------------------------------------------------------------------------

COMPILED = {"keep": {"activations": "keep"}, "pages alone": {"activations": None}}


@pytest.mark.gpu_only
@pytest.mark.parametrize("core", ["real"], indirect=True)
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_model_that_is_compiled_with_graphs_trains_alike(
    core: ModuleType, name: str, backwards: int
) -> None:
    from torch._dynamo.utils import counters

    results = []
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        counters.clear()
        model = build(lambda: Blocks(count=2))
        memory = {"device": "512MiB"}  # what tunes kernels clears caches of a GPU, 60 MB
        options: dict[str, Any] = {**COMPILED[name], "gradient_accumulation_steps": backwards}
        model, optimizer = strata.wrap(model, adamw(model), memory=memory, **options)
        run: Any = torch.compile(model, mode=mode)
        results.append((steps(run, optimizer, 8, backwards), strata.unwrap(model)))
        assert counters["inductor"]["cudagraph_skips"] == 0
    assert strata._runtime.streams.graphs_in_use()
    assert results[0][0] == results[1][0]  # the same kernels, launched otherwise
    assert_same(results[1][1], results[0][1])
    plain = build(lambda: Blocks(count=2))
    assert results[1][0] == pytest.approx(steps(plain, adamw(plain), 8, backwards), rel=1e-4)


@pytest.mark.gpu_only
@pytest.mark.parametrize("core", ["real"], indirect=True)
def test_an_outer_capture_of_torchs_is_refused_and_training_goes_on(core: ModuleType) -> None:
    plain = build(llama)
    expected = train(plain, adamw(plain))
    model, optimizer = tight(build(llama))
    inputs = batch(model)
    with (
        pytest.raises(strata.StrataError, match="around the model"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        model(**inputs)
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-5)
    strata.unwrap(model)


class Replayed(nn.Module):
    """A block that captures its inside when it first runs, and replays it then."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(48, 48)
        self.graph: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            self.place = x.clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.inner(self.place)  # libraries make their workspaces
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = torch.tanh(self.inner(self.place))
        self.place.copy_(x)
        self.graph.replay()
        return self.out.clone()


@pytest.mark.gpu_only
@pytest.mark.parametrize("core", ["real"], indirect=True)
def test_a_graph_of_a_units_inside_sees_its_parameters_of_now(core: ModuleType) -> None:
    """While the pump polls events and moves pages, and after frames were filled anew."""
    model = build(lambda: nn.Sequential(*(Replayed() for _ in range(6))))
    model, _ = tight(model, units=lambda name, module: isinstance(module, Replayed))
    x = torch.randn(3, 48)
    with torch.no_grad():
        for _ in range(4):
            seen = model(x)
            expected = x
            for block in model:
                expected = torch.tanh(block.inner(expected))
            torch.testing.assert_close(seen, expected)
            for block in model:
                block.inner.weight.mul_(0.9)
    strata.unwrap(model)


@pytest.mark.gpu_only
def test_a_replays_memory_is_told_from_an_allocators() -> None:
    own = torch.ones(4)
    storage = torch._C._construct_storage_from_data_pointer(  # type: ignore[attr-defined]
        own.data_ptr(), own.device, own.nbytes
    )
    handed = torch.empty(0).set_(storage, 0, (4,))
    assert strata._runtime.streams.owned_by_graph(handed)
    assert not strata._runtime.streams.owned_by_graph(own)
