"""Lets a Transformers causal language model compute its loss without ever making its logits.

    strata.nn.chunk_loss(model)
    model(input_ids=ids, labels=ids).loss        # the same number
    model(input_ids=ids).logits                  # without labels: as before
    strata.nn.unchunk_loss(model)

The model keeps its modules and their names. Labels are known when the model is called; its head is
then asked for statistics of the logits (request.py), and the loss function, which Transformers lets
every model have of its own, makes the loss of these. Threads: those of the model.
"""

import inspect
import logging
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional as F

from .._torch_compat import FakeTensorMode
from .cross_entropy import ChunkedCrossEntropy, columns_of, is_head
from .request import CHUNK_BYTES, Request

IGNORED = -100  # of labels, in Transformers
# Models that change their logits ahead of the loss say so in their config.
FACTORS = (
    "final_logit_softcapping", "logits_soft_cap", "logits_scaling", "logit_scale",
    "lm_head_multiplier", "output_multiplier_scale",
)  # fmt: skip

log = logging.getLogger("strata")


def chunk_loss(model: nn.Module, *, chunk_bytes: int | None = None) -> None:
    """From now on `model(..., labels=...)` makes no logits; those of its output raise if used.

    The loss is the same number but for the order of sums, and costs a fourth matrix product of the
    head beside three. Call it before or after strata.wrap(), or without.

    Args:
        model: a causal language model of Transformers.
        chunk_bytes: bytes of logits in float32 that exist at a time. Default: what suits the
            device, as in ChunkedCrossEntropy.

    Raises:
        ValueError: the model's loss is not the cross-entropy of its head's outputs as they are; the
            message says why.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> strata.nn.chunk_loss(model)
        >>> ids = torch.zeros(1, 8, dtype=torch.long)
        >>> model(input_ids=ids, labels=ids).loss.shape
        torch.Size([])
    """
    if is_chunked(model):
        return
    if reason := why_not_chunked(model):
        raise ValueError(f"chunk_loss: {reason}")
    ChunkedLoss(model, chunk_bytes)


def unchunk_loss(model: nn.Module) -> None:
    """Undoes chunk_loss(); nothing where there is nothing to undo.

    Example:
        >>> strata.nn.unchunk_loss(torch.nn.Linear(2, 2))
    """
    loss = getattr(model, "_loss_function", None)
    if isinstance(loss, ChunkedLoss):
        loss.remove(model)


def is_chunked(model: nn.Module) -> bool:
    """Whether chunk_loss() was called for it."""
    return isinstance(getattr(model, "_loss_function", None), ChunkedLoss)


def chunk_many(model: Any, tokens: int) -> bool:
    """chunk_loss() where a step of so many tokens has many logits and the model allows it, which is
    tried. Returns whether. REQUIRES: the model has no memory: on the meta device, or fake.

    Budgets have no say: a run that is continued under others must give the same bits.
    """
    if why_not_chunked(model):
        return False
    if 4 * tokens * columns_of(model.get_output_embeddings()) <= CHUNK_BYTES:
        return False
    chunk_loss(model)
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
            model.eval()(input_ids=ids, labels=ids, use_cache=False)
    except Exception as error:  # whatever the model does with its logits that we do not know
        log.info("the loss is computed from all logits at once: %s", error)
        unchunk_loss(model)
        return False
    finally:
        model.train()
    return True


def why_not_chunked(model: Any) -> str:
    """Why chunk_loss() cannot do anything for this model, or ""."""
    name = type(model).__name__
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    uses = code is not None and "loss_function" in code.co_names
    if not uses or not hasattr(model, "get_output_embeddings"):
        return f"{name} is no causal language model of Transformers with a loss_function"
    loss = getattr(model.loss_function, "__name__", "another")
    if loss != "ForCausalLMLoss":
        return f"the loss of {name} is {loss}, not the cross-entropy of the next token"
    head: Any = model.get_output_embeddings()
    if not is_head(head):
        return f"the head of {name} is {type(head).__name__}, not nn.Linear or TiledLinear"
    for factor in FACTORS:
        if getattr(getattr(model, "config", None), factor, None) not in (None, 1, False):
            return f"{name} changes its logits ahead of the loss ({factor})"
    return ""


class ChunkedLoss:
    """The loss function of one model, and the hooks that tell it the labels in time.

    A copy of the model has a copy of it. `labels` is None but for the time of a forward with some.
    """

    def __init__(self, model: Any, chunk_bytes: int | None) -> None:
        self.chunk_bytes = chunk_bytes
        self.labels: torch.Tensor | None = None
        self.targets: torch.Tensor | None = None
        self.ignore_index = IGNORED
        head = model.get_output_embeddings()
        self._handles = [
            model.register_forward_pre_hook(self.begin, with_kwargs=True),
            model.register_forward_hook(self.end, always_call=True),
            head.register_forward_pre_hook(self.ask),
            head.register_forward_hook(self.answered),
        ]
        model.loss_function = self

    def remove(self, model: Any) -> None:
        """Takes the hooks away and gives the model its own loss function back."""
        for handle in self._handles:
            handle.remove()
        del model._loss_function

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Called by torch ahead of the model's forward."""
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **kwargs}
        self.labels, shifted = given.get("labels"), given.get("shift_labels")
        self.ignore_index = given.get("ignore_index", IGNORED)
        if self.labels is not None and shifted is None:
            shifted = F.pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:]
        self.targets = None if self.labels is None else shifted

    def ask(self, head: nn.Module, args: tuple[Any, ...]) -> Any:
        """Called by torch ahead of the head's forward, which then gets a Request."""
        if self.targets is None:
            return None
        criterion = ChunkedCrossEntropy(
            ignore_index=self.ignore_index, chunk_bytes=self.chunk_bytes
        )
        return (criterion.request(args[0], head, self.targets.to(args[0].device)),)

    def answered(self, head: nn.Module, args: tuple[Any, ...], answer: Any) -> Any:
        """Called by torch behind the head's forward: the model shall take this for its logits."""
        if not isinstance(args[0], Request):
            return None
        return MissingLogits(answer, args[0].targets, columns_of(head))

    def __call__(
        self,
        logits: Any,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """Called by the model's forward, as ForCausalLMLoss is."""
        if type(logits) is not MissingLogits or labels is not self.labels:
            raise RuntimeError(
                "this model's forward takes its loss of other logits or labels than those that "
                "strata.nn.chunk_loss saw: call strata.nn.unchunk_loss(model)"
            )
        summed = num_items_in_batch is not None
        criterion = ChunkedCrossEntropy(
            ignore_index=self.ignore_index, reduction="sum" if summed else "mean"
        )
        loss = criterion.loss(logits._answer, logits._targets, logits._columns)
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch if num_items_in_batch is not None else loss

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """Called by torch behind the model's forward, also when that raised."""
        self.labels = self.targets = None


class MissingLogits:
    """Stands where logits would be. Whoever uses it is told why there are none."""

    def __init__(self, answer: Any, targets: torch.Tensor, columns: int) -> None:
        self._answer = answer
        self._targets = targets
        self._columns = columns

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_MISSING)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch where an operation is given the logits."""
        raise RuntimeError(_MISSING)

    def _refuse(self, *args: Any) -> NoReturn:
        raise RuntimeError(_MISSING)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __getitem__ = __len__ = __iter__ = __neg__ = _refuse


_MISSING = (
    "the logits of a forward with labels are never made once strata.nn.chunk_loss(model) was "
    "called: call the model without labels for them, or strata.nn.unchunk_loss(model)"
)
