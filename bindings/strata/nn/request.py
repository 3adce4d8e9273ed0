"""What is asked of a linear layer instead of its outputs: statistics of logits that are never made.

    head = nn.Linear(4096, 32000)                    # or a TiledLinear
    lse, picked = head(Request(hidden, targets))

With z = hidden Wᵀ + b, for every token: lse = log Σⱼ exp zⱼ, picked = z[target], and total = Σⱼ zⱼ
where `with_total` says so. All are float32 (float64 for such hidden states) and differentiable.

Note [Asking a layer]. A layer's parameters are on the device while its own forward runs, and that
is F.linear(input, weight, bias). torch lets the input say what F.linear does with it, by
__torch_function__. So any nn.Linear can be asked, inside its own hooks, and stays as it is.

Note [Columns]. Some columns of the logits exist at a time, for all tokens: logits are made in
forward, and once more in backward, where their gradient follows from lse. So the gradient of each
row of the weight is one matrix product, rounded once, and nothing adds up in 16 bits. Cutting the
tokens instead would need a second, float32 gradient of the weight.

The gradient of the hidden states adds up over chunks: each reads and writes all of it once, 8 bytes
an element, for 2 * width operations. A GPU makes 165 operations in the time of a byte (an H200: 790
TFLOP/s, 4.8 TB/s), so below 660 columns it waits for memory; from 1,024 on for arithmetic. So many
columns of logits and of their gradient take less memory than the hidden states of a wide model
and their gradient do, however many tokens there are. A budget has no say: a run that is continued
under another must give the same bits.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from .._torch_compat import FakeTensor, assert_async
from .products import add_product, full_linear, set_product

CHUNK_BYTES = 32 << 20  # of float32 logits that exist at a time; their gradient takes as much
ALIGNED = 64  # columns: matrix products of odd widths are slow
COLUMNS_MIN = {"cuda": 1024}  # of a chunk whose bytes nobody chose; elsewhere ALIGNED


class Request(NamedTuple):
    """Statistics wanted of a linear layer. A NamedTuple, so that its tensors are found in it.

    hidden: (tokens, features), of the layer's dtype, or float32 where that is a 16-bit one.
    targets: (tokens,), columns of the whole layer; those of other tiles pick nothing.
    first: the column that the asked layer begins with.
    """

    hidden: torch.Tensor
    targets: torch.Tensor
    first: int = 0
    with_total: bool = False
    chunk_bytes: int | None = None  # None: CHUNK_BYTES, or COLUMNS_MIN where they are more

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch where an operation is given a Request. See Note [Asking a layer]."""
        if func is not F.linear or kwargs or type(args[0]) is not Request:
            raise TypeError(
                f"strata.nn.ChunkedCrossEntropy needs a layer that computes F.linear(input, "
                f"weight, bias) of its input and nothing else; this one calls {func.__name__}"
            )
        request, weight, bias = args
        return request.answer(weight, bias)

    def answer(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The statistics of one layer, or of one tile."""
        return _Statistics.apply(self.hidden, weight, bias, self)

    def gathered(self, tiles: Sequence[nn.Linear]) -> tuple[torch.Tensor, ...]:
        """The statistics of tiles that stand side by side."""
        answers, first = [], self.first
        for tile in tiles:
            answers.append(tile(self._replace(first=first)))
            first += tile.out_features
        lse, *sums = (torch.stack(column) for column in zip(*answers, strict=True))
        return (lse.logsumexp(0), *(column.sum(0) for column in sums))

    def local_targets(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each target lies within columns [begin, end) of the asked layer, and whether."""
        local = self.targets - (self.first + begin)
        here = (local >= 0) & (local < end - begin)
        return local.clamp(0, end - begin - 1).unsqueeze(1), here


class _Statistics(torch.autograd.Function):
    """See Note [Columns]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        request: Request,
    ) -> tuple[torch.Tensor, ...]:
        """Called by apply()."""
        ctx.dtype = _compute_dtype(weight)
        states = hidden.to(ctx.dtype)
        shape = (hidden.shape[0],)
        exact = torch.promote_types(ctx.dtype, torch.float32)
        lse = torch.full(shape, -torch.inf, dtype=exact, device=hidden.device)
        picked = torch.zeros_like(lse)
        total = torch.zeros_like(lse)
        for begin, end in _chunks(states, weight, request):
            logits = _logits(states, weight, bias, begin, end)
            lse = torch.logaddexp(lse, logits.logsumexp(1))
            place, here = request.local_targets(begin, end)
            picked = torch.where(here, logits.gather(1, place).squeeze(1), picked)
            if request.with_total:
                total += logits.sum(1)
        ctx.request = request._replace(hidden=hidden[:0])  # autograd keeps the hidden states
        ctx.save_for_backward(hidden, weight, bias, lse)
        return (lse, picked, total) if request.with_total else (lse, picked)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Called by autograd: makes the logits again, and of each column what its gradient says."""
        hidden, weight, bias, lse = ctx.saved_tensors
        to_hidden, to_weight, to_bias, _ = ctx.needs_input_grad
        states = hidden.to(ctx.dtype)
        of_hidden = torch.zeros_like(hidden) if to_hidden else None
        of_weight = torch.empty_like(weight) if to_weight else None
        of_bias = torch.empty_like(bias) if to_bias else None
        for begin, end in _chunks(states, weight, ctx.request):
            logits = _logits(states, weight, bias, begin, end)
            slope = logits.sub_(lse.unsqueeze(1)).exp_().mul_(grads[0].unsqueeze(1))
            place, here = ctx.request.local_targets(begin, end)
            slope.scatter_add_(1, place, torch.where(here, grads[1], 0).unsqueeze(1))
            if ctx.request.with_total:
                slope += grads[2].unsqueeze(1)
            if of_bias is not None:
                of_bias[begin:end] = slope.sum(0)
            short = slope.to(ctx.dtype)
            if of_hidden is not None:
                add_product(of_hidden, short, weight[begin:end].to(ctx.dtype))
            if of_weight is not None:
                set_product(of_weight[begin:end], short.t(), states)
        return of_hidden, of_weight, of_bias, None


def autocasts(tensor: torch.Tensor) -> bool:
    """Whether autocast chooses the dtype of products on the tensor's device."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def _compute_dtype(weight: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(weight.device.type) if autocasts(weight) else weight.dtype


def _chunks(
    states: torch.Tensor, weight: torch.Tensor, request: Request
) -> Iterator[tuple[int, int]]:
    """Columns [begin, end) whose logits may exist together."""
    columns = weight.shape[0]
    wanted = (request.chunk_bytes or CHUNK_BYTES) // (4 * max(1, states.shape[0]))
    fewest = (
        COLUMNS_MIN.get(states.device.type, ALIGNED) if request.chunk_bytes is None else ALIGNED
    )
    step = max(fewest, wanted // ALIGNED * ALIGNED)
    return ((begin, min(begin + step, columns)) for begin in range(0, columns, step))


def _logits(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, begin: int, end: int
) -> torch.Tensor:
    """Some columns, as float32 at least, in memory that the caller may write to."""
    part = None if bias is None else bias[begin:end].to(states.dtype)
    return full_linear(states, weight[begin:end].to(states.dtype), part)


def check_range(values: torch.Tensor, end: int, what: str) -> None:
    """Raises IndexError where `what` is not in [0, end). Other devices raise when they get there,
    as they are not waited for."""
    if values.is_meta or isinstance(values, FakeTensor) or not values.numel():
        return
    if values.device.type != "cpu":
        assert_async(((values >= 0) & (values < end)).all(), f"{what} is out of range")
        return
    low, high = (int(bound) for bound in values.aminmax())
    if low < 0 or high >= end:
        raise IndexError(f"{what} is {low if low < 0 else high}, and must be from 0 to {end - 1}")
