"""Which parameters strata can manage: plain tensors of floating point, each with memory of its own,
and torchao's NF4Tensor, whose codes are taken over.

    check_parameters(model)     # raises ValueError with the name of the first that it cannot
    dtype_names()               # the dtypes that parameters may have, in words

Note [Memory]. In pages each parameter gets memory of its own. What else lay over the old memory
would stay behind there, and never see an update. Looked at is what belongs to the model: its
parameters, buffers, and tensors among the attributes of its modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from .._torch_compat import is_dtensor, is_nf4
from .sharding import shard_of, why_not_sharded

if TYPE_CHECKING:
    from .._core import DtypeName

DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

# Classes that say better than their name what they are, and what to do.
KNOWN = {
    "Params4bit": "quantised by bitsandbytes: build the model on the meta device, without "
    "quantization_config, and pass weights=FOLDER, whose codes are read as they are, and "
    "frozen='nf4' (or 'nf4-double') to strata.wrap()",
    "Int8Params": "quantised by bitsandbytes: build the model on the meta device, without "
    "quantization_config, and pass weights=FOLDER, whose codes are read as they are, and "
    "frozen='int8' to strata.wrap()",
    "FlatParameter": "FSDP's: wrap the plain model instead",
}


def check_parameters(model: nn.Module) -> None:
    """Raises ValueError where a parameter cannot be moved to pages, and says what would help."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run the lazy model once first")
        _check_class(name, parameter)
        if parameter.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}, which is not supported; "
                f"valid: {dtype_names()}"
            )
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"parameter {name!r} is {parameter.layout}, which is not supported: make it dense"
            )
    _check_memory(model)


def is_of_peft(module: nn.Module | None) -> bool:
    """Whether its class is PEFT's, which need not be installed."""
    return type(module).__module__.split(".")[0] == "peft"


# Where modules of PEFT have what they wrap.
WRAPPED_BY_PEFT = ("base_model", "model", "base_layer", "original_module", "token_adapter")


def is_of_adapter(model: nn.Module, name: str) -> bool:
    """Whether the parameter of this name is an adapter's, used at present or not, or belongs to a
    copy that PEFT has made of a module to train it."""
    module: nn.Module | None = model
    for part in name.split(".")[:-1]:
        if is_of_peft(module) and part not in WRAPPED_BY_PEFT:
            return True
        module = module._modules.get(part) if module is not None else None
    return is_of_peft(module)


def dtype_names() -> str:
    """The dtypes that parameters may have."""
    return ", ".join(str(dtype) for dtype in DTYPE_NAMES)


def _check_class(name: str, parameter: nn.Parameter) -> None:
    """What a subclass adds, such as scales or a place among ranks, pages do not have."""
    kind = type(parameter)
    if is_dtensor(parameter):
        if why := why_not_sharded(parameter):
            raise ValueError(f"parameter {name!r} is a DTensor {why}")
        return
    if kind is nn.Parameter or (is_nf4(parameter) and not parameter.requires_grad):
        return
    what = KNOWN.get(kind.__name__)
    if is_nf4(parameter):
        what = "quantised by torchao, and cannot be trained: freeze it (requires_grad_(False))"
    elif what is None and kind.__module__.startswith("torchao."):
        what = (
            "quantised by torchao, and of its forms strata takes NF4Tensor: load the model in "
            "bfloat16, and pass frozen='nf4'"
        )
    raise ValueError(
        f"parameter {name!r} is a {kind.__module__}.{kind.__name__}, "
        + (what or "a class of its own, which pages would not keep: make it a plain nn.Parameter")
        + "; strata stores moments in 8 bits by itself (state_dtype='8bit')" * (what is not None)
    )


def _check_memory(model: nn.Module) -> None:
    """See Note [Memory]."""
    found = [(f"parameter {name!r}", p) for name, p in model.named_parameters()]
    spans = sorted([(*_span(t), what, t) for what, t in found + list(_others(model))], key=_begins)
    ahead: list[tuple[int, int, str, torch.Tensor]] = []  # those that reach furthest
    for span in spans:
        begin, end, what, tensor = span
        ahead = [other for other in ahead if begin < other[1]]
        for _, _, other_what, other in ahead:
            either = isinstance(tensor, nn.Parameter) or isinstance(other, nn.Parameter)
            if either and _overlap(tensor, other):
                raise ValueError(
                    f"{other_what} and {what} share memory without being one: tie parameters by "
                    "assigning the parameter itself, cut tied layers with strata.nn.tile(), and "
                    "let buffers and attributes hold copies"
                )
        if begin < end:
            ahead.append(span)


def _others(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers, and tensors among the attributes of modules, that are no parameters of the model."""
    known = {id(p) for p in model.parameters()}
    for prefix, module in model.named_modules():
        # What spectral_norm and its like leave there is computed anew ahead of each forward.
        computed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        for kind, found in (("buffer", module._buffers), ("attribute", vars(module))):
            for name, value in found.items():
                fresh = isinstance(value, torch.Tensor) and id(value) not in known
                if fresh and name not in computed:
                    known.add(id(value))
                    yield f"{kind} {(f'{prefix}.{name}' if prefix else name)!r}", value


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to behind its last; (0, 0) where it has none."""
    if is_dtensor(tensor):
        tensor = shard_of(tensor)
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_meta or tensor.numel() == 0:
        return 0, 0
    return tensor.data_ptr(), tensor.data_ptr() + reach(tensor) * tensor.element_size()


def reach(tensor: torch.Tensor) -> int:
    """Elements from its first to behind its last one in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _begins(span: tuple[int, int, str, torch.Tensor]) -> tuple[int, int]:
    return span[0], -span[1]


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors with overlapping spans have an element in common: columns have none."""
    if (a.is_contiguous() and b.is_contiguous()) or a.element_size() != b.element_size():
        return True
    begin = min(a.data_ptr(), b.data_ptr())
    offsets = [(t.data_ptr() - begin) // t.element_size() for t in (a, b)]
    most = max(offset + reach(t) for offset, t in zip(offsets, (a, b), strict=True))
    taken = torch.zeros(most, dtype=torch.bool, device="cpu")
    taken.as_strided(a.shape, a.stride(), offsets[0]).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), offsets[1]).any())
