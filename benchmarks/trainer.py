"""What the Trainer of Transformers adds to a step: TrainerMixin over the loop that a user writes,
both over strata with the same model, batch and budgets, everything resident, taking turns.

The Trainer clips, schedules and logs as it does by default; the loop does none of it.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .common import Context, Figure, median_ratio, take_turns
from .models import llama_166m_or_small, tokens
from .sides import Paged, everything_resident, session_of

TARGETS = {2048: 1.02, 128: 1.05}
QUICK = {2048: 64, 128: 32}
STEPS = {2048: 3, 128: 12}  # timed in a turn, behind one that is not


def run(context: Context) -> Iterator[Figure]:
    """Yields the seconds of a step of both sides, and their ratio, for many tokens and for few."""
    for count, target in TARGETS.items():
        with context.scratch() as folder:
            taken = _taken(context, count, folder)
        for name, values in taken.items():
            yield Figure("trainer", f"{name}_at_{count}_seconds", statistics.median(values), "s")
        ratio = median_ratio(taken["trainer"], taken["loop"])
        yield Figure("trainer", f"trainer_over_loop_at_{count}", ratio, "x", target, bound=1)


def _taken(context: Context, count: int, folder: Path) -> dict[str, list[float]]:
    def model() -> torch.nn.Module:
        return llama_166m_or_small(context.quick, context.seed)

    batch = tokens(QUICK[count] if context.quick else count, context.seed)
    parameters = sum(p.numel() for p in model().parameters())
    budgets = everything_resident(parameters * 4 if context.quick else parameters)
    loop = Paged(model(), batch, budgets)
    trained = model()
    try:
        turns: dict[str, Callable[[], float]] = {
            "loop": partial(loop_step, loop, STEPS[count]),
            "trainer": partial(trainer_step, make_trainer(trained, batch, budgets, folder, count)),
        }
        for turn in turns.values():
            turn()  # the first step records, allocates and compiles
        return take_turns(turns, context.rounds, context.say)
    finally:
        loop.close()
        if "_strata" in trained.__dict__:
            session_of(trained).close()


def loop_step(side: Paged, steps: int) -> float:
    """Seconds of a step, the mean of some in a row."""
    side.step()
    begin = time.perf_counter()
    for _ in range(steps):
        side.step()
    took = (time.perf_counter() - begin) / steps
    side.synchronize()
    return took


def trainer_step(trainer: Any) -> float:
    """As loop_step(): from the beginning of the second step to that of the last, which is not
    timed."""
    trainer.begins.clear()
    trainer.train()
    session_of(trainer.model).synchronize()
    begins: list[float] = trainer.begins
    return (begins[-1] - begins[1]) / (len(begins) - 2)


def make_trainer(
    model: torch.nn.Module, batch: torch.Tensor, budgets: dict[str, int], folder: Path, count: int
) -> Any:
    """A Trainer that has `begins`: when its steps began."""
    from strata.integrations.transformers import TrainerMixin
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Timed(TrainerMixin, Trainer):
        """The mixin as users take it."""

        begins: list[float]

    class Clock(TrainerCallback):
        """Notes when steps begin."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """Called by the Trainer."""
            begins.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS[count] + 2,
        per_device_train_batch_size=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    begins: list[float] = []
    row = {"input_ids": batch[0], "labels": batch[0]}
    trainer = Timed(
        model,
        arguments,
        train_dataset=[row] * 64,
        callbacks=[Clock()],
        strata={"memory": budgets, "device": "host", "activations": None},
    )
    trainer.remove_callback(PrinterCallback)  # standard output is for figures
    trainer.begins = begins
    return trainer
