"""strata under the Trainer of Transformers, and under whatever is built on it (TRL's, for example).

    trainer.train(resume_from_checkpoint=True)

A class of trainers has TrainerMixin as its first base, ahead of Trainer or SFTTrainer, and is given
strata={"memory": {"device": "8GiB", "host": "24GiB"}}. The mixin calls strata.wrap() where the
Trainer makes its optimizer, with these keywords; so the model may be larger than memory, and may be
on the meta device (`weights=`). It leaves the model where it is until then. Checkpoints hold the
training state as strata.save() writes it, beside the model as save_pretrained() writes it, and
neither is in memory as a whole.

Note [Who clips]. The Trainer does, ahead of the update, as `args.max_grad_norm` says: 1.0 where
nobody says anything. Where wrap() was told to clip, the update does, and the Trainer leaves it to
that. With LockFree the Trainer could not, and the update clips by `args.max_grad_norm`. With
"in_backward" nobody could: that is refused.

Note [A step that is tried again]. The first step of each shape is recorded, and may run out of
device memory. Then its gradients are dropped and all its batches run again, which takes less, from
the random state that the step began with: the bits are those of a step that had enough. Of several
ranks the others would have to do the same: such a step is refused.

Note [Ranks]. Under torchrun every rank has a Trainer of its own, and each takes its batches: the
Trainer shares them out. What it does on the first process alone (logs, the exported model) it does
so here. Every rank calls strata.save() and strata.load(). Nobody goes on from a checkpoint until
all have written theirs of it.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from .._api import report, wrap
from .._errors import StrataError, nearest
from .._hooks.parallel import let_accelerate_ask
from .._runtime.optimizer import StrataOptimizer
from .._runtime.wrapped import wrapped
from ..optim import GradScaler, Lion
from ._trainer_arguments import (
    OPTIMIZERS,
    check_arguments,
    clipping,
    keywords_of_arguments,
    optimizer_name,
)
from ._trainer_checkpoints import newest_checkpoint as newest_checkpoint
from ._trainer_saving import SavingMixin

TIERS = ("device", "host", "ssd")
_KEYWORDS = [
    p.name
    for p in inspect.signature(wrap).parameters.values()
    if p.kind is inspect.Parameter.KEYWORD_ONLY
]


class TrainerMixin(SavingMixin):
    """Wraps the model of any Trainer, and streams its checkpoints. It is the first base of a class:
    `class MyTrainer(TrainerMixin, SFTTrainer): pass`.

    Args:
        *args: the Trainer's.
        strata: keywords of strata.wrap(), such as `{"memory": {"device": "8GiB"}}`. Default: those
            in `args.strata`, where the training arguments have such an attribute, or none. With
            `max_grad_norm` or `max_unit_norm` among them, `args.max_grad_norm` is not looked at.
        **kwargs: the Trainer's.

    Raises:
        TypeError: an unknown keyword in `strata`, with the nearest, or `strata` is no dictionary.
        ValueError: training arguments that cannot be followed, with what to use in their place, or
            `strata` for a model that is wrapped already, or a model on the meta device whose values
            the Trainer's constructor looks at.
    """

    def __init__(self, *args: Any, strata: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        given = _training_arguments(args, kwargs)
        keywords = strata if strata is not None else getattr(given, "strata", None)
        self._strata_keywords = _checked({} if keywords is None else keywords)
        if given is not None:
            check_arguments(given)
        self._window: list[tuple[Any, Any]] = []  # batches of the step so far, and their items
        self._window_rng: list[torch.Tensor] = []
        with _naming_meta((*args, *kwargs.values())):
            super().__init__(*args, **kwargs)
        if self._strata_keywords and _is_wrapped(self.model):
            raise ValueError(
                "strata= is given, and the model is wrapped already: pass these keywords to "
                "strata.wrap(), and leave strata= out"
            )
        self._strata_keywords |= clipping(self.args, self._strata_keywords)
        if self._strata_keywords.get("dtype") is torch.float16:
            self.accelerator.scaler = GradScaler()  # autocast, which has one, is not in use

    # Where the model is ---------------------------------------------------------------------------

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves it where it is: wrap() puts it into pages."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Makes the Trainer's optimizer, and wraps the model with it, unless it is wrapped. Called
        by the Trainer ahead of training or evaluation.

        Args:
            model: default: that of the Trainer.

        Returns:
            What strata.wrap() returned.

        Raises:
            StrataError, ValueError, TypeError, FileNotFoundError: as strata.wrap() does.
        """
        optimizer = super().create_optimizer(model)
        target = self.model if model is None else model
        if isinstance(_inner(optimizer), StrataOptimizer):
            return optimizer
        if _is_wrapped(target):
            raise ValueError(
                "the model is wrapped already: pass optimizers=(optimizer, None), with the "
                "optimizer that strata.wrap() returned, or call strata.unwrap(model) first"
            )
        keywords = {**keywords_of_arguments(self.args, optimizer), **self._strata_keywords}
        with self.advice():
            keywords = {"snapshots": self.snapshots, **keywords}
            _, self.optimizer = wrap(target, optimizer, **keywords)
        return self.optimizer

    def get_optimizer_cls_and_kwargs(
        self, args: Any, model: nn.Module | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Of `args.optim`, or of what does the same here. Raises ValueError for others."""
        kind, _ = OPTIMIZERS[optimizer_name(args)]
        if kind == "lion":
            return Lion, {
                "lr": args.learning_rate,
                "betas": (args.adam_beta1, args.adam_beta2),
            }
        plain = copy.copy(args)
        if kind == "adamw":
            plain.optim = type(args.optim)("adamw_torch")
        return super().get_optimizer_cls_and_kwargs(plain, model)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """Evaluation without training needs the model in its place, too. Of several ranks
        Accelerate gives it autocast here, as `args.bf16` says, and does not put it into DDP."""
        if not training and model is self.model:
            self.create_optimizer()
        if let_accelerate_ask(model):
            self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        return super()._wrap_model(model, training=training, dataloader=dataloader)

    # The step -------------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of a batch. See Note [A step that is tried again]. Raises
        StrataError where memory runs out and the step cannot take less."""
        if not self._window:
            self._window_rng = _rng_states()
            self.settle_if_complete()
        self._window.append((inputs, num_items_in_batch))
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        except torch.OutOfMemoryError as error:
            self._refuse_second_try(error)
            loss = None
        while loss is None:  # out of the handler, and so without the graph
            loss = self._try_again(model)
        if self.accelerator.sync_gradients:
            self._window.clear()
        return loss

    def _try_again(self, model: nn.Module) -> torch.Tensor | None:
        """The loss of the last batch. None: there was no room for the step again."""
        model.zero_grad()
        _set_rng_states(self._window_rng)
        try:
            for inputs, items in self._window:
                loss = super().training_step(model, inputs, items)
        except torch.OutOfMemoryError as error:
            self._refuse_second_try(error)
            return None
        return loss

    def _refuse_second_try(self, error: torch.OutOfMemoryError) -> None:
        """Raises where another try would need as much, or gradients are used already."""
        state = wrapped(self.model)
        used = state.config["update"] == "in_backward"
        planning, alone = state.planning, state.ranks is None
        if used or planning is None or not alone or not planning.recording.may_try_smaller:
            self._window.clear()
            why = "; ".join((str(error), *getattr(error, "__notes__", ())))
            other = ", or update='on_step', whose first steps may try again with less," * used
            raise StrataError(
                f"step {self.state.global_step + 1} ran out of device memory: {why}; a smaller "
                f"batch, a larger device budget{other} would help"
            ) from error

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """See Note [Who clips]. Accelerate divides gradients by the scale of the loss under its own
        autocast alone."""
        if cast(StrataOptimizer, _inner(self.optimizer)).clips:
            return None
        scaler = self.accelerator.scaler
        if isinstance(scaler, GradScaler):
            scaler.unscale_(_inner(self.optimizer))
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Where nothing was clipped, the update finds the norm; log() tells it."""
        return grad_norm

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Trains. The end of it, and an exception, wait for the snapshot that is under way.

        Args:
            resume_from_checkpoint: the folder of a checkpoint to go on from. True: the newest one
                in `args.output_dir` that is complete.
            **kwargs: the Trainer's.

        Returns:
            What the Trainer does: steps, their mean loss, and times in seconds.

        Raises:
            ValueError: there is no such checkpoint, or the one that is named is not complete.
            CheckpointError: it is damaged, or of another model.
            StrataError: a step ran out of memory and cannot take less, a disk failed, or ahead of
                the first step the SSD has no room for snapshots.
        """
        self._window.clear()  # of a training that was interrupted
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    # Logs -----------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds to those of training what the tiers hold, what the plan is, and how near the step
        is to what no plan could be faster than; figures() lists them. Called by the Trainer.

        Args:
            logs: numbers by name, which trackers get.
            args: the Trainer's, as kwargs are.
        """
        if "loss" in logs and _is_wrapped(self.model):
            logs.update({**self.figures(), **logs})
        super().log(logs, *args, **kwargs)

    def figures(self) -> dict[str, float]:
        """What log() adds."""
        return figures(self.model)


def figures(model: nn.Module) -> dict[str, float]:
    """Numbers for a tracker, of a wrapped model as it is now.

    Returns:
        By name: `strata_device_gib`, `strata_host_gib` and `strata_ssd_gib`, which the tiers hold;
        `strata_device_peak_gib`, the most that a step has on the device, with PyTorch's own memory;
        `strata_step_seconds` and `strata_planned_seconds`; `strata_percent_of_bound`;
        `strata_units_swap_host` and the like, how many units do not keep their activations; and
        `grad_norm` of the last step. What is not known yet is left out.

    Raises:
        ValueError: the model is not wrapped.
    """
    now = report(model)
    numbers = held(model)
    speed = {
        "strata_step_seconds": now.measured_seconds,
        "strata_planned_seconds": now.predicted_seconds,
        "strata_percent_of_bound": now.percent_of_bound,
    }
    numbers |= {name: value for name, value in speed.items() if value is not None}
    for way in {row.activation for row in now.planned} - {"keep"}:
        numbers[f"strata_units_{way}"] = sum(row.activation == way for row in now.planned)
    return numbers


def held(model: nn.Module) -> dict[str, float]:
    """The figures that cost nothing: what the tiers hold, the most that a step has on the device,
    and the norm of the last gradients."""
    state = wrapped(model)
    stats = state.session.stats()
    numbers = {f"strata_{tier}_gib": stats[f"{tier}_bytes"] / 2**30 for tier in TIERS}
    if state.planning is not None and (peak := state.planning.device_peak):
        numbers["strata_device_peak_gib"] = peak / 2**30
    return numbers | ({"grad_norm": state.steps.last["norm"]} if state.steps.last else {})


def _training_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Those of a Trainer's constructor, second by place; None: the Trainer makes its own."""
    return kwargs.get("args", args[1] if len(args) > 1 else None)


@contextmanager
def _naming_meta(given: Sequence[Any]) -> Iterator[None]:
    """Around a Trainer's constructor. One that computes with the model (DPO's, of the reference's
    log probabilities) comes before wrap(): a model on the meta device has no values then."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        models = [m for m in given if isinstance(m, nn.Module)]
        on_meta = any(p.is_meta for m in models for p in m.parameters())
        if not on_meta or not re.search(r"\bmeta\b", str(error)):
            raise
        raise ValueError(
            "this trainer's constructor looks at values of the model, which is on the meta device "
            f"and has none yet ({' '.join(str(error).split())}): wrap it before. Put adapters into "
            "it, if any, call model, optimizer = strata.wrap(model, optimizer, weights=..., ...), "
            "and give the trainer optimizers=(optimizer, None), without strata= and peft_config="
        ) from error


def _checked(keywords: Any) -> dict[str, Any]:
    if not isinstance(keywords, Mapping):
        raise TypeError(
            "strata= must be a dictionary of keywords for strata.wrap(), such as "
            f"{{'memory': {{'device': '8GiB'}}}}, not {keywords!r}"
        )
    for word in keywords:
        if word not in _KEYWORDS:
            raise TypeError(f"strata= has an unknown keyword {word!r}: {nearest(word, _KEYWORDS)}")
    if keywords.get("rank_group") is not None:
        raise ValueError(
            "strata={'rank_group': ...}: a Trainer shares batches out over all processes; leave it "
            "out, or write the loop without the Trainer"
        )
    return dict(keywords)


def _is_wrapped(model: Any) -> bool:
    return model is not None and model.__dict__.get("_strata") is not None


def _rng_states() -> list[torch.Tensor]:
    """Of the CPU, and of the GPU where there is one in use."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def _set_rng_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What Accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
