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
from .._errors import nearest
from ..optim import GradScaler
from ._deepspeed_file import AUTO, WARMUP_STEPS, values
from ._deepspeed_keys import HONOURED, KEYS, NOT_NEEDED, REFUSED, VERDICTS
from ._deepspeed_optim import SCHEDULES, STEPS, check_schedule, optimizer_of, scheduler_of

ACCUMULATION = "gradient_accumulation_steps"  # strata's keyword for several backward() calls a step
CLIPPING_DEFAULT = 1.0  # where a file says nothing: DeepSpeed has clipped so since June 2026
OLDER_CLIPPING = "; older versions do not clip: write gradient_clipping"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVICES = ("none", "cpu", "nvme")  # of offload_param and offload_optimizer
BATCH_KEYS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
TABLE_COLUMNS = 100
VALUE_COLUMNS = 60


class Row(NamedTuple):
    """What becomes of a key."""

    key: str
    value: Any
    verdict: str  # one of VERDICTS
    says: str

    @property
    def given(self) -> str:
        """The value, in short."""
        return textwrap.shorten(repr(self.value), VALUE_COLUMNS, placeholder=" ...")


class WrapKeywords(dict[str, Any]):
    """Keywords for strata.wrap(), and what else the file says: `rows`, the optimizer, the schedule
    of its learning rate, and for float16 the scaler of the loss."""

    def __init__(self, rows: list[Row], arguments: Any) -> None:
        super().__init__()
        self.rows = rows
        self._arguments = arguments  # TrainingArguments, or None
        self._optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None
        self._schedule: tuple[str, dict[str, Any]] | None = None
        self._scaler: dict[str, Any] | None = None

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """A new optimizer over `params`, parameters or groups of them, for strata.wrap().

        Raises:
            ValueError: the file has no "optimizer".
        """
        if self._optimizer is None:
            raise ValueError('the file has no "optimizer": construct one of torch.optim')
        kind, arguments = self._optimizer
        return kind(params, **arguments)

    def scheduler(
        self, optimizer: torch.optim.Optimizer, steps: int | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """A new schedule for what strata.wrap() returned; step() it behind every optimizer.step().

        Args:
            optimizer: what strata.wrap() returned.
            steps: of the whole run, for "auto".

        Raises:
            ValueError: the file has no "scheduler", or the steps are not known.
        """
        if self._schedule is None:
            raise ValueError('the file has no "scheduler": construct one of torch.optim')
        name, given = self._schedule
        arguments = dict(given)
        auto = [word for word in (STEPS, WARMUP_STEPS) if arguments.get(word) == AUTO]
        total = steps or max(0, getattr(self._arguments, "max_steps", 0))
        if auto and not total:
            raise ValueError(f"{auto[0]} is 'auto': pass steps=, those of the whole run")
        if STEPS in auto:
            arguments[STEPS] = total
        if WARMUP_STEPS in auto:
            arguments[WARMUP_STEPS] = max(1, self._arguments.get_warmup_steps(total))
        return scheduler_of(optimizer, name, arguments)

    def scaler(self) -> GradScaler:
        """A new scaler of the loss, for float16: scale(loss).backward(), step(optimizer), update().
        Without float16 it does nothing."""
        return GradScaler(enabled=self._scaler is not None, **self._scaler or {})

    def table(self) -> str:
        """For people: what becomes of every key; those of one section with one reason together."""
        lines = []
        for verdict in VERDICTS:
            groups: dict[tuple[str, str], list[str]] = {}
            for row in self.rows:
                if row.verdict == verdict:
                    section, dot, name = row.key.rpartition(".")
                    shown = name if verdict == NOT_NEEDED else f"{name} = {row.given}"
                    groups.setdefault((section + dot, row.says), []).append(shown)
            if groups:
                lines.append(verdict if verdict != NOT_NEEDED else f"{verdict} here")
            for (section, says), names in groups.items():
                text = f"{section}{', '.join(names)}: {says}"
                lines += textwrap.wrap(
                    text,
                    TABLE_COLUMNS,
                    initial_indent="  ",
                    subsequent_indent="      ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
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
        ...     {"optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}, "gradient_clipping": 1.0}
        ... )  # doctest: +ELLIPSIS
        honoured
          gradient_clipping = 1.0: max_grad_norm=1.0
        ...
        >>> model, optimizer = strata.wrap(
        ...     model, keywords.optimizer(model.parameters()), **keywords
        ... )
    """
    found = _Reading(values(config, args), args).read()
    print(found.table())
    refused = [row for row in found.rows if row.verdict == REFUSED]
    if refused:
        lines = [f"  {row.key} = {row.given}: {row.says}" for row in refused]
        raise ValueError("\n".join(["strata cannot do all that the file asks for:", *lines]))
    return found


class _Reading:
    """Goes through a file once: each method takes the keys that belong together."""

    def __init__(self, given: dict[str, Any], args: Any | None) -> None:
        self.given = given
        self.found = WrapKeywords([], args)

    def read(self) -> WrapKeywords:
        """Everything. A key that no method took gets a row by its verdict alone."""
        self._batch()
        self._clipping()
        self._float16()
        self._bfloat16()
        self._data_types()
        self._offload()
        self._optimizer()
        self._scheduler()
        known = {row.key for row in self.found.rows}
        for path, value in ((p, v) for p, v in self.given.items() if p not in known):
            verdict, says, *_ = key = KEYS[path]
            if verdict == HONOURED:  # params, whose type is refused
                verdict, says = NOT_NEEDED, "belongs to a type, and none is taken"
            elif verdict == REFUSED and not key.is_on(value):
                verdict, says = NOT_NEEDED, "off"
            self._note(path, value, verdict, says)
        return self.found

    def _note(self, path: str, value: Any, verdict: str, says: str) -> None:
        self.found.rows.append(Row(path, value, verdict, says))

    def _honour(self, path: str, keyword: str, value: Any, note: str = "") -> None:
        self.found[keyword] = value
        if path not in self.given and path not in BATCH_KEYS:
            note = f", DeepSpeed's default: the file does not say{note}"
        shown = self.given.get(path, value)
        self._note(path, shown, HONOURED, f"{keyword}={value!r}{note}")

    def _batch(self) -> None:
        """Of two sizes DeepSpeed computes the third one; of all, how many processes there are:
        those that were started."""
        processes = processes_started()
        total, micro, calls = (
            None if self.given.get(path) in (None, AUTO) else self._count(path)
            for path in BATCH_KEYS
        )
        total_key, micro_key, calls_key = BATCH_KEYS
        if total and micro:
            here = "one process" if processes == 1 else f"{processes} processes"
            times, rest = divmod(total, micro * processes)
            if rest or calls not in (None, times):
                enough = f": {calls_key} {times} gives the same batch in {here}"
                self._note(
                    total_key,
                    total,
                    REFUSED,
                    f"is not {micro_key} {micro} x {calls_key} {calls or 1} in {here}"
                    + ("" if rest else enough),
                )
            calls = calls or max(1, times)
        elif total:
            micro, rest = divmod(total, (calls or 1) * processes)
            if rest:
                by = " and ".join(
                    ([f"{calls_key} {calls}"] if calls else [])
                    + ([f"{processes} processes"] if processes > 1 else [])
                )
                self._note(total_key, total, REFUSED, f"cannot be divided by {by}")
        calls = calls or 1
        for path in (total_key, micro_key):
            if path in self.given and path not in {row.key for row in self.found.rows}:
                each = f"DataLoader(batch_size={micro})" if micro else "DataLoader(batch_size=...)"
                self._note(path, self.given[path], NOT_NEEDED, f"the loop's own: {each}")
        if calls > 1:
            note = f"; the gradients add up: divide the loss by {calls} (Trainer does)"
            self._honour(calls_key, ACCUMULATION, calls, note)
        elif calls_key in self.given:
            self._note(calls_key, calls, NOT_NEEDED, "one backward() for each step")

    def _count(self, path: str) -> int:
        value = self.given[path]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value % 1:
            raise ValueError(f"{path} must be a whole number from 1 on, not {value!r}")
        return int(value)

    def _number(self, path: str, default: float) -> float:
        value = self.given.get(path, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ValueError(f"{path} must be a number from 0 on, not {value!r}")
        return value

    def _clipping(self) -> None:
        path = "gradient_clipping"
        norm = self._number(path, CLIPPING_DEFAULT)
        if norm > 0:
            older = "" if path in self.given else OLDER_CLIPPING
            self._honour(path, "max_grad_norm", float(norm), older)
        else:
            self._note(path, norm, NOT_NEEDED, "nothing is clipped")

    def _on(self, section: str) -> bool:
        """Whether a section is enabled. Where it is not, nothing else in it counts."""
        if self.given.get(f"{section}.enabled"):
            return True
        for path, value in self.given.items():
            if path.startswith(f"{section}."):
                self._note(path, value, NOT_NEEDED, "off")
        return False

    def _float16(self) -> None:
        if not self._on("fp16"):
            return
        if self.given.get("bf16.enabled"):
            raise ValueError("fp16 and bf16 are both enabled: DeepSpeed takes one of them")
        self._honour("fp16.enabled", "dtype", torch.float16)
        power = self._number("fp16.initial_scale_power", 16)
        window = self._number("fp16.loss_scale_window", 1000)
        self.found._scaler = {"init_scale": 2.0**power, "growth_interval": int(window)}
        for path in ("fp16.initial_scale_power", "fp16.loss_scale_window"):
            if path in self.given:
                self._note(path, self.given[path], HONOURED, "scaler(), a strata.GradScaler")
        if scale := self._number("fp16.loss_scale", 0):
            says = "write 0: scaler() adapts its scale, and has no fixed one"
            self._note("fp16.loss_scale", scale, REFUSED, says)
        else:
            says = "scaler(): scale(loss).backward(), step(optimizer), update() (Trainer has one)"
            self._note("fp16.loss_scale", self.given.get("fp16.loss_scale", 0), HONOURED, says)

    def _bfloat16(self) -> None:
        if not self._on("bf16"):
            return
        self._honour("bf16.enabled", "dtype", torch.bfloat16)
        path = "bf16.check_grad_overflow"
        if self.given.get(path, True):  # DeepSpeed's default
            self._honour(path, "skip_nonfinite", True)
        else:
            self._note(path, False, NOT_NEEDED, "steps are not checked unless asked")
        path = "bf16.bf16_optimizer_states"
        if self.given.get(path):
            self._honour(path, "state_dtype", torch.bfloat16, ", rounded stochastically")
        elif path in self.given:
            self._note(path, False, NOT_NEEDED, "moments are float32")

    def _data_types(self) -> None:
        path = "data_types.param_dtype"
        if (name := self.given.get(path)) is not None:
            if name not in DTYPES:
                raise ValueError(f"unknown {path} {name!r}: {nearest(str(name), DTYPES)}")
            self._honour(path, "dtype", DTYPES[name])
        elif path in self.given:
            self._note(path, None, NOT_NEEDED, "bf16 and fp16 say it")
        path = "data_types.grad_accum_dtype"
        if path in self.given:
            says = "gradients of several backward() calls add up in float32"
            self._note(path, self.given[path], NOT_NEEDED, says)

    def _offload(self) -> None:
        """All tiers are open to everything; what DeepSpeed offloads to NVMe names the SSDs."""
        places: list[str] = []
        zero = "zero_optimization"
        for section in (f"{zero}.offload_param", f"{zero}.offload_optimizer"):
            device_key, path_key = f"{section}.device", f"{section}.nvme_path"
            device = self.given.get(device_key, "none")
            if device not in DEVICES:
                raise ValueError(
                    f"unknown {device_key} {device!r}: {nearest(str(device), DEVICES)}"
                )
            place = self.given.get(path_key)
            if device == "nvme" and place:
                places += [str(place)] * (str(place) not in places)
                says = f"ssd_path={str(place)!r}: what has no room in memory rests there"
                self._note(device_key, device, HONOURED, says)
                self._note(path_key, place, HONOURED, f"ssd_path={str(place)!r}")
            elif device == "nvme":
                self._note(device_key, device, REFUSED, "needs nvme_path, a folder on the drive")
            elif device_key in self.given:
                self._note_host(device_key, device == "cpu")
            if path_key in self.given and device != "nvme":
                self._note(path_key, place, NOT_NEEDED, f"device is {device!r}")
        for path in (f"{zero}.cpu_offload", f"{zero}.cpu_offload_param"):
            if path in self.given:
                self._note_host(path, bool(self.given[path]))
        if places:
            self.found["ssd_path"] = places[0] if len(places) == 1 else places

    def _note_host(self, path: str, offloads: bool) -> None:
        says = "what has no room on the device rests in host memory, in any case"
        self._note(path, self.given[path], HONOURED if offloads else NOT_NEEDED, says)

    def _optimizer(self) -> None:
        path, params_path = "optimizer.type", "optimizer.params"
        name, given = self.given.get(path), self._params("optimizer")
        if name is None:
            return
        if given.pop("fp32_optimizer_states", True) is False:
            self._honour(params_path, "state_dtype", torch.bfloat16, ", rounded stochastically")
        try:
            kind, arguments = optimizer_of(str(name), given)
        except ValueError as error:
            self._note(path, name, REFUSED, str(error))
            return
        self.found._optimizer = kind, arguments
        written = ", ".join(f"{word}={value!r}" for word, value in arguments.items())
        home = "strata" if kind.__module__.startswith("strata") else "torch.optim"
        says = f"optimizer(params) makes {home}.{kind.__name__}(params, {written})"
        self._note(path, name, HONOURED, says)
        self._note_params(params_path)

    def _scheduler(self) -> None:
        path, params_path = "scheduler.type", "scheduler.params"
        name, given = self.given.get(path), self._params("scheduler")
        if name is None:
            return
        try:
            check_schedule(str(name), given)
        except ValueError as error:
            self._note(path, name, REFUSED, str(error))
            return
        self.found._schedule = str(name), given
        says = "scheduler(optimizer) makes one with the same rates"
        if str(name) not in SCHEDULES:
            says = f"scheduler(optimizer) makes torch.optim.lr_scheduler.{name}"
        self._note(path, name, HONOURED, says + "; the loop steps it (Trainer does)")
        self._note_params(params_path)

    def _params(self, section: str) -> dict[str, Any]:
        value = self.given.get(f"{section}.params")
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{section}.params must be a dictionary, not {value!r}")
        if value and self.given.get(f"{section}.type") is None:
            raise ValueError(f"{section} has params, and no type that they could be for")
        return dict(value or {})

    def _note_params(self, path: str) -> None:
        if path in self.given and path not in {row.key for row in self.found.rows}:
            self._note(path, self.given[path], HONOURED, "as above")
