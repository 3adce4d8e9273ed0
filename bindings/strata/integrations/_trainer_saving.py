"""How the Trainer's checkpoints are written and read: the training state as a snapshot, while
training goes on, where there is an SSD; by strata.save() elsewhere.

    class TrainerMixin(SavingMixin): ...

Note [A checkpoint is whole or not chosen]. The Trainer writes trainer_state.json behind everything
else. So a checkpoint without a readable one is of a run that was killed while it wrote. With an SSD
the training state is a snapshot, which becomes complete while training goes on: only then older
checkpoints are removed. resume_from_checkpoint=True takes the newest that is whole. A run that
comes to a step for the second time writes into the folder of the first: it removes that file ahead
of all others. Of several ranks the first writes it, when all the others have written their parts.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._config.options import Options
from .._errors import StrataError, is_for_snapshots, with_more
from .._runtime.wrapped import wrapped
from .._storage import rng
from .._storage.rank_board import name_dead
from .._storage.replacing import make_newest, writing
from .._storage.saving import save
from .._storage.snapshots.capture import SnapshotHandle, snapshot_alone
from .._storage.snapshots.load import load
from .._storage.snapshots.series import snapshots_of
from ._trainer_checkpoints import (
    STATE_FOLDER,
    TRAINER_STATE,
    checkpoints_in,
    clear_state,
    is_complete,
    newest_checkpoint,
    outdated,
    remove_checkpoint,
    snapshots_at_once,
)

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

log = logging.getLogger("strata")


class SavingMixin(_Base):
    """The part of TrainerMixin that saves and goes on."""

    _strata_keywords: dict[str, Any]
    snapshots = 0  # complete ones at once; 0: checkpoints are saved by strata.save()
    _taken: SnapshotHandle | None = None  # the last, unless it is known to be complete
    _rotates_in: Path | None = None  # there older checkpoints are to be removed
    _told = False  # that there are none
    _limit: int | None = None  # save_total_limit, while the Trainer writes a checkpoint

    def create_optimizer(self, model: Any = None) -> Any:
        """Called ahead of training, and of evaluation alone, which takes no snapshots."""
        if self.is_in_train or self.args.max_steps > 0:
            self._plan_snapshots(max(self.state.max_steps, self.args.max_steps))
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Ahead of the first step, behind the making of the optimizer, which is when most models
        are wrapped. Raises StrataError where snapshots have no room."""
        self._plan_snapshots(num_training_steps)
        if self.snapshots:
            with self.advice():
                wrapped(self.model).session.reserve_snapshots(self.snapshots)
        return super().create_scheduler(num_training_steps, optimizer)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """See TrainerMixin."""
        if resume_from_checkpoint:
            self.accelerator.wait_for_everyone()  # rank 0 may still write to a checkpoint
        if resume_from_checkpoint is True:
            folder = newest_checkpoint(self.args.output_dir)
            if folder is None:
                raise ValueError(
                    f"no complete checkpoint in {self.args.output_dir}: train() without "
                    "resume_from_checkpoint= begins anew"
                )
            resume_from_checkpoint = str(folder)
        elif resume_from_checkpoint and not is_complete(Path(resume_from_checkpoint)):
            raise ValueError(
                f"{resume_from_checkpoint} is no complete checkpoint: {TRAINER_STATE} is missing "
                "or cut, or its training state is not whole; True takes the newest complete one"
            )
        try:
            result = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first one is told
                self._settle()
            if isinstance(error, RuntimeError) and not isinstance(error, StrataError):
                self._name_dead()
            raise
        self._settle()
        return result

    def _name_dead(self) -> None:
        """Raises StrataError, with its number, where a rank has died: what the Trainer exchanges
        with it fails without a name."""
        state = self.model.__dict__.get("_strata")
        if state is not None and state.ranks is not None:
            name_dead(state.session)

    def _plan_snapshots(self, steps: int) -> None:
        """Decides whether checkpoints are snapshots, and how many of them there are at once."""
        saves = str(getattr(self.args.save_strategy, "value", self.args.save_strategy)) != "no"
        if not saves or self.args.save_only_model:
            return
        given = self._strata_keywords.get("snapshots")
        if given is not None:
            self.snapshots = given
        elif self._drives():
            self.snapshots = snapshots_at_once(self.args, steps)
        elif not self._told:
            self._told = True
            log.info("no ssd_path: checkpoints are saved by strata.save, and training waits for it")

    def _drives(self) -> list[str]:
        """The folders of ssd_path, of a wrapped model or as they will be."""
        state = self.model.__dict__.get("_strata")
        if state is not None:
            return [str(path) for path in state.config["ssd_paths"]]
        return Options(ssd_path=self._strata_keywords.get("ssd_path")).ssd_paths()

    @contextlib.contextmanager
    def advice(self) -> Iterator[None]:
        """Says in a refusal for want of room what else would do."""
        try:
            yield
        except StrataError as error:
            if not self.snapshots or not is_for_snapshots(error):
                raise
            limit = self.args.save_total_limit
            few = f"save_total_limit={limit}" if limit else "save_total_limit=1, which is not set,"
            raise with_more(
                error,
                f". Of {self.snapshots} checkpoints at once, and the one that is being taken, the "
                f"snapshots are kept there: {few} says how many; strata={{'snapshots': 0}} saves "
                "checkpoints by strata.save",
            ) from error

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """With snapshots the rotation is ours: the Trainer would remove older checkpoints before
        the newest is complete. See Note [A checkpoint is whole or not chosen]."""
        run = Path(self._get_output_dir(trial=trial))
        folder = run / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            (folder / TRAINER_STATE).unlink(missing_ok=True)
        with writing(folder):
            self._write_checkpoint(model, trial, run, folder)

    def _write_checkpoint(self, model: Any, trial: Any, run: Path, folder: Path) -> None:
        if not self.snapshots:
            super()._save_checkpoint(model, trial)
            return
        self._settle()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._limit = limit
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            others = [path / TRAINER_STATE for _, path in checkpoints_in(run) if path != folder]
            make_newest(folder / TRAINER_STATE, others)
            self._rotates_in = run

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """In a checkpoint with a snapshot, which has all parameters, only what is small: the
        configuration, the tokenizer, adapters."""
        if not (_internal_call and self.snapshots and output_dir):
            super().save_model(output_dir, _internal_call)
            return
        if not self.args.should_save:
            return
        collator = getattr(self.data_collator, "tokenizer", None)
        adapted = hasattr(self.model, "peft_config")
        names = ("config", "generation_config")
        parts = [self.model] if adapted else [getattr(self.model, n, None) for n in names]
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        for part in (*parts, self.processing_class or collator):
            if part is not None and hasattr(part, "save_pretrained"):
                part.save_pretrained(output_dir)
        args = copy.copy(self.args)
        args.save_total_limit = self._limit
        torch.save(args, Path(output_dir) / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir) / STATE_FOLDER
        folder.parent.mkdir(parents=True, exist_ok=True)  # ranks come here at any moment
        if self.snapshots:
            if self.args.should_save:
                clear_state(folder)
                folder.mkdir(exist_ok=True)  # see is_complete()
            self.accelerator.wait_for_everyone()
            self._taken = snapshot_alone(self.model, folder)
        else:
            save(self.model, folder)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _save_rng_state(self, output_dir: str) -> None:
        """Of each rank its own: trainer_state.json comes behind all of them."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def _settle(self) -> None:
        """Waits for the snapshot under way, and removes checkpoints that it makes outdated. Raises
        what it failed with."""
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.wait()
        self._rotate()

    def settle_if_complete(self) -> None:
        """Removes checkpoints that are outdated by one which became complete meanwhile."""
        if self._taken is not None and self._taken.complete:
            self._settle()

    def _rotate(self) -> None:
        if self._rotates_in is None:
            return
        best = self.state.best_model_checkpoint
        for folder in outdated(self._rotates_in, self.args.save_total_limit, best):
            remove_checkpoint(folder)
        self._rotates_in = None

    def _leave_best(self) -> None:
        """Of one that may stay, the Trainer leaves the best, and would not know of links."""
        self._settle()
        best = self.state.best_model_checkpoint
        if not self.snapshots or best is None or self.args.save_total_limit != 1:
            return
        if not self.args.should_save:
            return
        for _, folder in checkpoints_in(Path(best).parent):
            if not folder.samefile(best):
                remove_checkpoint(folder)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer loads the best model."""
        self._leave_best()
        return super()._finalize_training(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Of a checkpoint of ours all is read at once, behind the optimizer's making."""
        if not (Path(resume_from_checkpoint) / STATE_FOLDER).is_dir():
            self.create_optimizer()
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Where there is a snapshot, with the optimizer's state. Random states go on."""
        self._leave_best()
        best = Path(self.state.best_model_checkpoint)
        if not snapshots_of(best / STATE_FOLDER):
            self.accelerator.wait_for_everyone()  # others may still compute with the last values
            super()._load_best_model()
            return
        states = rng.capture()
        load(self.model, best / STATE_FOLDER)
        rng.restore(states)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / STATE_FOLDER).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load(self.model, Path(checkpoint) / STATE_FOLDER)
        state = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
        self.lr_scheduler.load_state_dict(state)
