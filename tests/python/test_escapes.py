"""Views of parameters that live on behind the forward that made them: true, or an exception."""

import dataclasses
import gc
from collections import namedtuple
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any, ClassVar

import pytest
import strata
import torch
from small_models import adamw, assert_same, build, tight
from stacks import Blocks, steps
from strata._runtime.paged import PagedTensor
from strata._runtime.wrapped import wrapped
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 48
Pair = namedtuple("Pair", "value view")


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor
    view: Any


class Slots:
    """An object of a class that strata cannot know."""

    __slots__ = ("kept",)


class Keeper(nn.Module):
    """A layer whose forward leaves a view of its parameter somewhere."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(WIDTH, WIDTH) / 7)
        self.keep = keep
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(x @ self.p)
        output = self.keep(self, y)
        return y if output is None else output


class Stack(nn.Module):
    """Layers around a Keeper: what it kept is used behind them."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], Any], find: Callable[[Any, Any], Any]):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.keeper = Keeper(keep)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.find = find

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.keeper(self.before(x))
        x = output if isinstance(output, torch.Tensor) else next(_values(output))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        view = self.find(self.keeper, output)
        return x + F.linear(x[:, : view.shape[1]], view[:1]) + view.abs().mean()


def _values(output: Any) -> Any:
    if isinstance(output, Frozen):
        output = vars(output)
    return iter(output.values() if isinstance(output, dict) else output)


def in_object(keeper: Any, y: torch.Tensor) -> None:
    keeper.kept = Slots()
    keeper.kept.kept = {"deep": [keeper.p[:16]]}


def in_closure(keeper: Any, y: torch.Tensor) -> None:
    view = keeper.p.t()
    keeper.kept = lambda: view


def in_cycle(keeper: Any, y: torch.Tensor) -> None:
    cycle: list[Any] = [keeper.p[:16]]
    cycle.append(cycle)
    keeper.kept = cycle


def by_default(keeper: Any, y: torch.Tensor) -> Any:
    return {"value": y, "view": [(keeper.p[:16],)]}


def _set(make: Callable[[Any], torch.Tensor]) -> Callable[[Any, torch.Tensor], None]:
    return lambda keeper, y: setattr(keeper, "kept", make(keeper.p))


def kept(keeper: Any, output: Any) -> Any:
    return keeper.kept


Case = tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any, Any], Any]]
KEPT: dict[str, Case] = {
    "attribute": (_set(lambda p: p[:16]), kept),
    "data": (_set(lambda p: p.data), kept),
    "detached": (_set(lambda p: p.detach()[3:9]), kept),
    "view of a view": (_set(lambda p: p.data.t()[5:]), kept),
    "another parameter": (_set(lambda p: nn.Parameter(p.data)), kept),
    "object": (in_object, lambda keeper, _: keeper.kept.kept["deep"][0]),
    "closure": (in_closure, lambda keeper, _: keeper.kept()),
    "cycle": (in_cycle, lambda keeper, _: keeper.kept[0]),
}
RETURNED: dict[str, Case] = {
    "namedtuple": (lambda k, y: Pair(y, k.p[:16]), lambda _, output: output.view),
    "dataclass": (lambda k, y: Frozen(y, k.p[:16]), lambda _, output: output.view),
    "nested": (lambda k, y: Frozen(y, {"a": Pair(1, [k.p[:16]])}), lambda _, o: o.view["a"][1][0]),
    "dict": (by_default, lambda _, output: output["view"][0][0]),
}


def make(case: Case) -> nn.Module:
    return build(lambda: Stack(*case))


@pytest.mark.parametrize("name", [*KEPT, *RETURNED])
def test_an_escaped_view_is_computed_with(core: ModuleType, name: str) -> None:
    case = {**KEPT, **RETURNED}[name]
    plain = make(case)
    expected = steps(plain, adamw(plain))
    model, optimizer = tight(make(case))
    assert steps(model, optimizer) == pytest.approx(expected, rel=1e-6)
    assert_same(model, plain, 1e-5)


