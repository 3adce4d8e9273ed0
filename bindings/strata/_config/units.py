"""Finds the units of a model: the parameters that are gathered, moved and updated together.

    units, hooked = find_units(model)
    units[1].name                  # "model.layers.0"
    hooked[model.lm_head]          # [1]: indices of the units that a module's forward reads

A *block* is a child of an outermost ModuleList or Sequential, with all parameters below it. So is a
module that owns a good part of the parameters below it, such as an attention layer. Every other
module that owns parameters makes a unit of just these. Small ones among the latter share a unit, so
that they share pages. A tied parameter belongs to the unit that owns it first; the other
module's forward reads that unit too. A layer that is cut into tiles (nn/tiles.py) is there to be
on the device in parts: its tiles are units of their own, and no block has it within.

Note [Slivers]. Pages belong to one unit, and each role of what is trained has its own. An adapter
of some kilobytes in each of many frozen blocks would take ten times what it needs. So what is
trained of such blocks, in their order, makes units that several blocks read, each as large as some
pages: it stays on the device while these blocks come one after the other. So does what is frozen
and no codes where the rest of a block is codes, such as norms: those have pages of their own, too.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from .._errors import nearest
from ..nn.tiles import Tiled
from .sharding import sharding_of

Predicate = Callable[[str, nn.Module], bool]
Chosen = Iterable[nn.Module | str] | Predicate

SMALL_BYTES_MAX = 1 << 20  # a unit is small up to here ...
SMALL_SHARE = 64  # ... and up to this part of the model: a toy model has small units too
SLIVERS_BYTES_MAX = 16 << 20  # of a unit of slivers: see Note [Slivers]
OWN_SHARE = 8  # a module that owns this part of what lies below it is a block


@dataclass
class UnitSpec:
    """A unit: its name, its parameters' indices in model.parameters(), and their bytes."""

    name: str
    params: list[int] = field(default_factory=list)
    bytes: int = 0


@dataclass
class _Owner:
    """A module whose forward reads `params`: a block with all below it, or its direct ones."""

    name: str
    module: nn.Module
    params: list[nn.Parameter]
    is_block: bool


class _Shared:
    """The unit that what is small joins, until it is small no more, and then the next one."""

    def __init__(self, most: int, name: Callable[[list[str]], str]) -> None:
        """`most`: bytes of one. `name`: of one, by its owners."""
        self.most = most
        self._name = name
        self._owners: list[str] = []
        self._place = 0  # of the unit, where it has owners

    def take(self, units: list[UnitSpec], owner: str, size: int) -> int:
        """The index of the unit that so much of an owner joins; a new one is added to `units`."""
        if not self._owners or units[self._place].bytes + size > self.most:
            self._place, self._owners = len(units), []
            units.append(UnitSpec(""))
        self._owners.append(owner)
        units[self._place].name = self._name(self._owners)
        return self._place


def find_units(
    model: nn.Module,
    chosen: Chosen | None = None,
    slivers: bool = True,
    coded: Collection[int] = (),
) -> tuple[list[UnitSpec], dict[nn.Module, list[int]]]:
    """The units in order of definition, and the modules to hook with the units each one reads.

    `chosen` names more blocks: modules, their names, or a predicate. `slivers`: those of several
    blocks share units. `coded`: the ids of parameters that rest as codes. Raises
    ValueError where a block is not in the model or lies in another.
    """
    index_of = {id(p): i for i, p in enumerate(model.parameters())}
    owners = list(_owners(model, "", _chosen_modules(model, chosen)))
    share = _bytes(list(model.parameters())) // SMALL_SHARE
    small = _Shared(min(SMALL_BYTES_MAX, share), "+".join)
    trained = _Shared(
        min(SLIVERS_BYTES_MAX, share),
        lambda of: (
            f"what is {'small' if coded else 'trained'} of {of[0]}"
            + (f" to {of[-1]}" if len(of) > 1 else "")
        ),
    )

    units: list[UnitSpec] = []
    unit_of: dict[int, int] = {}

    def give(place: int, params: list[nn.Parameter]) -> None:
        units[place].params += [index_of[id(p)] for p in params]
        units[place].bytes += _bytes(params)
        unit_of.update((id(p), place) for p in params)

    for owner in owners:
        fresh = [p for p in owner.params if id(p) not in unit_of]
        # That of slivers comes first: a module's own unit has the largest index that it reads.
        for sliver in _slivers(fresh, coded) if slivers else ():
            if 0 < 2 * _bytes(sliver) <= trained.most:
                give(trained.take(units, owner.name, _bytes(sliver)), sliver)
                fresh = [p for p in fresh if id(p) not in unit_of]
                break
        if not fresh:
            continue
        if not owner.is_block and _bytes(fresh) <= small.most:
            give(small.take(units, owner.name, _bytes(fresh)), fresh)
        else:
            units.append(UnitSpec(owner.name))
            give(len(units) - 1, fresh)

    hooked: dict[nn.Module, list[int]] = {}
    for owner in owners:
        reads = hooked.setdefault(owner.module, [])
        reads += [u for u in dict.fromkeys(unit_of[id(p)] for p in owner.params) if u not in reads]
    return units, hooked


