"""Which forwards may be cut along the batch, and which may not: found by trying."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from strata._activations import trial
from strata._activations.arguments import Arguments
from strata._activations.trial import Verdicts
from torch import nn
from torch.nn import functional as F


class Case(nn.Module):
    """A forward of which the test says whether it may be cut."""

    def __init__(self, run: Callable[..., Any], *, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: torch.Tensor
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    x += 1
    return self.layer(x)


def counts_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen += x.size(0)
    return self.layer(x)


def of_training(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.layer(x)
    return y - y.mean(0) if self.training else y


def alike(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([F.normalize(x, dim=1) @ F.normalize(row, dim=0) for row in x], dim=1)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "mean over the batch": (lambda s, x: s.layer(x) - x.mean(0), "other rows"),
    "only in training": (of_training, "other rows"),
    "loss": (lambda s, x: s.layer(x).square().mean(), "whole batch"),
    "rows of the batch against each other": (lambda s, x: (s.layer(x) @ x.T).tanh(), "other rows"),
    "negatives of the batch": (alike, "other rows"),
    "earlier rows": (lambda s, x: s.layer(x).cumsum(0), "other rows"),
    "neighbours": (lambda s, x: s.layer(x) + x.roll(1, 0), "other rows"),
    "number of rows": (lambda s, x: s.layer(x) / x.size(0), "something else"),
    "position by row": (lambda s, x: s.layer(x) + torch.arange(x.size(0))[:, None], "something"),
    "batch is last": (lambda s, x: s.layer(x).T, "shape (8, 6) depends"),
    "batch is nowhere": (lambda s, x: x.new_ones(2, x.numel()), "no batch dimension"),
    "argument changed in place": (in_place, "changes its arguments"),
    "buffer changed": (counts_rows, "changes the buffer 'seen'"),
    "list filled": (lambda s, x, told: told.append(s.layer(x)) or told[0], "changes its arguments"),
    "more arguments with as many rows": (lambda s, x, p: s.layer(x) * p.sum(), "other rows"),
    "an object": (lambda s, x, o: s.layer(x), "given a object"),
    "returns an object": (lambda s, x: (s.layer(x), object()), "returns a object"),
    "knows how many rows there are": (lambda s, x: s.layer(x.view(6, 4, 8)), "RuntimeError"),
}
MORE: dict[str, Any] = {
    "list filled": [],
    "more arguments with as many rows": torch.linspace(0, 1, 6),
    "an object": object(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, reason = REFUSED[name]
    x = torch.randn(6, 4, 8) if "knows" in name else torch.randn(6, 8)
    more = (MORE[name],) if name in MORE else ()
    module = Case(run)
    before = x.clone()
    state = torch.get_rng_state()
    verdicts = Verdicts(module, module.forward)
    verdict = verdicts.find(Arguments(((x, *more), {})))
    assert verdict is not None
    assert reason in verdict.reason, verdict.reason
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.seen == 0
    assert module.training
    if "as many" not in name:  # other numbers of rows are of the same kind, which is known
        monkeypatch.setattr(trial, "try_slices", lambda *_: None)
    assert verdicts.find(Arguments(((x[:5], *more), {}))) is not None


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(8), nn.SyncBatchNorm(8), nn.Sequential(nn.BatchNorm1d(8))]
)
def test_batch_norm_is_not_cut_in_training(layer: nn.Module) -> None:
    module = Case(lambda s, x: s.layer(x), layer=layer)
    x = Arguments(((torch.randn(6, 8),), {}))
    verdict = Verdicts(module, module.forward).find(x)
    assert verdict is not None
    assert "normalises over the batch" in verdict.reason


CUT: dict[str, tuple[Callable[..., Any], tuple[bool, ...]]] = {
    "rows": (lambda s, x: s.layer(x), (True,)),
    "dropout": (lambda s, x: F.dropout(s.layer(x), 0.5, s.training), (True,)),
    "what is not of the batch": (lambda s, x: (s.layer(x), s.layer.weight.sum()), (True, False)),
    "nothing at all": (lambda s, x: (None, s.layer(x), {"flag": True}), (True,)),
    "whole numbers": (lambda s, x: x.argmax(1), (True,)),
    "masks": (lambda s, x: s.layer(x).masked_fill(x > 0, float("-inf")), (True,)),
    "no number": (lambda s, x: torch.cat([x * float("nan"), s.layer(x)], 1), (True,)),
}


@pytest.mark.parametrize("rows", [2, 3, 8])
@pytest.mark.parametrize("name", CUT)
def test_what_is_cut(name: str, rows: int) -> None:
    run, expected = CUT[name]
    module = Case(run)
    arguments = Arguments(((torch.randn(rows, 8),), {}))
    state = torch.get_rng_state()
    verdict = Verdicts(module, module.forward).find(arguments)
    assert verdict is not None
    assert (verdict.reason, verdict.cut) == ("", expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_that_are_all_alike_tell_nothing() -> None:
    module = Case(lambda s, x: x + x.sum(0))
    verdicts = Verdicts(module, module.forward)
    same = Arguments(((torch.ones(4, 3, dtype=torch.int64),), {}))
    assert verdicts.find(same) is None
    other = Arguments(((torch.arange(12).reshape(4, 3),), {}))
    assert verdicts.find(other) is not None
