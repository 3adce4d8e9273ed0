"""Parameters read and written outside their module, as a user would try it."""

import copy
import io
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import strata
import torch
from small_models import adamw, assert_same, build, llama, tight, train
from strata._runtime.paged import PagedParameter, PagedTensor
from torch import nn


@pytest.fixture
def model(core: ModuleType) -> nn.Module:
    """One unit at a time on the device; `twin(model)` is the same in ordinary memory."""
    wrapped, _ = tight(build(llama))
    return wrapped  # type: ignore[no-any-return]


def twin() -> nn.Module:
    return build(llama)


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.norm(),
    "add": lambda p: p + 1,
    "reversed add": lambda p: 1 + p,
    "view then sum": lambda p: p.view(-1).sum(),
    "data": lambda p: p.data * 2,
    "detach of detach": lambda p: p.detach().detach().sum(),
    "transpose": lambda p: p.t() @ p,
    "row": lambda p: p[0] * 3,
    "row of rows": lambda p: p[1:3][0][:4].exp(),
    "unbind": lambda p: p.unbind()[1] + 0,
    "iteration": lambda p: sum(row.sum() for row in p),
    "item": lambda p: p[0, 0].item(),
    "tolist": lambda p: p.tolist(),
    "repr": repr,
    "repr of a view": lambda p: str(p.detach()[0]),
    "numpy": lambda p: p.detach().numpy().sum(),
    "asarray": lambda p: np.asarray(p.detach()).sum(),
    "stack": lambda p: torch.stack([p, p]),
    "keyword": lambda p: torch.nn.functional.linear(input=torch.ones(p.shape[1]), weight=p),
    "out": lambda p: torch.add(p.detach(), 1, out=torch.empty(p.shape)),
    "max": lambda p: p.max(dim=0).values,
    "foreach": lambda p: torch._foreach_norm([p.detach()])[0],
    "double": lambda p: p.double(),
    "clone": lambda p: p.clone(),
    "float": lambda p: float(p.detach()[0, 0]),
    "equal": lambda p: bool((p == p).all()),
    "contains": lambda p: 123.0 in p,
    "chunk": lambda p: [c + 0 for c in p.chunk(2)],
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "vector": lambda p: torch.nn.utils.parameters_to_vector([p, p]),
    "metadata": lambda p: (p.shape, p.dtype, p.device, p.stride(), p.numel(), p.requires_grad),
    "len": len,
    "isinstance": lambda p: (isinstance(p, nn.Parameter), isinstance(p, torch.Tensor)),
    "hash": lambda p: hash(p) == id(p),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b)) and a.requires_grad == b.requires_grad
    if isinstance(a, list | tuple) and a and isinstance(a[0], torch.Tensor):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("name", READS)
def test_reads_are_true(model: nn.Module, name: str) -> None:
    paged = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    plain = twin().get_parameter("model.layers.1.mlp.up_proj.weight")
    assert type(paged) is PagedParameter
    found = READS[name](paged)
    assert same(found, READS[name](plain))
    assert type(paged) is PagedParameter


