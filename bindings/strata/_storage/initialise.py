"""First values for the modules of a model that was built on the meta device, one module at a time.

    for module_name, module in model.named_modules():
        values = initialise.parameters(model, module_name, seed=0)  # {"weight": tensor, ...}
    initialise.buffers(model)                                       # rotary tables, running means

Note [Initialising one module at a time]. PyTorch initialises a module when it is built, and
Transformers once more from the leaves to the root, where an ancestor may overwrite what the leaf
got (GPT-2 rescales the projections inside its attention). Running that over the whole model would
need the whole model in memory. Here only the parameters of one module are real while its own
initialiser and those of its ancestors run, innermost first; everything else is on the meta device,
where an initialiser is a no-op. The value of a parameter is thus the one the full pass would give
it, drawn from a random stream of its own: it depends on the seed and the module's name alone.
Limit: the meta device refuses an initialiser that reads one parameter to set another.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Initialiser = Callable[[], object]


def parameters(
    model: nn.Module, module_name: str, seed: int, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """First values, as float32, of the meta parameters that `module_name` owns itself.

    `device` draws and holds them: each kind of device has a random stream of its own.

    The module is left as it was. Raises ValueError for a parameter that no initialiser sets.
    """
    module = model.get_submodule(module_name)
    original = {name: p for name, p in module._parameters.items() if p is not None and p.is_meta}
    if not original:
        return {}
    # NaN marks what no initialiser has touched.
    values = {
        name: nn.Parameter(torch.full(p.shape, torch.nan, dtype=torch.float32, device=device))
        for name, p in original.items()
    }
    try:
        module._parameters.update(values)
        seeded(seed, module_name, _initialisers(model, module_name), device)
        if any(_untouched(value) for value in values.values()):
            again = [*_own_initialisers(module), *_initialisers(model, module_name)]
            seeded(seed, module_name, again, device)
    finally:
        module._parameters.update(original)
    for name, value in values.items():
        if _untouched(value):
            raise ValueError(
                f"no initialiser sets parameter {_join(module_name, name)!r} of "
                f"{type(module).__name__}: give reset_parameters() to the module, pass weights=, "
                "or build the model on the CPU"
            )
    return {name: value.detach() for name, value in values.items()}


def buffers(model: nn.Module, skip: frozenset[str] = frozenset()) -> None:
    """Makes every meta buffer of `model` real, but for the names in `skip`.

    A buffer is set by its module's initialisers where they do so, and otherwise by building the
    module a second time on the CPU with the arguments it was built with. Raises ValueError, naming
    the buffer, where neither is possible.
    """
    for module_name, module in model.named_modules():
        wanted = [
            name
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta and _join(module_name, name) not in skip
        ]
        hidden = [n for n, v in vars(module).items() if isinstance(v, torch.Tensor) and v.is_meta]
        wanted = wanted if hidden else _initialise_buffers(model, module_name, wanted)
        if wanted or hidden:
            _rebuild_buffers(module, module_name, wanted, hidden)


def _initialise_buffers(model: nn.Module, module_name: str, wanted: list[str]) -> list[str]:
    """Lets the initialisers set the buffers `wanted` of one module; returns those they left."""
    module = model.get_submodule(module_name)
    # A bool has no value that could mark it as untouched.
    marked = [n for n in wanted if module._buffers[n].dtype != torch.bool]  # type: ignore[union-attr]
    if not marked:
        return wanted
    original = {name: module._buffers[name] for name in marked}
    for name, meta in original.items():
        assert meta is not None
        module._buffers[name] = torch.full(
            meta.shape, _mark(meta.dtype), dtype=meta.dtype, device="cpu"
        )
    seeded(0, module_name, [*_own_initialisers(module), *_initialisers(model, module_name)])
    left = [name for name in marked if _untouched(module._buffers[name])]
    module._buffers.update({name: original[name] for name in left})
    return [name for name in wanted if name not in marked or name in left]


def _rebuild_buffers(
    module: nn.Module, module_name: str, wanted: list[str], hidden: list[str]
) -> None:
    """Takes the buffers `wanted` and the plain tensor attributes `hidden` from a second module."""
    first = _join(module_name, (wanted + hidden)[0])
    arguments = _constructor_arguments(module)
    if arguments is None:
        raise ValueError(
            f"cannot recompute buffer {first!r}: {type(module).__name__} does not keep the "
            "arguments it was built with; make the buffer persistent and pass weights=, or build "
            "the model on the CPU"
        )
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        again = type(module)(**arguments)
    for name in wanted + hidden:
        old, new = getattr(module, name), getattr(again, name, None)
        if not isinstance(new, torch.Tensor) or new.shape != old.shape or new.is_meta:
            found = tuple(new.shape) if isinstance(new, torch.Tensor) else new
            raise ValueError(
                f"cannot recompute buffer {_join(module_name, name)!r}: it has shape "
                f"{tuple(old.shape)}, a second {type(module).__name__} gives {found}"
            )
        value = new.detach().to(old.dtype)
        if name in wanted:
            module._buffers[name] = value
        else:
            setattr(module, name, value)


def _constructor_arguments(module: nn.Module) -> dict[str, object] | None:
    """The arguments `module` was built with, where it keeps each under its own name."""
    arguments: dict[str, object] = {}
    for name, parameter in inspect.signature(type(module).__init__).parameters.items():
        if name in ("self", "device", "dtype"):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return None
        if not hasattr(module, name) or isinstance(getattr(module, name), nn.Module):
            return None
        arguments[name] = getattr(module, name)
    return arguments


def _initialisers(model: nn.Module, module_name: str) -> list[Initialiser]:
    """What runs on a module and then on each of its ancestors, innermost first."""
    lineage = [model.get_submodule(name) for name in _ancestors(module_name)]
    found: list[Initialiser] = []
    for place, module in enumerate(lineage):
        # Transformers lets the nearest enclosing model initialise a module.
        models = (m for m in lineage[place:] if callable(getattr(m, "_init_weights", None)))
        nearest: Any = next(models, None)
        if nearest is not None:
            found.append(functools.partial(nearest._init_weights, module))
        else:
            found += _own_initialisers(module)
    return found


def _own_initialisers(module: nn.Module) -> list[Initialiser]:
    """One, or none."""
    methods = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return [method for method in methods if callable(method)][:1]


def seeded(
    seed: int,
    name: str,
    initialisers: list[Initialiser],
    device: str | torch.device = "cpu",
) -> None:
    """Runs the initialisers with a random stream that only `seed` and `name` decide."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    where = torch.device(device)
    others = [] if where.type == "cpu" else [where]
    with torch.random.fork_rng(others, device_type="cuda"), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        for initialise in initialisers:
            initialise()


def _ancestors(name: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a` and the empty name of the root."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _mark(dtype: torch.dtype) -> float | int:
    """A value that no initialiser leaves behind."""
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def _untouched(value: torch.Tensor | None) -> bool:
    assert value is not None
    if value.dtype.is_floating_point:
        return bool(value.detach().sum().isnan())  # one NaN is enough, and a sum needs no memory
    return bool((value == _mark(value.dtype)).any())


def _join(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name
