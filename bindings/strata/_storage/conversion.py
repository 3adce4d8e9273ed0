"""How files of Transformers name, and cut, the tensors of a model: both ways.

    mapping = mapping_of(model)                      # None: files have the names of the modules
    for conversion in mapping.to_model(names, known):
        values = conversion.run(read)                # {"layers.0.mlp.experts.down_proj": ...}
    as_in_files(model, model.state_dict())           # {"layers.0.mlp.experts.0.w2.weight": ...}

Since version 5 a module of Transformers may hold in one tensor what its files hold in many (the
experts of Mixtral), or call it otherwise. Its `conversion_mapping` says how: by renamings, and by
converters with a chain of operations. from_pretrained() and save_pretrained() apply them to all
tensors of a model at once. Here they are applied to the tensors that belong together, one such
group at a time, and to tensors on the meta device where shapes alone are wanted.

All that is known here of Transformers' own modules is in this file.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from .._runtime.stand_in import StandIn, make

Read = Callable[[str], torch.Tensor]


@dataclass
class Conversion:
    """Tensors of one side that together become tensors of the other."""

    sources: list[str]
    target: str  # the first that they become
    transform: Any = None  # of Transformers; None: the source becomes the target as it is
    patterns: list[str] = field(default_factory=list)  # of each source, that the transform knows
    model: Any = None
    rename: Callable[[str], str] = str  # of what the transform gives

    def run(self, read: Read) -> dict[str, torch.Tensor]:
        """What becomes of the sources, which are read now."""
        if self.transform is None:
            return {self.target: read(self.sources[0])}
        transform = copy.deepcopy(self.transform)
        for source, pattern in zip(self.sources, self.patterns, strict=True):
            transform.add_tensor(self.target, source, pattern, partial(read, source))
        made = transform.convert(self.target, model=self.model, config=self.model.config)
        return {
            self.rename(name): value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }


class FileMapping:
    """The renamings and converters of one model."""

    def __init__(self, model: Any, loading: Any, transforms: list[Any]) -> None:
        self.model = model
        self._loading = loading  # the module of Transformers that applies them
        self._rename = loading.rename_source_key
        self._transforms = transforms

    def to_model(self, names: Iterable[str], known: Collection[str]) -> list[Conversion]:
        """From tensors of files, called `names`, to those that a model has; `known` are its names.
        What belongs to no tensor of the model becomes one that is not in `known`."""
        there = dict.fromkeys(known, True)
        prefix = self.model.base_model_prefix
        renamings, converters = self._kinds(self._transforms)

        def place(name: str) -> tuple[str, str | None]:
            target, pattern = self._rename(name, renamings, converters, prefix, there)
            if target not in there and name in there:
                target, pattern = self._rename(name, [], [], prefix, there)
            return target, pattern if target in there else None

        return self._grouped(names, place, converters)

    def to_files(self, names: Iterable[str]) -> list[Conversion]:
        """From tensors of the model to those of files, as save_pretrained() writes them."""
        reverse = [transform.reverse_transform() for transform in reversed(self._transforms)]
        renamings, converters = self._kinds(reverse)

        def renamed(name: str) -> str:
            return str(self._rename(name, renamings, [])[0])

        def place(name: str) -> tuple[str, str | None]:
            target, pattern = self._rename(name, [], converters)
            return (renamed(name), None) if pattern is None else (target, pattern)

        return self._grouped(names, place, converters, renamed)

    def keep_used(self) -> None:
        """Has the model write its files in the form of those that it was read from, as
        from_pretrained() has."""
        self.model._weight_conversions = [t for t in self._transforms if t.was_used()]

    def _kinds(self, transforms: list[Any]) -> tuple[list[Any], list[Any]]:
        renamings = [t for t in transforms if isinstance(t, self._loading.WeightRenaming)]
        return renamings, [t for t in transforms if isinstance(t, self._loading.WeightConverter)]

    def _grouped(
        self,
        names: Iterable[str],
        place: Callable[[str], tuple[str, str | None]],
        converters: list[Any],
        rename: Callable[[str], str] = str,
    ) -> list[Conversion]:
        """`place` gives what a tensor becomes, and the pattern of the converter that makes it."""
        of_pattern = {p: converter for converter in converters for p in converter.source_patterns}
        found: list[Conversion] = []
        groups: dict[str, Conversion] = {}
        for name in sorted(names, key=self._loading.dot_natural_key):
            target, pattern = place(name)
            if pattern is None:
                found.append(Conversion([name], target))
                continue
            group = groups.get(target)
            if group is None:
                group = Conversion([], target, of_pattern[pattern], [], self.model, rename)
                groups[target] = group
                found.append(group)
            group.sources.append(name)
            group.patterns.append(pattern)
        return found


def mapping_of(model: nn.Module, saving: bool = False) -> FileMapping | None:
    """That of a model of Transformers 5; None for all others, whose files have the names of their
    modules. `saving`: as its files were when it was loaded, where it was."""
    loading = sys.modules.get("transformers.core_model_loading")
    models = sys.modules.get("transformers.modeling_utils")
    if loading is None or models is None or not isinstance(model, models.PreTrainedModel):
        return None
    if not hasattr(loading, "PrefixChange"):  # the first versions 5 do it otherwise
        return None
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not saving:
        return FileMapping(model, loading, get_model_conversion_mapping(model))
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:
        made = get_model_conversion_mapping(model, add_legacy=False)
        # Whether the files had that prefix is not known.
        transforms = [t for t in made if not isinstance(t, loading.PrefixChange)]
    return FileMapping(model, loading, transforms) if transforms else None


# Files, one tensor at a time ----------------------------------------------------------------------


def as_in_files(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a model by their names in files, as save_pretrained() writes them. What files
    have otherwise than the model has no memory, and is made when it is looked at."""
    mapping = mapping_of(model, saving=True)
    if mapping is None:
        return dict(tensors)
    found: dict[str, torch.Tensor] = {}
    outputs = Outputs(lambda name: tensors[name].detach().to("cpu", copy=True))
    for conversion in mapping.to_files(tensors):
        if conversion.transform is None:
            found[conversion.target] = tensors[conversion.sources[0]]
            continue
        for name, like in conversion.run(lambda source: on_meta(tensors[source])).items():
            found[name] = make(StandIn, Made(outputs, conversion, name, like))
    return found


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """One of the same shape and dtype, without values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class Makes(Protocol):
    """Tensors that are made together."""

    def run(self, read: Read) -> dict[str, torch.Tensor]: ...


class Outputs:
    """Runs conversions and the like, and keeps what nobody has looked at yet: of the last few, for
    files have their tensors in another order than models."""

    KEPT = 3  # of which the outputs alternate in a file

    def __init__(self, read: Read) -> None:
        self._read = read
        self._kept: dict[int, dict[str, torch.Tensor]] = {}  # the newest last

    def take(self, maker: Makes, name: str) -> torch.Tensor:
        """One output, which is forgotten here."""
        outputs = self._kept.pop(id(maker), None)
        if outputs is None or name not in outputs:
            while len(self._kept) >= self.KEPT:
                del self._kept[next(iter(self._kept))]
            outputs = maker.run(self._read)
        value = outputs.pop(name)
        if outputs:
            self._kept[id(maker)] = outputs
        return value


class Made:
    """One tensor that is made with others; see Values of stand_in.py."""

    def __init__(self, outputs: Outputs, maker: Makes, name: str, like: torch.Tensor) -> None:
        self.shape, self.dtype = like.shape, like.dtype
        self.device = torch.device("cpu")
        self._outputs, self._maker, self._name = outputs, maker, name

    def open(self) -> torch.Tensor:
        return self._outputs.take(self._maker, self._name)

    def close(self, values: torch.Tensor, changed: bool) -> None:
        """A change would be lost: whoever wants one copies."""
        assert not changed
