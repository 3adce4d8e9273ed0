"""What `strata finetune` can be told, and what follows from it; `strata demo` is a fixed run of it.

options = parse(["--model", "llama-25m", "--data", "notes/", "--steps", "100"])
"""

import argparse
import dataclasses
import json
import math
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..._config.choices import DTYPES, MODEL_SIZES, as_written, check_split, page_size, worded
from ..._config.update_modes import LockFree, parse_update
from ..options import ENDURANCE, MODEL, Parser, adder

OPTIONS_NAME = "options.json"


@dataclass
class Options:
    """One field per option of the command line; sizes as people write them."""

    model: str = ""
    data: list[str] = field(default_factory=list)
    output: str = "runs/finetune"
    device_memory: str | None = None
    host_memory: str | None = None
    ssd_memory: str | None = None
    ssd_path: list[str] | None = None
    ssd_endurance: str | None = None
    steps: int = 100
    batch: int = 1
    sequence: int = 512
    accumulation: int = 1
    lr: float | None = None
    warmup: int | None = None
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    eval_every: int | None = None
    eval_windows: int = 16
    held_out: float = 0.05
    save_every: int = 0
    resume: bool = False
    overwrite: bool = False
    seed: int = 0
    dtype: str = "auto"
    update: str = "on_step"
    state_dtype: str = "float32"
    page_size: str = "auto"
    io_engine: str = "auto"
    workers: int | None = None
    activations: str = "auto"
    split: int | None = None
    device: str = "auto"
    vocabulary: int | None = None
    data_limit: str | None = None
    prompt: str | None = None
    generate: int = 64
    no_progress: bool = False

    def memory(self) -> dict[str, str]:
        """The budgets that were given, by tier, as strata.wrap takes them."""
        given = {"device": self.device_memory, "host": self.host_memory, "ssd": self.ssd_memory}
        return {tier: size for tier, size in given.items() if size is not None}

    def updates(self) -> dict[str, Any]:
        """When and with what parameters are updated, as strata.wrap takes it."""
        import torch  # parsing options needs none of it

        update = parse_update(self.update)
        clipped = "max_unit_norm" if update == "in_backward" else "max_grad_norm"
        return {
            "update": update,
            "state_dtype": getattr(torch, self.state_dtype, self.state_dtype),
            clipped: self.max_grad_norm or None,
            "accumulation_steps": self.accumulation,
            "skip_nonfinite": self.may_skip(),
        }

    def may_skip(self) -> bool:
        """Whether a step whose gradients are not finite can be left out."""
        return parse_update(self.update) in ("on_step", LockFree(0))

    def rate(self, step: int, peak: float) -> float:
        """Learning rate of step `step` (from 0): linear warm-up, then a cosine to a tenth of it."""
        warmup = self.warmup if self.warmup is not None else min(100, self.steps // 10)
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        part = (step - warmup) / max(1, self.steps - warmup)
        return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, part))))

    def save(self, folder: Path) -> None:
        """Remembers the options, so that --resume needs none but --output."""
        text = json.dumps(dataclasses.asdict(self), indent=2)
        temporary = folder / f"{OPTIONS_NAME}.tmp"
        temporary.write_text(text + "\n")
        os.replace(temporary, folder / OPTIONS_NAME)  # killed in between, a run stays resumable


def add_arguments(parser: Parser) -> None:
    """The options of `finetune`, in groups."""
    default = Options()
    for title, fill in (
        ("what to train", _add_model),
        ("where it lives", _add_places),
        ("how to train", _add_training),
        ("what to show and keep", _add_results),
    ):
        fill(adder(parser.add_argument_group(title), written=True), default)
    parser.set_defaults(**dataclasses.asdict(default))


def _add_model(add: Callable[..., None], default: Options) -> None:
    sizes = ", ".join(MODEL_SIZES)
    add(
        "--model",
        f"a save_pretrained folder, a config.json, or a fresh model of a size: {sizes}",
        metavar=MODEL,
    )
    add("--data", "text files, or folders searched for them", metavar="PATH")
    add("--output", f"where results go (default: {default.output})", metavar="DIR")
    add(
        "--resume",
        "continue the run in --output; its other options are remembered",
        action="store_true",
    )
    add("--overwrite", "replace an earlier run in --output", action="store_true")
    add(
        "--vocabulary",
        "tokens of the tokenizer trained for a fresh model (default: 8192, or its config's)",
    )
    add("--data-limit", "use so much of the text at most")
    add("--held-out", f"part of the text kept for evaluation (default: {default.held_out})")


def _add_places(add: Callable[..., None], default: Options) -> None:
    add("--device", f"what computes: auto, host, cuda or cuda:N (default: {default.device})")
    for tier in ("device", "host", "ssd"):
        rest = " (default: from what is free)" if tier != "ssd" else "; needs --ssd-path"
        add(f"--{tier}-memory", f"budget of the {tier} tier, such as 256MiB{rest}")
    add("--ssd-path", "folders on one or several disks", type=str)
    add("--ssd-endurance", ENDURANCE)
    add(
        "--dtype",
        "of the computation (default: auto, which is bfloat16, or float32 on a processor that has "
        "no arithmetic for it)",
        choices=("auto", *DTYPES),
    )
    add(
        "--state-dtype",
        f"of AdamW's moments; shorter ones lose bits (default: {default.state_dtype})",
    )
    add("--page-size", "default: auto", type=worded(_page_size))
    add("--io-engine", "default: auto")
    add("--workers", "threads that update parameters")
    add(
        "--activations",
        "what becomes of what backward needs: as planned, or so wherever it can be "
        f"(default: {default.activations})",
    )
    add("--split", "compute units on slices of the batch")


