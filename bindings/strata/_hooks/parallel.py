"""Other ways to train on several processes: DDP, FSDP, and what Accelerate does by itself.

    refuse_parallel(model)                 # ValueError: DDP or FSDP is around the model, or inside
    kept = KeptUnwrapped(model, 2, False)  # of so many ranks: neither will be put around it
    refuse_ddp_around(model)               # nor was DDP, where nobody was asked
    kept.remove()

Note [Accelerate and DDP]. Ranks train one model already, so DDP around it would add up gradients
for a second time. Accelerator.prepare(), which the Trainer calls as well, puts every model of
several processes into DDP, but for those that have `_is_accelerate_prepared`: it is answered here.
Whoever puts DDP around the model, or around one that it is in, is refused where DDP takes that in,
ahead of its first collective, and one that was there before in the first forward. Accelerate asks
ahead of autocast, which it would then leave out without a word: that is refused. So is an
Accelerate that was not told that the CPU computes: it starts torch.distributed, and shares out no
batches.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .._config.rank_group import group_of

PREPARED = "_is_accelerate_prepared"
# By class: what to do in place of it. FSDP2 makes its own class of the model's.
PARALLEL = {
    "DistributedDataParallel": "give strata.wrap() the model inside, model.module",
    "DataParallel": "give strata.wrap() the model inside, model.module",
    "FullyShardedDataParallel": "leave it out",
    "FSDPModule": "leave fully_shard() out",
}


def refuse_parallel(model: nn.Module) -> None:
    """Raises ValueError where the model is in DDP or FSDP, or a part of it is."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if (instead := PARALLEL.get(kind.__name__)) is not None:
                where = f"module {name!r}" if name else "this model"
                raise ValueError(
                    f"{where} is in {kind.__name__}, and strata.wrap() lets the ranks of torchrun "
                    f"train one model by itself: {instead}"
                )


def refuse_ddp_around(model: nn.Module) -> None:
    """Raises ValueError where the model computes within DDP, whoever put that around it."""
    around = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if around is not None:
        _refuse_around(weakref.ref(model), around, "module", around.module)


def _refuse_around(
    kept: weakref.ref[nn.Module], parent: nn.Module, _: str, child: nn.Module | None
) -> None:
    """Called by torch where any module takes in another."""
    kind = next((k.__name__ for k in type(parent).__mro__ if k.__name__ in PARALLEL), None)
    model = kept()
    if kind is None or child is None or model is None:
        return
    if any(module is model for module in child.modules()):
        raise ValueError(
            f"a model whose ranks train it together already is in {kind}, which would add up "
            "gradients for a second time: leave it out"
        )


class Answer:
    """What a model of several processes answers to those who would put something around it."""

    def __init__(self, ranks: int, shards: bool) -> None:
        self._ranks, self._shards = ranks, shards

    def __bool__(self) -> bool:
        """Whether Accelerate leaves the model as it is. Raises ValueError where it was to compute
        under autocast, and where Accelerate does not know of the other ranks, or of more."""
        seen = _said_by_accelerate("PartialState", "num_processes")
        if seen == 1 < self._ranks:
            raise ValueError(
                "Accelerate sees one process, and would give every rank the same batches: "
                "TrainingArguments(use_cpu=True) and Accelerator(cpu=True) see all of them"
            )
        if seen not in (None, self._ranks) and self._shards:
            raise ValueError(
                f"Accelerate shares batches out over {seen} processes, and those that have shards "
                "of one DTensor need the same: write the loop without Accelerate"
            )
        if seen not in (None, self._ranks):
            raise ValueError(
                f"Accelerate shares batches out over {seen} processes, and {self._ranks} of them "
                "train this model (rank_group=): leave rank_group= out, or write the loop without "
                "Accelerate"
            )
        precision = _said_by_accelerate("AcceleratorState", "_mixed_precision")
        if precision not in (None, "no"):
            raise ValueError(
                f"mixed_precision={precision!r} does not reach a model of several ranks through "
                "Accelerator.prepare(): give strata.wrap() dtype=torch.bfloat16, which saves "
                "memory too, or the Trainer strata's TrainerMixin"
            )
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a wrapped model is a plain one, and not prepared."""
        return (tuple, ())


class KeptUnwrapped:
    """Until remove(), nothing is put around the model. See Note [Accelerate and DDP]."""

    def __init__(self, model: nn.Module, ranks: int, shards: bool) -> None:
        """`shards`: some parameters are DTensors."""
        self._model = model
        model.__dict__[PREPARED] = Answer(ranks, shards)
        hook = partial(_refuse_around, weakref.ref(model))
        self._handle = register_module_module_registration_hook(hook)
        weakref.finalize(model, self._handle.remove).atexit = False

    def remove(self) -> None:
        """Accelerate and DDP may wrap the model again."""
        self._model.__dict__.pop(PREPARED, None)
        self._handle.remove()


def let_accelerate_ask(model: nn.Module) -> bool:
    """Accelerate may prepare the model once, for a caller who keeps DDP away by other means. False:
    it has, or the model is not of several ranks."""
    if not isinstance(model.__dict__.get(PREPARED), Answer):
        return False
    del model.__dict__[PREPARED]
    return True


def several_processes() -> bool:
    """Whether torch.distributed knows of others, though a group of one may train by itself."""
    world = group_of(None)
    return world is not None and len(world.members) > 1


def _said_by_accelerate(state: str, name: str) -> Any:
    """What one of its states in this process holds; None: nothing yet."""
    module = sys.modules.get("accelerate.state")
    return getattr(module, state)._shared_state.get(name) if module is not None else None
