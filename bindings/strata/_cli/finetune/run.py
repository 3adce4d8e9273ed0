"""Fine-tunes a causal language model inside memory budgets: what `strata finetune` does.

    finetune.run(Options(model="llama-25m", data=["notes/"], device_memory="16MiB"))

Files of a run, in its output folder:

    options.json    what it was told                data/           the tokens of the text
    metrics.jsonl   one line per step/evaluation    tokenizer/      trained for a fresh model
    progress.png    the picture of them             checkpoint/     of strata.save
    report.json     for `strata report`             model/          the result, as save_pretrained
                                                                    writes it, with its tokenizer
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ... import checkpoint
from ..._api import wrap
from ..._config import machine
from ..._config.choices import HOST
from ..._config.configure import tier_budgets
from ..._config.device import choose as choose_device
from ..._errors import StrataError
from ..._report.reports import make_report
from ..._runtime.wrapped import wrapped
from ..._storage.export import export_safetensors
from ...nn.causal_lm import chunk_many
from ...optim import GradScaler
from ..models import Choice, choose
from .check import Wear, check
from .files import CHECKPOINT_NAME, MODEL_NAME, Data, claim, prepare, remove_earlier
from .interrupt import Interrupt
from .metrics import Metrics, draw
from .options import Options
from .view import StepFigures, View, make_view, opening, perplexity, plain_needs, summary

if TYPE_CHECKING:
    from ..._core import DtypeName

RATE_FRESH = 6e-4
RATE_SAVED = 2e-5
INTERRUPTED = 130  # the exit status that shells use for Ctrl-C

log = logging.getLogger("strata")


def run(options: Options) -> int:
    """Trains, saves and reports. Returns the exit status: 0, or 130 after Ctrl-C.

    Raises ValueError or OSError for options, data or files that cannot be used, StrataError for
    budgets that cannot work and disks that fail.
    """
    output = Path(options.output)
    choice = choose(options.model, options.vocabulary, options.sequence)
    claim(output, options)
    device = choose_device(options.device)
    if options.dtype == "auto":
        options = replace(options, dtype=usual_dtype(device, machine.processor_flags()))
    wear = check(choice, options, device)
    for sentence in wear.counted():
        log.info("%s", sentence)
    with prepare(options, choice, output) as data:
        choice.adopt(data.tokenizer)
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(options.seed)
        model, optimizer = _wrap(choice, options, device)
        try:
            # No sooner: a call that was refused is not a run to continue, and takes none away.
            if not options.resume:
                remove_earlier(output)
            training = _Training(model, optimizer, choice, options, data, output, wear)
            if options.resume:
                training.resume()
            data.keep()
            options.save(output)
            if not training.go():
                return INTERRUPTED
            training.finish()
            return 0
        finally:
            wrapped(model).close()


def usual_dtype(device: str, flags: Collection[str]) -> DtypeName:
    """bfloat16; float32 on processors that have no arithmetic for it. `flags`: what they have. No
    GPU without it is taken. The same machine always gives the same answer, however busy it is."""
    if device != HOST or machine.has_bfloat16(flags):
        return "bfloat16"
    log.info(
        "this processor has no arithmetic in bfloat16, so float32 is taken; --dtype bfloat16 takes "
        "half the memory, and several times as long"
    )
    return "float32"


def _wrap(choice: Choice, options: Options, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = choice.build()
    chunk_many(model, options.batch * options.sequence)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},  # norms, biases
    ]
    rate = options.lr or (RATE_SAVED if choice.weights else RATE_FRESH)
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=rate, betas=(0.9, 0.95))
    return wrap(
        model,
        optimizer,
        memory=options.memory(),
        ssd_path=options.ssd_path,
        dtype=getattr(torch, options.dtype),
        **options.updates(),
        weights=choice.weights or "init",
        seed=options.seed,
        page_size=options.page_size,
        io_engine=options.io_engine,
        workers=options.workers,
        activations=options.activations,
        device=device,
        split=options.split,
    )


@dataclass
class _Training:
    """The loop, and where it stands."""

    _model: Any
    _optimizer: torch.optim.Optimizer
    _choice: Choice
    _options: Options
    _data: Data
    _output: Path
    _wear: Wear
    _position: int = 0  # windows drawn so far
    _step: int = 0
    _seconds: float = 0.0  # of training, without evaluation and saving

    def __post_init__(self) -> None:
        self._state = wrapped(self._model)
        self._scaler = GradScaler(enabled=self._options.dtype == "float16")
        self._budgets = tier_budgets(self._state.config)
        self._peak_rate = float(self._optimizer.param_groups[0]["lr"])
        self._metrics = Metrics(self._output / "metrics.jsonl", keep=self._options.resume)

    def resume(self) -> None:
        """Continues where the checkpoint stands. Raises where it is of another run."""
        path = self._output / CHECKPOINT_NAME
        extra = checkpoint.load(self._model, path)
        if missing := [name for name in self._where() if name not in extra]:
            raise ValueError(
                f"cannot resume: {path} was not written by strata finetune: its extra has no "
                + ", ".join(map(repr, missing))
            )
        identity = self._identity()
        for name, value in extra["identity"].items():
            if identity.get(name) != value:
                raise ValueError(
                    f"cannot resume: {name} was {value!r} in the run that {self._output} holds, "
                    f"and is {identity.get(name)!r} now"
                )
        self._step, self._position = extra["step"], extra["position"]
        self._seconds = extra["seconds"]
        self._peak_rate = self._options.lr or extra["peak_rate"]
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(extra["scaler"])
        self._metrics.forget_after(self._step)

    def go(self) -> bool:
        """Trains to the last step. False: interrupted, with a checkpoint to continue from."""
        options = self._options
        every = options.eval_every
        if every is None:
            every = max(1, options.steps // 5)
        with (
            make_view(options.steps, self._step, self._budgets, options.no_progress) as view,
            Interrupt(view.note) as interrupt,
        ):
            view.note(opening(self._state, self._choice, self._data))
            if self._step == 0:
                self._evaluate(view)
            while self._step < options.steps:
                view.step(self._train_step())
                for sentence in self._wear.timed(self._state):
                    view.note(sentence)
                last = self._step == options.steps
                if last or (every and self._step % every == 0):
                    self._evaluate(view)
                if interrupt.requested and not last:
                    break
                if options.save_every and self._step % options.save_every == 0:
                    self._save(view)
            else:
                return True
            self._save(view)
            view.note(f"to continue: strata finetune --resume --output {self._output}")
            return False

    def _train_step(self) -> StepFigures:
        options = self._options
        began = time.perf_counter()
        self._model.train()
        rate = options.rate(self._step, self._peak_rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        total = self._gradients()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self._step += 1
        took = time.perf_counter() - began
        self._seconds += took
        stats = self._state.session.stats()
        assert self._state.last_step is not None
        record = StepFigures(
            step=self._step,
            loss=total,
            lr=rate,
            norm=self._state.last_step["norm"],
            tokens_per_second=options.accumulation * options.batch * options.sequence / took,
            seconds=self._seconds,
            **{f"{tier}_bytes": stats[f"{tier}_bytes"] for tier in ("device", "host", "ssd")},
        )
        self._metrics.add_step(record)
        return record

    def _gradients(self) -> float:
        """Those of a step, and its loss. Where a step that is recorded runs out of memory, it is
        run again, and takes less. StrataError where that cannot be."""
        begin = self._position
        while True:
            try:
                return sum(self._backward() for _ in range(self._options.accumulation))
            except torch.OutOfMemoryError as error:
                planning = self._state.planning
                used = self._state.config["update"] == "in_backward"  # some gradients, already
                if used or planning is None or not planning.recording.may_try_smaller:
                    why = "; ".join((str(error), *getattr(error, "__notes__", ())))
                    other = ", or --update=on_step, whose first steps may try again with less,"
                    raise StrataError(
                        f"step {self._step + 1} ran out of device memory: {why}; a smaller "
                        f"--batch, a larger --device-memory{other if used else ''} would help"
                    ) from error
            self._position = begin
            self._optimizer.zero_grad()

    def _backward(self) -> float:
        """Of one batch. Its graph is gone when an exception has been caught."""
        options = self._options
        tokens = self._data.training.batch(self._position, options.batch)
        self._position += options.batch
        loss = self._loss(tokens) / options.accumulation
        self._scaler.scale(loss).backward()
        return loss.item()

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(self._state.device)
        loss: torch.Tensor = self._model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    def _evaluate(self, view: View) -> None:
        """Mean loss over the held-out windows: the same ones every time."""
        windows = self._data.held_out
        count = min(self._options.eval_windows, windows.count)
        self._model.eval()
        total = 0.0
        with torch.no_grad():
            for begin in range(0, count, self._options.batch):
                size = min(self._options.batch, count - begin)
                total += size * self._loss(windows.batch(begin, size)).item()
        loss = total / count
        self._metrics.add_evaluation(self._step, self._seconds, loss)
        figures = f"{loss:.4f} (perplexity {perplexity(loss)})"
        view.note(f"held-out loss after step {self._step}: {figures}")

    def _save(self, view: View) -> None:
        path = self._output / CHECKPOINT_NAME
        checkpoint.save(self._model, path, extra=self._where())
        view.note(f"checkpoint of step {self._step} in {path}")

    def _where(self) -> dict[str, Any]:
        """Which run it is, and how far it has come."""
        return {
            "identity": self._identity(),
            "step": self._step,
            "position": self._position,
            "seconds": self._seconds,
            "peak_rate": self._peak_rate,
            "scaler": self._scaler.state_dict(),
        }

    def _identity(self) -> dict[str, Any]:
        """What must stay the same for a resumed run to be the run it continues."""
        names = ("model", "seed", "batch", "sequence", "accumulation", "dtype", "weight_decay")
        return {name: getattr(self._options, name) for name in names} | {
            "text": self._data.fingerprint
        }

    def finish(self) -> None:
        """Saves the result and the report, draws the picture, generates, prints the summary."""
        make_report(self._state).save(self._output / "report.json")
        folder = self._output / MODEL_NAME
        export_safetensors(self._model, folder)
        self._data.tokenizer.save_pretrained(folder)
        draw(self._metrics, self._budgets, self._output / "progress.png", self._choice.name)
        needs = plain_needs(self._choice, self._options.batch, self._options.sequence)
        summary(self._state, self._metrics, needs, self._budgets, self._output, self._choice.name)
        if self._options.generate:
            print(f"\nThe model continues a prompt:\n\n{self._generate()}")

    def _generate(self) -> str:
        """The prompt and its continuation."""
        tokenizer = self._data.tokenizer
        prompt = self._options.prompt or self._data.prompt
        tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        tokens = tokens.to(self._state.device)
        self._model.eval()
        device = self._state.device
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        ):
            torch.manual_seed(self._options.seed)
            result = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=self._options.generate,
                do_sample=True,
                temperature=0.8,
                top_k=50,
                pad_token_id=tokenizer.eos_token_id,
            )
        text: str = tokenizer.decode(result[0], skip_special_tokens=True)
        return text
