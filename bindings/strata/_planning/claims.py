"""What the plans of a wrapped model claim of the core: device memory for parameters that come and
go, units that rest on the device, room for swapped tensors.

    claims = Claims(state, allocator)
    if claims.take(units, param_bytes, host_bytes, ssd_bytes): ...    # False: not now

The core lets pages come to rest elsewhere only while no thread is in a forward or backward of the
model, and refuses it otherwise. Then what is claimed stays as it is, and may be asked for again.
Use from the thread that trains, between two rounds.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .._errors import StrataError
from .._profiling.allocator import Allocator
from .shape_class import device_pages

if TYPE_CHECKING:
    from .._runtime.wrapped import Wrapped

log = logging.getLogger("strata")


class Claims:
    """What is claimed for the plans of one wrapped model."""

    def __init__(self, state: Wrapped, allocator: Allocator) -> None:
        self._state = state
        self._allocator = allocator
        self._param_bytes = 0
        self._activation_bytes = (0, 0)  # of host memory and SSD

    @property
    def resting(self) -> list[bool]:
        """Units that rest on the device, by index."""
        return [unit["on_device"] for unit in self._state.session.plan["units"]]

    def take(self, units: list[bool], param_bytes: int, host_bytes: int, ssd_bytes: int) -> bool:
        """Claims as much. What the core has no room for stays as it is, and the log tells.

        False: not now. Raises StrataError where parameters need more than `param_bytes`.
        """
        try:
            self._take_device(units, param_bytes)
            if (host_bytes, ssd_bytes) != self._activation_bytes:
                self._take_activations(host_bytes, ssd_bytes)
        except StrataError as error:
            if error.fault != "busy":
                raise
            log.info("the plan waits: %s", error)
            return False
        return True

    def take_device(self, param_bytes: int) -> bool:
        """Likewise; no units rest on the device, and room for swapped tensors stays."""
        return self.take([False] * len(self._state.units), param_bytes, *self._activation_bytes)

    def take_room(self, host_bytes: int, ssd_bytes: int) -> tuple[int, int]:
        """Claims at least so much for tensors that leave, no more. Returns what there is."""
        host_now, ssd_now = self._activation_bytes
        room = max(host_bytes, host_now), max(ssd_bytes, ssd_now)
        self.take(self.resting, self._param_bytes, *room)
        return self._activation_bytes

    def _take_activations(self, host_bytes: int, ssd_bytes: int) -> None:
        if self._state.hooks.swapping.drain():  # of graphs that somebody keeps
            return
        try:
            self._state.session.reserve_activations(host_bytes, ssd_bytes)
        except StrataError as error:
            if error.fault == "busy":
                raise
            log.warning("tensors that find no room stay on the device: %s", error)
        self._activation_bytes = (host_bytes, ssd_bytes)

    def _take_device(self, units: list[bool], param_bytes: int) -> None:
        session, now = self._state.session, self.resting
        if units == now and param_bytes == self._param_bytes:
            return
        if units != now and self._state.hooks.swapping.drain():
            return  # as above
        before = self._allocator.page_bytes
        after = device_pages(session.plan, units, param_bytes)
        self._allocator.give_pages(max(before, after))
        try:
            if units == now:
                session.limit_device(param_bytes)
            else:
                session.rest_on_device(units, param_bytes)
        except StrataError as error:
            self._allocator.give_pages(before)
            if units == now or error.fault == "busy":
                raise
            log.info("units rest where they are: %s", error)
            return
        self._allocator.give_pages(after)
        self._param_bytes = param_bytes
