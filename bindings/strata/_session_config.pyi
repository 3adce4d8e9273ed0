"""What a session is asked to do, and what it is given to do it with; engine/config.hpp says what it
means. For type checkers only: import these from _core.
"""

from collections.abc import Callable
from typing import Literal, NotRequired, Protocol, TypedDict

DtypeName = Literal["float32", "float16", "bfloat16"]
StoredName = Literal["int8", "nf4", "nf4-double", "nf4-torchao"]

class ParamSpec(TypedDict):
    name: str
    numel: int
    dtype: DtypeName  # of computation
    trainable: bool
    unit: int  # index into Config.units
    group: int  # index of the optimizer's parameter group; 0 for frozen ones
    stored: NotRequired[StoredName]  # of a frozen one that rests as codes

class GroupSpec(TypedDict):
    """Hyperparameters of one parameter group, as torch.optim names them."""

    rule: Literal["adamw", "adam", "sgd", "lion", "adagrad", "foreign"]
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    momentum: float
    dampening: float
    lr_decay: float
    initial_accumulator: float
    nesterov: bool
    maximize: bool
    options: NotRequired[int]  # foreign: handed to the callable
    moments: NotRequired[int]  # foreign: how many it keeps, 0 to 2

class Ranks(TypedDict):
    rank: int
    count: int
    folder: str  # where they meet: of this user alone
    pids: list[int]  # their processes, by rank; empty: not known
    timeout_s: float  # how long they wait there for each other
    sums: bool  # gradients are summed, and not averaged
    machine: int  # this one's number, of ...
    machines: int  # ... so many, which each hold all of the state

class Config(TypedDict):
    params: list[ParamSpec]  # in the order of model.parameters(); its place here is its id
    units: list[str]  # names, in order of first use
    groups: list[GroupSpec]
    page_bytes: int  # 0: chosen from the sizes and budgets
    device_bytes: int
    host_bytes: int
    ssd_bytes: int
    ssd_paths: list[str]
    io_engine: Literal["auto", "io_uring", "libaio", "threads", "memory"]
    workers: int
    accumulate: bool  # gradients rest, and several backward calls add up, in float32
    update: Literal["on_step", "in_backward", "lock_free"]
    max_staleness: int  # lock_free: steps that a parameter may lag behind; else 0
    moment_dtype: Literal["float32", "bfloat16", "block8"]
    pin_workers: bool  # to cores of their own where there are spare ones, else they give way
    compute_threads: int  # cores that pinned workers leave to the computation
    # Complete snapshots that have room on the SSD from the start, beside one that begins.
    snapshots: NotRequired[int]
    device: NotRequired[str]  # "host" (default) or "cuda:N"
    # Of several that train together; budgets of host memory and of the SSD are then this rank's.
    ranks: NotRequired[Ranks]
    # in_backward, by unit: its first and last gradient may land far apart, and are needed together.
    apart: NotRequired[list[bool]]
    # By module: its name, and the units that are entered while it runs. None: one at a time.
    together: NotRequired[list[tuple[str, list[int]]]]

Rule = Callable[[int, int, int, int, int, int, int, int], None]
"""Updates a slice: options, parameter, step (from 1), count, and addresses of so many float32
values: parameter, gradient, moment1 and moment2 (0: absent)."""

Kind = Literal["master", "moment1", "moment2", "grad"]

class Column(Protocol):
    """Ranks of one number, one on each machine. All make the same calls; each waits, and raises
    where a machine is lost. Addresses are of memory that both may use until it returns."""

    def meet(self) -> None: ...
    def gather(self, mine: int, size: int, everything: int) -> None: ...
    def exchange(self, parts: int, size: int, mine: int) -> None: ...
