"""The state behind a step, held for strata.save(wait=False) while training goes on.

    holder.make_room(complete)                  # beside so many snapshots
    held = holder.hold(path)                    # or None; and later
    future = holder.write(held, call, write)    # a thread calls write(...), then lets go; or
    holder.let_go(held)
    holder.hurry()                              # somebody waits: see pace.py

Its slots are held as those of a snapshot are (engine/snapshots.hpp), and read through links that
are removed in the end; a killed process leaves them to the next one's clean_up(). Use from the
thread that trains.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .._config.threads import Pool
from .._errors import StrataError
from .._runtime.wrapped import Wrapped
from .durability import Durability
from .pace import Pace
from .rank_board import Board
from .rank_calls import Call, Calls
from .snapshot_links import Links

if TYPE_CHECKING:
    from .._core import TakenSnapshot

log = logging.getLogger("strata")

Write = Callable[["TakenSnapshot", list[str], Pace], None]
"""Is given what the session says of the held state, a link to each page file, and its pace."""


@dataclass(frozen=True)
class Held:
    """A state that is held until somebody lets go."""

    number: int  # the core's
    links: Links


class Holder:
    """Holds the state of one step at a time."""

    def __init__(self, state: Wrapped, drives: list[str], durability: Durability) -> None:
        """Nothing is held."""
        self._session = state.session
        self._drains = state.config["update"] == "lock_free"  # and the log is still to say so
        self.calls = Calls(Board.of(state, "saves"), "strata.save()")
        self._drives = drives
        self._durability = durability
        self._last: Future[None] | None = None
        self._pace = Pace()  # of the last one
        self._told: Future[None] | None = None
        self._complete = 0  # snapshots, when room was made
        self.number = 0  # the core's, of the last one
        # Its thread ends what was begun before the interpreter goes.
        self._pool = Pool("strata-save")

    def raise_failure(self) -> None:
        """Raises what the last one failed with, once."""
        last = self._last
        if last is not None and last.done() and self._told is not last:
            self._told = last
            last.result()

    def hurry(self, future: Future[None] | None = None) -> None:
        """Somebody waits for it, or for slots: for the last one, where none is named."""
        if future is None or future is self._last:
            self._pace.hurry()

    def was_told(self, future: Future[None]) -> None:
        """Somebody has waited for it."""
        self._told = future

    def finish(self) -> None:
        """Waits for the last one. Raises nothing."""
        self.hurry()
        if self._last is not None:
            with contextlib.suppress(Exception):
                self._last.result()

    def shutdown(self) -> None:
        """Waits for what is held, and holds no more."""
        self.hurry()
        self._pool.shutdown()

    def begin(self, complete: int) -> int:
        """A snapshot beside so many complete ones, and what is held; where there is no room beside
        that, it waits for it when it is captured. As Session.begin_snapshot()."""
        self._say_that_it_drains()
        held = self._last is not None and not self._last.done()
        try:
            return self._session.begin_snapshot(complete + held)
        except StrataError as error:
            if not held or error.fault != "config":
                raise
            self.hurry()
            return self._session.begin_snapshot(complete)

    def _say_that_it_drains(self) -> None:
        if self._drains:
            log.info("LockFree: a snapshot first lets the updates that were released end")
        self._drains = False

    def make_room(self, complete: int) -> None:
        """Waits for the last one. Raises StrataError (config) where there is no room."""
        self.finish()
        self._session.reserve_snapshots(complete)
        self._complete = complete

    def hold(self, path: Path) -> Held | None:
        """None, and nothing is held: the drives have no hard links. REQUIRES: make_room()."""
        self._say_that_it_drains()
        with self._durability.watch(path.parent):
            links = Links(self._drives, path)
        try:
            if not self._session.link_pages(links.paths):
                links.remove()
                return None
            self.number = self._session.begin_snapshot(self._complete)
        except BaseException:
            links.remove()
            raise
        return Held(self.number, links)

    def let_go(self, held: Held) -> None:
        """Its slots may be used again."""
        held.links.remove()
        with contextlib.suppress(RuntimeError):  # the session may have ended
            self._session.drop_snapshot(held.number)

    def write(self, held: Held, call: Call, write: Write) -> Future[None]:
        """Of several ranks all do so, when all hold it."""
        self._pace = Pace(self._ends)
        try:
            call.post({})
            self._last = self._pool.submit(self._write, held, call, write, self._pace)
        except BaseException:  # the interpreter ends, or Ctrl-C
            self.let_go(held)
            raise
        return self._last

    def _ends(self) -> bool:
        """Whether the interpreter does: it waits for the thread, and tells it only so."""
        try:
            self._pool.submit(int).cancel()
        except RuntimeError:
            return True
        return False

    def _write(self, held: Held, call: Call, write: Write, pace: Pace) -> None:
        """On the thread."""
        try:
            call.hear()
            with call.together.phase():
                pages = self._session.snapshot(held.number)  # waits
            write(pages, held.links.paths, pace)
        except BaseException as error:
            log.warning("strata.save(wait=False) has failed: %s", error)
            raise
        finally:
            self.let_go(held)