@pytest.mark.parametrize("name", KEPT)
def test_an_escaped_view_follows_its_parameter(core: ModuleType, name: str) -> None:
    """Behind updates, and behind writes through it."""
    found = []
    for wrap in (lambda model: (model, adamw(model)), tight):
        model, optimizer = wrap(make(KEPT[name]))
        steps(model, optimizer, 1)
        view = KEPT[name][1](model.keeper, None)
        values = [view.detach().clone()]
        with torch.no_grad():
            view[0].add_(1)
        values += [view.detach().clone(), model.keeper.p.detach().clone()]
        model.keeper.p.data.mul_(2)
        values += [view.detach() + 0]
        found.append([value.detach() for value in values])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


class Before(nn.Module):
    """Reads in its forward what the one before left, and what another layer left."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(WIDTH, WIDTH) / 7)
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            x = x + self.last.sum() * torch.tanh(x @ self.last.t()).mean()
        other = self.__dict__.get("other")
        if other is not None and other.last is not None:
            x = x + other.last.mean()
        self.last = self.p.detach()[:16]
        return x @ self.p


def test_the_next_forward_reads_what_the_one_before_left(core: ModuleType) -> None:
    def make() -> nn.Module:
        layers = [Before() for _ in range(4)]
        for layer, other in pairwise(layers):
            object.__setattr__(layer, "other", other)  # not a child
        return nn.Sequential(*[nn.Sequential(layer) for layer in layers])

    plain = build(make)
    expected = steps(plain, adamw(plain))
    # Two layers at a time.
    memory = {"device": "128KiB" if core is strata._core else 20000, "host": "64MiB"}
    model, optimizer = tight(build(make), memory=memory, page_size="64KiB")
    assert steps(model, optimizer) == pytest.approx(expected, rel=1e-6)
    assert_same(model, plain, 1e-5)


def test_hooks_of_the_user_keep_views(core: ModuleType) -> None:
    """Registered before and after wrap(), in forward and in backward."""
    kept: list[torch.Tensor] = []

    def keep(module: Any, *_: Any) -> None:
        kept.append(module.weight[:4])

    def layers(model: Any) -> list[nn.Module]:
        return [m for m in model.modules() if isinstance(m, nn.Linear)]

    model = build(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(48, 48)) for _ in range(4)]))
    for layer in layers(model):
        layer.register_forward_hook(keep)
    model, _ = tight(model)
    for layer in layers(model):
        layer.register_forward_hook(keep)
        layer.register_forward_hook(keep, prepend=True)
        layer.register_full_backward_hook(keep)
        layer.weight.register_hook(kept.append)
    model(torch.randn(3, 48)).sum().backward()
    model(torch.zeros(3, 48))
    expected = [p.detach()[:4].clone() for p in model.parameters() if p.dim() == 2]
    gradients = [strata.gather_grad(p) for p in model.parameters() if p.dim() == 2]
    views = [view for view in kept if view.shape[0] == 4]
    assert len(views) == 4 * (2 * 3 + 1)
    for view in views:
        assert any(torch.equal(view.detach(), rows) for rows in expected)
    for tensor in (tensor for tensor in kept if tensor.shape[0] == 48):
        assert any(torch.equal(tensor, gradient) for gradient in gradients)


class KeepsSaved(torch.autograd.Function):
    """A linear map whose backward keeps a view of its weight, and returns it as a gradient."""

    kept: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x * weight.t()[:3]).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        KeepsSaved.kept.append(weight[:4])
        return weight.t()[:3], F.pad(x, (0, 0, 0, WIDTH - 3)).t()


def test_a_backward_keeps_views_and_returns_them(core: ModuleType) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.randn(WIDTH, WIDTH) / 7)

        def forward(self, x: torch.Tensor) -> Any:
            return KeepsSaved.apply(x, self.p)

    def make() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        return nn.Sequential(*blocks, nn.Sequential(Last()))

    found = []
    for wrap in (lambda model: (model, adamw(model)), tight):
        KeepsSaved.kept.clear()
        model, optimizer = wrap(build(make))
        losses = steps(model, optimizer, 2)
        found.append((losses, [v.detach().clone() for v in KeepsSaved.kept], model))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert_same(found[1][2], found[0][2], 1e-5)


def test_arguments_of_a_checkpoint(core: ModuleType) -> None:
    """What a user's checkpoint keeps of its arguments until it computes them again."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.randn(WIDTH, WIDTH) / 7)

        def forward(self, x: torch.Tensor) -> Any:
            function = lambda x, w: torch.tanh(x @ w)  # noqa: E731
            return x + checkpoint(function, x, self.p.t(), use_reentrant=False)

    def make() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(Block()) for _ in range(4)])

    plain = build(make)
    expected = steps(plain, adamw(plain))
    model, optimizer = tight(build(make))
    assert steps(model, optimizer) == pytest.approx(expected, rel=1e-6)
    assert_same(model, plain, 1e-5)