def _bytes(params: list[nn.Parameter]) -> int:
    """Of shards those of the whole: all processes that have some make the same units."""
    spread = [(p, sharding_of(p)) for p in params]
    return sum(p.nbytes if s is None else s.shape.numel() * p.itemsize for p, s in spread)


def _slivers(params: list[nn.Parameter], coded: Collection[int]) -> list[list[nn.Parameter]]:
    """What of them may be apart, the most of it first: what is no codes, where others are codes;
    what is trained, where others are frozen."""
    plain = [p for p in params if id(p) not in coded]
    trained = [p for p in params if p.requires_grad]
    return [part for part in (plain, trained) if len(part) < len(params)]


def used_apart(units: list[UnitSpec], hooked: dict[nn.Module, list[int]]) -> list[bool]:
    """By unit: whether forwards of other units may come between uses of its parameters.

    So where several modules read it, and where its module has others within.
    """
    result = []
    for place, unit in enumerate(units):
        readers = [module for module, reads in hooked.items() if place in reads]
        within = [m for m in readers[0].modules() if m in hooked]
        result.append(len(unit.params) > 1 and (len(readers) > 1 or len(within) > 1))
    return result


def _chosen_modules(model: nn.Module, chosen: Chosen | None) -> set[nn.Module]:
    if chosen is None:
        return set()
    modules = dict(model.named_modules())
    if callable(chosen) and not isinstance(chosen, nn.Module):
        return {m for name, m in modules.items() if chosen(name, m)}
    result: set[nn.Module] = set()
    known = set(modules.values())
    for item in [chosen] if isinstance(chosen, str | nn.Module) else chosen:
        module = modules.get(item) if isinstance(item, str) else item
        if module is None:
            raise ValueError(
                f"units: the model has no module {item!r}: {nearest(str(item), modules)}"
            )
        if module not in known:
            raise ValueError(f"units: {type(module).__name__} is not a module of the model")
        result.add(module)
    for module in result:
        inner = next((m for m in module.modules() if m is not module and m in result), None)
        if inner is not None:
            raise ValueError(
                f"units: {_name_of(model, inner)!r} lies in {_name_of(model, module)!r}; "
                "a parameter can belong to one unit only"
            )
    return result


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, m in model.named_modules() if m is module)


def _owners(module: nn.Module, name: str, chosen: set[nn.Module]) -> Iterator[_Owner]:
    """Modules that own parameters, in order of definition, outermost first."""
    if module in chosen:
        yield _Owner(name or "model", module, list(module.parameters()), True)
        return
    if direct := _direct_params(module):
        everything = list(module.parameters())
        if _holds_together(module, direct, everything):
            yield _Owner(name or "model", module, everything, len(everything) > len(direct))
            return
        yield _Owner(name or "model", module, direct, False)
    blocks = _is_block_list(module) and not any(m in chosen for m in module.modules())
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            continue  # its parameters are used by `module` directly: never called by itself
        if blocks and _is_block(child):
            yield _Owner(path, child, list(child.parameters()), True)
        else:
            yield from _owners(child, path, chosen)


def _is_block(child: nn.Module) -> bool:
    """Whether a child of a list is a block: more than a leaf, with nothing to be taken apart."""
    modules = list(child.modules())
    if len(modules) == 1 or any(isinstance(m, Tiled) for m in modules):
        return False
    return any(True for _ in child.parameters())


def _direct_params(module: nn.Module) -> list[nn.Parameter]:
    direct = list(module.parameters(recurse=False))
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            direct += child.parameters()
    return list({id(p): p for p in direct}.values())


def _holds_together(
    module: nn.Module, direct: list[nn.Parameter], everything: list[nn.Parameter]
) -> bool:
    """Whether what a module owns itself is used with what lies below, and is not small beside it.

    If it made a unit of its own, both would have to be on the device at the same time anyway.
    """
    if any(_is_block_list(m) for m in module.modules()):
        return False
    return _bytes(direct) * OWN_SHARE >= _bytes(everything)


def _is_block_list(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    return sum(any(True for _ in child.parameters()) for child in module.children()) >= 2
