"""Which tensors of files become which tensors of a model, and what does not fit.

    match = Match(model, source)              # ValueError where something is missing or too much
    for wanted, value in match.read():        # in the model's order, one at a time
        ...

Files of a model of Transformers may name and cut its tensors otherwise than its modules do
(conversion.py); what belongs together is read together. Those of a model with adapters of PEFT are
files of the model inside, and name nothing that the adapters add.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from .._config.sharding import Sharding, sharding_of
from .._errors import listed
from .._runtime.ready_codes import ReadyCodes
from .conversion import Conversion, mapping_of
from .stored import Shape, StoredTensor, base_model, base_name, persistent_buffers, stored_tensors

if TYPE_CHECKING:
    from .weights import WeightFiles


@dataclass(eq=False)
class Wanted:
    """A tensor of the model that files are to have."""

    name: str  # in the model
    names: list[str]  # in the model inside, whose the files are; of a tied one more than one
    shape: Shape
    tensor: StoredTensor | None  # None: a buffer
    sharding: Sharding | None = None  # of a shard: files have the whole

    def own(self, value: torch.Tensor | ReadyCodes) -> torch.Tensor | ReadyCodes:
        """What the model has of a value of the files. Raises ValueError for codes of a shard."""
        if self.sharding is None:
            return value
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"the weights of {self.name!r} are quantised, and it is a DTensor: read weights "
                "that are not"
            )
        return self.sharding.cut(value)


class _Wrong(NamedTuple):
    """What there is to say of files that do not fit."""

    missing: set[str]
    extra: set[str]
    shaped: set[str]


class Match:
    """A model, and the files that it is read from."""

    def __init__(self, model: nn.Module, source: WeightFiles) -> None:
        """Raises one ValueError for everything that does not fit, in the names of the files."""
        self._source = source
        self._base: Any = base_model(model)
        self._wanted = _wanted(model)
        others = (base_name(model, name) for name, _ in model.named_buffers())
        known = {name for wanted in self._wanted for name in wanted.names}
        known |= {name for name in others if name is not None}
        mapping = mapping_of(self._base)
        if mapping is None:
            found = _under_prefixes(self._base, source.names(), known)
        else:
            found = mapping.to_model(source.names(), known)
        self._made: dict[str, Conversion] = {}  # by the names that they give
        self._shapes: dict[str, Shape] = {}
        unmade = [conversion for conversion in found if not self._try(conversion)]
        self._check(known, unmade)
        if mapping is not None:
            mapping.keep_used()

    def read(self) -> Iterator[tuple[Wanted, torch.Tensor | ReadyCodes]]:
        """Every wanted tensor once, in the dtype of the files, or as the codes that they have.
        Raises ValueError for codes that the model has as a part of something."""
        takers: dict[str, list[Wanted]] = {}
        for wanted in self._wanted:
            takers.setdefault(self._names(wanted)[0], []).append(wanted)
        for name in list(takers):
            if name not in takers:
                continue  # it came with another
            if (ready := self._ready(name)) is not None:
                yield from ((wanted, wanted.own(ready)) for wanted in takers.pop(name))
                continue
            values = self._made[name].run(self._source.read)
            while values:
                made, value = values.popitem()
                for wanted in takers.pop(made, ()):
                    self._check_tied(wanted, value)
                    yield wanted, wanted.own(value)

    def _ready(self, name: str) -> ReadyCodes | None:
        """The codes that become this tensor; None: it is made of values."""
        conversion = self._made[name]
        if conversion.transform is None:
            return self._source.ready(conversion.sources[0])
        for source in conversion.sources:
            if self._source.is_ready(source):
                raise ValueError(
                    f"{source!r} is quantised, and a part of {name!r} in the model: codes can only "
                    "be taken as they are"
                )
        return None

    def _names(self, wanted: Wanted) -> list[str]:
        """Those under which files have it."""
        return [name for name in wanted.names if name in self._made]

    def _try(self, conversion: Conversion) -> bool:
        """Notes what a conversion gives; whether it gives anything of what there is."""
        try:
            made = conversion.run(self._source.like)
        except Exception:  # parts that do not go together; which, _find_wrong() tells
            return False
        for name, like in made.items():
            if name in self._made:
                pair = self._made[name].sources[0], conversion.sources[0]
                raise ValueError(f"both {pair[0]!r} and {pair[1]!r} stand for {name!r}")
            self._made[name] = conversion
            self._shapes[name] = tuple(like.shape)
        return True

    def _check_tied(self, wanted: Wanted, value: torch.Tensor) -> None:
        first, *others = self._names(wanted)
        for other in others:
            if not torch.equal(value, self._made[other].run(self._source.read)[other]):
                raise ValueError(
                    f"{first!r} and {other!r} are one tied parameter of the model, but their "
                    f"tensors in {self._source.path} differ"
                )

    def _check(self, known: set[str], unmade: list[Conversion]) -> None:
        ignored = [
            re.compile(p)
            for p in getattr(self._base, "_keys_to_ignore_on_load_unexpected", None) or ()
        ]
        extra = {
            f"{source!r} {self._source.shape(source)}"
            for name, conversion in self._made.items()
            for source in conversion.sources
            if name not in known and not any(p.search(source) for p in ignored)
        }
        wrong = _Wrong(set(), extra, set())
        for wanted in self._wanted:
            names = self._names(wanted)
            if not names or any(self._shapes[name] != wanted.shape for name in names):
                sources = {s for name in names for s in self._made[name].sources}
                sources |= {s for c in unmade if c.target in wanted.names for s in c.sources}
                self._find_wrong(wanted, sources, wrong)
        found = zip(("missing", "not in the model", "of another shape"), wrong, strict=True)
        problems = [f"{what}: {listed(sorted(which))}" for what, which in found if which]
        if problems:
            raise ValueError(
                f"the tensors of {self._source.path} do not fit the model; " + "; ".join(problems)
            )

    def _find_wrong(self, wanted: Wanted, sources: set[str], wrong: _Wrong) -> None:
        """Says which tensors files should have had for one that cannot be made of `sources`."""
        shape = self._source.shape
        parts = self._parts(wanted)
        if parts.keys() & sources or (parts and not sources):
            found = _Wrong(
                {f"{n!r} {s}" for n, s in parts.items() if n not in sources},
                {f"{n!r} {shape(n)}" for n in sources if n not in parts},
                {
                    f"{n!r} is {shape(n)}, and {s} is needed"
                    for n, s in parts.items()
                    if n in sources and shape(n) != s
                },
            )
            for all_of_it, here in zip(wrong, found, strict=True):
                all_of_it |= here
            if any(found):
                return
        if sources:
            first = min(sources)
            others = f" and {len(sources) - 1} others" if len(sources) > 1 else ""
            wrong.shaped.add(
                f"{first!r}{others} is {shape(first)}, the model's {wanted.name!r} is "
                f"{wanted.shape}"
            )
        else:
            wrong.missing.add(f"{wanted.names[0]!r} {wanted.shape}")

    def _parts(self, wanted: Wanted) -> dict[str, Shape]:
        """What files that save_pretrained() writes have for it, where that is not itself."""
        mapping = mapping_of(self._base, saving=True)
        if mapping is None:
            return {}
        shapes = {w.names[0]: w.shape for w in self._wanted}
        for conversion in mapping.to_files(shapes):
            if wanted.names[0] in conversion.sources and conversion.transform is not None:
                made = conversion.run(lambda name: torch.empty(shapes[name], device="meta"))
                return {name: tuple(like.shape) for name, like in made.items()}
        return {}


def _wanted(model: nn.Module) -> list[Wanted]:
    found = []
    parameters = list(model.parameters())
    for tensor in stored_tensors(model):
        names = [base for name in tensor.names if (base := base_name(model, name)) is not None]
        if names:
            sharding = sharding_of(parameters[tensor.parts[0]])
            shape = tensor.shape if sharding is None else tuple(sharding.shape)
            found.append(Wanted(tensor.name, names, shape, tensor, sharding))
    for name, value in persistent_buffers(model).items():
        base = base_name(model, name)
        if base is not None:
            found.append(Wanted(name, [base], tuple(value.shape), None))
    return found


def _under_prefixes(model: nn.Module, stored: set[str], known: set[str]) -> list[Conversion]:
    """Tensors of files become those of the same name.

    A folder may hold the tensors of a base model that this one wraps under `base_model_prefix`, or
    the other way round.
    """
    prefix = getattr(model, "base_model_prefix", "")
    found = []
    for name in sorted(stored):
        candidates = [name]
        if prefix:
            candidates += [f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
        found.append(Conversion([name], next((c for c in candidates if c in known), name)))
    return found
