"""Habits: short programs as people write them, run over plain PyTorch and over a wrapped model.

HABITS = Habits()

@HABITS.add
def a_counter(run: Run) -> None:
    model, optimizer = run.wrap(Net(Counting))
    run.train(model, optimizer)
    run.count(model.blocks[0].calls)

@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_forwards(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)

What a program notes, and at its end the parameters, buffers and optimizer state of all models that
it wrapped, must be those of plain PyTorch. Every habit runs in the default mode and in one more,
which its name picks; the others are thorough.
"""

import copy
import functools
import itertools
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strata
import torch
from strata._errors import StrataError
from torch import nn
from torch.nn import functional as F

WIDTH = 32
STEPS = 4
TOLERANCE = 1e-5
PAGE_BYTES = 64 << 10
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}  # a large eps: rounding stays rounding
UPDATES = ("on_step", "in_backward", "lock_free")
ACTIVATIONS = ("auto", "keep", "swap", "recompute", None)
BUDGETS = ((False, False), (True, True), (False, True), (True, False))  # device tight, SSD
REFUSALS = (StrataError, RuntimeError, ValueError, TypeError)


@dataclass(frozen=True)
class Mode:
    """How a model is wrapped."""

    update: str = "on_step"
    activations: str | None = "auto"
    tight: bool = False  # the device has room for little more than one unit
    ssd: bool = False  # the host has room for a part of the state

    def __str__(self) -> str:
        words = [self.update, str(self.activations)]
        return "-".join(words + ["tight"] * self.tight + ["ssd"] * self.ssd)

    @property
    def counts(self) -> bool:
        """Whether a forward runs as often as it was called, and no more."""
        return self.activations != "recompute" and not (self.tight and self.activations == "auto")

    def options(self, folder: Path, factor: int) -> dict[str, Any]:
        update: Any = self.update
        memory: dict[str, Any] = {"device": "64MiB", "host": "64MiB"}
        options = {"page_size": PAGE_BYTES, "workers": 1, "activations": self.activations}
        options["update"] = strata.LockFree(max_staleness=0) if update == "lock_free" else update
        if self.ssd:
            memory = {"device": "64MiB", "host": factor << 20, "ssd": "64MiB"}
            options["ssd_path"] = folder
        return {**options, "memory": memory}


class Run:
    """One run of a habit, plain (without a mode) or wrapped."""

    def __init__(self, mode: Mode | None, folder: Path | None = None, factor: int = 1) -> None:
        self.mode = mode
        self.folder = folder
        self.factor = factor
        self.notes: list[tuple[str, Any]] = []
        self.models: list[tuple[nn.Module, Any]] = []
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)

    @property
    def plain(self) -> bool:
        return self.mode is None

    def wrap(self, model: nn.Module, optimizer: Any = None, **more: Any) -> tuple[Any, Any]:
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), **ADAMW)
        if self.mode is not None:
            assert self.folder is not None
            options = {**self.mode.options(self.folder, self.factor), **more}
            if self.mode.tight:
                least = strata.plan(model, optimizer, **options).plan["device_bytes_min"]
                spare = 0 if self.mode.activations is None else 2 * PAGE_BYTES
                options["memory"]["device"] = self.factor * (least + spare)
            model, optimizer = strata.wrap(model, optimizer, **options)
        self.models.append((model, optimizer))
        return model, optimizer

    def note(self, *values: Any) -> None:
        """What is the same in every mode. It is copied."""
        self.notes.extend(("value", frozen(value)) for value in values)

    def count(self, *values: Any) -> None:
        """What is the same wherever nothing is computed twice."""
        self.notes.extend(("count", frozen(value)) for value in values)

    def note_gradients(self, model: nn.Module) -> None:
        """In modes that keep gradients until step()."""
        if self.mode is None or self.mode.update == "on_step":
            gradients = {name: frozen(p.grad) for name, p in model.named_parameters()}
            self.notes.append(("gradients", gradients))
        else:
            self.notes.append(("gradients", None))

    def train(
        self,
        model: Any,
        optimizer: Any,
        loss_of: Callable[[Any, int], torch.Tensor] | None = None,
        steps: int = STEPS,
        then: Callable[[int], None] | None = None,
    ) -> None:
        """The plain loop. `then` is called after every step."""
        for step in range(steps):
            loss = (loss_of or mean_loss)(model, step)
            loss.backward()
            self.note(loss)
            self.note_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            if then is not None:
                then(step)

    def end(self) -> None:
        """Notes what became of the models."""
        for model, optimizer in self.models:
            state = optimizer.state_dict()["state"]
            if isinstance(optimizer.defaults.get("momentum"), float):  # SGD counts no steps
                state = {i: {**entry, "step": 0} for i, entry in state.items()}
            self.note(dict(sorted(state.items())))
            if self.mode is not None:
                strata.unwrap(model)
            self.note(dict(model.state_dict()))
            self.note([p.requires_grad for p in model.parameters()])


