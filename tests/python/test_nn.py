"""Tiled layers: the numbers of plain PyTorch, and the files of the plain layer."""

import copy

import pytest
import torch
from small_models import gpt2
from strata.nn import TiledEmbedding, TiledLinear, tile
from tiled_layers import gradients
from torch import nn


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 101)


@pytest.mark.parametrize("tiles", [1, 2, 7, 101])
def test_a_tiled_linear_is_the_linear(linear: nn.Linear, tiles: int) -> None:
    tiled = TiledLinear.from_linear(copy.deepcopy(linear), tiles)
    x = torch.randn(3, 5, 24, requires_grad=True)
    upstream = torch.randn(3, 5, 101)
    torch.testing.assert_close(tiled(x), linear(x))
    expected = gradients((linear(x) * upstream).sum(), linear, x)
    torch.testing.assert_close(gradients((tiled(x) * upstream).sum(), tiled, x), expected)
    assert tiled.tiles[0].out_features == -(-101 // tiles)
    assert "out_features=101" in repr(tiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tiles_lose_nothing_by_being_many(linear: nn.Linear, dtype: torch.dtype) -> None:
    """The gradient of the input is added up in float32; in 16 bits it would be off twice as far."""
    short = copy.deepcopy(linear).to(dtype)
    tiled = TiledLinear.from_linear(copy.deepcopy(short), 20)
    x = torch.randn(64, 24).to(dtype).requires_grad_()
    upstream = torch.randn(64, 101).to(dtype)
    assert tiled(x).dtype == dtype
    assert torch.equal(tiled(x), short(x))
    exact = upstream.double() @ short.weight.detach().double()
    plain = gradients((short(x) * upstream).sum(), short, x)
    ours = gradients((tiled(x) * upstream).sum(), tiled, x)
    assert torch.equal(ours["weight"], plain["weight"])
    assert (ours["x"] - exact).norm() <= 1.5 * (plain["x"] - exact).norm()


def test_autocast_and_second_derivatives_are_as_without_tiles(linear: nn.Linear) -> None:
    tiled = TiledLinear.from_linear(copy.deepcopy(linear), 3)
    x = torch.randn(4, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert tiled(x).dtype == torch.bfloat16
        torch.testing.assert_close(tiled(x), linear(x))
    short = TiledLinear.from_linear(copy.deepcopy(linear).bfloat16(), 3)
    y = x.bfloat16().requires_grad_()
    (first,) = torch.autograd.grad(short(y).square().sum(), y, create_graph=True)
    first.float().sum().backward()
    assert y.grad is not None
    weight = linear.weight.detach()
    expected = (2 * weight.t() @ weight).sum(0).expand_as(x)
    torch.testing.assert_close(y.grad.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("tiles", [1, 3, 10])
@pytest.mark.parametrize("padding", [None, 0, 7])
def test_a_tiled_embedding_is_the_embedding(tiles: int, padding: int | None) -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(10, 6, padding)
    tiled = TiledEmbedding.from_embedding(copy.deepcopy(plain), tiles)
    ids = torch.randint(0, 10, (4, 9))
    assert torch.equal(tiled(ids), plain(ids))
    upstream = torch.randn(4, 9, 6)
    nothing = torch.zeros(1)
    expected = gradients((plain(ids) * upstream).sum(), plain, nothing)
    assert torch.equal(
        gradients((tiled(ids) * upstream).sum(), tiled, nothing)["weight"], expected["weight"]
    )
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match=f"index of the embedding is {wrong}"):
            tiled(torch.tensor([3, wrong]))


def test_files_have_the_names_and_shapes_of_the_plain_layer(linear: nn.Linear) -> None:
    tiled = TiledLinear.from_linear(copy.deepcopy(linear), 4)
    state = tiled.state_dict()
    assert list(state) == ["weight", "bias"]
    assert all(torch.equal(state[name], p) for name, p in linear.named_parameters())
    other = nn.Sequential(nn.ReLU(), TiledLinear.from_linear(nn.Linear(24, 101), 3))
    result = other.load_state_dict({f"1.{name}": value for name, value in state.items()})
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(other.state_dict()["1.weight"], linear.weight)
    back = nn.Linear(24, 101)
    back.load_state_dict(other[1].state_dict())
    assert torch.equal(back.bias, linear.bias)


def test_what_does_not_fit_is_told_under_the_layers_name(linear: nn.Linear) -> None:
    tiled = nn.Sequential(TiledLinear.from_linear(linear, 4))
    before = tiled.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.bias"') as caught:
        tiled.load_state_dict({"0.weight": before["0.weight"]})
    assert "tiles" not in str(caught.value)
    with pytest.raises(
        RuntimeError, match=r"size mismatch for 0\.weight: .*\(101, 23\).*"
    ) as caught:
        tiled.load_state_dict({"0.weight": torch.ones(101, 23), "0.bias": before["0.bias"]})
    assert "Missing" not in str(caught.value)
    assert torch.equal(tiled.state_dict()["0.weight"], before["0.weight"])
    loose = tiled.load_state_dict({"other": torch.ones(1)}, strict=False)
    assert loose.missing_keys == ["0.weight", "0.bias"]


def test_meta_copies_and_modes(linear: nn.Linear) -> None:
    linear.weight.requires_grad_(False)
    tiled = TiledLinear.from_linear(linear.eval(), 4)
    assert not tiled.training
    assert [p.requires_grad for p in tiled.parts("weight")] == [False] * 4
    assert all(p.requires_grad for p in tiled.parts("bias"))
    again = copy.deepcopy(tiled)
    assert torch.equal(again.state_dict()["weight"], tiled.state_dict()["weight"])
    with torch.device("meta"):
        empty = TiledLinear.from_linear(nn.Linear(24, 101, bias=False), 4)
    assert empty.state_dict()["weight"].shape == (101, 24)
    assert empty(torch.empty(2, 24, device="meta")).shape == (2, 101)


def test_a_weight_in_tiles_has_no_joined_copy_to_write_to(linear: nn.Linear) -> None:
    tiled = TiledLinear.from_linear(linear, 4)
    for name in ("weight", "bias"):
        with pytest.raises(AttributeError, match=rf"the {name} of this TiledLinear is in tiles"):
            getattr(tiled, name)
    with pytest.raises(AttributeError, match="no attribute 'wait'"):
        _ = tiled.wait
    tiled.requires_grad_(False)
    tiled.parts("weight")[1].zero_()
    assert tiled.state_dict()["weight"][26:51].eq(0).all()


def test_hooks_of_the_layer_go_along(linear: nn.Linear) -> None:
    calls = []
    handle = linear.register_forward_hook(lambda *_: calls.append(1))
    tiled = TiledLinear.from_linear(linear, 2)
    tiled(torch.ones(1, 24))
    handle.remove()
    tiled(torch.ones(1, 24))
    assert calls == [1]


def test_layers_that_cannot_be_cut(linear: nn.Linear) -> None:
    for tiles in (0, 102):
        with pytest.raises(ValueError, match=f"from 1 to 101.*not {tiles}"):
            TiledLinear.from_linear(linear, tiles)
    with pytest.raises(TypeError, match=r"whole number, not 2\.5"):
        TiledLinear.from_linear(linear, 2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Bilinear cannot be cut"):
        TiledLinear.from_linear(nn.Bilinear(2, 2, 2), 2)  # type: ignore[arg-type]
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        with pytest.raises(ValueError, match=next(iter(option))):
            TiledEmbedding.from_embedding(nn.Embedding(8, 2, **option), 2)
    linear.weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match="its weight has hooks"):
        TiledLinear.from_linear(linear, 2)


def test_tying_is_kept_and_the_optimizer_told() -> None:
    torch.manual_seed(0)
    model = gpt2().eval()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tile(model, "lm_head", 3, optimizer)
    head, embedding = model.lm_head, model.transformer.wte
    assert head.parts("weight") == embedding.parts("weight")
    assert set(map(id, model.parameters())) == set(map(id, optimizer.param_groups[0]["params"]))
    assert list(model.state_dict()) == list(plain.state_dict())
    tokens = torch.randint(0, 64, (2, 8))
    for step in range(2):
        loss, expected = (m(input_ids=tokens, labels=tokens).loss for m in (model, plain))
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5), step
        loss.backward()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    with pytest.raises(ValueError, match=r"no module 'lm_hed'.*'lm_head'"):
        tile(model, "lm_hed", 2)
    with pytest.raises(ValueError, match="already"):
        tile(model, "lm_head", 2)


def test_a_weight_tied_to_something_else_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 8, bias=False)
            self.out = nn.Bilinear(2, 2, 2)
            self.odd = nn.Module()
            self.odd.table = self.head.weight

    model = Odd()
    with pytest.raises(ValueError, match=r"'odd', tied to 'head': Module cannot be cut"):
        tile(model, "head", 2)
    assert type(model.head) is nn.Linear
