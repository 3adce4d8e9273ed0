"""Who has units of a model entered, and who of them cannot go on any more.

    visit = visits.add(Visit())              # known from here on, before anything is entered
    state.enter(unit, visit)
    state.leave(unit, visit)
    visits.end(visit)

    bound, live = visits.sort_out()          # of all visits below `bound` only these may go on
    session.leave_all_but(live, bound)
    visits.forget(*visits.over(bound, live))

Note [Interrupts]. A signal handler may raise between any two bytecodes, also between a call of the
core and the line that notes it. So nothing is counted here: the core alone counts what is entered,
by visit. A visit is known before it enters and until it has left. So what an exception leaves
behind belongs to a visit that cannot go on, or to none, and reset() has the core leave both.
Everything else that is noted during a visit may be done, or undone, twice without harm.

Threads: any, under the GIL.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from types import FrameType
from typing import TypeVar

from torch.autograd import Variable

from .._torch_compat import graph_task

V = TypeVar("V", bound="Visit")


class Visit:
    """A holder of entered units: a thread, or the backward that runs on it."""

    __slots__ = ("handled", "number", "recorded", "task", "thread")

    def __init__(self) -> None:
        self.handled = sys.exception()  # by the caller's own `except`: this visit may go well
        self.number = 0  # given by Visits.add()
        self.recorded = True  # it may be part of the training step
        self.task = graph_task()
        self.thread = threading.get_ident()


class StepCall(Visit):
    """A call of step(), which enters nothing. One that cannot go on may be half done."""

    __slots__ = ()


class Visits:
    """The visits of one model that have not ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._open: dict[int, Visit] = {}
        # Backwards: the thread that told of each, and what autograd drops with it.
        self._tasks: dict[int, tuple[int, weakref.ref[partial[None]]]] = {}

    @property
    def idle(self) -> bool:
        """Whether there are none, and no backward."""
        return not self._open and not self._tasks

    def renew_lock(self) -> None:
        """In a forked child: another thread of the parent's may have had it."""
        self._lock = threading.Lock()

    def add(self, visit: V) -> V:
        """Gives it its number."""
        with self._lock:
            visit.number = next(self._numbers)
            self._open[visit.number] = visit
        return visit

    def end(self, visit: Visit) -> None:
        """It has left what it entered."""
        self._open.pop(visit.number, None)

    def watch(self, end: Callable[[int], None]) -> None:
        """Has `end` called with the backward now running when that has run all its nodes, once."""
        task = graph_task()
        if task != -1 and task not in self._tasks:
            callback = partial(end, task)
            self._tasks[task] = (threading.get_ident(), weakref.ref(callback))
            Variable._execution_engine.queue_callback(callback)

    def outermost(self, task: int) -> int:
        """The running backward that was told of first; `task`, where none was."""
        known = self._tasks.copy().items()
        return next((each for each, (_, callback) in known if callback() is not None), task)

    def end_backward(self, task: int) -> None:
        """It has run all its nodes, and nothing is left to be done for it."""
        self._tasks.pop(task, None)

    def is_last(self, task: int) -> bool:
        """Whether no other backward is running, around it or beside it."""
        others = [callback for other, (_, callback) in self._tasks.copy().items() if other != task]
        return all(callback() is None for callback in others)

    @property
    def in_backward(self) -> bool:
        """Whether a backward is running. REQUIRES: not on the calling thread."""
        return any(self._is_running(task) for task in list(self._tasks))

    def sort_out(self) -> tuple[int, list[int]]:
        """A bound above all visits so far, and the numbers of those that may go on.

        REQUIRES: the calling thread runs no visit, and no backward.
        """
        with self._lock:
            bound = next(self._numbers)
            if not self._open:
                return bound, []
            threads = sys._current_frames()
            visits = self._open.copy().items()  # at once: others end theirs meanwhile
            return bound, [n for n, v in visits if self._may_go_on(v, threads)]

    def among(self, numbers: list[int]) -> list[Visit]:
        """Those of these numbers that have not ended."""
        return [visit for number, visit in self._open.copy().items() if number in numbers]

    def over(self, bound: int, live: list[int]) -> tuple[list[Visit], list[int]]:
        """Visits that cannot go on, and backwards that were given up."""
        visits = [v for n, v in self._open.copy().items() if n < bound and n not in live]
        return visits, [task for task in list(self._tasks) if not self._is_running(task)]

    def forget(self, visits: list[Visit], tasks: list[int]) -> None:
        """Drops what over() returned: nothing is left to be done about it."""
        for visit in visits:
            self.end(visit)
        for task in tasks:
            self.end_backward(task)

    def _may_go_on(self, visit: Visit, threads: dict[int, FrameType]) -> bool:
        if visit.task != -1:
            return self._is_running(visit.task)
        return visit.thread != threading.get_ident() and visit.thread in threads

    def _is_running(self, task: int) -> bool:
        """Whether a backward is. The calling thread runs none: not the one that it told of. Of
        another, autograd holds on to the callback for as long as it runs."""
        thread, callback = self._tasks.get(task, (0, None))
        return thread != threading.get_ident() and callback is not None and callback() is not None
