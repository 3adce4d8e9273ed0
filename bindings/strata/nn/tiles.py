"""Linear and embedding layers whose weight is cut into tiles of rows, each a module of its own.

    head = TiledLinear.from_linear(nn.Linear(4096, 32000), tiles=8)
    head(hidden)                     # as the linear layer, tile by tile
    head.state_dict()                # "weight" and "bias": those of the linear layer

A tile becomes a unit of a wrapped model, so one tile is on the device while the next is on its way,
and its gradient leaves as soon as it is complete. Threads: as any nn.Module.

Note [Tiles are rows]. A row of the weight is one output of a linear layer, or one entry of an
embedding. So every element of the output, and of the weight's gradient, is computed from the same
numbers as without tiles. Only the gradient of a linear layer's input is a sum over tiles: 16-bit
layers add it up in float32, and the error that is left is about 1.4 times that of one product.

Note [Names]. state_dict() and load_state_dict() know the tensors of the layer before it was cut, so
checkpoints are those of the plain model. What state_dict() returns is therefore a copy: to write to
the weight, write to the parameters of the tiles.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn import functional as F

from .._torch_compat import is_dtensor, is_nf4
from .products import SHORT
from .request import Request, autocasts, check_range

SomeTiled = TypeVar("SomeTiled", bound="Tiled")


class Tiled(nn.Module):
    """What tiled layers share. Invariants:

    1. The rows of tiles[i] follow those of tiles[i - 1]; together they are the rows of the layer.
    2. All tiles have parameters of the same names.
    3. original[0], if any, is the module that this one stands in for until untile().
    """

    def __init__(self, tiles: Sequence[nn.Module]) -> None:
        super().__init__()
        self.tiles = nn.ModuleList(tiles)
        self.original: tuple[nn.Module, ...] = ()  # in a tuple: no module of the model any more
        self.register_state_dict_post_hook(_join_tiles)
        self.register_load_state_dict_pre_hook(_split_tiles)

    def tensor_names(self) -> list[str]:
        """The names of the layer's own tensors, such as "weight" and "bias"."""
        return [name for name, _ in self.tiles[0].named_parameters()]

    def parts(self, name: str) -> list[nn.Parameter]:
        """The parameters that the layer's tensor `name` is cut into, in order."""
        return [cast(nn.Parameter, getattr(tile, name)) for tile in self.tiles]

    def plain(self) -> nn.Module:
        """The layer before it was cut, without values: on the meta device."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """What is no attribute. A joined weight would be a copy, and writes to it be lost."""
        if name in ("weight", "bias"):
            raise AttributeError(
                f"the {name} of this {type(self).__name__} is in tiles: read "
                f"state_dict()[{name!r}], write to parts({name!r})"
            )
        return super().__getattr__(name)


class TiledLinear(Tiled):
    """y = x Wᵀ + b, with W and b cut into tiles of outputs. from_linear() makes one.

    It has `in_features`, `out_features` and `tiles`; state_dict() knows "weight" and "bias", those
    of the layer before it was cut.

    Example:
        >>> head = strata.nn.TiledLinear.from_linear(torch.nn.Linear(16, 1000), tiles=8)
        >>> head(torch.randn(2, 16)).shape
        torch.Size([2, 1000])
    """

    def __init__(self, tiles: Sequence["LinearTile"]) -> None:
        super().__init__(tiles)
        self.in_features = tiles[0].in_features
        self.out_features = sum(tile.out_features for tile in tiles)

    @classmethod
    def from_linear(cls, linear: nn.Linear, tiles: int) -> "TiledLinear":
        """Cuts a layer into `tiles` tiles, as equal as they can be, which share its memory.

        The layer must not be used any more. Where other modules have the same weight, as a tied
        embedding has, use tile(), which cuts it for all of them.

        Raises:
            TypeError: a layer of another class, which may compute something else.
            ValueError: there are fewer outputs than tiles, or its parameters have hooks.
        """
        _check_plain(linear, nn.Linear)
        return cls.of_parts(linear, cut_parameters(linear, tiles))

    @classmethod
    def of_parts(cls, linear: nn.Linear, parts: dict[str, list[nn.Parameter]]) -> "TiledLinear":
        """A layer over parameters that are cut already."""
        weights = parts["weight"]
        biases: Sequence[nn.Parameter | None] = parts.get("bias") or [None] * len(weights)
        tiled = cls([LinearTile(w, b) for w, b in zip(weights, biases, strict=True)])
        return _dressed_as(tiled, linear)

    def forward(self, input: torch.Tensor) -> Any:
        """All outputs, (..., out_features) of `input`, (..., in_features)."""
        if isinstance(input, Request):
            return input.gathered(cast(Any, self.tiles))
        wide = input
        if input.dtype in SHORT and input.dtype == cast(LinearTile, self.tiles[0]).weight.dtype:
            wide = input.float()  # see Note [Tiles are rows]
        return torch.cat([tile(wide) for tile in self.tiles], -1)

    def plain(self) -> nn.Module:
        """As Tiled.plain."""
        bias = "bias" in self.tensor_names()
        return nn.Linear(self.in_features, self.out_features, bias, device="meta")

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class LinearTile(nn.Linear):
    """Some rows of a linear layer. Takes float32 for a 16-bit weight, and gives such gradients."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        self.weight = weight
        if bias is not None:
            self.bias = bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The outputs of this tile."""
        if not isinstance(input, Request) and self._is_wide(input):
            return cast(torch.Tensor, _WideLinear.apply(input, self.weight, self.bias))
        return F.linear(input, self.weight, self.bias)

    def _is_wide(self, input: torch.Tensor) -> bool:
        short = self.weight.dtype in SHORT and input.dtype == torch.float32
        return short and not autocasts(input)


class _WideLinear(torch.autograd.Function):
    """F.linear of a float32 input that is computed in the dtype of the weight."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Called by apply()."""
        ctx.save_for_backward(input, weight)
        return F.linear(input.to(weight.dtype), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Called by autograd; may be differentiated again."""
        input, weight = ctx.saved_tensors
        grad = grads[0]
        rows = grad.reshape(-1, grad.shape[-1])
        to_input, to_weight, to_bias = ctx.needs_input_grad
        return (
            (grad @ weight).to(input.dtype) if to_input else None,
            rows.t() @ input.reshape(-1, input.shape[-1]).to(weight.dtype) if to_weight else None,
            rows.sum(0) if to_bias else None,
        )


class TiledEmbedding(Tiled):
    """An embedding table that is cut into tiles of entries. from_embedding() makes one.

    It has `num_embeddings`, `embedding_dim`, `padding_idx` and `tiles`; state_dict() knows
    "weight", that of the table before it was cut.

    Example:
        >>> table = strata.nn.TiledEmbedding.from_embedding(torch.nn.Embedding(1000, 16), tiles=8)
        >>> table(torch.tensor([[1, 999]])).shape
        torch.Size([1, 2, 16])
    """

    def __init__(self, tiles: Sequence["EmbeddingTile"], padding_idx: int | None = None) -> None:
        super().__init__(tiles)
        self.num_embeddings = sum(tile.rows for tile in tiles)
        self.embedding_dim = tiles[0].weight.shape[1]
        self.padding_idx = padding_idx

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, tiles: int) -> "TiledEmbedding":
        """Cuts a table as TiledLinear.from_linear() cuts a layer.

        Raises:
            TypeError: a layer of another class.
            ValueError: there are fewer entries than tiles, or it has max_norm=, sparse= or
                scale_grad_by_freq=, which need the whole table or all indices at once.
        """
        _check_plain(embedding, nn.Embedding)
        return cls.of_parts(embedding, cut_parameters(embedding, tiles))

    @classmethod
    def of_parts(
        cls, embedding: nn.Embedding, parts: dict[str, list[nn.Parameter]]
    ) -> "TiledEmbedding":
        """A table over parameters that are cut already."""
        padding = embedding.padding_idx
        tiles, first = [], 0
        for weight in parts["weight"]:
            tiles.append(EmbeddingTile(weight, first, padding))
            first += weight.shape[0]
        return _dressed_as(cls(tiles, padding), embedding)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The entries at the indices `input`, (...) whole numbers: (..., embedding_dim).

        Raises:
            IndexError: an index is out of range.
        """
        check_range(input, self.num_embeddings, "an index of the embedding")
        found = None
        for tile in self.tiles:
            found = tile(input, found)
        return cast(torch.Tensor, found)

    def plain(self) -> nn.Module:
        """As Tiled.plain."""
        return nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta"
        )

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class EmbeddingTile(nn.Module):
    """The entries from `first` on of an embedding."""

    def __init__(self, weight: nn.Parameter, first: int, padding_idx: int | None) -> None:
        super().__init__()
        self.weight = weight
        self.first = first
        self.rows = weight.shape[0]
        here = padding_idx is not None and first <= padding_idx < first + self.rows
        self.padding_idx = padding_idx - first if here and padding_idx is not None else None

    def forward(self, input: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor:
        """`found`, with the entries that this tile has in their places."""
        local = input - self.first
        here = (local >= 0) & (local < self.rows)
        # What lies elsewhere looks an entry up as well: its gradient is zero.
        entries = F.embedding(local.clamp(0, self.rows - 1), self.weight, self.padding_idx)
        if found is None:
            found = torch.zeros((), dtype=entries.dtype, device=entries.device)
        return torch.where(here.unsqueeze(-1), entries, found)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.rows}, first={self.first}"


