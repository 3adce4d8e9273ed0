"""Whatever people write with p.grad of a wrapped model: reads give the true values, and changes
reach the gradient and the update. A plain model is beside it."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_models import (
    TIERS,
    WIDE,
    backward,
    both,
    grads,
    plain_net,
    same_gradients,
    sgd,
    weight,
    wrapped_net,
)  # fmt: skip
from small_models import assert_same
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

READS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda g: g.abs().mean(),
    "max": lambda g: g.max(),
    "item": lambda g: g.sum().item(),
    "numpy": lambda g: torch.from_numpy(g.float().detach().cpu().numpy().copy()),
    "tolist": lambda g: torch.tensor(g.tolist()),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "isnan": lambda g: torch.isnan(g).any(),
    "isinf": lambda g: g.isinf(),
    "nonfinite": lambda g: bool((g != g).any()),
    "first": lambda g: g[0],
    "rows": lambda g: torch.stack(list(g)),
    "slice": lambda g: g[1:3],
    "view": lambda g: g.view(-1),
    "transposed": lambda g: g.T @ g,
    "deepcopy": copy.deepcopy,
    "copy": lambda g: copy.copy(g).clone(),
    "zeros": torch.zeros_like,
    "new": lambda g: g.new_ones(3),
    "compared": lambda g: g > 0,
    "added": lambda g: 1 + g,
    "added to": lambda g: torch.ones_like(g) + g,
    "histogram": lambda g: torch.histc(g.float(), 8),
    "len": lambda g: torch.tensor(len(g)),
    "shape": lambda g: torch.tensor(g.shape),
    "numel": lambda g: torch.tensor([g.numel(), g.dim(), g.size(0), g.nbytes, g.element_size()]),
    "flags": lambda g: torch.tensor([g.is_sparse, g.requires_grad, g.is_leaf, g.is_cuda]),
    "repr": repr,
    "format": lambda g: f"{g.norm():.1f} {g[0]}",
    "cosine": lambda g: torch.nn.functional.cosine_similarity(g.view(-1), g.view(-1), dim=0),
    "equal": lambda g: torch.equal(g, g.clone()),
    "unique": lambda g: g.unique(),
    "to": lambda g: g.to("cpu", torch.float64),
    "type": lambda g: g.type(torch.float64),
    "double": lambda g: g.double(),
    "dot": lambda g: torch.dot(g.flatten(), g.flatten()),
    "where": lambda g: torch.where(g > 0, g, 0),
    "topk": lambda g: g.flatten().topk(3).values,
    "einsum": lambda g: torch.einsum("ij,ik->jk", g, g),
    "iteration": lambda g: sum(row.sum() for row in g),
    "cat": lambda g: torch.cat([g, g]),
    "contains": lambda g: 0.0 in g,
    "reversed": lambda g: g.flip(0),
    "atleast": lambda g: torch.atleast_1d(g).clone(),
    "out": lambda g: torch.mul(g, 2, out=torch.empty_like(g)),
    "to numpy": lambda g: torch.as_tensor(g.float().numpy().sum()),
    "tensor": lambda g: torch.tensor(g),
    "stream": lambda g: saved_and_loaded(g),
    "broadcast": lambda g: torch.broadcast_tensors(g, torch.ones(1, dtype=g.dtype))[0].clone(),
    "foreach": lambda g: torch._foreach_add([g, g], 1.0)[1],
}


def saved_and_loaded(tensor: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    assert type(loaded) is torch.Tensor
    return loaded


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference", "scaled"])
@pytest.mark.parametrize("name", READS)
def test_reads_give_the_true_values(name: str, mode: str, tmp_path: Path) -> None:
    plain = plain_net(torch.bfloat16)
    model, _ = wrapped_net("host", tmp_path, torch.bfloat16)
    contexts: dict[str, Any] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    for m in (model, plain):
        backward(m)
        if mode == "scaled":
            weight(m).grad.mul_(0.3)
    with contexts.get(mode, torch.enable_grad)():
        ours, theirs = READS[name](weight(model).grad), READS[name](weight(plain).grad)
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs
    same_gradients(model, plain)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "clip value": lambda m: clip_grad_value_(m.parameters(), 1e-2),
    "clip value, foreach": lambda m: clip_grad_value_(m.parameters(), 1e-2, foreach=True),
    "clip, norm 1": lambda m: clip_grad_norm_(m.parameters(), 0.5, norm_type=1.0),
    "clip, norm inf": lambda m: clip_grad_norm_(m.parameters(), 1e-3, norm_type="inf"),  # type: ignore[arg-type]
    "noise": lambda m: weight(m).grad.add_(torch.ones(WIDE, WIDE), alpha=1e-3),
    "noise, +=": lambda m: setattr(weight(m), "grad", weight(m).grad.__iadd__(0.25)),
    "zero a row": lambda m: weight(m).grad.__setitem__(0, 0.0),
    "zero by a view": lambda m: weight(m).grad[2].zero_(),
    "by data": lambda m: weight(m).grad.data[1:3].mul_(0.1),
    "flat": lambda m: weight(m).grad.view(-1)[5:9].fill_(1.0),
    "mask": lambda m: weight(m).grad.masked_fill_(weight(m) > 0, 0.0),
    "copy_": lambda m: weight(m).grad.copy_(weight(m).detach() * 2),
    "sign_": lambda m: weight(m).grad.sign_(),
    "lerp_": lambda m: weight(m).grad.lerp_(torch.ones_like(weight(m).grad), 0.5),
    "out": lambda m: torch.neg(weight(m).detach(), out=weight(m).grad),
    "mul_ by a tensor": lambda m: weight(m).grad.mul_(torch.full((WIDE,), 0.5)),
    "mul_ by itself": lambda m: weight(m).grad.mul_(weight(m).grad),
    "weight decay": lambda m: weight(m).grad.add_(weight(m), alpha=0.1),
    "foreach add": lambda m: torch._foreach_add_(grads(m), 1e-3),
    "foreach mul list": lambda m: torch._foreach_mul_(grads(m), [0.5] * len(grads(m))),
    "set": lambda m: setattr(weight(m), "grad", torch.ones(WIDE, WIDE)),
    "set to what it was made of": lambda m: setattr(weight(m), "grad", weight(m).grad * 2),
    "set data": lambda m: setattr(weight(m).grad, "data", torch.ones(WIDE, WIDE)),
    "set none": lambda m: setattr(weight(m), "grad", None),
    "delete": lambda m: delattr(weight(m), "grad"),
    "set where none was": lambda m: (
        setattr(m, "unused.grad", None) or setattr(m.unused, "grad", torch.full((5,), 0.5))
    ),
    "exchange": lambda m: exchange(m.blocks[0][0].weight, m.blocks[2][0].weight),
    "zero_": lambda m: weight(m).grad.zero_(),
    "zero_grad": lambda m: m.zero_grad(),
    "zero_grad to zeros": lambda m: m.zero_grad(set_to_none=False),
    "set_": lambda m: [g.clamp_(min=-0.1).mul_(0.3) for g in grads(m)],
    "dropped and back": lambda m: (m.zero_grad(), backward(m, 3)),
    "zeroed and back": lambda m: (m.zero_grad(set_to_none=False), backward(m, 3)),
    "changed and added to": lambda m: (weight(m).grad.clamp_(-0.1, 0.1), backward(m, 3)),
    "set and added to": lambda m: (CHANGES["set"](m), backward(m, 3)),
}


def exchange(a: nn.Parameter, b: nn.Parameter) -> None:
    a.grad, b.grad = b.grad, a.grad


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_reach_the_gradient_and_the_update(name: str, tier: str, tmp_path: Path) -> None:
    plain = plain_net()
    model, optimizer = wrapped_net(tier, tmp_path)
    other = sgd(plain)
    for seed in range(2):
        backward(model, seed)
        backward(plain, seed)
        both(CHANGES[name], model, plain)
        optimizer.step()
        other.step()
        assert_same(model, plain, 1e-6 if name == "clip, norm 1" else 0.0)
        optimizer.zero_grad()
        other.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [n for n in CHANGES if "set" not in n and "decay" not in n])
def test_changes_in_16_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain = plain_net(dtype)
    model, optimizer = wrapped_net("host", tmp_path, dtype)
    backward(model)
    backward(plain)
    both(CHANGES[name], model, plain)
    optimizer.step()
