"""How much memory PyTorch's allocator may hold on a GPU beside the pages of wrapped models.

    allocator = Allocator(device, 8 << 30)
    allocator.give_pages(5 << 30)        # more than 3 GiB of tensors raise torch's own error
    allocator.close()                    # as before

Use from one thread at a time.

Note [What counts]. All that torch's allocator has given out, batch and buffers included. Only the
pages, which it does not know, lie in the device's budget as well. What it keeps in reserve
counts for the limit: where that would be passed, it gives the reserve back first.

Note [Shared limit]. PyTorch has one limit for a device, and several wrapped models may share it. So
each of them has a share. The limit is the sum of the shares, and never above the user's own, which
is set again behind the last model. A limit that the user sets meanwhile stays.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import ClassVar

import torch

from .memory_curve import counts_memory


class Allocator:
    """What PyTorch's allocator may have on behalf of one wrapped model: what its pages leave of its
    device budget. On the host nothing is to be done: there is no limit there. What is left when
    nobody closes it is taken back with the object. See Note [Shared limit].
    """

    def __init__(self, device: torch.device, device_bytes: int) -> None:
        self._device = device
        self._device_bytes = device_bytes
        self.page_bytes = 0
        self.close = weakref.finalize(self, _Limit.give_up, device, id(self), os.getpid())
        self.close.atexit = False

    def give_pages(self, page_bytes: int) -> None:
        """Pages take so much of the budget. What PyTorch has in reserve is given back."""
        if page_bytes != self.page_bytes and self._device.type == "cuda":
            _Limit.set_share(self._device, id(self), max(0, self._device_bytes - page_bytes))
            self.give_reserve_back()
        self.page_bytes = page_bytes

    def give_reserve_back(self) -> None:
        """Memory that PyTorch keeps without using it goes back to the device."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()


class _Limit:
    """Of PyTorch's allocator on one device. Threads: any may call the class methods."""

    lock = threading.RLock()  # a finalizer may run wherever Python collects garbage
    limits: ClassVar[dict[torch.device, _Limit]] = {}

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shares: dict[int, int] = {}  # bytes, by allocator
        self._usual = memory_fraction(device)  # what of the device the user let PyTorch have
        self._set = self._usual

    @classmethod
    def set_share(cls, device: torch.device, owner: int, byte_count: int) -> None:
        """One of the wrapped models leaves so many bytes to PyTorch."""
        with cls.lock:
            if device not in cls.limits:
                cls.limits[device] = cls(device)
            limit = cls.limits[device]
            limit._shares[owner] = byte_count
            limit._apply()

    @classmethod
    def give_up(cls, device: torch.device, owner: int, process: int) -> None:
        """It does not any more; behind the last one the limit is the user's again."""
        if os.getpid() != process:  # a forked child cannot use the device
            return
        with cls.lock:
            limit = cls.limits.get(device)
            if limit is None or limit._shares.pop(owner, None) is None:
                return
            if not limit._shares:
                del cls.limits[device]
            limit._apply()

    def _apply(self) -> None:
        if memory_fraction(self._device, self._set) != self._set:
            return  # the user has chosen another one since: it is his
        part = self._usual
        if self._shares:
            total = torch.cuda.mem_get_info(self._device)[1]
            part = min(part, sum(self._shares.values()) / total)
        torch.cuda.set_per_process_memory_fraction(part, self._device)
        self._set = memory_fraction(self._device, part)


def memory_fraction(device: torch.device, otherwise: float = 1.0) -> float:
    """The part of a device that PyTorch may have; `otherwise` where it does not say."""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # older PyTorches have none
    return float(ask(device)) if ask is not None and counts_memory() else otherwise
