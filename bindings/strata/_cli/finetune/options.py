"""What `strata finetune` can be told, and what follows from it; `strata demo` is a fixed run of it.

options = parse(["--model", "llama-25m", "--data", "notes/", "--steps", "100"])
"""

import dataclasses
import json
import math
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..._config.choices import DTYPES, MODEL_SIZES, as_written, page_size, worded
from ..._config.update_modes import LockFree, parse_update
from ..._storage.replacing import write_whole
from ..options import (
    DEFAULT,
    DEVICES,
    ENDURANCE,
    MODEL,
    STATE_DTYPE,
    UPDATE,
    WORKERS,
    Parser,
    adder,
)

OPTIONS_NAME = "options.json"


def _page_size(text: str) -> str:
    return text if text == "auto" else as_written(page_size)(text)


def _option(default: Any, text: str, **more: Any) -> Any:
    """A field, and the help of its option; `more`: as argparse takes it."""
    return field(default=default, metadata={"help": text, **more})


def _budget(tier: str, behind: str = " (default: from what is free)") -> Any:
    return _option(None, f"budget of the {tier} tier, such as 256MiB{behind}")


# The groups of help, by the first field of each.
GROUPS = {
    "model": "what to train",
    "device": "where it lives",
    "steps": "how to train",
    "eval_every": "what to show and keep",
}


@dataclass
class Options:
    """One field per option of the command line; sizes as people write them."""

    model: str = _option(
        "",
        "a save_pretrained folder, a config.json, or a fresh model of a size: "
        + ", ".join(MODEL_SIZES),
        metavar=MODEL,
    )
    data: list[str] = field(
        default_factory=list,
        metadata={"help": "text files, or folders searched for them", "metavar": "PATH"},
    )
    output: str = _option("runs/finetune", f"where results go ({DEFAULT})", metavar="DIR")
    resume: bool = _option(False, "continue the run in --output; its other options are remembered")
    overwrite: bool = _option(False, "replace an earlier run in --output")
    vocabulary: int | None = _option(
        None, "tokens of the tokenizer trained for a fresh model (default: 8192, or its config's)"
    )
    data_limit: str | None = _option(None, "use so much of the text at most")
    held_out: float = _option(0.05, f"part of the text kept for evaluation ({DEFAULT})")

    device: str = _option("auto", f"what computes: {DEVICES}")
    device_memory: str | None = _budget("device")
    host_memory: str | None = _budget("host")
    ssd_memory: str | None = _budget("ssd", "; needs --ssd-path")
    ssd_path: list[str] | None = field(
        default=None, metadata={"help": "folders on one or several disks", "type": str}
    )
    ssd_endurance: str | None = _option(None, ENDURANCE)
    dtype: str = _option(
        "auto",
        "of the computation (default: auto, which is bfloat16, or float32 on a processor that has "
        "no arithmetic for it)",
        choices=("auto", *DTYPES),
    )
    state_dtype: str = _option("float32", STATE_DTYPE)
    page_size: str = _option("auto", DEFAULT, type=worded(_page_size))
    io_engine: str = _option("auto", DEFAULT)
    workers: int | None = _option(None, WORKERS)
    activations: str = _option(
        "auto",
        f"what becomes of what backward needs: as planned, or so wherever it can be ({DEFAULT})",
    )
    split: int | None = _option(None, "compute units on slices of the batch")

    steps: int = _option(100, DEFAULT)
    batch: int = _option(1, f"sequences ({DEFAULT})")
    sequence: int = _option(512, f"tokens ({DEFAULT})")
    accumulation: int = _option(1, f"backward calls per step ({DEFAULT})")
    lr: float | None = _option(None, "peak (default: 6e-4 if fresh, 2e-5 if saved)")
    warmup: int | None = _option(None, "steps (default: a tenth, at most 100)")
    update: str = _option("on_step", UPDATE)
    weight_decay: float = _option(0.1, DEFAULT)
    max_grad_norm: float = _option(
        1.0,
        "gradients are scaled down to it, with --update in_backward those of every unit by "
        f"themselves; 0: never ({DEFAULT})",
    )
    seed: int = _option(0, DEFAULT)

    eval_every: int | None = _option(
        None, "steps between evaluations; 0: first and last only (default: a fifth of --steps)"
    )
    eval_windows: int = _option(16, f"held-out sequences per evaluation ({DEFAULT})")
    save_every: int = _option(0, "steps between checkpoints (default: none)")
    prompt: str | None = _option(None, "what the model continues at the end", metavar="TEXT")
    generate: int = _option(64, f"tokens to generate at the end; 0: none ({DEFAULT})")
    no_progress: bool = _option(False, "log lines in place of a progress bar")

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
            "gradient_accumulation_steps": self.accumulation,
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
        write_whole(folder / OPTIONS_NAME, json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def add_arguments(parser: Parser) -> None:
    """The options of `finetune`, in groups: one for each field of Options."""
    for option in dataclasses.fields(Options):
        if title := GROUPS.get(option.name):
            add = adder(parser.add_argument_group(title), written=True)
        default = [] if option.default is dataclasses.MISSING else option.default
        more = {"action": "store_true"} if default is False else {"default": default}
        add(f"--{option.name.replace('_', '-')}", **{**more, **option.metadata})


def finish(parser: Parser, arguments: Sequence[str]) -> Options:
    """Parses; with --resume the options of the run to continue are the defaults."""
    names = {f.name for f in dataclasses.fields(Options)}
    values = vars(parser.parse(arguments))
    if values["resume"]:
        remembered = Path(values["output"], OPTIONS_NAME)
        if not remembered.is_file():
            parser.error(f"--resume: there is no run in {values['output']}")
        saved: dict[str, Any] = json.loads(remembered.read_text())
        saved |= {"resume": True, "overwrite": False}
        parser.set_defaults(**{k: v for k, v in saved.items() if k in names})
        values = vars(parser.parse(arguments))
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
    if options.resume and options.overwrite:
        parser.error("--resume and --overwrite contradict each other")
    return options


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
