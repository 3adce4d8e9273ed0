"""What `strata finetune` can be told: on the command line, in a YAML file, and by an earlier run.

options = parse(["--model", "llama-25m", "--data", "notes/", "--steps", "100"], "...")
options.training.steps, options.memory.budgets()

A field is an option, under its name. A file of options is put in front of the command line, so that
both are read alike, and what comes last wins. Values that are saved again stay as they are written.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..._config.choices import (
    DTYPES,
    check_base,
    check_split,
    count,
    fraction,
    number,
    page_size,
    positive,
)
from ..._config.sizes import parse_size, parse_some
from ..._config.update_modes import LockFree, parse_update
from ..._errors import nearest
from ..._storage.replacing import write_whole
from ..options import DEFAULT, ENDURANCE, MODEL, UPDATE, WORKERS, Parser, adder
from .identity import IDENTITY, differences

OPTIONS_NAME = "options.yaml"
NOT_KEPT = ("config", "resume", "overwrite")


def _option(
    default: Any,
    help: str,
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    **more: Any,
) -> Any:
    """A field, and what the command line knows of it. Without `parse` it is read as by other
    commands, or is any text."""
    shown = default not in (None, "", ()) and not isinstance(default, bool)
    if shown and DEFAULT not in help:
        help += f" ({DEFAULT})"
    told = {"parse": parse, "metavar": metavar, "help": help, **more}
    return field(default=default, metadata={k: v for k, v in told.items() if v is not None})


def _size(help: str, parse: Callable[[str], int] = parse_size) -> Any:
    return _option(None, help, parse, "SIZE")


def _count(default: int | None, help: str, parse: Callable[[str], int] = count) -> Any:
    return _option(default, help, parse, "N")


def _page_size(text: str) -> int | str:
    return text if text == "auto" else page_size(text)


@dataclass(frozen=True)
class Start:
    """what is trained, and on what"""

    config: str | None = _option(
        None, "a YAML file of options, under their names; the command line wins", metavar="PATH"
    )
    model: str = _option(
        "",
        "needed: a save_pretrained folder, a config.json, or a fresh model of a size: llama-10m, "
        "llama-25m, llama-110m, llama-350m, llama-1b",
        metavar=MODEL,
    )
    data: tuple[str, ...] = _option(
        (),
        "needed: text, .jsonl and .parquet files, or folders searched for them. Records have "
        "messages, prompt and completion, instruction and output, or text; questions are read, and "
        "only answers learned",
        metavar="PATH",
    )
    data_limit: str | None = _size("use so much of the data at most", parse_some)
    held_out: float = _option(0.05, "part of the data kept for evaluation", fraction, "PART")
    sequence: int = _option(
        512, "tokens of a window; documents and records are packed into windows"
    )
    vocabulary: int | None = _count(
        None,
        "tokens of the tokenizer trained for a fresh model; without it 8192, or its config's",
        positive,
    )
    lora: str | None = _option(
        None,
        "train adapters of a saved model: r=8, or r=8,alpha=16,dropout=0.05,targets=q_proj+v_proj",
    )
    trust_remote_code: bool = _option(False, "run the code that comes with the model")


@dataclass(frozen=True)
class Memory:
    """where it lives"""

    device: str = _option("auto", "what computes: auto, host, cuda or cuda:0")
    device_memory: str | None = _size(
        "budget of the device tier, such as 256MiB; without it, from what is free"
    )
    host_memory: str | None = _size("budget of the host tier; without it, from what is free")
    ssd_memory: str | None = _size(
        "budget of the ssd tier; without it, from what --ssd-path has free"
    )
    ssd_path: tuple[str, ...] = _option(
        (), "folders on one or several disks; without it, there is no ssd tier"
    )
    ssd_endurance: str | None = _option(None, ENDURANCE)
    dtype: str = _option(
        "auto",
        "of the computation; auto: bfloat16, or float32 on a processor without arithmetic for it",
        choices=("auto", *DTYPES),
    )
    state_dtype: str = _option("float32", "of AdamW's moments; shorter ones lose bits")
    frozen: str = _option(
        "as-is", "how the base of adapters rests: as 4 or 8 bits of each weight; needs --lora"
    )
    page_size: str = _option("auto", "of pages, a power of two", _page_size, "SIZE")
    io_engine: str = _option("auto", "how the SSD is read and written")
    workers: int | None = _option(None, f"{WORKERS}; without it, by the number of processors")
    activations: str = _option(
        "auto", "what becomes of what backward needs: as planned, or so wherever it can be"
    )
    split: int | None = _option(
        None, "compute units on so many slices of the batch; without it, as planned"
    )

    def budgets(self) -> dict[str, str]:
        """Those that were given, by tier, as strata.wrap takes them."""
        given = {"device": self.device_memory, "host": self.host_memory, "ssd": self.ssd_memory}
        return {tier: size for tier, size in given.items() if size is not None}


@dataclass(frozen=True)
class Training:
    """how to train"""

    steps: int = _option(100, "of the optimizer")
    batch: int = _option(1, "windows")
    accumulation: int = _count(1, "backward calls per step", positive)
    lr: float | None = _option(
        None,
        "peak; without it 6e-4 for a fresh model, 2e-4 with --lora, 2e-5 otherwise",
        number,
        "RATE",
    )
    warmup: int | None = _count(None, "steps; without it a tenth, at most 100")
    update: str = _option("on_step", UPDATE)
    weight_decay: float = _option(0.1, "of matrices; of norms and biases none", number, "NUMBER")
    max_grad_norm: float = _option(
        1.0,
        "gradients are scaled down to it (with in_backward, those of each unit apart); 0: never",
        number,
        "NUMBER",
    )
    seed: int = _count(0, "of first values, dropout and the order of windows")

    def may_skip(self) -> bool:
        """Whether a step whose gradients are not finite can be left out."""
        return parse_update(self.update) in ("on_step", LockFree(0))

    def warmup_steps(self) -> int:
        """In which the learning rate rises."""
        return min(100, self.steps // 10) if self.warmup is None else self.warmup


@dataclass(frozen=True)
class Results:
    """what to show and keep"""

    output: str = _option("runs/finetune", "where results go", metavar="DIR")
    resume: bool = _option(False, "continue the run in --output; its other options are remembered")
    overwrite: bool = _option(False, "replace an earlier run in --output")
    eval_every: int | None = _count(
        None,
        "steps between evaluations; 0: first and last only; without it a fifth of --steps",
    )
    eval_windows: int = _count(16, "held-out windows per evaluation", positive)
    save_every: int = _count(0, "steps between checkpoints, for which training waits; 0: none")
    snapshot_every: int = _count(
        0,
        "steps between snapshots, which are taken while it trains; needs --ssd-path; 0: none",
    )
    report_to: tuple[str, ...] = _option(
        (),
        "trackers of the Trainer, such as tensorboard or wandb; without it, none",
        metavar="NAME",
    )
    prompt: str | None = _option(
        None,
        "what the model continues at the end; without it the beginning of held-out data",
        metavar="TEXT",
    )
    generate: int = _count(64, "tokens to generate at the end; 0: none")
    progress: bool = _option(True, "a progress bar on a terminal; without it, log lines")


@dataclass(frozen=True)
class Options:
    """All of it, in the groups of help."""

    start: Start = field(default_factory=Start)
    memory: Memory = field(default_factory=Memory)
    training: Training = field(default_factory=Training)
    results: Results = field(default_factory=Results)
    # Names of those that this call gave, and not the run that it continues.
    given: frozenset[str] = field(default=frozenset(), compare=False)

    def flat(self) -> dict[str, Any]:
        """By name, without groups."""
        groups = (self.start, self.memory, self.training, self.results)
        return {k: v for group in groups for k, v in dataclasses.asdict(group).items()}

    def replaced(self, group: str, **values: Any) -> Options:
        """With other values in one group."""
        changed = dataclasses.replace(getattr(self, group), **values)
        return dataclasses.replace(self, **{group: changed})

    def updates(self) -> dict[str, Any]:
        """When and with what parameters are updated, as strata.wrap takes it."""
        import torch  # parsing options needs none of it

        training = self.training
        update = parse_update(training.update)
        clipped = "max_unit_norm" if update == "in_backward" else "max_grad_norm"
        state_dtype = self.memory.state_dtype
        return {
            "update": update,
            "state_dtype": getattr(torch, state_dtype, state_dtype),
            clipped: training.max_grad_norm or None,
            "gradient_accumulation_steps": training.accumulation,
            "skip_nonfinite": training.may_skip(),
        }

    def save(self, folder: Path) -> None:
        """Remembers the options: --resume needs none but --output, and --config repeats the run."""
        kept = {k: v for k, v in self.flat().items() if k not in NOT_KEPT and v not in (None, ())}
        lists = {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}
        write_whole(folder / OPTIONS_NAME, yaml.safe_dump(lists, sort_keys=False))


def read(file: Path) -> dict[str, Any]:
    """The options in a YAML file. Raises ValueError for what is none, with the nearest name.

    As on the command line, `no-` before the name of a switch turns it off.
    """
    try:
        values = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no options such as 'steps: 100'")
    known = Options().flat()
    given = {}
    for name, value in ((str(n).replace("-", "_"), v) for n, v in values.items()):
        switch = name.removeprefix("no_")
        if name not in known and isinstance(known.get(switch), bool) and isinstance(value, bool):
            name, value = switch, not value
        if name not in known:
            raise ValueError(f"{file}: unknown option {name!r}: {nearest(name, known)}")
        if isinstance(value, bool) != isinstance(known[name], bool):
            kind = "true or false" if isinstance(known[name], bool) else "a value"
            raise ValueError(f"{file}: {name} takes {kind}, not {value!r}")
        given[name] = value
    if "config" in given:
        raise ValueError(f"{file}: a file of options cannot name another with config")
    return given


def as_arguments(values: Mapping[str, Any]) -> list[str]:
    """Options as they would be written on the command line."""
    words: list[str] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(str, value)]
        elif value is not None:
            words.append(f"--{flag}={value}")
    return words


def parse(
    arguments: Sequence[str], description: str | None, preset: Mapping[str, Any] | None = None
) -> Options:
    """The options of `strata finetune`, or of a fixed run of it, which `preset` has."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--output")
    first.add_argument("--resume", action=argparse.BooleanOptionalAction)
    found = first.parse_known_args(arguments)[0]
    in_file = read(found.config) if found.config else {}
    given = dict(preset or {}) | in_file
    output = Path(found.output or given.get("output", Results.output))
    resume = given.get("resume", False) if found.resume is None else found.resume
    parser = finetune_parser(description, "strata demo" if preset else "strata finetune")
    remembered: dict[str, Any] = {}
    if resume:
        if not (output / OPTIONS_NAME).is_file():
            parser.error(f"--resume: there is no run in {output}")
        remembered = read(output / OPTIONS_NAME)
        given = remembered | {"output": str(output)} | in_file
    named = {word[2:].partition("=")[0].replace("-", "_") for word in arguments if word[:2] == "--"}
    options = _parsed(parser, [*as_arguments(given), *arguments])
    options = dataclasses.replace(options, given=frozenset(named | in_file.keys()))
    try:
        if resume:
            if options.memory.dtype == "auto":  # which is what the run found
                options = options.replaced("memory", dtype=remembered.get("dtype", "auto"))
            _check_same(parser, options, remembered, output)
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def finetune_parser(description: str | None, prog: str = "strata finetune") -> Parser:
    """The options of `strata finetune`."""
    usage = f"{prog} --model {MODEL} --data PATH [PATH ...] [--OPTION ...]"
    parser = Parser(prog=prog, usage=usage, description=description)
    for group in (Start, Memory, Training, Results):
        add = adder(parser.add_argument_group(group.__doc__), written=True)
        for option in dataclasses.fields(group):
            more: dict[str, Any] = {**option.metadata, "default": option.default}
            if isinstance(option.default, bool):
                more["action"] = argparse.BooleanOptionalAction
            elif option.default == ():
                more["nargs"] = "+"
            add("--" + option.name.replace("_", "-"), **more)
    return parser


