"""The units of a wrapped model at run time: what is gathered, moved and updated together.

units = units_of(config)
units[1].params, units[1].together
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._core import ActivationName, Config


@dataclass(slots=True, eq=False)
class Unit:
    """A unit at run time."""

    index: int
    name: str
    params: list[int]
    trainable: int  # how many of them train
    together: frozenset[int] = frozenset()  # units that some module reads with it
    # Parameters whose gradients end its use in a backward: its own, or those that a module of it
    # reads elsewhere, where nothing of its own trains.
    awaited: list[int] = field(default_factory=list)
    landed: int = 0  # of these, gradients of this backward
    expected: int = field(init=False)  # of them: how many there will be
    completes: bool = False  # in_backward: its update begins as soon as they are in their pages
    # What the plan says of its activations; changed between steps only.
    activation: ActivationName = "keep"
    slices: int = 1
    # What could be said of them: found when the model is wrapped, and by trying.
    may_swap: bool = True
    may_recompute: bool = False
    slices_max: int = 1
    unsplit_reason: str = ""  # why it is 1, where that was tried

    def __post_init__(self) -> None:
        self.expected = len(self.awaited)


def units_of(config: Config) -> list[Unit]:
    """Those that it names, in its order."""
    members: list[list[int]] = [[] for _ in config["units"]]
    for i, spec in enumerate(config["params"]):
        members[spec["unit"]].append(i)
    together: list[set[int]] = [set() for _ in config["units"]]
    for _, entered in config["together"]:
        for u in entered:
            together[u].update(entered)
    trained = [[i for i in own if config["params"][i]["trainable"]] for own in members]
    return [
        Unit(u, name, members[u], len(trained[u]), frozenset(together[u]), trained[u])
        for u, name in enumerate(config["units"])
    ]
