"""What goes into the planner and what comes out of it, of which _core's PaperPlan is made and with
which it answers. Names and units are those of offload/planner/{trace,costs,plan,simulate}.hpp. For
type checkers only: import these from _core.
"""

from typing import Any, ClassVar, Literal, Self, dataclass_transform

ActivationName = Literal[
    "keep", "swap_host", "swap_ssd", "recompute", "recompute_host", "recompute_ssd"
]
LaneName = Literal["compute", "upload", "download", "read", "write", "update"]

@dataclass_transform(kw_only_default=True)
class _Struct:
    """A struct of the core. Equal to another one where all fields are."""

    fields: ClassVar[dict[str, type]]  # that are values of their own, in order
    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
    def replace(self, **changes: Any) -> Self:
        """A copy with other values."""

class Use(_Struct):
    unit: int
    backward: bool
    enter: int
    leave: int
    seconds: float
    gap_seconds: float
    live_bytes: int
    peak_bytes: int
    gap_peak_bytes: int

class SavedTensor(_Struct):
    unit: int
    bytes: int
    born: int
    last_used: int
    input: bool

class TracedUnit(_Struct):
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
    code_bytes: int = ...  # what rests of param_bytes, where some rest as codes
    remote_elements: int = ...  # what other ranks hold of the sizes above: it is uploaded, and ...
    remote_param_bytes: int = ...  # ... takes no memory, SSD or update of this one
    remote_grad_bytes: int = ...
    remote_state_bytes: int = ...

class Trace(_Struct):
    uses: list[Use]  # these three are the trace's own: their elements may be changed
    moments: int
    units: list[TracedUnit]
    tensors: list[SavedTensor]
    tail_seconds: float
    tail_peak_bytes: int

class Costs(_Struct):
    compute_scale: float
    upload_bytes_s: float
    download_bytes_s: float
    read_bytes_s: float
    write_bytes_s: float
    update_elements_s: float
    transfer_seconds: float
    slice_seconds: float
    decode_bytes_s: float = ...  # values of codes that come up; 0: as fast as the link
    landing_waits: bool = ...  # computation stands still while a gradient goes down
    updates_first: bool = ...  # computation waits for updates that wait for no disk
    slow: dict[LaneName, dict[LaneName, float]]  # all pairs; those left out: 1

class Budgets(_Struct):
    page_bytes: int
    device_bytes: int
    host_bytes: int
    ssd_bytes: int
    staging_bytes: int
    grads_rest: bool = ...  # in pages; False: in buffers that host_bytes does not count

class Wishes(_Struct):
    activation: ActivationName | None = ...  # None: chosen
    slices: int = ...  # 0: chosen
    may_split: bool = ...
    fewest_slices: bool = ...  # that fit, from slices_min on
    slices_min: int = ...
    on_device: list[bool] | None = ...  # by unit: exactly these rest on the device. None: chosen

class PlannedUnit(_Struct):
    activation: ActivationName
    slices: int
    on_device: bool  # all of it rests there, and nothing of it moves
    param_ssd_bytes: int
    grad_ssd_bytes: int
    state_ssd_bytes: int

class Peak(_Struct):
    bytes: int
    budget: int
    use: int

class StepPlan(_Struct):
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

class SimulatedSpan(_Struct):
    lane: LaneName
    purpose: str
    unit: int
    begin: float
    end: float
    bytes: int

class LaneUse(_Struct):
    busy_seconds: float
    bytes: int

class Stall(_Struct):
    use: int
    lane: LaneName
    purpose: str
    seconds: float

class Simulation(_Struct):
    step_seconds: float
    lanes: dict[LaneName, LaneUse]
    stalls: list[Stall]
    spans: list[SimulatedSpan]

class Bound(_Struct):
    seconds: float
    compute_seconds: float
    update_seconds: float
    lane_seconds: dict[LaneName, float]
    # Bytes; of update elements, of compute seconds of the trace.
    lane_work: dict[LaneName, float]
    ssd_seconds: float
    what: str
