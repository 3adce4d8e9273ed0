"""Coming from DeepSpeed: what its configuration file says, as keywords of strata.wrap().

    keywords = strata.from_deepspeed("ds_config.json", args)    # prints what becomes of every key
    optimizer = keywords.optimizer(model.parameters())          # as its "optimizer" section says
    model, optimizer = strata.wrap(model, optimizer, **keywords)
    scheduler = keywords.scheduler(optimizer)                   # as its "scheduler" section says

DeepSpeed itself is not needed. _deepspeed_keys.py has all its keys.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from .._config.launched import processes_started
from .._config.paths import AnyPath
from .._errors import check_choice
from .._report.report_text import folded
from ..optim import GradScaler
from ._deepspeed_file import AUTO, values
from ._deepspeed_keys import KEYS, Keyword, Refused, number
from ._deepspeed_optim import SCHEDULES, STEPS, WARMUP_STEPS, Made, optimizer_of, schedule_of

HONOURED, NOT_NEEDED, REFUSED = "honoured", "not needed", "refused"
BATCH_KEYS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
ACCUMULATION = BATCH_KEYS[2]  # of the same name in strata
# What DeepSpeed does where a file says nothing. It has clipped since June 2026.
_DEFAULT = ", DeepSpeed's default: the file does not say"
DEFAULTS = {
    "gradient_clipping": f"{_DEFAULT}; older versions do not clip: write gradient_clipping",
    "bf16.check_grad_overflow": _DEFAULT,
}
TABLE_COLUMNS = 100
VALUE_COLUMNS = 60


class Row(NamedTuple):
    """What becomes of a key."""

    key: str
    value: Any
    verdict: str
    says: str

    @property
    def given(self) -> str:
        """The value, in short."""
        return textwrap.shorten(repr(self.value), VALUE_COLUMNS, placeholder=" ...")


class WrapKeywords(dict[str, Any]):
    """Keywords for strata.wrap(), and what else the file says: `rows`, the optimizer, the schedule
    of its learning rate, and for float16 the scaler of the loss."""

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self._arguments = arguments  # TrainingArguments, or None
        self.made: dict[str, Made] = {}  # by section
        self.scaling: dict[str, Any] | None = None

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """A new optimizer over `params`, parameters or groups of them, for strata.wrap().

        Raises:
            ValueError: the file has no "optimizer".
        """
        if "optimizer" not in self.made:
            raise ValueError('the file has no "optimizer": construct one of torch.optim')
        kind, arguments = self.made["optimizer"]
        made: torch.optim.Optimizer = kind(params, **arguments)
        return made

    def scheduler(
        self, optimizer: torch.optim.Optimizer, steps: int | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """A new schedule for what strata.wrap() returned; step() it after every optimizer.step().

        Args:
            optimizer: what strata.wrap() returned.
            steps: of the whole run, for "auto".

        Raises:
            ValueError: the file has no "scheduler", or the steps are not known.
        """
        if "scheduler" not in self.made:
            raise ValueError('the file has no "scheduler": construct one of torch.optim')
        kind, given = self.made["scheduler"]
        auto = [word for word in (STEPS, WARMUP_STEPS) if given.get(word) == AUTO]
        total = steps or max(0, getattr(self._arguments, "max_steps", 0))
        if auto and not total:
            raise ValueError(f"{auto[0]} is 'auto': pass steps=, those of the whole run")
        arguments = dict(given)
        if STEPS in auto:
            arguments[STEPS] = total
        if WARMUP_STEPS in auto:
            arguments[WARMUP_STEPS] = max(1, self._arguments.get_warmup_steps(total))
        made: torch.optim.lr_scheduler.LRScheduler = kind(optimizer, **arguments)
        return made

    def scaler(self) -> GradScaler:
        """A new scaler of the loss, for float16: scale(loss).backward(), step(optimizer), update().
        Without float16 it does nothing."""
        return GradScaler(enabled=self.scaling is not None, **self.scaling or {})

    def note(self, key: str, value: Any, verdict: str, says: str) -> None:
        """Adds a row."""
        self.rows.append(Row(key, value, verdict, says))

    def table(self) -> str:
        """For people: what becomes of every key; those of one section with one reason together."""
        lines = []
        for verdict in (HONOURED, NOT_NEEDED, REFUSED):
            groups: dict[tuple[str, str], list[str]] = {}
            for row in self.rows:
                if row.verdict == verdict:
                    section, dot, name = row.key.rpartition(".")
                    shown = name if verdict == NOT_NEEDED else f"{name} = {row.given}"
                    groups.setdefault((section + dot, row.says), []).append(shown)
            if groups:
                lines.append(verdict if verdict != NOT_NEEDED else f"{verdict} here")
            for (section, says), names in groups.items():
                lines += folded(f"{section}{', '.join(names)}: {says}", TABLE_COLUMNS, 6, first=2)
        return "\n".join(lines)


def from_deepspeed(config: AnyPath | Mapping[str, Any], args: Any | None = None) -> WrapKeywords:
    """Reads a DeepSpeed configuration. Prints what becomes of every key: honoured, not needed here
    and why, or refused.

    DeepSpeed's files have no budgets: add memory={"device": ..., "host": ..., "ssd": ...} where
    strata shall not take what is free. Gradients of several backward() calls add up: divide the
    loss by their number, as in plain PyTorch (DeepSpeed's backward does it; so does Trainer).

    Args:
        config: the path of a JSON file, or a dictionary.
        args: transformers.TrainingArguments, whose values stand for "auto".

    Returns:
        Keywords for strata.wrap(): a dict, whose optimizer(params), scheduler(optimizer) and
        scaler() make what the file describes.

    Raises:
        ValueError: a key that DeepSpeed does not have, with the nearest one; "auto" without `args`,
            or against `args`; and, once the table is printed, what strata cannot do, with what to
            use instead.
        TypeError: what is no configuration.
        OSError: the file cannot be read.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> keywords = strata.from_deepspeed(
        ...     {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}}
        ... )  # doctest: +ELLIPSIS
        honoured
          gradient_clipping = 1.0: max_grad_norm=1.0
        ...
        >>> model, optimizer = strata.wrap(
        ...     model, keywords.optimizer(model.parameters()), **keywords
        ... )
    """
    found = WrapKeywords(args)
    _take(values(config, args), found)
    print(found.table())
    refused = [row for row in found.rows if row.verdict == REFUSED]
    if refused:
        lines = [f"  {row.key} = {row.given}: {row.says}" for row in refused]
        raise ValueError("\n".join(["strata cannot do all that the file asks for:", *lines]))
    return found


def _take(given: dict[str, Any], found: WrapKeywords) -> None:
    """Keys that belong together first, then every other one by its verdict. Rows are in the order
    of the file."""
    enabled = {section: bool(given.get(f"{section}.enabled")) for section in ("fp16", "bf16")}
    if all(enabled.values()):
        raise ValueError("fp16 and bf16 are both enabled: DeepSpeed takes one of them")
    _take_batch(given, found)
    _take_drives(given, found)
    for section, make in (("optimizer", optimizer_of), ("scheduler", schedule_of)):
        _take_type(section, make, given, found)
    if enabled["fp16"]:
        _take_scaler(given, found)
    checks = {"bf16.check_grad_overflow": True} if enabled["bf16"] else {}
    taken = {row.key for row in found.rows}
    said = {"gradient_clipping": 1.0, **checks, **given}
    for key in sorted(said, key=lambda key: key.startswith("data_types.")):  # whose dtype wins
        if key in taken:
            continue
        value, verdict = said[key], KEYS[key]
        if not enabled.get(key.partition(".")[0], True):
            found.note(key, value, NOT_NEEDED, "off")
        elif isinstance(verdict, Keyword) and (made := verdict.make(value)) is None:
            found.note(key, value, NOT_NEEDED, verdict.off)
        elif isinstance(verdict, Keyword):
            found[verdict.name] = made
            absent = "" if key in given else DEFAULTS[key]
            found.note(key, value, HONOURED, f"{verdict.name}={made!r}{verdict.more}{absent}")
        elif isinstance(verdict, Refused):
            on = verdict.is_on(value)
            found.note(key, value, REFUSED if on else NOT_NEEDED, verdict.instead if on else "off")
        else:
            found.note(key, value, NOT_NEEDED, verdict or "belongs to a type, and none is taken")
    order = {key: place for place, key in enumerate(given)}
    found.rows.sort(key=lambda row: order.get(row.key, len(order)))


def _take_batch(given: dict[str, Any], found: WrapKeywords) -> None:
    """From two sizes DeepSpeed computes the third one, for as many processes as were started."""
    processes = processes_started()
    total, micro, calls = (
        None if given.get(key) in (None, AUTO) else number(key, given[key], whole=True)
        for key in BATCH_KEYS
    )
    total_key, micro_key, calls_key = BATCH_KEYS
    here = "one process" if processes == 1 else f"{processes} processes"
    refusal = ""
    if total and micro:
        times, rest = divmod(total, micro * processes)
        if rest or calls not in (None, times):
            refusal = f"is not {micro_key} {micro} x {calls_key} {calls or 1} in {here}"
            refusal += "" if rest else f": {calls_key} {times} gives the same batch in {here}"
        calls = calls or max(1, times)
    elif total:
        micro, rest = divmod(total, (calls or 1) * processes)
        if rest:
            by = [f"{calls_key} {calls}"] * bool(calls) + [here] * (processes > 1)
            refusal = f"cannot be divided by {' and '.join(by)}"
    each = f"the loop's own: DataLoader(batch_size={micro or '...'})"
    for key in (total_key, micro_key):
        if key == total_key and refusal:
            found.note(key, total, REFUSED, refusal)
        elif key in given:
            found.note(key, given[key], NOT_NEEDED, each)
    calls = calls or 1
    if calls > 1:
        found[ACCUMULATION] = calls
        says = f"{ACCUMULATION}={calls}; the gradients add up: divide the loss by {calls} (Trainer"
        found.note(calls_key, given.get(calls_key, calls), HONOURED, f"{says} does)")
    elif calls_key in given:
        found.note(calls_key, calls, NOT_NEEDED, "one backward() for each step")


def _take_drives(given: dict[str, Any], found: WrapKeywords) -> None:
    """All tiers are open to everything. What DeepSpeed offloads to NVMe names the SSDs."""
    places: list[str] = []
    for part in ("offload_param", "offload_optimizer"):
        device_key, place_key = (f"zero_optimization.{part}.{n}" for n in ("device", "nvme_path"))
        device, place = given.get(device_key, "none"), given.get(place_key)
        check_choice(device_key, str(device), ("none", "cpu", "nvme"))
        if device == "nvme" and place:
            places += [str(place)] * (str(place) not in places)
            found.note(place_key, place, HONOURED, f"ssd_path={str(place)!r}")
        elif device == "nvme":
            found.note(device_key, device, REFUSED, "needs nvme_path, a folder on the drive")
        elif place_key in given:
            found.note(place_key, place, NOT_NEEDED, f"device is {device!r}")
    if places:
        found["ssd_path"] = places[0] if len(places) == 1 else places


def _take_scaler(given: dict[str, Any], found: WrapKeywords) -> None:
    read = {"initial_scale_power": 16.0, "loss_scale_window": 1000.0}
    for name in read:
        if (key := f"fp16.{name}") in given:
            read[name] = number(key, given[key])
            found.note(key, given[key], HONOURED, "scaler(), a strata.GradScaler")
    power, window = read.values()
    found.scaling = {"init_scale": 2.0**power, "growth_interval": int(window)}


def _take_type(section: str, make: Any, given: dict[str, Any], found: WrapKeywords) -> None:
    """What a section makes, from `type` and `params`. Raises TypeError and ValueError."""
    type_key, params_key = f"{section}.type", f"{section}.params"
    name, params = given.get(type_key), given.get(params_key)
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"{params_key} must be a dictionary, not {params!r}")
    if params and name is None:
        raise ValueError(f"{section} has params, and no type that they could be for")
    if name is None:
        return
    params = dict(params or {})
    says = "as above"
    if section == "optimizer" and params.pop("fp32_optimizer_states", True) is False:
        found["state_dtype"] = torch.bfloat16
        says = f"state_dtype={torch.bfloat16!r}, rounded stochastically"
    try:
        kind, arguments = found.made[section] = make(str(name), params)
    except ValueError as error:
        found.note(type_key, name, REFUSED, str(error))
        return
    if section == "optimizer":
        written = ", ".join(f"{word}={value!r}" for word, value in arguments.items())
        home = "strata" if kind.__module__.startswith("strata") else "torch.optim"
        made = f"optimizer(params) makes {home}.{kind.__name__}(params, {written})"
    else:
        like = "one with the same rates" if name in SCHEDULES else kind.__name__
        made = f"scheduler(optimizer) makes {like}; the loop steps it (Trainer does)"
    found.note(type_key, name, HONOURED, made)
    if params_key in given:
        found.note(params_key, given[params_key], HONOURED, says)
