"""Exceptions as a signal handler raises them, at a chosen point of the code of strata.

    count = Interrupt(None).run(function)      # how many points there are
    Interrupt(17).run(function)                # raises KeyboardInterrupt at the 18th
    Interrupt(17, Expired).run(function)       # raises that

A handler runs where the interpreter looks for signals: when a function begins, behind a call, and
where a loop goes back. A tracing function raises there, at the very instruction; so the points of a
function of ours that autograd calls are among them. Behind the last call of a block the point is
left out where the next instruction has another handler: a signal would come ahead of it.
"""

import dis
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import strata

PACKAGE = str(Path(strata.__file__).parent)


@functools.cache
def points_of(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions at which a signal handler may raise."""
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]

    def handler(offset: int) -> Any:
        return next((e.target for e in entries if e.start <= offset < e.end), None)

    found = set()
    before: dis.Instruction | None = None
    for now in dis.get_instructions(code):
        called = before is not None and before.opname.startswith("CALL")
        if called and before is not None and handler(before.offset) == handler(now.offset):
            found.add(now.offset)
        if now.opname.startswith("JUMP_BACKWARD"):
            found.add(now.offset)
        before = now
    return frozenset(found)


class Expired(Exception):  # noqa: N818 (named as those of libraries are)
    """What a timeout's handler raises: as pytest-timeout and others do, no BaseException."""


class Interrupt:
    """Raises at point `at`, once; None: counts only."""

    def __init__(self, at: int | None, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.count = 0
        self.where = ""
        self._at = at
        self._kind = kind

    def run(self, function: Callable[[], Any]) -> bool:
        """Calls it. Returns whether it was interrupted; an exception in a `__del__` is lost."""
        sys.settrace(self._enter)
        try:
            function()
        except (KeyboardInterrupt, Expired):
            return True
        finally:
            sys.settrace(None)
        return False

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._pass(frame)
        return self._within

    def _within(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and frame.f_lasti in points_of(frame.f_code):
            self._pass(frame)
        return self._within

    def _pass(self, frame: FrameType) -> None:
        self.count += 1
        if self.count - 1 == self._at:
            code = frame.f_code
            self.where = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname}"
            raise self._kind(self.where)
