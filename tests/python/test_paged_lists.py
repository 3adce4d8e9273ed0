"""Operations on lists of parameters, and on more of them than fit on the device together."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from small_models import assert_same, build, llama, tight
from strata._runtime.tensor_functions import written
from test_paged import same
from torch import nn


def average(params: list[Any]) -> list[torch.Tensor]:
    kept = [torch.ones(p.shape) for p in params]
    torch._foreach_lerp_(kept, params, 0.25)
    return kept


def zeros(params: list[Any]) -> list[torch.Tensor]:
    return [torch.zeros(p.shape) for p in params]


LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "read into plain ones": average,
    "copied into plain ones": lambda ps: torch._foreach_copy_(zeros(ps), ps),
    "norms": torch._foreach_norm,
    "a power of them": lambda ps: torch._foreach_pow(2.0, ps),
    "joined into a tensor": lambda ps: torch.cat(
        [p.flatten() for p in ps], out=torch.empty(sum(p.numel() for p in ps))
    ),
    "stacked": lambda ps: torch.stack([p.view(-1)[:8] for p in ps]),
    "multiplied": lambda ps: torch._foreach_mul_(ps, 2),
    "multiplied, by name": lambda ps: torch._foreach_mul_(self=ps, scalars=[2.0] * len(ps)),
    "added to one another": lambda ps: torch._foreach_add_(ps, ps[1:] + ps[:1]),
    "moved by a tensor of numbers": lambda ps: torch._foreach_addcmul_(
        ps, ps, average(ps), torch.linspace(0, 1, len(ps))
    ),
    "updated by a fused optimizer": lambda ps: torch._fused_sgd_(
        ps, average(ps), [], weight_decay=0.1, momentum=0.0, lr=0.1, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=True,
    ),
    "from a vector": lambda ps: nn.utils.vector_to_parameters(
        torch.arange(sum(p.numel() for p in ps)) / 1e4, ps
    ),
    "one from two others": lambda ps: torch.add(ps[0], ps[1], out=ps[2]),
    "one from another": lambda ps: ps[2].addmm_(ps[0], ps[1].t()),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_more_than_fits_at_once(core: ModuleType, name: str) -> None:
    """The device holds one unit. What is written is one of the arguments, not any of them."""

    def make() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(4)])

    plain, (model, _) = build(make), tight(build(make))
    found, expected = (LISTS[name]([p.detach() for p in m.parameters()]) for m in (model, plain))
    assert found is expected is None or isinstance(found, nn.Parameter) or same(found, expected)
    assert_same(model, plain)


def test_what_an_operation_may_change() -> None:
    p, q = nn.Parameter(torch.ones(2)), torch.ones(2)
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = [
        (torch._foreach_lerp_, ([q], [p], 0.5), {}, [[q]]),
        (torch.Tensor.add_, (q, p), {}, [q]),
        (torch.relu_, (), {"input": q}, [q]),
        (torch.add, (p, p), {"out": q}, [q]),
        (torch.Tensor.__setitem__, (q, 0, p), {}, [q]),
        (torch.Tensor.__itruediv__, (q, p), {}, [q]),
        (torch.Tensor.__invert__, (p,), {}, []),
        (torch.Tensor.index_copy_, (q, 0, p, p), {}, [q]),
        (torch._fused_sgd_, ([q], [p], [p]), {}, [[q], [p], [p]]),
        (nn.init.uniform_, (), {"tensor": q}, [q]),
        (nn.functional.relu, (q,), {"inplace": True}, [q, True]),
        (nn.functional.relu, (q,), {"inplace": False}, []),
        (torch.add, (p, p), {"out": None}, [None]),
    ]
    for func, args, kwargs, expected in cases:
        found = written(func, args, kwargs)
        assert len(found) == len(expected), func
        assert all(a is b or a == b for a, b in zip(found, expected, strict=True)), func


def test_an_average_of_lists(core: ModuleType) -> None:
    """torch's own, whose update is one operation on all parameters."""
    model, _ = tight(build(llama))
    averages = []
    for m in (model, build(llama)):
        ema = torch.optim.swa_utils.AveragedModel(
            m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for _ in range(2):
            with torch.no_grad():
                torch._foreach_mul_(list(m.parameters()), 1.5)
            ema.update_parameters(m)
        averages.append(ema.module)
    assert_same(averages[0], averages[1])
