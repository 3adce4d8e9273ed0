"""What goes into the planner and what comes out of it: dictionaries, of which _core's PaperPlan is
made and with which it answers. Names and units are those of
offload/{trace,costs,plan,simulate}.hpp. For type checkers only: import these from _core.
"""

from typing import Literal, NotRequired, TypedDict

ActivationName = Literal[
    "keep", "swap_host", "swap_ssd", "recompute", "recompute_host", "recompute_ssd"
]
LaneName = Literal["compute", "upload", "download", "read", "write", "update"]

class Use(TypedDict):
    unit: int
    backward: bool
    enter: int
    leave: int
    seconds: float
    gap_seconds: float
    live_bytes: int
    peak_bytes: int
    gap_peak_bytes: int

class SavedTensor(TypedDict):
    unit: int
    bytes: int
    born: int
    last_used: int
    input: bool

class TracedUnit(TypedDict):
    name: str
    elements: int
    param_bytes: int
    grad_bytes: int
    state_bytes: int
    chunks: int
    slices_max: int
    may_swap: bool
    may_recompute: bool
    traced: ActivationName  # kept, or recomputed
    slices_traced: int

class Trace(TypedDict):
    uses: list[Use]
    moments: int
    units: list[TracedUnit]
    tensors: list[SavedTensor]
    tail_seconds: float
    tail_peak_bytes: int

class Costs(TypedDict):
    compute_scale: float
    upload_bytes_s: float
    download_bytes_s: float
    read_bytes_s: float
    write_bytes_s: float
    update_elements_s: float
    transfer_seconds: float
    slice_seconds: float
    landing_waits: NotRequired[bool]  # computation stands still while a gradient goes down
    slow: dict[LaneName, dict[LaneName, float]]  # pairs left out: 1

class Budgets(TypedDict):
    page_bytes: int
    device_bytes: int
    host_bytes: int
    ssd_bytes: int
    staging_bytes: int
    grads_rest: NotRequired[bool]  # in pages; False: in buffers that host_bytes does not count

class Wishes(TypedDict):
    activation: ActivationName | None
    slices: int
    may_split: bool
    fewest_slices: NotRequired[bool]  # that fit, from slices_min on
    slices_min: NotRequired[int]
    # By unit: exactly these rest on the device. None: chosen; left out: none.
    on_device: NotRequired[list[bool] | None]

class PlannedUnit(TypedDict):
    activation: ActivationName
    slices: int
    on_device: bool  # all of it rests there, and nothing of it moves
    param_ssd_bytes: int
    grad_ssd_bytes: int
    state_ssd_bytes: int

class Peak(TypedDict):
    bytes: int
    budget: int
    use: int

class StepPlan(TypedDict):
    feasible: bool
    refusal: str
    refused_units: list[str]  # those in use at the moment that is refused
    device_bytes_min: int
    units: list[PlannedUnit]
    lookahead: int  # of parameters, in uses
    resident: list[bool]  # by unit: its parameters never leave the device
    param_device_bytes: int  # frames of what moves
    resting_device_bytes: int  # of units that rest on the device
    activation_device_bytes: int
    activation_host_bytes: int
    activation_ssd_bytes: int
    activation_lookahead: int
    resting_host_bytes: int
    resting_ssd_bytes: int
    device_curve: list[int]  # by use
    peaks: dict[Literal["device", "host", "ssd"], Peak]

class SimulatedSpan(TypedDict):
    lane: LaneName
    purpose: str
    unit: int
    begin: float
    end: float
    bytes: int

class LaneUse(TypedDict):
    busy_seconds: float
    bytes: int

class Stall(TypedDict):
    use: int
    lane: LaneName
    purpose: str
    seconds: float

class Simulation(TypedDict):
    step_seconds: float
    lanes: dict[LaneName, LaneUse]
    stalls: list[Stall]
    spans: list[SimulatedSpan]

class Bound(TypedDict):
    seconds: float
    compute_seconds: float
    update_seconds: float
    lane_seconds: dict[LaneName, float]
    # Bytes; of update elements, of compute seconds of the trace.
    lane_work: dict[LaneName, float]
    ssd_seconds: float
    what: str