def frozen(value: Any) -> Any:
    """A copy of a value that later steps do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: frozen(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(entry) for entry in value]
    return copy.deepcopy(value)


def check_same(value: Any, expected: Any, where: str) -> None:
    """Numbers and tensors up to rounding, anything else exactly."""
    if isinstance(expected, dict):
        assert value.keys() == expected.keys(), f"{where}: {[*value]}, not {[*expected]}"
        for key, entry in expected.items():
            check_same(value[key], entry, f"{where}[{key}]")
    elif isinstance(expected, list):
        assert len(value) == len(expected), f"{where}: {len(value)}, not {len(expected)}"
        for i, entry in enumerate(expected):
            check_same(value[i], entry, f"{where}[{i}]")
    elif isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor):
        torch.testing.assert_close(
            torch.as_tensor(value), expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True,
            msg=lambda told: f"{where}: {told}",
        )  # fmt: skip
    elif isinstance(expected, float):
        assert value == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE, nan_ok=True), where
    else:
        assert type(value) is type(expected), f"{where}: {value!r}, not {expected!r}"
        assert np.array_equal(value, expected), f"{where}: {value!r}, not {expected!r}"


@dataclass(frozen=True)
class Habit:
    """A program, and the modes that cannot run it.

    early: what becomes of it where gradients are used up before step(): "same", "refused" with a
        message that names update=, "perhaps" so, or "none" where it makes no sense.
    once: a second run of its forward has other results, or lacks its input. Where units are
        computed again it has plain PyTorch's results, or is refused by a message that names
        activations=.
    refused: documented so: strata's error in every mode, which says this.
    """

    body: Callable[[Run], None]
    early: str = "same"
    once: bool = False
    refused: str = ""

    @property
    def name(self) -> str:
        return self.body.__name__

    def check(self, mode: Mode, folder: Path) -> None:
        refusal = self.refused
        if mode.update != "on_step" and self.early == "refused":
            refusal = "update="
        if refusal:
            with pytest.raises(REFUSALS, match=refusal):
                self._wrapped(mode, folder)
            return
        expected = plain_notes(self.body)
        try:
            found = self._wrapped(mode, folder)
        except REFUSALS as error:
            again = self.once and not mode.counts and "activations=" in str(error)
            early = self.early == "perhaps" and mode.update != "on_step" and "update=" in str(error)
            if not (again or early):
                raise
            return
        assert [kind for kind, _ in found] == [kind for kind, _ in expected]
        for i, ((kind, value), (_, wanted)) in enumerate(zip(found, expected, strict=True)):
            if not (
                (kind == "gradients" and value is None) or (kind == "count" and not mode.counts)
            ):
                check_same(value, wanted, f"{self.name}: {kind} {i}")

    def _wrapped(self, mode: Mode, folder: Path) -> list[tuple[str, Any]]:
        """What a step needs is known once it has run, which may refuse the budgets."""
        for factor in (1, 2, 4, 8):
            try:
                return notes(self.body, Run(mode, folder, factor))
            except StrataError as error:
                if not re.search("would do|may help", str(error)) or factor == 8:
                    raise
        raise AssertionError("not reached")

    def modes(self) -> list[Mode]:
        """Every mode of updates with every one of activations, in budgets that take turns."""
        updates = UPDATES[:1] if self.early == "none" else UPDATES
        turn = zlib.crc32(self.name.encode())
        found = []
        for update, kind in itertools.product(updates, ACTIVATIONS):
            tight, ssd = BUDGETS[(turn + len(found)) % 4]
            found.append(Mode(update, kind, tight, ssd))
        return [mode for mode in found if mode != Mode()]


def notes(body: Callable[[Run], None], run: Run) -> list[tuple[str, Any]]:
    body(run)
    run.end()
    return run.notes


@functools.cache
def plain_notes(body: Callable[[Run], None]) -> list[tuple[str, Any]]:
    return notes(body, Run(None))


class Habits:
    """The habits of a file."""

    def __init__(self) -> None:
        self._habits: list[Habit] = []

    def add(self, body: Callable[[Run], None]) -> Callable[[Run], None]:
        self._habits.append(Habit(body))
        return body

    def add_with(self, **what: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
        def add(body: Callable[[Run], None]) -> Callable[[Run], None]:
            self._habits.append(Habit(body, **what))
            return body

        return add

    def cases(self) -> list[Any]:
        """Habits with modes, for pytest.mark.parametrize."""
        cases = []
        for habit in self._habits:
            modes = habit.modes()
            picked = zlib.crc32(habit.name.encode()) % len(modes)
            for i, mode in enumerate([Mode(), *modes]):
                marks = [] if i == 0 or i == picked + 1 else [pytest.mark.thorough]
                cases.append(pytest.param(habit, mode, marks=marks, id=f"{habit.name}-{mode}"))
        return cases


# Models -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block, which habits change."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return found

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.inner(x)


class Net(nn.Module):
    """A stem, blocks and a head."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(seed: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def mean_loss(model: Any, step: int) -> torch.Tensor:
    loss: torch.Tensor = (model(batch(step)) - 1).square().mean()
    return loss
