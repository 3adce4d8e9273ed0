"""The Trainer of `strata finetune`, and what follows it while it trains.

trainer = Finetuner(model, arguments, train_dataset=..., strata={...})
with Follower(wear, lead, output) as follower:
    trainer.follow(follower)
    trainer.train()
trainer.state.log_history               # a record for each step and evaluation
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer import TRAINER_STATE_NAME

from ..._config.choices import HOST
from ..._runtime.wrapped import wrapped
from ..._storage.replacing import write_text, writing
from ..._storage.snapshots.load import load
from ...integrations._trainer_checkpoints import STATE_FOLDER
from ...integrations.transformers import TrainerMixin, held
from .interrupt import Interrupt
from .view import note, perplexity

if TYPE_CHECKING:
    from .check import Wear
    from .options import Options
    from .ranks import Lead

METRICS_NAME = "metrics.jsonl"
FIGURES_SECONDS = 1.0  # for which those that are costly stand


def training_arguments(options: Options, device: str, rate: float) -> TrainingArguments:
    """What the Trainer is told. Clipping is left to the update (options.updates())."""
    training, results = options.training, options.results
    every = results.eval_every
    if every is None:
        every = max(1, training.steps // 5)
    saves = results.snapshot_every or results.save_every
    arguments = TrainingArguments(
        output_dir=results.output,
        max_steps=training.steps,
        per_device_train_batch_size=training.batch,
        per_device_eval_batch_size=training.batch,
        gradient_accumulation_steps=training.accumulation,
        learning_rate=rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=training.warmup_steps(),
        adam_beta2=0.95,
        weight_decay=training.weight_decay,
        max_grad_norm=0.0,
        seed=training.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if every else "no",
        eval_steps=every or None,
        eval_on_start=not results.resume,
        save_strategy="steps" if saves else "no",
        save_steps=saves or 1,
        save_total_limit=1,
        report_to=list(results.report_to) or "none",
        use_cpu=device == HOST,
        disable_tqdm=True,
        include_num_input_tokens_seen="all",
        log_level_replica="error",  # of other ranks than the first
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # of several, the first trains
    return arguments


class Finetuner(TrainerMixin, Trainer):
    """Windows of tokens, records with times, and checkpoints that hold the training state alone."""

    _follower: Follower

    def __init__(self, model: Any, args: TrainingArguments, **more: Any) -> None:
        """`more`: as Trainer and TrainerMixin take it."""
        super().__init__(model, args, data_collator=default_data_collator, **more)
        self._figured: dict[str, float] = {}
        self._figured_until = 0.0
        self.remove_callback(PrinterCallback)

    def follow(self, follower: Follower) -> None:
        """REQUIRES: called once, ahead of training."""
        self._follower = follower
        self.add_callback(follower)

    def get_train_dataloader(self) -> Any:
        """Batches of one size: another would need a plan of its own."""
        self.args.dataloader_drop_last = True
        try:
            return super().get_train_dataloader()
        finally:
            self.args.dataloader_drop_last = False  # of evaluations, nothing is left out

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the Trainer's; however often it is called, training draws the same numbers."""
        with torch.random.fork_rng(devices=[]):
            found: dict[str, float] = super().evaluate(*args, **kwargs)
        return found

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the time that training took so far, and how many tokens a second were trained on."""
        if "loss" in logs or "eval_loss" in logs:
            logs["seconds"] = self._follower.seconds
        if "loss" in logs:
            logs["tokens_per_second"] = self._follower.tokens_per_second
        super().log(logs, *args, **kwargs)

    def figures(self) -> dict[str, float]:
        """What tiers hold at every step; the rest, which takes milliseconds, every second."""
        if time.monotonic() >= self._figured_until:
            self._figured = super().figures()
            self._figured_until = time.monotonic() + FIGURES_SECONDS
        return {**self._figured, **held(self.model)}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Into checkpoints nothing: the training state has all parameters."""
        if _internal_call and output_dir is not None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
        else:
            super().save_model(output_dir, _internal_call)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The next step gets the rate of this run's schedule: it may be longer than the one whose
        rate was saved."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        schedule = self.lr_scheduler
        rates = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        schedule._last_lr = [base * share(schedule.last_epoch) for base, share in rates]
        for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
            group["lr"] = rate

    def go_on_from(self, checkpoint: Path) -> None:
        """Trains on, if there are steps left."""
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if state.global_step < self.args.max_steps:
            self.train(resume_from_checkpoint=str(checkpoint))
            return
        load(self.model, checkpoint / STATE_FOLDER)
        self.state = state


class Follower(TrainerCallback, AbstractContextManager["Follower"]):
    """Tells of evaluations and checkpoints, writes metrics.jsonl, and ends training after Ctrl-C.
    With several ranks the first tells and writes, and all end at the same step."""

    def __init__(self, wear: Wear, lead: Lead, output: Path) -> None:
        self._interrupt = Interrupt(self.note)
        self._wear = wear
        self._lead = lead
        self._leads = lead.leads
        self._path = output / METRICS_NAME
        self._began = 0.0
        self._tokens = 0  # seen when the step began
        self.seconds = 0.0  # of training, without evaluation and saving
        self.tokens_per_second = 0.0
        self.stopped = False  # by Ctrl-C

    def __enter__(self) -> Follower:
        """Takes signals over."""
        self._interrupt.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Gives them back."""
        self._interrupt.__exit__(*error)

    def note(self, text: str) -> None:
        """Tells it, on the first rank."""
        if self._leads:
            note(text)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Called by the Trainer, behind the loading of a checkpoint."""
        records = [record for record in state.log_history if _is_figure(record)]
        self.seconds = records[-1]["seconds"] if records else 0.0
        if self._leads:
            write_text(self._path, "".join(json.dumps(record) + "\n" for record in records))

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Called by the Trainer."""
        self._began, self._tokens = time.perf_counter(), state.num_input_tokens_seen

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Called by the Trainer, behind the update and ahead of logs, evaluation and checkpoint."""
        took = time.perf_counter() - self._began
        self.seconds += took
        self.tokens_per_second = (state.num_input_tokens_seen - self._tokens) / took
        last = state.global_step >= state.max_steps
        control.should_evaluate = control.should_evaluate or last
        if not last and self._lead.any(self._interrupt.requested):
            control.should_save = control.should_training_stop = self.stopped = True

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **more: Any
    ) -> None:
        """Called by the Trainer, with what it logs."""
        if not _is_figure(logs) or not self._leads:
            return
        with writing(self._path), open(self._path, "a") as file:
            file.write(json.dumps({**logs, "step": state.global_step}) + "\n")
        if "loss" in logs:
            for sentence in self._wear.timed(wrapped(model)):
                self.note(sentence)
        else:
            loss = logs["eval_loss"]
            figures = f"{loss:.4f} (perplexity {perplexity(loss)})"
            self.note(f"held-out loss after step {state.global_step}: {figures}")

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Called by the Trainer, behind a checkpoint."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        taken = " is being taken" * bool(wrapped(model).config["snapshots"])
        self.note(f"checkpoint of step {state.global_step}{taken} in {folder}")


def _is_figure(record: dict[str, Any]) -> bool:
    return "loss" in record or "eval_loss" in record
