"""The C++ core as Python sees it. Everything here moves pages; nothing here knows torch modules.

Addresses are plain integers (``tensor.data_ptr()``), counts are elements, offsets are elements
from the start of the parameter. Methods that may wait release the GIL. Every failure is a
``StrataError`` (budgets that cannot work, disks that fail, pages that are corrupt); after an I/O
failure the session is closed for business and repeats that error.
"""

from typing import Any, Literal, NotRequired, TypedDict

Kind = Literal["master", "moment1", "moment2", "grad"]
DtypeName = Literal["float32", "float16", "bfloat16"]

class StrataError(RuntimeError):
    fault: str  # "io", "short_read", "corrupt", "no_space", "memory", "config", "cancelled"
    errno: int
    unit: str
    page: int  # -1 where it does not apply
    tier: str
    path: str
    offset: int

class ParamSpec(TypedDict):
    name: str
    numel: int
    dtype: DtypeName  # of computation
    trainable: bool
    unit: int  # index into Config.units
    group: int  # index of the optimizer's parameter group; 0 for frozen ones

class GroupSpec(TypedDict):
    """Hyperparameters of one parameter group, as torch.optim names them."""

    rule: Literal["adamw", "adam", "sgd"]
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    momentum: float
    dampening: float
    nesterov: bool
    maximize: bool

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
    session_name: NotRequired[str]  # files are <ssd path>/<session_name>.pages; default "strata"
    accumulate: bool  # gradients rest in float32 and several backward calls add up

class UnitPlan(TypedDict):
    name: str
    params: int  # elements
    param_bytes: int  # in pages, compute dtype
    param_tier: str  # where they rest: "host", "ssd" or "mixed"
    grad_tier: str
    state_tier: str

class Plan(TypedDict):
    page_bytes: int
    device_bytes: int  # used of each budget, in whole frames
    host_bytes: int
    ssd_bytes: int
    staging_bytes: int  # part of host_bytes
    device_bytes_min: int  # smallest device budget that works
    units: list[UnitPlan]

def plan(config: Config) -> Plan:
    """What would go where. Allocates nothing, opens nothing. Raises StrataError if infeasible."""

class Session:
    def __init__(self, config: Config) -> None: ...
    @property
    def plan(self) -> Plan: ...
    def tensor(self, param: int) -> Any:
        """A DLPack capsule of shape (numel,) over the parameter's address on the device. The
        address never changes; the contents are true between enter() and leave() of its unit."""
    def write(self, param: int, kind: Kind, offset: int, address: int, count: int) -> None:
        """Stores `count` float32 values as master weight (and parameter) or moment."""
    def read(self, param: int, kind: Kind, offset: int, address: int, count: int) -> None:
        """Reads `count` values as float32, after pending updates. Frozen float16/bfloat16
        parameters have no master: theirs is the parameter itself."""
    def enter(self, unit: int, backward: bool, recorded: bool = True) -> None:
        """Waits until the unit's parameters are on the device at their newest version, and pins
        them. Nests. `recorded`: part of the training step, so the plan should foresee it."""
    def leave(self, unit: int) -> None:
        """Undoes one enter()."""
    def resident(self, unit: int) -> bool: ...
    def device_written(self, param: int) -> None:
        """The user changed the parameter's device view: makes that its value in every tier (the
        residual becomes zero). REQUIRES: its unit is entered."""
    def land_gradient(self, param: int, address: int, dtype: DtypeName) -> None:
        """Takes the gradient of a whole parameter (numel contiguous elements). Returns when the
        memory at `address` may be reused."""
    def drop_gradients(self) -> None:
        """Forgets what has landed since the last step: zero_grad()."""
    def gradient_count(self, param: int) -> int:
        """How many times a gradient landed since the last step or drop_gradients()."""
    def step(
        self, groups: list[GroupSpec], max_norm: float, grad_divisor: float, skip_nonfinite: bool
    ) -> StepResult:
        """Starts the updates of every parameter whose gradient landed, and returns at once; enter()
        waits per unit. max_norm <= 0: no clipping. Ends the recorded step."""
    def param_step(self, param: int) -> int:
        """Updates applied (or started) so far to this parameter."""
    def set_param_step(self, param: int, step: int) -> None: ...
    def synchronize(self) -> None:
        """Waits until every update and every write has finished."""
    def stats(self) -> dict[str, Any]:
        """Counters and gauges: bytes per link, seconds waited in enter() by unit, frames in use and
        peak per tier, updates, steps, io engine, page size."""
    def close(self) -> None:
        """Stops threads, removes files, unmaps memory; tensors over views become invalid.
        Idempotent."""

class StepResult(TypedDict):
    norm: float  # of the gradients before clipping, after division; 0.0 if none landed
    finite: bool
    skipped: bool  # nothing was updated because the gradients were not finite

def update_span(
    group: GroupSpec,
    dtype: DtypeName,
    grad_dtype: DtypeName,
    count: int,
    param: int,
    master: int,
    moment1: int,
    moment2: int,
    grad: int,
    step: int,
    grad_scale: float,
    threads: int,
    isa: str,
) -> None:
    """Runs one optimizer kernel over plain memory at the given addresses (0: absent); for tests and
    benchmarks. isa: "best", "scalar", "avx2", "avx512"."""
