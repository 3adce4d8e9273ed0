"""The activations of fake_core's session.

It exists to catch memory that is freed, used or saved again too early: copies are as late as they
may be, as on a GPU. Bytes are taken when activation_saved() first says so, and given when
await_activation() puts them in order before a stream, or when activation_fetched() says that they
are there; they are never given again, for the memory may be somebody else's by then.
"""

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

import torch
from strata._core import StrataError


@dataclass
class _Save:
    address: int
    byte_count: int
    to_ssd: bool
    data: torch.Tensor | None = None
    fetch_to: int | None = None
    asked: bool = False
    in_order: bool = False


class Saves:
    """A session's saved activations. Every method checks what the contract requires."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.members: list[Any] = []
        self.closed = False
        self.streams: list[tuple[str, int]] = []  # call and stream
        self.room = {False: 0, True: 0}  # bytes for activations, by to_ssd
        self.saves: dict[int, _Save] = {}
        self.saves_made = 0

    def owners(self, param: int) -> list[tuple[int, int, int]]:
        """Of every element: this process, which is alone."""
        return [(0, 0, self.config["params"][param]["numel"])]

    def _make_room(self, host_bytes: int | None, ssd_bytes: int | None) -> None:
        self._open()
        for size, to_ssd in ((host_bytes, False), (ssd_bytes, True)):
            key = "ssd_bytes" if to_ssd else "host_bytes"
            if size is None:
                continue
            assert not self.saves, "an activation is saved"
            if size > self.config[key]:
                raise StrataError(f"activations: {size} > {self.config[key]} {key}")
            self.room[to_ssd] = size

    def save_activation(
        self, address: int, byte_count: int, to_ssd: bool, unit: int, *, stream: int
    ) -> int:
        self._open()
        self._note_stream(stream)
        assert byte_count > 0
        assert 0 <= unit < len(self.members)
        if byte_count > self.room[to_ssd]:
            return -1
        self.room[to_ssd] -= byte_count
        self.saves_made += 1
        self.saves[self.saves_made] = _Save(address, byte_count, to_ssd)
        return self.saves_made

    def activation_saved(self, save: int, wait: bool) -> bool:
        self._open()
        held = self.saves[save]
        if held.data is None and (wait or held.asked):
            held.data = borrow(held.address, held.byte_count, torch.uint8).clone()
        held.asked = True
        return held.data is not None

    def stage_activation(self, save: int) -> None:
        self._open()
        assert save in self.saves

    def fetch_activation(self, save: int, address: int, *, stream: int) -> None:
        self._open()
        self._note_stream(stream)
        held = self.saves[save]
        assert held.data is not None, "fetch_activation() before activation_saved()"
        assert held.fetch_to is None, "one fetch at a time"
        held.fetch_to, held.asked, held.in_order = address, False, False

    def activation_fetched(self, save: int, wait: bool) -> bool:
        self._open()
        held = self.saves[save]
        if held.fetch_to is not None and (wait or held.asked):
            self._give(held)
            held.fetch_to = None
        held.asked = True
        return held.fetch_to is None

    def await_activation(self, save: int, *, stream: int) -> bool:
        self._open()
        self._note_stream(stream)
        held = self.saves[save]
        if held.fetch_to is not None:
            self._give(held)
        return held.fetch_to is None

    @staticmethod
    def _give(held: "_Save") -> None:
        if not held.in_order:
            assert held.fetch_to is not None
            borrow(held.fetch_to, held.byte_count, torch.uint8).copy_(held.data)
        held.in_order = True

    def drop_activation(self, save: int) -> None:
        if self.closed:
            return
        held = self.saves.pop(save)
        assert held.fetch_to is None, "whoever drops it now waits for the copy"
        self.room[held.to_ssd] += held.byte_count

    def _note_stream(self, stream: int) -> None:
        """Every call that reads or writes device memory says on which stream."""
        assert type(stream) is int
        self.streams.append((sys._getframe(1).f_code.co_name, stream))

    def _open(self) -> None:
        if self.closed:
            raise StrataError("the session is closed")


def borrow(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over somebody else's memory."""
    raw = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)