def cut_parameters(module: nn.Module, tiles: int) -> dict[str, list[nn.Parameter]]:
    """The parameters of a layer as views of rows; a single tile is the parameter itself.

    Raises ValueError where there are fewer rows than tiles.
    """
    if isinstance(tiles, bool) or not isinstance(tiles, int):
        raise TypeError(f"tiles must be a whole number, not {tiles!r}")
    rows = next(module.parameters()).shape[0]
    if not 1 <= tiles <= rows:
        raise ValueError(
            f"tiles must be from 1 to {rows}, the rows of this {type(module).__name__}, not {tiles}"
        )
    if tiles == 1:
        return {name: [p] for name, p in module.named_parameters()}
    return {
        name: [nn.Parameter(v, p.requires_grad) for v in p.detach().split(tile_rows(rows, tiles))]
        for name, p in module.named_parameters()
    }


def tile_rows(rows: int, tiles: int) -> list[int]:
    """Of each tile, where a layer is cut into as many. Checkpoints rely on it."""
    return [rows // tiles + (i < rows % tiles) for i in range(tiles)]


def why_not(module: nn.Module) -> str:
    """Why a module cannot be cut into tiles, or ""."""
    if type(module) is nn.Embedding:
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                return f"embeddings with {option}= cannot be cut into tiles"
    elif type(module) is not nn.Linear:
        return (
            f"{type(module).__name__} cannot be cut into tiles: only nn.Linear and nn.Embedding "
            "themselves can, as other classes may compute something else"
        )
    for name, parameter in module.named_parameters():
        if is_nf4(parameter):
            return f"its {name} is an NF4Tensor, which is not cut into rows"
        if is_dtensor(parameter):
            return f"its {name} is a DTensor, which is cut already"
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"its {name} has hooks, which tiles would not call"
    return ""


def _check_plain(module: nn.Module, kind: type[nn.Module]) -> None:
    if type(module) is not kind:
        raise TypeError(why_not(module) or f"expected nn.{kind.__name__}, not {type(module)}")
    if reason := why_not(module):
        raise ValueError(reason)


HOOK_TABLES = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
    "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip


def _dressed_as(tiled: SomeTiled, module: nn.Module) -> SomeTiled:
    """Takes over a module's mode and its hooks; their handles still remove them."""
    tiled.train(module.training)
    for table in HOOK_TABLES:
        setattr(tiled, table, getattr(module, table))
    return tiled


def _tile_keys(module: Tiled, prefix: str, name: str) -> Iterator[str]:
    return (f"{prefix}tiles.{i}.{name}" for i in range(len(module.tiles)))


def _join_tiles(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Called by state_dict() behind the tiles: puts the layer's tensors in the place of theirs."""
    assert isinstance(module, Tiled)
    for name in module.tensor_names():
        parts = [state_dict.pop(key) for key in _tile_keys(module, prefix, name)]
        state_dict[f"{prefix}{name}"] = parts[0] if len(parts) == 1 else torch.cat(parts)


def _split_tiles(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Called by load_state_dict() ahead of the tiles: cuts the layer's tensors for them.

    What cannot be cut is told under the layer's name; tiles then get what they have already.
    """
    assert isinstance(module, Tiled)
    for name in module.tensor_names():
        parts = module.parts(name)
        keys = list(_tile_keys(module, prefix, name))
        given = state_dict.pop(f"{prefix}{name}", None)
        shape = (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
        if given is not None and tuple(given.shape) == shape:
            state_dict.update(zip(keys, given.split([p.shape[0] for p in parts]), strict=True))
            continue
        if given is None:
            missing_keys.append(f"{prefix}{name}")
        else:
            error_msgs.append(
                f"size mismatch for {prefix}{name}: the shape in the checkpoint is "
                f"{tuple(given.shape)}, that of the model is {shape}"
            )
        state_dict.update((key, p.detach()) for key, p in zip(keys, parts, strict=True))
