"""Calls that all ranks make, and whose work is done by threads of their own, beside the training.

    calls = Calls(Board.of(state, "snapshots"), "strata.snapshot()")
    with calls.begin() as call:                  # by the thread that trains; waits for nobody
        call.post({"folders": path})             # what is to be the same on all ranks
        pool.submit(work, call)
    call.hear()                                  # by the other thread: all have called, and agree
    with call.together.phase(): ...

A process that is alone says nothing, and waits for nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .rank_board import Board
from .together import Together


class Call:
    """One of them. Its key is where the ranks are, and how many were made there, so that a call
    that some did not make confuses no later one."""

    def __init__(self, board: Board | None, name: str, number: int) -> None:
        """`number`: of those at one place."""
        self._board, self._name = board, name
        self._place = board.place() if board is not None else 0
        self._key = f"{self._place // 2}.{number}"  # wherever in its step each rank is
        self.runs = False  # the other thread takes part, whatever this one has raised
        self.together = Together.alone(name)
        if board is not None:
            self.together = Together.beside(board, name, self._key)

    def post(self, said: dict[str, Any]) -> None:
        """What is to be the same on all ranks."""
        if self._board is not None:
            self._board.post(f"{self._key}/call", self.together.message(said))

    def give_up(self, error: BaseException) -> None:
        """Nobody takes part here: also where it was posted that somebody would."""
        if self._board is None:
            return
        with contextlib.suppress(RuntimeError):  # the session, or torch.distributed, has ended
            for key in ("call", "1"):
                self._board.post(f"{self._key}/{key}", self.together.failure(error))

    def hear(self) -> None:
        """Waits until all ranks have called. Raises CheckpointError where one did not, or has
        failed in the call, and where they said different things."""
        if self._board is None:
            return
        messages = self._board.hear(f"{self._key}/call", self._name, self._place)
        heard = self.together.understand(messages)
        for what in heard[0]:
            self.together.agree(what, [said[what] for said in heard])


class Calls:
    """Of one name, and of one thread that does their work."""

    def __init__(self, board: Board | None, name: str) -> None:
        """`board`: of that thread; None: this process is alone."""
        self._board, self._name = board, name
        self._step, self._count = 0, 0  # of the last one

    @contextlib.contextmanager
    def begin(self) -> Iterator[Call]:
        """Around one of them. Where it raises, and no thread takes part, other ranks are told."""
        step = self._board.place() // 2 if self._board is not None else 0
        self._count = self._count + 1 if self._step == step else 1
        self._step = step
        call = Call(self._board, self._name, self._count)
        try:
            yield call
        except BaseException as error:
            if not call.runs:
                call.give_up(error)
            raise
