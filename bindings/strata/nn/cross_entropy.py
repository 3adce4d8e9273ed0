"""Cross-entropy of a linear layer's outputs that are never all in memory.

    criterion = ChunkedCrossEntropy(label_smoothing=0.1)
    loss = criterion(hidden, head, targets)          # head: nn.Linear or TiledLinear

is F.cross_entropy(head(hidden).flatten(0, -2), targets.flatten(), label_smoothing=0.1). It costs
one more matrix product in four, as backward makes the logits again: see request.py. Threads: as any
nn.Module.
"""

import torch
from torch import nn

from .products import SHORT
from .request import Request, autocasts, check_range
from .tiles import LinearTile, TiledLinear

REDUCTIONS = ("mean", "sum")


class ChunkedCrossEntropy(nn.Module):
    """Cross-entropy of a linear layer's outputs that are never all in memory: head and loss in one.

    The head is an argument, as it belongs to the model. The result is that of
    `F.cross_entropy(head(hidden).flatten(0, -2), targets.flatten())` but for the order of sums.

    Args:
        ignore_index: targets of this value count for nothing.
        label_smoothing: from 0 to 1, as of nn.CrossEntropyLoss.
        reduction: "mean" over the targets that count, or "sum".
        chunk_bytes: bytes of logits in float32 that exist at a time. Default: 32 MiB, on a GPU no
            fewer than 1,024 columns.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> head = torch.nn.Linear(16, 1000)
        >>> hidden, targets = torch.randn(2, 8, 16), torch.randint(1000, (2, 8))
        >>> loss = strata.nn.ChunkedCrossEntropy()(hidden, head, targets)
        >>> plain = torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
        >>> torch.allclose(loss, plain)
        True
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        chunk_bytes: int | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must be from 0 to 1, not {label_smoothing}")
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
        if chunk_bytes is not None and chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.chunk_bytes = chunk_bytes

    def forward(self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> torch.Tensor:
        """The loss.

        Args:
            hidden: (..., features), of the head's dtype.
            head: nn.Linear or TiledLinear of (features, classes).
            targets: (...), whole numbers from 0 to classes - 1, or `ignore_index`.

        Returns:
            A scalar of float32 (float64 for such hidden states), which can be differentiated.

        Raises:
            ValueError: shapes do not go together.
            TypeError: dtypes do not, or the head is another layer.
            IndexError: a target is no output of the head.
        """
        request = self.request(hidden, head, targets)
        return self.loss(head(request), request.targets, columns_of(head))

    def request(self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> Request:
        """What the head is to be called with."""
        _check(hidden, head, targets)
        flat = targets.reshape(-1)
        counted = flat.masked_fill(flat == self.ignore_index, 0)
        check_range(counted, columns_of(head), "a target")
        states = hidden.reshape(-1, hidden.shape[-1])
        if states.dtype in SHORT:
            states = states.float()  # tiles add up its gradient
        return Request(
            states,
            flat,
            with_total=self.label_smoothing > 0,
            chunk_bytes=self.chunk_bytes,
        )

    def loss(
        self, answer: tuple[torch.Tensor, ...], targets: torch.Tensor, columns: int
    ) -> torch.Tensor:
        """The loss, from what the head answered."""
        lse, picked = answer[:2]
        losses = lse - (1.0 - self.label_smoothing) * picked
        if self.label_smoothing > 0:
            losses = losses - self.label_smoothing / columns * answer[2]
        counts = targets != self.ignore_index
        total = losses.masked_fill(~counts, 0.0).sum()
        return total / counts.sum() if self.reduction == "mean" else total

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return (
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
            f"reduction={self.reduction!r}"
        )


def is_head(module: nn.Module) -> bool:
    """Whether a module's outputs are logits that need not be made."""
    kinds = (nn.Linear.forward, LinearTile.forward, TiledLinear.forward)
    return isinstance(module, nn.Linear | TiledLinear) and type(module).forward in kinds


def columns_of(head: nn.Module) -> int:
    """The outputs of a head."""
    assert isinstance(head, nn.Linear | TiledLinear)
    return head.out_features


def _check(hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> None:
    if not is_head(head):
        raise TypeError(
            "the head must be nn.Linear or TiledLinear, and compute F.linear(input, weight, bias) "
            f"and nothing else; {type(head).__name__} may do more"
        )
    assert isinstance(head, nn.Linear | TiledLinear)
    if hidden.dim() < 1 or hidden.shape[-1] != head.in_features:
        raise ValueError(
            f"hidden states of shape {tuple(hidden.shape)} do not fit a head of "
            f"{head.in_features} features"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"targets must be whole numbers, not {targets.dtype}")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} do not fit hidden states of shape "
            f"{tuple(hidden.shape)}: one target for each"
        )
    weight = next(head.parameters())
    if hidden.dtype != weight.dtype and not autocasts(hidden):
        raise TypeError(f"hidden states are {hidden.dtype} and the head is {weight.dtype}")