WRITES: dict[str, Callable[[Any], Any]] = {
    "data.mul_": lambda p: p.data.mul_(2),
    "data.add_ of a row": lambda p: p.data[3].add_(1),
    "detach().zero_": lambda p: p.detach().zero_(),
    "set item": lambda p: p.data.__setitem__((slice(None), 0), 7.0),
    "copy_": lambda p: p.data.copy_(torch.arange(p.numel()).view(p.shape)),
    "copy_ of a row": lambda p: p.data[2].copy_(torch.arange(p.shape[1])),
    "copy_ of a column": lambda p: p.data[:, 2].copy_(torch.arange(p.shape[0])),
    "copy_ of itself": lambda p: p.data.copy_(p.detach().flip(0)),
    "copy_ broadcast": lambda p: p.data.copy_(torch.ones(1)),
    "data =": lambda p: setattr(p, "data", p.data.clamp(-0.01, 0.01)),
    "view": lambda p: p.detach().view(-1)[5:9].fill_(3),
    "out": lambda p: torch.add(torch.ones(p.shape), 1, out=p.detach()),
    "init": lambda p: nn.init.constant_(p, 0.5),
    "foreach": lambda p: torch._foreach_mul_([p.detach()], 0.5),
    "augmented": lambda p: p.data.__iadd__(1),
    "no_grad": torch.no_grad()(lambda p: p.lerp_(torch.ones(p.shape), 0.25)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_the_parameter(model: nn.Module, name: str) -> None:
    plain = twin()
    for m in (model, plain):
        WRITES[name](m.get_parameter("model.layers.1.mlp.up_proj.weight"))
    tokens = torch.arange(6).view(1, -1)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    assert_same(strata.unwrap(model), plain)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "bytes of its storage": lambda p: p.untyped_storage()[0],
    "typed storage": lambda p: p.storage().tolist(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "share_memory_": lambda p: p.share_memory_(),
    "other shape": lambda p: setattr(p, "data", torch.ones(3)),
    "other dtype": lambda p: setattr(p, "data", p.data.double()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_true_raises(model: nn.Module, name: str) -> None:
    with pytest.raises((RuntimeError, BufferError)):
        REFUSED[name](model.get_parameter("model.layers.1.mlp.up_proj.weight"))


def test_numpy_copies_refuse_writes(model: nn.Module) -> None:
    array = model.get_parameter("lm_head.weight").detach().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_operations_on_more_than_fits_at_once(model: nn.Module) -> None:
    """The device holds one unit; these read all of them."""
    plain = twin()
    joined, expected = (torch.cat([p.view(-1) for p in m.parameters()]) for m in (model, plain))
    assert torch.equal(joined, expected)
    weights = torch.randn(expected.numel())
    wanted = [m.get_parameter("model.layers.1.mlp.up_proj.weight") for m in (model, plain)]
    (found,) = torch.autograd.grad((joined * weights).sum(), wanted[0])
    (other,) = torch.autograd.grad((expected * weights).sum(), wanted[1])
    assert torch.equal(found, other)
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert torch.equal(vector, nn.utils.parameters_to_vector(plain.parameters()))
    assert_same(model, plain)


def test_ema_loop(model: nn.Module) -> None:
    plain = twin()
    averages = []
    for m in (model, plain):
        average = [torch.zeros(p.shape) for p in m.parameters()]
        for e, p in zip(average, m.parameters(), strict=True):
            e.lerp_(p.detach(), 0.1)
        averages.append(average)
    assert all(torch.equal(a, b) for a, b in zip(*averages, strict=True))


def test_averaged_model(model: nn.Module) -> None:
    plain = twin()
    averages = []
    for m in (model, plain):
        average = torch.optim.swa_utils.AveragedModel(m)
        for p in m.parameters():
            p.data.mul_(3)
        for e, p in zip(average.parameters(), m.parameters(), strict=True):
            e.data.lerp_(p.detach(), 0.5)
        averages.append(average.module)
    assert_same(averages[0], averages[1])


def test_torch_save_of_state_dict(model: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(type(value) is torch.Tensor for value in loaded.values())
    plain = build(llama, seed=4)
    plain.load_state_dict(loaded)
    assert_same(plain, twin())


def test_deepcopy_of_the_model_is_plain(model: nn.Module) -> None:
    plain = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter for p in plain.parameters())
    with pytest.raises(ValueError, match="not wrapped"):
        strata.report(plain)
    before = [p.clone() for p in model.parameters()]
    expected = twin()
    assert train(plain, adamw(plain)) == train(expected, adamw(expected))
    assert_same(plain, expected)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_whole_model_pickles_as_a_plain_one(model: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    plain = torch.load(file, weights_only=False)
    assert_same(plain, twin())
    train(plain, adamw(plain), 1)


def test_a_parameter_returned_by_its_module(core: ModuleType) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(40, 40))

        def forward(self, count: int) -> Any:
            return self.weight[:count], {"all": self.weight, "some": [self.weight.t()[1]]}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = Table()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(40, 40)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, more = self.table(3)
            for layer in self.layers:
                x = layer(x)
            return x @ rows.t() + more["all"].sum() + (x * more["some"][0]).sum()

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for i in range(3):
            model(torch.full((2, 40), 0.1 * (i + 1))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = build(Model)
    run(plain, adamw(plain))
    model, optimizer = tight(build(Model))
    run(model, optimizer)
    assert_same(model, plain, 1e-5)


def test_gather_grad(model: nn.Module) -> None:
    plain = twin()
    for m in (model, plain):
        m(torch.arange(6).view(1, -1)).logits.sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        found = strata.gather_grad(a)
        assert found is not None
        torch.testing.assert_close(found, b.grad)


@pytest.mark.parametrize("how", ["half", "double", "cuda"])
def test_the_model_cannot_be_converted(model: nn.Module, how: str) -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        getattr(model, how)()
    assert_same(model, twin())


def test_conversions_that_change_nothing_work(model: nn.Module) -> None:
    model.float().cpu().to(torch.float32)
    assert_same(model, twin())


def test_exchanged_parameters_are_noticed(model: nn.Module) -> None:
    layer = model.get_submodule("model.layers.2.mlp.up_proj")
    before = layer.weight
    tokens = torch.arange(6).view(1, -1)
    layer.weight = nn.Parameter(torch.zeros(64, 32))  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"model\.layers\.2\.mlp\.up_proj\.weight.*wrap"):
        model(tokens)
    layer.weight = before
    model(tokens)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").set_(torch.zeros(64, 32))
    with pytest.raises(RuntimeError, match=r"lm_head\.weight.*wrap"):
        model(tokens)


def test_frozen_parameters_cannot_thaw(core: ModuleType) -> None:
    plain = build(llama)
    plain.lm_head.weight.requires_grad_(False)  # type: ignore[union-attr]
    model, _ = tight(plain)
    with pytest.raises(RuntimeError, match=r"lm_head\.weight.*frozen"):
        model.lm_head.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"lm_head\.weight.*frozen"):
        model.lm_head.weight.requires_grad = True


def test_parameters_may_be_frozen_later(core: ModuleType) -> None:
    plain = build(llama)
    inner = adamw(plain)
    model, optimizer = tight(build(llama))
    for m, o in ((plain, inner), (model, optimizer)):
        train(m, o, 1)
        m.get_parameter("lm_head.weight").requires_grad_(False)
        train(m, o, 2)
        m.get_parameter("lm_head.weight").requires_grad_(True)
        train(m, o, 1)
    assert_same(model, plain, 1e-5)


def test_writes_inside_the_own_forward_last(core: ModuleType) -> None:
    class Clamped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.05, 0.05)
            return super().forward(x)

    def make() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(Clamped(48, 48)) for _ in range(3)])

    plain = build(make)
    model, _ = tight(build(make))
    x = torch.randn(2, 48)
    assert torch.equal(model(x), plain(x))
    assert_same(model, plain)


def test_views_are_paged_too(model: nn.Module) -> None:
    p = model.get_parameter("lm_head.weight")
    assert type(p.detach()) is PagedTensor
    assert type(p.detach().view(-1)) is PagedTensor
    assert type(p + 1) is torch.Tensor


def test_moving_a_model_to_where_it_is_moves_nothing(core: ModuleType) -> None:
    """Whoever does not know where a model is says model.to(device)."""
    model, optimizer = tight(build(llama))
    train(model, optimizer, steps=1)
    model(torch.arange(6).view(1, -1), labels=torch.arange(6).view(1, -1)).loss.backward()
    session = model.__dict__["_strata"].session
    session.synchronize()
    parameter, before = next(model.parameters()), session.stats()
    for move in (
        lambda: model.to("cpu"),
        lambda: model.cpu(),
        lambda: model.float(),
        lambda: model.to(dtype=torch.float32),
    ):
        assert move() is model
        assert next(model.parameters()) is parameter
    assert parameter.to("cpu") is parameter
    after = session.stats()
    assert {n: c for n, c in after.items() if " to " in n} == {
        n: c for n, c in before.items() if " to " in n
    }
    assert parameter.to(torch.float32, copy=True) is not parameter
    optimizer.step()
