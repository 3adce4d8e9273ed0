"""The modules of one model that are running, and what their parameters are meanwhile.

    frame = frames.begin(hook, pushed)       # known from here on: see visits.py
    ...                                      # its units are entered
    frames.make_plain(frame)
    ...
    frames.make_paged(frame)                 # while they are entered still
    frames.drop(frame)

While a module runs, the parameters of its units are plain ones; else they are paged (paged.py).
Each thread has modules of its own. Use under the GIL.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING

from torch import nn

from .._runtime.paged import PagedParameter
from .._runtime.unit import Unit
from .._runtime.visits import Visit
from .._runtime.wrapped import Wrapped
from .._torch_compat import graph_task

if TYPE_CHECKING:
    from .hooks import ModuleHook

_call_code = nn.Module._call_impl.__code__


class Frame(Visit):
    """A run of a module's forward. `pushed`: saved-tensor hooks before it."""

    __slots__ = ("hook", "kept", "pushed", "unit")

    def __init__(self, hook: ModuleHook, pushed: int) -> None:
        super().__init__()
        self.hook = hook
        self.unit: Unit = hook.unit
        self.pushed = pushed
        self.kept = 0  # references to parameters when it began, see pins.py


class Frames:
    """The frames of one model, by thread."""

    def __init__(self, state: Wrapped) -> None:
        self._state = state
        self._by_thread: dict[int, list[Frame]] = {}

    def begin(self, hook: ModuleHook, pushed: int) -> Frame:
        """A module begins to run on this thread."""
        frame = self._state.visits.add(Frame(hook, pushed))
        self.mine().append(frame)
        return frame

    def drop(self, frame: Frame) -> None:
        """The module does not run any more."""
        for frames in self._by_thread.copy().values():
            if frame in frames:
                frames.remove(frame)

    def mine(self) -> list[Frame]:
        """Those of the calling thread, innermost last."""
        thread = threading.get_ident()
        frames = self._by_thread.get(thread)
        return self._by_thread.setdefault(thread, []) if frames is None else frames

    def all(self) -> list[Frame]:
        """Those of all threads."""
        return [frame for frames in self._by_thread.copy().values() for frame in frames]

    def in_step(self) -> bool:
        """Whether a module of the model, or a backward, is running now on this thread."""
        if graph_task() != -1:
            return True
        return bool(self.mine()) and _in_module()  # frames may be left from an exception

    def in_forward(self) -> bool:
        """Whether the forward of any module, or a backward, is running now on this thread."""
        return graph_task() != -1 or _in_module()

    def make_plain(self, frame: Frame) -> None:
        """REQUIRES: the units of the frame are entered."""
        for unit in frame.hook.units:
            for i in unit.params:
                self._state.params[i].__class__ = nn.Parameter

    def make_paged(self, gone: Iterable[Frame]) -> None:
        """Makes parameters paged again, and tells the core which were written to meanwhile. The
        second time it does nothing. REQUIRES: the units of these frames are still entered, or
        make_plain() was not called."""
        gone = list(gone)
        rest = [frame.hook.units for frame in self.all() if frame not in gone]
        refused: RuntimeError | None = None
        for unit in (unit for frame in gone for unit in frame.hook.units):
            if any(unit in units for units in rest):
                continue
            if self._state.shards is not None:
                self._state.shards.hide(unit.params)
            for i in unit.params:
                parameter = self._state.params[i]
                if type(parameter) is not PagedParameter:
                    try:
                        self._take_writes(parameter, i)
                    except RuntimeError as error:
                        refused = error  # all become paged, whatever happens
                    parameter.__class__ = PagedParameter
        if refused is not None:
            raise refused

    def _take_writes(self, parameter: nn.Parameter, index: int) -> None:
        state = self._state
        if parameter.data_ptr() != state.aliases[index].data_ptr():
            state.views.take_back(index)
        elif parameter._version != state.written[index] or index in state.silent:
            state.note_write(index)


def _in_module() -> bool:
    """Whether any module calls us."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _call_code:
        frame = frame.f_back
    return frame is not None
