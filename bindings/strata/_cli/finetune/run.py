"""Fine-tunes a causal language model inside memory budgets: what `strata finetune` does.

    finetune.run(options.parse(["--model", "llama-25m", "--data", "notes/"], None))

The loop is that of Transformers' Trainer (trainer.py). Files of a run, in its output folder:

    options.yaml    what it was told                data/           windows of tokens
    metrics.jsonl   one line per step/evaluation    tokenizer/      trained for a fresh model
    progress.png    the picture of them             checkpoint-N/   the Trainer's, of step N
    report.json     for `strata report`             model/          the result, as save_pretrained
                                                                    writes it, with its tokenizer

Under torchrun every rank runs this, and takes a part of each step's windows. Rank 0 alone writes
these files, prints and draws, but for the checkpoints, which all write together.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import set_seed
from transformers.utils import logging as transformers_logging

from ..._config import machine
from ..._config.budgets import tier_budgets
from ..._config.choices import HOST
from ..._config.device import choose as choose_device
from ..._config.sizes import format_count
from ..._report.reports import make_report
from ..._runtime.wrapped import wrapped
from ..._storage.export import export_safetensors
from ..._storage.replacing import writing
from ..._storage.tiled import tile_as
from ...integrations._trainer_checkpoints import STATE_FOLDER
from ...integrations.transformers import newest_checkpoint
from ...nn.causal_lm import chunk_many
from ..lora import add_adapters
from ..models import Choice, choose
from .check import Wear, check
from .claim import MODEL_NAME, claim, remove_earlier
from .data import Data, check_vocabulary, prepare, refuse_others
from .options import Options
from .picture import draw
from .ranks import Lead, led, meet
from .trainer import Finetuner, Follower, training_arguments
from .view import Bar, Lines, opening, plain_needs, summary

if TYPE_CHECKING:
    from ..._config.ranks import Ranks
    from ..._core import DtypeName

RATE_FRESH = 6e-4
RATE_ADAPTERS = 2e-4
RATE_SAVED = 2e-5
INTERRUPTED = 130  # the exit status that shells use for Ctrl-C

log = logging.getLogger("strata")


def run(options: Options) -> int:
    """Trains, saves and reports. Returns the exit status: 0, or 130 after Ctrl-C.

    Raises ValueError or OSError for options, data or files that cannot be used, StrataError for
    budgets that cannot work and disks that fail.
    """
    start, results = options.start, options.results
    output = Path(results.output)
    ranks = meet()
    transformers_logging.disable_progress_bar()
    choice = choose(start.model, start.vocabulary, start.sequence, start.trust_remote_code)
    if start.lora and choice.weights is None:
        raise ValueError("--lora trains adapters of a saved model, and --model names a fresh one")
    check_vocabulary(choice)
    check_trackers(results.report_to)
    claim(output, options)
    if results.resume:
        newest = newest_checkpoint(output)
        check_ranks(newest, output, ranks)
        check_steps(steps_of(newest), options.training.steps, output)
        led(ranks, partial(refuse_others, options, choice, output))
    device = choose_device(options.memory.device)
    if ranks is not None:
        refuse_for_ranks(device)
    if device not in (HOST, "cuda:0"):
        number = device.removeprefix("cuda:")
        raise ValueError(f"set CUDA_VISIBLE_DEVICES={number} and take --device cuda")
    if options.memory.dtype == "auto":
        dtype = usual_dtype(device, machine.processor_flags())
        options = options.replaced("memory", dtype=dtype)
    wear = check(choice, options, device, ranks)
    for sentence in wear.counted():
        log.info("%s", sentence)
    data = prepare(options, choice, output, ranks)
    choice.adopt(data.tokenizer)
    set_seed(options.training.seed)
    trainer = make_trainer(choice, options, data, device)
    try:
        trainer.create_optimizer()  # which wraps the model, or refuses to
        lead = Lead(wrapped(trainer.model))
        lead.first(lambda: accept(output, options, data))
        if not train(trainer, choice, options, data, wear, lead):
            return INTERRUPTED
        lead.first(lambda: finish(trainer, choice, options, data))
        return 0
    except BaseException:
        if (state := trainer.model.__dict__.get("_strata")) is not None:
            Lead(state).give_up()
        raise
    finally:
        state = trainer.model.__dict__.get("_strata")
        if state is not None:
            state.close()


def check_ranks(checkpoint: Path | None, output: Path, ranks: Ranks | None) -> None:
    """Raises ValueError where there is no checkpoint to go on from, or another number of ranks has
    written it, which would have seen other batches."""
    if checkpoint is None:
        raise ValueError(f"cannot resume: there is no complete checkpoint in {output}")
    before = max(1, len(list(checkpoint.glob("rng_state_*.pth"))))  # the Trainer's, of each rank
    now = ranks.count if ranks is not None else 1
    if before != now:
        how = f"torchrun --nproc-per-node {before}" if before > 1 else "a start without torchrun"
        raise ValueError(
            f"cannot resume: {format_count(before, 'rank')} trained the run that {output} holds, "
            f"and {now} would go on with other batches: {how} goes on with the same ones"
        )


def steps_of(checkpoint: Path | None) -> int:
    """How many had been made."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def check_steps(done: int, steps: int, output: Path) -> None:
    """Raises ValueError where a run was to end before where it is."""
    if steps < done:
        raise ValueError(
            f"cannot resume to --steps {steps}: the run in {output} has made {done} already, and "
            f"goes on with more than these"
        )


