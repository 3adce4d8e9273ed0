"""What `strata finetune` can be told: on the command line, in a YAML file, and by an earlier run.

options = parse(["--model", "llama-25m", "--data", "notes/", "--steps", "100"], "...")
options.training.steps, options.memory.budgets()

A field is an option, its docstring the help, which has one line: tyro keeps line breaks. tyro makes
the parser of them. A file of options is put in front of the command line, so that both are read
alike, and what comes last wins.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
import yaml
from tyro.constructors import PrimitiveConstructorSpec

from ..._config.choices import (
    as_written,
    check_base,
    check_split,
    count,
    folder,
    fraction,
    number,
    page_size,
    parse_device,
    positive,
    workers,
)
from ..._config.launched import rank_name
from ..._config.sizes import parse_size, parse_some
from ..._config.update_modes import LockFree, parse_update
from ..._errors import nearest, nearest_option
from ..._storage.replacing import write_whole
from ..lora import parse_lora
from .identity import IDENTITY, differences

OPTIONS_NAME = "options.yaml"
NOT_KEPT = ("config", "resume", "overwrite")


def _given(parse: Callable[[str], Any], metavar: str) -> Any:
    """How an option is read, and how help calls it."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _several(parse: Callable[[str], str], metavar: str) -> Any:
    """As _given(), for options that take any number of words."""
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=metavar,
        instance_from_str=lambda words: tuple(map(parse, words)),
        is_instance=lambda value: True,
        str_from_instance=list,
    )


def _page_size(text: str) -> str:
    return text if text == "auto" else as_written(page_size)(text)


# Help names no default: its text says what is done without the option.
Unset = tyro.conf.arg(help_behavior_hint="")

# Sizes, devices and modes stay as people write them.
Text = Annotated[str | None, _given(str, "TEXT"), Unset]
Name = Annotated[str | None, _given(str, "PATH"), Unset]
Size = Annotated[str | None, _given(as_written(parse_size), "SIZE"), Unset]
SomeSize = Annotated[str | None, _given(as_written(parse_some), "SIZE"), Unset]
Positive = Annotated[int, _given(positive, "N")]
Count = Annotated[int, _given(count, "N")]
Some = Annotated[int | None, _given(positive, "N"), Unset]
Possible = Annotated[int | None, _given(count, "N"), Unset]
Number = Annotated[float, _given(number, "NUMBER")]


@dataclass(frozen=True)
class Start:
    """What is trained, and on what."""

    config: Name = None
    """a YAML file of options, under their names; the command line wins"""
    model: Annotated[
        str,
        _given(str, "DIR|CONFIG|SIZE"),
        tyro.conf.arg(
            help="needed: a save_pretrained folder, a config.json, or a fresh model of a size: "
            "llama-10m, llama-25m, llama-110m, llama-350m, llama-1b",
            help_behavior_hint="",
        ),
    ] = ""
    data: Annotated[
        tuple[str, ...],
        _several(str, "PATH ..."),
        tyro.conf.arg(
            help="needed: text, .jsonl and .parquet files, or folders searched for them. Records "
            "have messages, prompt and completion, instruction and output, or text; questions are "
            "read, and only answers learned",
            help_behavior_hint="",
        ),
    ] = ()
    data_limit: SomeSize = None
    """use so much of the data at most"""
    held_out: Annotated[float, _given(fraction, "PART")] = 0.05
    """part of the data kept for evaluation"""
    sequence: Positive = 512
    """tokens of a window; documents and records are packed into windows"""
    vocabulary: Some = None
    """tokens of the tokenizer trained for a fresh model; without it 8192, or its config's"""
    lora: Annotated[str | None, _given(as_written(parse_lora), "r=N[,...]"), Unset] = None
    """train adapters of a saved model: r=8, or r=8,alpha=16,dropout=0.05,targets=q_proj+v_proj"""
    trust_remote_code: bool = False
    """run the code that comes with the model"""