def _parsed(parser: Parser, arguments: Sequence[str]) -> Options:
    found = vars(parser.parse_args(arguments))

    def of(group: type) -> Any:
        told = {option.name: found[option.name] for option in dataclasses.fields(group)}
        return group(**{k: tuple(v) if isinstance(v, list) else v for k, v in told.items()})

    return Options(of(Start), of(Memory), of(Training), of(Results))


def _check(options: Options) -> None:
    """Raises ValueError for options that are missing or contradict each other."""
    start, memory, results = options.start, options.memory, options.results
    for name in ("model", "data"):
        if not getattr(start, name):
            raise ValueError(f"--{name} is needed")
    if memory.ssd_memory and not memory.ssd_path:
        raise ValueError("--ssd-memory needs --ssd-path, a folder on the disk to use")
    if results.snapshot_every and not memory.ssd_path:
        raise ValueError(
            "--snapshot-every needs --ssd-path, where they are kept; --save-every does not"
        )
    if results.snapshot_every and results.save_every:
        raise ValueError(
            "--snapshot-every and --save-every exclude each other: one of them is enough"
        )
    if memory.dtype == "float16" and not options.training.may_skip():
        raise ValueError(
            "--dtype float16 scales the loss and skips steps that overflow, which --update "
            f"{options.training.update} cannot: take bfloat16, or --update on_step"
        )
    if results.resume and results.overwrite:
        raise ValueError("--resume and --overwrite contradict each other")
    check_base(memory.frozen, start.lora)
    check_split(memory.split, memory.activations)


def _check_same(
    parser: Parser, options: Options, remembered: Mapping[str, Any], output: Path
) -> None:
    """Raises ValueError for what would make another run of it."""
    before, now = (
        _parsed(parser, as_arguments({k: v for k, v in told.items() if k in IDENTITY})).flat()
        for told in (remembered, options.flat())
    )
    if found := differences(before, now):
        raise ValueError(
            f"cannot resume the run in {output}: {'; '.join(found)}. Leave that out to go on with "
            "it; --overwrite in place of --resume starts anew"
        )