def _add_training(add: Callable[..., None], default: Options) -> None:
    add("--steps", f"default: {default.steps}")
    add("--batch", f"sequences (default: {default.batch})")
    add("--sequence", f"tokens (default: {default.sequence})")
    add("--accumulation", "backward calls per step (default: 1)")
    add("--lr", "peak (default: 6e-4 if fresh, 2e-5 if saved)")
    add("--warmup", "steps (default: a tenth, at most 100)")
    add(
        "--update",
        "on_step; in_backward: as soon as a unit's gradients are there; lock-free:S: the model may "
        f"compute with parameters up to S steps old (default: {default.update})",
    )
    add("--weight-decay", f"default: {default.weight_decay}")
    add(
        "--max-grad-norm",
        "gradients are scaled down to it, with --update in_backward those of every unit by "
        f"themselves; 0: never (default: {default.max_grad_norm})",
    )
    add("--seed", f"default: {default.seed}")


def _add_results(add: Callable[..., None], default: Options) -> None:
    add(
        "--eval-every",
        "steps between evaluations; 0: first and last only (default: a fifth of --steps)",
    )
    add(
        "--eval-windows",
        f"held-out sequences per evaluation (default: {default.eval_windows})",
    )
    add("--save-every", "steps between checkpoints (default: none)")
    add("--prompt", "what the model continues at the end", metavar="TEXT")
    add(
        "--generate",
        f"tokens to generate at the end; 0: none (default: {default.generate})",
    )
    add("--no-progress", "log lines in place of a progress bar", action="store_true")


def finish(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Options:
    """Parses; with --resume the options of the run to continue are the defaults."""
    names = {f.name for f in dataclasses.fields(Options)}
    values = vars(parser.parse_args(arguments))
    if values["resume"]:
        remembered = Path(values["output"], OPTIONS_NAME)
        if not remembered.is_file():
            parser.error(f"--resume: there is no run in {values['output']}")
        saved: dict[str, Any] = json.loads(remembered.read_text())
        saved |= {"resume": True, "overwrite": False}
        parser.set_defaults(**{k: v for k, v in saved.items() if k in names})
        values = vars(parser.parse_args(arguments))
    options = Options(**{k: v for k, v in values.items() if k in names})
    for name in ("model", "data"):
        if not getattr(options, name):
            parser.error(f"--{name} is needed")
    if options.ssd_memory and not options.ssd_path:
        parser.error("--ssd-memory needs --ssd-path, a folder on the disk to use")
    for path in options.ssd_path or []:
        if not Path(path).is_dir():
            parser.error(f"--ssd-path {path} is not a folder")
    if options.dtype == "float16" and not options.may_skip():
        parser.error(
            "--dtype float16 scales the loss and skips steps that overflow, which --update "
            f"{options.update} cannot: take bfloat16, or --update on_step"
        )
    try:
        check_split(options.split, options.activations)
    except ValueError as error:
        parser.error(str(error))
    if options.resume and options.overwrite:
        parser.error("--resume and --overwrite contradict each other")
    return options


def _page_size(text: str) -> str:
    return text if text == "auto" else as_written(page_size)(text)


DEMO = """`strata demo`: a fixed run of `strata finetune` that needs nothing but this machine.

A Llama of 112 M parameters learns Python from the standard library's own sources. Its parameters
alone take 213 MiB in 16 bits, its whole training state 1.5 GiB; the device may hold 192 MiB, for
parameters, activations and PyTorch's own memory together, and the optimizer's state rests on the
disk.
"""
SSD_PATH = "runs/demo-ssd"

PRESET: dict[str, Any] = {
    "model": "llama-110m",
    "data": [sysconfig.get_path("stdlib")],
    "data_limit": "8MB",
    "output": "runs/demo",
    "overwrite": True,
    "device_memory": "192MiB",
    "host_memory": "384MiB",
    "ssd_memory": "2GiB",
    "ssd_path": [SSD_PATH],
    "steps": 100,
    "batch": 4,
    "sequence": 256,
    "lr": 6e-4,
    "warmup": 10,
    "eval_every": 20,
    "eval_windows": 16,
    "prompt": "def read_lines(path):\n",
    "generate": 64,
}


def parse(arguments: Sequence[str], description: str | None) -> Options:
    """Of `strata finetune`."""
    parser = Parser(prog="strata finetune", description=description)
    add_arguments(parser)
    return finish(parser, arguments)


def parse_demo(arguments: Sequence[str]) -> Options:
    """The demo; any option of finetune may be given to change it."""
    parser = Parser(prog="strata demo", description=DEMO)
    add_arguments(parser)
    parser.set_defaults(**PRESET)
    Path(SSD_PATH).mkdir(parents=True, exist_ok=True)
    return finish(parser, arguments)