@dataclass(frozen=True)
class Memory:
    """Where it lives."""

    device: Annotated[str, _given(as_written(parse_device), "NAME")] = "auto"
    """what computes: auto, host, cuda or cuda:0"""
    device_memory: Size = None
    """budget of the device tier, such as 256MiB; without it, from what is free"""
    host_memory: Size = None
    """budget of the host tier; without it, from what is free"""
    ssd_memory: Size = None
    """budget of the ssd tier; without it, from what --ssd-path has free"""
    ssd_path: Annotated[tuple[str, ...], _several(folder, "DIR ..."), Unset] = ()
    """folders on one or several disks; without it, there is no ssd tier"""
    ssd_endurance: SomeSize = None
    """what the drives last for, all together (TBW on their data sheets), such as 600TB"""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """of the computation; auto: bfloat16, or float32 on a processor without arithmetic for it"""
    state_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    """of AdamW's moments; shorter ones lose bits"""
    frozen: Literal["as-is", "int8", "nf4", "nf4-double", "nf4-torchao"] = "as-is"
    """how the base of adapters rests: as 4 or 8 bits of each weight; needs --lora"""
    page_size: Annotated[str, _given(_page_size, "SIZE")] = "auto"
    """of pages, a power of two"""
    io_engine: Literal["auto", "io_uring", "libaio", "threads", "memory"] = "auto"
    """how the SSD is read and written"""
    workers: Annotated[int | None, _given(workers, "N"), Unset] = None
    """threads that update parameters; without it, by the number of processors"""
    activations: Literal["auto", "keep", "swap", "recompute"] = "auto"
    """what becomes of what backward needs: as planned, or so wherever it can be"""
    split: Some = None
    """compute units on so many slices of the batch; without it, as planned"""

    def budgets(self) -> dict[str, str]:
        """Those that were given, by tier, as strata.wrap takes them."""
        given = {"device": self.device_memory, "host": self.host_memory, "ssd": self.ssd_memory}
        return {tier: size for tier, size in given.items() if size is not None}


