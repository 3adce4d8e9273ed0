"""Which parameters wrap() takes, and what it says of the others. The model is left as it was."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from small_models import adamw, assert_same, build, tight
from stacks import steps
from torch import nn


class Params4bit(nn.Parameter):
    """As bitsandbytes names its own."""


class Marked(nn.Parameter):
    """A class that strata knows nothing of."""


class Scaled(torch.Tensor):
    """A tensor subclass, of which nn.Parameter makes a parameter."""


class Layer(nn.Module):
    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(48, 48)
        change(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def put(make: Callable[[torch.Tensor], Any], name: str = "weight") -> Callable[[Any], None]:
    return lambda layer: layer.inner._parameters.__setitem__(name, make(layer.inner.weight.data))


def distributed(layer: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    weight = layer.inner.weight.data
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    meta = TensorMeta(weight.shape, weight.stride(), weight.dtype)
    spec = DTensorSpec(mesh, (Partial(),), tensor_meta=meta)
    layer.inner._parameters["weight"] = nn.Parameter(DTensor(weight, spec, requires_grad=True))


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "subclass": (put(Marked), r"inner.weight' is a test_managed.Marked.*plain nn.Parameter"),
    "tensor subclass": (
        put(lambda w: nn.Parameter(w.as_subclass(Scaled))),
        r"inner.weight' is a test_managed.Scaled",
    ),
    "bitsandbytes": (put(Params4bit), r"Params4bit, quantised by bitsandbytes.*8bit"),
    "DTensor": (distributed, r"inner.weight' is a DTensor with Partial\(sum\).*redistribute"),
    "lazy": (
        lambda layer: setattr(layer, "inner", nn.LazyLinear(48)),
        r"inner.weight' has no shape yet",
    ),
    "integer": (
        put(lambda w: nn.Parameter(w.to(torch.int8), requires_grad=False)),
        r"inner.weight' is torch.int8",
    ),
    "complex": (put(lambda w: nn.Parameter(w.to(torch.complex64))), r"is torch.complex64"),
    "double": (put(lambda w: nn.Parameter(w.double())), r"is torch.float64"),
    "sparse": (put(lambda w: nn.Parameter(w.to_sparse())), r"is torch.sparse_coo"),
    "rows of another": (put(lambda w: nn.Parameter(w[3]), "bias"), r"inner.weight.*inner.bias"),
    "column of another": (put(lambda w: nn.Parameter(w[:, 3]), "bias"), r"share memory"),
    "transposed": (put(lambda w: nn.Parameter(w.t()), "other"), r"inner.weight.*inner.other"),
    "buffer": (
        lambda layer: layer.register_buffer("head", layer.inner.weight.data[:4]),
        r"buffer '..0.head'",
    ),
    "attribute": (
        lambda layer: setattr(layer, "last", layer.inner.weight[:4]),
        r"attribute '..0.last'",
    ),
}


def model_of(change: Callable[[Any], None]) -> nn.Module:
    return build(lambda: nn.Sequential(*[nn.Sequential(Layer(change)) for _ in range(2)]))


@pytest.mark.parametrize("core", ["fake"], indirect=True)
@pytest.mark.parametrize("name", REFUSED)
def test_what_pages_cannot_hold_is_refused(core: ModuleType, name: str) -> None:
    change, said = REFUSED[name]
    model = model_of(change)
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=said):
        tight(model, optimizer)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert "_strata" not in model.__dict__


def columns(layer: Any) -> None:
    """Two parameters that lie between each other, without an element in common."""
    whole = torch.randn(48, 96)
    layer.inner.weight = nn.Parameter(whole[:, :48])
    layer.other = nn.Parameter(whole[:, 48:])


def spectral(layer: Any) -> None:
    """Leaves an attribute over the parameter's memory until the first forward."""
    nn.utils.spectral_norm(layer.inner)


def parametrized(layer: Any) -> None:
    nn.utils.parametrizations.weight_norm(layer.inner)


@pytest.mark.parametrize("core", ["fake"], indirect=True)
@pytest.mark.parametrize("change", [columns, spectral, parametrized])
def test_what_only_looks_like_it_is_not(core: ModuleType, change: Callable[[Any], None]) -> None:
    plain = model_of(change)
    expected = steps(plain, adamw(plain))
    model, optimizer = tight(model_of(change))
    assert steps(model, optimizer) == pytest.approx(expected, rel=1e-6)
    assert_same(model, plain, 1e-5)


def test_ranks_that_do_not_know_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started"):
        tight(model)
    monkeypatch.delenv("WORLD_SIZE")
    tight(model)


class Adapted(nn.Module):
    """A layer as PEFT makes them: adapters by name."""

    __module__ = "peft.tuners.made_up"

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_A["default"](x)  # type: ignore[no-any-return]


def test_adapters_that_come_after_wrapping_are_refused(core: ModuleType) -> None:
    import strata

    model = nn.Sequential(Adapted(), nn.Linear(8, 8))
    tight(model)
    for add in (
        lambda: model[0].lora_A.update({"second": nn.Linear(8, 8)}),
        lambda: setattr(model[0], "lora_B", nn.Linear(8, 8)),
        lambda: model.append(Adapted()),
    ):
        with pytest.raises(RuntimeError, match=r"ahead of strata.wrap\(\)"):
            add()
    model[0].lora_A["default"].load_state_dict(nn.Linear(8, 8).state_dict())  # fills it
    model[0].lora_A["again"] = model[0].lora_A["default"]
    del model[0].lora_A["again"]
    model.append(nn.ReLU())
    model(torch.ones(2, 8)).sum().backward()
    strata.unwrap(model)[0].lora_A["second"] = nn.Linear(8, 8)