def refuse_for_ranks(device: str) -> None:
    """Raises ValueError for what several ranks cannot do yet."""
    if device != HOST:
        raise ValueError("ranks compute on the CPU for now: --device host, or start one process")


def accept(output: Path, options: Options, data: Data) -> None:
    """No sooner than the model is wrapped: a call that was refused is not a run to continue, and
    takes none away."""
    if not options.results.resume:
        remove_earlier(output)
        data.keep(output)
    options.save(output)


def train(
    trainer: Finetuner, choice: Choice, options: Options, data: Data, wear: Wear, lead: Lead
) -> bool:
    """To the last step. False: interrupted, with a checkpoint to continue from."""
    results, state = options.results, wrapped(trainer.model)
    newest = newest_checkpoint(results.output) if results.resume else None
    view = Bar if results.progress and sys.stdout.isatty() else Lines
    with (
        contextlib.closing(view(tier_budgets(state.config))) as shown,
        Follower(wear, lead, Path(results.output)) as follower,
    ):
        trainer.add_callback(shown)
        trainer.follow(follower)
        follower.note(opening(state, choice, data))
        if newest:
            trainer.go_on_from(newest)
        else:
            trainer.train()
    if follower.stopped and lead.leads:
        print(f"to continue: strata finetune --resume --output {results.output}", flush=True)
    return not follower.stopped


def check_trackers(names: Collection[str]) -> None:
    """Raises ValueError for trackers that the Trainer does not know, or that are not installed."""
    from transformers.integrations import (
        get_available_reporting_integrations,
        get_reporting_integration_callbacks,
    )

    if names:
        get_reporting_integration_callbacks(list(names))
    for name in names:
        if name not in get_available_reporting_integrations():
            raise ValueError(f"--report-to {name}: its package is not installed")


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


def make_trainer(choice: Choice, options: Options, data: Data, device: str) -> Finetuner:
    """For a model that has no memory yet: its values are read, or drawn, where they will rest."""
    start, memory, training = options.start, options.memory, options.training
    model = choice.build()
    chunk_many(model, training.batch * start.sequence)
    if start.lora:
        add_adapters(model, start.lora)
    if options.results.resume and (newest := newest_checkpoint(options.results.output)):
        tile_as(model, newest / STATE_FOLDER)
    saved = RATE_ADAPTERS if start.lora else RATE_SAVED
    rate = training.lr or (saved if choice.weights else RATE_FRESH)
    count = min(options.results.eval_windows, len(data.held_out))
    return Finetuner(
        model,
        training_arguments(options, device, rate),
        train_dataset=data.training,
        eval_dataset=data.held_out.select(range(count)),
        strata={
            "memory": memory.budgets(),
            "ssd_path": list(memory.ssd_path) or None,
            "dtype": getattr(torch, memory.dtype),
            **options.updates(),
            "weights": choice.weights or "init",
            "seed": training.seed,
            "frozen": memory.frozen,
            "page_size": memory.page_size,
            "io_engine": memory.io_engine,
            "workers": memory.workers,
            "activations": memory.activations,
            "device": device,
            "split": memory.split,
            **({} if options.results.snapshot_every else {"snapshots": 0}),
        },
    )


def finish(trainer: Finetuner, choice: Choice, options: Options, data: Data) -> None:
    """Saves the result and the report, draws the picture, generates, prints the summary."""
    output = Path(options.results.output)
    state = wrapped(trainer.model)
    budgets = tier_budgets(state.config)
    make_report(state).save(output / "report.json")
    export_safetensors(trainer.model, output / MODEL_NAME)
    with writing(output / MODEL_NAME):
        data.tokenizer.save_pretrained(output / MODEL_NAME)
    history = trainer.state.log_history
    draw(history, budgets, output / "progress.png", choice.name)
    needs = plain_needs(choice, options)
    summary(state, history, needs, budgets, output, choice.name)
    if options.results.generate:
        print(f"\nThe model continues a prompt:\n\n{generate(trainer.model, options, data)}")


def generate(model: Any, options: Options, data: Data) -> str:
    """The prompt and its continuation."""
    tokenizer = data.tokenizer
    prompt = options.results.prompt or data.facts["prompt"]
    device = wrapped(model).device
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    tokens = tokens.to(device)
    model.eval()
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
    ):
        torch.manual_seed(options.training.seed)
        result = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=options.results.generate,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
    text: str = tokenizer.decode(result[0], skip_special_tokens=True)
    return text