def test_what_python_cannot_see_is_refused(core: ModuleType) -> None:
    def hide(keeper: Any, y: torch.Tensor) -> None:
        indices = torch.arange(WIDTH).view(1, -1)
        keeper.kept = torch.sparse_coo_tensor(indices, keeper.p.detach()[0], (WIDTH,))

    model, _ = tight(make((hide, kept)))
    with pytest.raises(strata.StrataError, match=r"keeper\.p.* lives on .*clone"):
        model(torch.randn(3, WIDTH))


class Named(torch.Tensor):
    """A class of the user's own."""


def test_views_of_classes_of_the_users_own_are_refused(core: ModuleType) -> None:
    model, _ = tight(make((_set(lambda p: p.detach().as_subclass(Named)), kept)))
    with pytest.raises(strata.StrataError, match=r"keeper\.p.* lives on .* Named"):
        model(torch.randn(3, WIDTH))


def test_an_exception_keeps_what_it_refers_to_true(core: ModuleType) -> None:
    """The frames of a traceback refer to views."""

    def fail(keeper: Any, y: torch.Tensor) -> None:
        view = keeper.p[:16]
        raise ValueError(view.shape)

    model, _ = tight(make((fail, kept)))
    with pytest.raises(ValueError, match="16") as caught:
        model(torch.randn(3, WIDTH))
    view = caught.traceback[-1].frame.f_locals["view"]
    assert type(view) is PagedTensor
    assert torch.equal(view, model.keeper.p[:16])


def test_nothing_is_searched_for_in_ordinary_steps(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where somebody holds views that were made outside."""
    model, optimizer = tight(build(lambda: Blocks()))
    held = [p.data for p in model.parameters()] + [p[:1] for p in model.parameters()]
    monkeypatch.setattr(gc, "get_objects", None)
    steps(model, optimizer)
    assert all(type(view) is PagedTensor for view in held)
    del held
    steps(model, optimizer)
    state = wrapped(model)
    assert all(not known for known in state.views._known)  # type: ignore[union-attr]


class Rewriter(nn.Module):
    """Writes through a view that an earlier forward left, and uses the parameter then."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(WIDTH))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            self.last.copy_(torch.full((16,), 5.0))
        self.last = self.p.detach()[:16]
        return x * self.p.sum()


def test_a_write_through_a_kept_view_is_seen_at_once(core: ModuleType) -> None:
    x = torch.ones(2)
    plain = Rewriter()
    model, _ = tight(nn.Sequential(Rewriter(), nn.Linear(2, 2)))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model[0](x), plain(x))


def test_views_are_looked_for_while_an_exception_is_handled(core: ModuleType) -> None:
    def keep(keeper: Any, y: torch.Tensor) -> None:
        keeper.kept = keeper.p[:2].detach().as_subclass(Named)

    model, _ = tight(nn.Sequential(Keeper(keep), nn.Linear(WIDTH, WIDTH)))
    try:
        raise KeyError
    except KeyError:
        with pytest.raises(strata.StrataError, match=r"a view of parameter '0\.p' lives on"):
            model(torch.randn(3, WIDTH))
