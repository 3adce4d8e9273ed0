"""Wrapped models whose saved tensors are swapped, and what their session is asked for."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import tight
from strata._config.choices import RECOMPUTES, TO_SSD
from strata._runtime.wrapped import Wrapped, wrapped
from torch import nn

ROOM = 8 << 20


class Counts:
    """What a session is asked for, while it does it. `slow`: no copy is done until waited for."""

    def __init__(self, state: Wrapped, monkeypatch: pytest.MonkeyPatch, slow: bool = False) -> None:
        self.slow = slow
        self.leaving: set[int] = set()
        self.saves: list[tuple[int, int]] = []  # address, bytes
        self.fetches: list[int] = []
        self.stages: list[int] = []
        self.live: set[int] = set()
        state.hooks.swapping.drain()  # what was under way before is not counted
        self.session = _Watched(state.session, self)
        monkeypatch.setattr(state, "session", self.session)
        monkeypatch.setattr(state.hooks.swapping, "_session", self.session)


class _Watched:
    def __init__(self, session: Any, counts: Counts) -> None:
        self._session = session
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def save_activation(
        self, address: int, size: int, to_ssd: bool, unit: int, *, stream: int
    ) -> int:
        save = self._session.save_activation(address, size, to_ssd, unit, stream=stream)
        if save >= 0:
            self._counts.saves.append((address, size))
            self._counts.live.add(save)
            self._counts.leaving.add(save)
        return save

    def activation_saved(self, save: int, wait: bool) -> bool:
        if self._counts.slow and save in self._counts.leaving and not wait:
            return False
        saved = self._session.activation_saved(save, wait)
        if saved:
            self._counts.leaving.discard(save)
        return saved

    def fetch_activation(self, save: int, address: int, *, stream: int) -> None:
        self._counts.fetches.append(save)
        self._session.fetch_activation(save, address, stream=stream)

    def stage_activation(self, save: int) -> None:
        self._counts.stages.append(save)
        self._session.stage_activation(save)

    def drop_activation(self, save: int) -> None:
        assert save not in self._counts.leaving
        self._counts.live.remove(save)
        self._session.drop_activation(save)


def set_mode(model: nn.Module, activation: str, room: int = ROOM) -> Wrapped:
    state = wrapped(model)
    to_ssd = activation in TO_SSD
    state.session.adopt(
        activation_host_bytes=0 if to_ssd else room, activation_ssd_bytes=room if to_ssd else 0
    )
    for unit in state.units:
        fits = unit.may_recompute or activation not in RECOMPUTES
        unit.activation = activation if fits else "keep"  # type: ignore[assignment]
    return state


def make_swapping(
    model: nn.Module, activation: str = "swap_host", room: int = ROOM, **more: Any
) -> tuple[nn.Module, Any, Wrapped]:
    model, optimizer = tight(model, **more)
    return model, optimizer, set_mode(model, activation, room)


def is_idle(state: Wrapped) -> bool:
    """Whether nothing is saved any more, once what was under way has ended.

    What an error left behind is dropped before, as the next forward does it.
    """
    state.hooks.reset()
    gc.collect()
    return state.hooks.swapping.drain() == 0


class Recipe(nn.Module):
    """One unit whose forward is the test's."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run
        self.inner = nn.Linear(48, 48)
        self.outer = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def recipes(run: Callable[[Any, torch.Tensor], torch.Tensor], count: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Recipe(run) for _ in range(count)])
