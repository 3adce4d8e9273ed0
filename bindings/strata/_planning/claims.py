"""What the core adopts of the plans of a wrapped model: device memory for parameters that come and
go, units that rest on the device, room for swapped tensors, and the order of uses.

    claims = Claims(state, allocator, param_bytes)
    if claims.take(units, param_bytes, host_bytes, ssd_bytes, trace.uses): ...    # False: not now

The core lets pages come to rest elsewhere only while no thread is in a forward or backward of the
model, and refuses it otherwise. Then what is claimed stays as it is, and may be asked for again.
Use from the thread that trains, between two rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._errors import StrataError
from .._profiling.allocator import Allocator
from .shape_class import device_pages

if TYPE_CHECKING:
    from .._core import Use
    from .._runtime.wrapped import Wrapped

Room = tuple[int, int]  # for swapped tensors: bytes of host memory and SSD
Order = list[tuple[int, bool, int, int]]  # of uses: unit, backward, enter, leave

log = logging.getLogger("strata")


class Claims:
    """What is claimed for the plans of one wrapped model."""

    def __init__(self, state: Wrapped, allocator: Allocator, param_bytes: int) -> None:
        self._state = state
        self._allocator = allocator
        self._param_bytes = param_bytes  # of the device: what the session was given first
        self._room: Room = (0, 0)
        self._room_wanted: Room = (0, 0)  # what was asked for last, there or not
        self._order: Order = []  # the uses that were adopted; none: the core's own

    @property
    def resting(self) -> list[bool]:
        """Units that rest on the device, by index."""
        return [unit["on_device"] for unit in self._state.session.plan["units"]]

    def take(
        self,
        units: list[bool],
        param_bytes: int,
        host_bytes: int,
        ssd_bytes: int,
        uses: Sequence[Use] = (),
    ) -> bool:
        """Claims as much, for steps with these uses; none: as before. What the core has no room for
        stays as it is, and the log tells.

        False: not now. Raises StrataError where parameters need more than `param_bytes`.
        """
        now, room = self.resting, (host_bytes, ssd_bytes)
        if room == self._room_wanted:
            room = self._room  # what was refused is not asked for again
        moves = units != now or room != self._room
        if moves and self._state.hooks.swapping.drain():  # of graphs that somebody keeps
            units, room = now, self._room
            param_bytes = max(param_bytes, self._param_bytes)
        else:
            self._room_wanted = (host_bytes, ssd_bytes)
        try:
            self._adopt_what_fits(units, param_bytes, room, uses)
        except StrataError as error:
            if error.fault != "busy":
                raise
            log.info("the plan waits: %s", error)
            return False
        return True

    def take_device(self, param_bytes: int) -> bool:
        """Likewise; no units rest on the device, and room for swapped tensors stays."""
        return self.take([False] * len(self._state.units), param_bytes, *self._room_wanted)

    def take_room(self, host_bytes: int, ssd_bytes: int) -> tuple[int, int]:
        """Claims at least so much for tensors that leave, no more. Returns what there is."""
        host_now, ssd_now = self._room_wanted
        room = max(host_bytes, host_now), max(ssd_bytes, ssd_now)
        self.take(self.resting, self._param_bytes, *room)
        return self._room_wanted

    def _adopt_what_fits(
        self, units: list[bool], param_bytes: int, room: Room, uses: Sequence[Use]
    ) -> None:
        """All of it; where that is refused, without the room, without the units, without both."""
        now, kept = self.resting, self._room
        refused = ""
        for there, larger in ((units, room), (units, kept), (now, room), (now, kept)):
            # Units that do not come to rest need frames, where the plan had none for them.
            frames = param_bytes if there == units else max(param_bytes, self._param_bytes)
            try:
                self._adopt(there, frames, larger, uses)
            except StrataError as error:
                if error.fault == "busy" or (there, larger) == (now, kept):
                    raise
                refused = refused or str(error)
                continue
            if larger != room:
                log.warning("tensors that find no room stay on the device: %s", refused)
            if there != units:
                log.info("units rest where they are: %s", refused)
            return

    def _adopt(self, units: list[bool], param_bytes: int, room: Room, uses: Sequence[Use]) -> None:
        session, now = self._state.session, self.resting
        order: Order = [(u.unit, u.backward, u.enter, u.leave) for u in uses] or self._order
        wanted = units, param_bytes, room, order
        if wanted == (now, self._param_bytes, self._room, self._order):
            return
        before = self._allocator.page_bytes
        after = device_pages(session.plan, units, param_bytes)
        self._allocator.give_pages(max(before, after))
        try:
            # What stays is not named: room and units change only while nothing is saved.
            host_bytes, ssd_bytes = room if room != self._room else (None, None)
            session.adopt(
                units if units != now else None,
                param_bytes if param_bytes != self._param_bytes else None,
                host_bytes,
                ssd_bytes,
                uses if order != self._order else None,
            )
        except StrataError:
            self._allocator.give_pages(before)
            raise
        self._allocator.give_pages(after)
        self._param_bytes, self._room, self._order = param_bytes, room, order