@dataclass(frozen=True)
class Training:
    """How to train."""

    steps: Positive = 100
    """of the optimizer"""
    batch: Positive = 1
    """windows"""
    accumulation: Positive = 1
    """backward calls per step"""
    lr: Annotated[float | None, _given(number, "RATE"), Unset] = None
    """peak; without it 6e-4 for a fresh model, 2e-4 with --lora, 2e-5 otherwise"""
    warmup: Possible = None
    """steps; without it a tenth, at most 100"""
    update: Annotated[str, _given(as_written(parse_update), "MODE")] = "on_step"
    """on_step, in_backward (as gradients come) or lock-free:S (parameters may be S steps old)"""
    weight_decay: Number = 0.1
    """of matrices; of norms and biases none"""
    max_grad_norm: Number = 1.0
    """gradients are scaled down to it (with in_backward, those of each unit apart); 0: never"""
    seed: Count = 0
    """of first values, dropout and the order of windows"""

    def may_skip(self) -> bool:
        """Whether a step whose gradients are not finite can be left out."""
        return parse_update(self.update) in ("on_step", LockFree(0))

    def warmup_steps(self) -> int:
        """In which the learning rate rises."""
        return min(100, self.steps // 10) if self.warmup is None else self.warmup


@dataclass(frozen=True)
class Results:
    """What to show and keep."""

    output: Annotated[str, _given(str, "DIR")] = "runs/finetune"
    """where results go"""
    resume: bool = False
    """continue the run in --output; its other options are remembered"""
    overwrite: bool = False
    """replace an earlier run in --output"""
    eval_every: Possible = None
    """steps between evaluations; 0: first and last only; without it a fifth of --steps"""
    eval_windows: Positive = 16
    """held-out windows per evaluation"""
    save_every: Count = 0
    """steps between checkpoints, for which training waits; 0: none"""
    snapshot_every: Count = 0
    """steps between snapshots, which are taken while training goes on; needs --ssd-path; 0: none"""
    report_to: Annotated[tuple[str, ...], _several(str, "NAME ..."), Unset] = ()
    """trackers of the Trainer, such as tensorboard or wandb; without it, none"""
    prompt: Text = None
    """what the model continues at the end; without it the beginning of held-out data"""
    generate: Count = 64
    """tokens to generate at the end; 0: none"""
    progress: bool = True
    """a progress bar on a terminal; without it, log lines"""


@dataclass(frozen=True)
class Options:
    """All of it, in the groups of help."""

    start: Start = field(default_factory=Start)
    memory: Memory = field(default_factory=Memory)
    training: Training = field(default_factory=Training)
    results: Results = field(default_factory=Results)
    given: Annotated[frozenset[str], tyro.conf.Suppress] = field(
        default=frozenset(), compare=False
    )  # names of those that this call gave, and not the run that it continues

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
    """Of `strata finetune`; of a fixed run of it, where `preset` gives its options."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--output")
    first.add_argument("--resume", action=argparse.BooleanOptionalAction)
    found = first.parse_known_args(arguments)[0]
    in_file = read(found.config) if found.config else {}
    given = dict(preset or {}) | in_file
    output = Path(found.output or given.get("output", Results.output))
    resume = given.get("resume", False) if found.resume is None else found.resume
    if resume:
        if not (output / OPTIONS_NAME).is_file():
            _refuse(f"--resume: there is no run in {output}")
        remembered = read(output / OPTIONS_NAME)
        given = remembered | {"output": str(output)} | in_file
    flags = _flags()
    prog = "strata finetune" if preset is None else "strata demo"
    told = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    for flag in told:
        if flag not in flags:
            _refuse(nearest_option(flag, flags, prog))
    named = frozenset(flag.removeprefix("--").replace("-", "_") for flag in told) | in_file.keys()
    options = _parsed([*as_arguments(given), *arguments], prog, description)
    options = dataclasses.replace(options, given=named)
    if resume:
        if options.memory.dtype == "auto":  # which is what the run found
            options = options.replaced("memory", dtype=remembered.get("dtype", "auto"))
        _check_same(options, remembered, output)
    _check(options)
    return options


def _parsed(arguments: Sequence[str], prog: str, description: str | None = None) -> Options:
    return tyro.cli(
        Options,
        args=arguments,
        prog=prog,
        description=description,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _flags() -> list[str]:
    """All that there are."""
    known = {name.replace("_", "-"): value for name, value in Options().flat().items()}
    switches = [f"--no-{name}" for name, value in known.items() if isinstance(value, bool)]
    return ["--help", *(f"--{name}" for name in known), *switches]


def _check(options: Options) -> None:
    """Refuses options that are missing or contradict each other."""
    start, memory, results = options.start, options.memory, options.results
    for name in ("model", "data"):
        if not getattr(start, name):
            _refuse(f"--{name} is needed")
    if memory.ssd_memory and not memory.ssd_path:
        _refuse("--ssd-memory needs --ssd-path, a folder on the disk to use")
    if results.snapshot_every and not memory.ssd_path:
        _refuse("--snapshot-every needs --ssd-path, where they are kept; --save-every does not")
    if results.snapshot_every and results.save_every:
        _refuse("--snapshot-every and --save-every exclude each other: one of them is enough")
    if memory.dtype == "float16" and not options.training.may_skip():
        _refuse(
            "--dtype float16 scales the loss and skips steps that overflow, which --update "
            f"{options.training.update} cannot: take bfloat16, or --update on_step"
        )
    if results.resume and results.overwrite:
        _refuse("--resume and --overwrite contradict each other")
    try:
        check_base(memory.frozen, options.start.lora)
        check_split(memory.split, memory.activations)
    except ValueError as error:
        _refuse(str(error))


def _check_same(options: Options, remembered: Mapping[str, Any], output: Path) -> None:
    """Refuses what would make another run of it."""
    before, now = (
        _parsed(as_arguments({k: v for k, v in told.items() if k in IDENTITY}), "").flat()
        for told in (remembered, options.flat())
    )
    if found := differences(before, now):
        _refuse(
            f"cannot resume the run in {output}: {'; '.join(found)}. Leave that out to go on with "
            "it; --overwrite in place of --resume starts anew"
        )


def _refuse(message: str) -> NoReturn:
    print(f"strata finetune: {rank_name()}{message}", file=sys.stderr)
    raise SystemExit(2)
