"""The C++ core as Python sees it. Everything here moves pages; nothing here knows torch modules.

Addresses are plain integers (``tensor.data_ptr()``), counts are elements, offsets are elements
from the start of the parameter. Methods that may wait release the GIL. Every failure is a
``StrataError`` (budgets that cannot work, disks that fail, pages that are corrupt); after an I/O
failure the session is closed for business and repeats that error.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

from typing_extensions import Buffer

from ._planner import ActivationName as ActivationName
from ._planner import Bound as Bound
from ._planner import Budgets as Budgets
from ._planner import Costs as Costs
from ._planner import LaneName as LaneName
from ._planner import LaneUse as LaneUse
from ._planner import Peak as Peak
from ._planner import PlannedUnit as PlannedUnit
from ._planner import SavedTensor as SavedTensor
from ._planner import SimulatedSpan as SimulatedSpan
from ._planner import Simulation as Simulation
from ._planner import Stall as Stall
from ._planner import StepPlan as StepPlan
from ._planner import Trace as Trace
from ._planner import TracedUnit as TracedUnit
from ._planner import Use as Use
from ._planner import Wishes as Wishes
from ._probes import CopyProbe as CopyProbe
from ._probes import SsdProbe as SsdProbe
from ._probes import UpdateProbe as UpdateProbe
from ._probes import best_isa as best_isa
from ._probes import code_values as code_values
from ._probes import config_schema as config_schema
from ._probes import packing as packing
from ._probes import update_span as update_span
from ._saved_pages import Hasher as Hasher
from ._saved_pages import PageFiles as PageFiles
from ._saved_pages import SavedPages as SavedPages
from ._saved_pages import TakenSnapshot as TakenSnapshot
from ._saved_pages import join_master as join_master
from ._saved_pages import load_moments as load_moments
from ._saved_pages import open_lock_file as open_lock_file
from ._saved_pages import remove_leftovers as remove_leftovers
from ._session_config import Config as Config
from ._session_config import DtypeName as DtypeName
from ._session_config import GroupSpec as GroupSpec
from ._session_config import Kind as Kind
from ._session_config import ParamSpec as ParamSpec
from ._session_config import Ranks as Ranks
from ._session_config import StoredName as StoredName
from ._session_parts import Column as Column
from ._session_parts import Rule as Rule
from ._session_parts import adds_in_float32 as adds_in_float32
from ._session_parts import element_bytes as element_bytes

__version__: str

class StrataError(RuntimeError):
    fault: str  # "io", "short_read", "corrupt", "no_space", "memory", "config", "cancelled", "busy"
    errno: int
    unit: str
    page: int  # -1 where it does not apply
    tier: str
    path: str
    offset: int
    # Where budgets cannot work: when in the step ("forward of layers.11"), the units in use, and
    # bytes: needed, there, of those for snapshots, and that would do. Otherwise empty, and 0.
    moment: str
    units: list[str]
    needed_bytes: int
    budget_bytes: int
    snapshot_bytes: int
    would_do_bytes: int

def device_error(device: str) -> str:
    """Why the device cannot be used here, and what to do about it; "": it can. Opens it to see."""

def device_description(device: str) -> str:
    """Which one it is: "host", or "GPU 0 (NVIDIA H200, 0000:17:00.0), driver for CUDA 13.0".
    Raises StrataError where it cannot be used."""

class UnitPlan(TypedDict):
    name: str
    params: int  # elements
    param_bytes: int  # in pages, compute dtype
    resting_param_bytes: int  # what rests of them
    codes: bool  # some of them rest as codes, and the device computes its pages from these
    landing_bytes: int  # of gradients, where they land in a step; 0 where nothing is trained
    grad_bytes: int  # at rest: in pages, or under lock_free in buffers; 0 under in_backward
    state_bytes: int  # in pages: residuals or masters, and moments
    remote_params: int  # of all of these: what other ranks hold
    remote_param_bytes: int
    remote_landing_bytes: int
    remote_state_bytes: int
    chunks: int
    on_device: bool  # all of it rests there
    # "host", "ssd", "device" or "mixed"; "remote": on other ranks; "none": there is nothing.
    param_tier: str
    grad_tier: str
    state_tier: str

def check_groups(laid_out: list[GroupSpec], now: list[GroupSpec]) -> None:
    """Raises ValueError, with group and option, where hyperparameters make no sense, or need
    moments for which those that a session was made with laid out no room."""

class Plan(TypedDict):
    page_bytes: int
    device_bytes: int  # used of each budget, in whole frames
    host_bytes: int
    ssd_bytes: int
    snapshot_bytes: int  # part of ssd_bytes
    staging_bytes: int  # part of host_bytes
    # Part of host_bytes: gradients in buffers or on their way there, and scales of 8-bit moments.
    buffer_bytes: int
    device_bytes_min: int  # smallest device budget that works
    nested_bytes: int  # of it: the most that `together` says is entered at one moment
    trained_page_bytes: int  # pages of what is trained, of all roles, on any tier and rank
    trained_bytes: int  # the part of them that elements fill
    units: list[UnitPlan]

def plan(config: Config) -> Plan:
    """What would go where. Allocates nothing, opens nothing. Raises StrataError if infeasible."""

class Session:
    def __init__(
        self,
        config: Config,
        foreign: Rule | None = None,
        claimed: Callable[[], None] | None = None,
        column: Column | None = None,
    ) -> None:
        """`foreign` updates groups of rule "foreign", on worker threads; what it raises ends the
        session with a StrataError. `claimed` is called once a rank has all it claims, before it
        waits for others; may raise."""
    @property
    def plan(self) -> Plan: ...
    def step_budgets(self, device_bytes: int) -> Budgets:
        """What plans of steps may use beside what the session sets aside for itself."""
    # `stream`: the caller's cudaStream_t as an integer; 0 on the host. What touches the device's
    # memory comes after what was submitted there so far, or before what comes later.
    @property
    def device(self) -> tuple[int, int]:
        """DLPack's type and id of the device: (1, 0) is the host, (2, N) is GPU N."""
    def tensor(self, param: int) -> Any:
        """A DLPack capsule of shape (numel,) over the parameter's address on the device. The
        address never changes; the contents are true between enter() and leave() of its unit."""
    def write(self, param: int, kind: Kind, offset: int, address: int, count: int) -> None:
        """Stores `count` float32 values as master weight (and parameter) or moment."""
    def read(self, param: int, kind: Kind, offset: int, address: int, count: int) -> None:
        """Reads float32 values, after pending updates. Frozen parameters are their own masters."""
    def quantise(
        self, param: int, address: int, dtype: DtypeName, row_elements: int, offset: float | None
    ) -> None:
        """Makes codes of all values of a parameter that rests so. `offset`: of nf4-double, the mean
        of the blocks' largest magnitudes; None: computed here, in double. Raises StrataError, and
        has changed nothing, where its unit is entered or a value is not finite."""
    def write_codes(self, param: int, first: int, stored: tuple[Buffer, Buffer, Buffer]) -> None:
        """Codes, scales and groups of scales of elements from `first` on, a multiple of 64, in
        nf4-double of 256 blocks; as read_codes() gives them; see form.hpp."""
    def read_codes(self, param: int, first: int, stored: tuple[Buffer, Buffer, Buffer]) -> None:
        """Fills the buffers, of just the size. The last one is empty but for nf4-double."""
    def enter(
        self, unit: int, backward: bool, recorded: bool = True, stream: int = 0, visit: int = 0,
    ) -> None:  # fmt: skip
        """Waits until the unit's newest parameters are there, and pins them for what is submitted
        next. Nests. `recorded`: part of the training step, so the plan foresees it. `visit`: on
        whose account; the session alone counts. `exact`: nothing comes as codes."""
    def leave(self, unit: int, stream: int = 0, visit: int = 0) -> bool:
        """Undoes one enter() of the visit. False, and nothing happens, where there is none. The
        parameters stay until what was submitted so far has passed."""
    def leave_all_but(self, live: list[int], bound: int, stream: int = 0) -> int:
        """Visits below `bound` are over, but for these: leaves whatever they have entered. Where
        they had anything, the recorded step begins anew. Returns how often a unit was left."""
    def entered(self, unit: int) -> int:
        """How often."""
    def resident(self, unit: int) -> bool: ...
    def device_written(self, param: int, stream: int = 0) -> None:
        """The user changed the parameter's device view: makes that its value in every tier; what
        the master holds beyond 16 bits stays where these did not change. Raises StrataError where
        lock_free let the view lag behind an update: the change is lost. REQUIRES: its unit is
        entered."""
    def expect_write(self, param: int) -> None:
        """The next visit of the parameter's unit may change its device view."""
    def land_gradient(
        self, param: int, address: int, dtype: DtypeName, stream: int = 0, owner: object = None
    ) -> None:
        """Takes the gradient of a whole parameter (numel contiguous elements, on the device). On a
        GPU it waits for what was submitted so far: call it on a thread of its own. Without `owner`
        the memory may be reused on return; else the owner is kept until the gradient is used. A
        second one of a step is added to the first, in the dtype in which gradients rest."""
    # These four: of update "on_step" alone.
    def replace_gradient(self, param: int, address: int, dtype: DtypeName, stream: int = 0) -> None:
        """Takes it in the place of what has landed. The memory may be reused on return."""
    def scale_gradient(self, param: int, factor: float, divides: bool) -> bool:
        """Readers and updates do it, and round; the next call writes it first. False: a GPU alone
        reaches it. REQUIRES: it has landed; a finite factor or NaN, no zero where it divides."""
    def gradient_squares(self, param: int) -> tuple[float, bool]:
        """The sum of squares of the newest gradient, also of one that was used; whether it was
        scaled since it landed, so that the sum knows nothing of its rounding."""
    def drop_gradients_of(self, params: list[int]) -> None:
        """Forgets those of these parameters: of ranks, all of them do so."""
    def drop_gradients(self, wanted: bool = False) -> None:
        """Forgets what has landed since the last step. Raises StrataError where that was used, or
        added to older ones. Ranks that have any meet; `wanted`: so does one that has none."""
    def gradient_count(self, param: int) -> int:
        """How many times a gradient landed since the last step or drop_gradients()."""
    # Of one of several ranks (see engine/ranks).
    def begin_window(self) -> None:
        """What lands from here on is of another backward."""
    def look_at_gradients(self, wanted: bool = False) -> bool:
        """Waits until what has landed of all ranks is added up: all of them ask, as often in a
        step. False: nothing has landed here since the last time, and it was not `wanted`."""
    def leave_ranks(self, gives_up: bool) -> None:
        """Makes no more steps, and stays until the others need nothing of this rank any more.
        `gives_up`: ahead of the end of the training; the others are told, and raise StrataError."""
    def awaited_rank(self) -> int | None:
        """Whom a call waits for right now."""
    def silent_ranks(self) -> list[int]:
        """Ranks that have not taken what was said to them, which every call does: the stopped."""
    def heard_from(self, rank: int) -> int:
        """How many messages of that rank have come: of one that is slow there are some."""
    def give_up_rank(self, rank: int, seconds: float) -> None:
        """Ends the session, where a call has waited for that rank for so long: StrataError."""
    def rank_places(self) -> list[int]:
        """By rank: twice the step that it is in, as far as is known here, and one more where it has
        begun a backward pass of it; 2**63 - 1: it goes no further."""
    def renew_others(self) -> None:
        """Every rank has changed all that it owns: what this one has of others is stale."""
    def owners(self, param: int, rank: int) -> list[tuple[int, int, int]]:
        """(owner, first, count) of its elements, run by run: who owns them, as the rank sees it."""
    def gradient_fits(self, param: int) -> bool:
        """in_backward: waits for room. False: no update will make any; complete() others first."""
    def complete(self, unit: int, groups: list[GroupSpec], max_unit_norm: float) -> None:
        """in_backward: starts the update with what has landed. More may land, and be completed."""
    def updated(self, param: int) -> bool:
        """complete() has used its gradient since the last step(): it may show new values."""
    def updates_first(self) -> bool:
        """Whether a forward waits for all updates of the last step, where those wait for no disk:
        workers have the processors of the computation."""
    def in_half_step(self) -> bool:
        """... that of any parameter: some have taken this step, and others have not."""
    def step(
        self,
        groups: list[GroupSpec],
        max_norm: float,
        grad_divisor: float,
        skip_nonfinite: bool,
        max_unit_norm: float = 0.0,
        squares: float | None = None,
    ) -> StepResult:
        """Starts the updates of all parameters whose gradients landed and returns; enter() waits.
        max_norm <= 0: no clipping. `squares`: of all gradients, where others have some, too."""
    def forget_step(self) -> None:
        """Forgets what has landed since the last step(), also what was used or added to gradients
        of earlier steps. Parameters are of no one step then: call it ahead of writing them all."""
    def end_load(self) -> None:
        """They are written; until then no page of another rank is asked for."""
    def steps(self) -> int:
        """Steps whose gradients were used or skipped."""
    def last_params(self) -> list[int]: ...  # whose gradients, of any rank, the last step took
    def drain(self) -> None:
        """Waits until every update that was started is published: what lock_free leaves open."""
    def param_step(self, param: int) -> int:
        """Updates applied (or started) so far to this parameter, but for those without moments."""
    def set_param_step(self, param: int, step: int) -> None: ...
    def synchronize(self) -> None:
        """Waits until every update and every write has finished."""
    def stats(self) -> dict[str, Any]:
        """Counters and gauges: bytes per link, seconds waited in enter() by unit, frames in use and
        peak per tier, updates, steps, io engine, page size. By unit: "staleness" (how many forwards
        saw parameters 0, 1, ... steps old), "merged gradients" and "update waits". "driver": what a
        GPU's driver was asked to wait for and to map, in calls by strata ("event_not_ready": looks
        that found nothing); empty on the host."""
    def lock_holds(self) -> dict[str, Any]:
        """How long the core's lock was held since the last call, of which the first begins to
        measure: "holds", and of the holder's processor time "sum_s" and "longest_s"; "wall_ns" by
        the wall clock, hold by hold."""
    def adopt(
        self,
        on_device: list[bool] | None = None,
        param_bytes: int | None = None,
        activation_host_bytes: int | None = None,
        activation_ssd_bytes: int | None = None,
        uses: Sequence[Use] | None = None,
    ) -> None:
        """Takes over from a plan what rests where and in which order parameters are fetched, from
        the next step on. What is None stays.

        on_device: these units, by index, rest on the device whole, and are updated there; none
        where there are several ranks.
        param_bytes: parameters of the others use at most these bytes of it, in whole frames.
        activation_*_bytes: room for swapped activations: memory that was claimed and not used, and
        where that is not enough, pages whose residence saves least go to rest on the SSD.
        uses: of a whole step, in order of enter; each unit's parameters are fetched ahead of its
        use. Where two steps in a row differ, the order of the last one takes its place.

        All or nothing: raises StrataError, and changes nothing, where there is no room, where the
        planned step needs more frames, where no step of these units has these uses, and with fault
        "busy" where a thread is in the middle of a step. Waits for pending updates, unless the uses
        alone are named. REQUIRES: no activation is saved where on_device or activation_*_bytes
        change, and no gradient has landed where on_device changes."""
    def save_activation(
        self, address: int, byte_count: int, to_ssd: bool, unit: int, stream: int = 0
    ) -> int:
        """Starts to copy device memory into pages; -1 where there is no room. The memory must stay
        as it is until activation_saved()."""
    def activation_saved(self, save: int, wait: bool) -> bool:
        """Whether the copy is done; `wait`: after waiting for it."""
    def stage_activation(self, save: int) -> None:
        """Asks for its pages in host memory ahead of fetch_activation(); never waits."""
    def fetch_activation(self, save: int, address: int, stream: int = 0) -> None:
        """Starts to copy the bytes to device memory."""
    def activation_fetched(self, save: int, wait: bool) -> bool:
        """Whether they are there; `wait`: after waiting for them. Any number of fetches, one at a
        time."""
    def await_activation(self, save: int, stream: int = 0) -> bool:
        """Makes work that is submitted to `stream` from here on see the bytes of the last fetch. On
        a GPU it waits only until every copy is submitted, and both memories remain in use until
        activation_fetched(); on the host it waits for the bytes. True: they are there already."""
    def drop_activation(self, save: int) -> None:
        """Forgets it, whatever is under way; afterwards no copy touches the caller's memory: waits
        for one that is in flight, and for nothing else. Never raises on a closed session."""
    def reserve_snapshots(self, keep: int) -> None:
        """Makes room for so many complete snapshots beside one that begins, for good."""
    def begin_snapshot(self, keep: int) -> int:
        """Keeps the state after the last step, and returns the number of that; with lock_free it
        waits for the updates that were released. Raises StrataError: "config" where the budget has
        no room for `keep` complete ones beside it, "busy" where gradients have landed since."""
    def snapshots_begun(self) -> int: ...  # the number of the last one
    def restore_run(self, param: int, first: int, count: int, step: int) -> None:
        """These elements have had so many updates."""
    def snapshot(self, number: int) -> TakenSnapshot: ...  # waits until it is complete
    def drop_snapshot(self, number: int) -> None: ...  # complete or not: its slots are free again
    def make_pages_durable(self) -> None: ...  # what was written is on the disks behind it
    def link_pages(self, paths: list[str]) -> bool:
        """Gives the page file of each SSD path one more name. False: a file system has no links."""
    def page_files(self) -> list[int]: ...  # by SSD path: descriptors, for the caller to close
    def page_layout(self) -> TakenSnapshot: ...  # as of snapshot(), now, with no page in a slot
    def resume(self, files: PageFiles, held: list[Any], pages: list[Any], raw: bytes) -> list[int]:
        """Goes on from the first of the snapshots that link the files, and returns their numbers.
        Raises StrataError, and changes nothing. See snapshots/adopt.py, engine/resumption.hpp."""
    def go_back(self, number: int, raw: bytes) -> None: ...  # the same of one that it holds
    def timeline(self) -> list[TimelineSpan]:
        """What was busy since the last call, oldest first; a bounded number of the newest."""
    def close(self) -> None:
        """Stops threads, removes files, unmaps memory; tensors over views become invalid.
        Idempotent."""

class TimelineSpan(TypedDict):
    track: Literal["read", "write", "upload", "download", "update", "wait"]
    cause: str  # of a wait: what was missing; "copy", "ssd", "room", "frame", "update"; else "none"
    lane: int  # of an update: the worker
    backward: bool
    unit: int  # -1 where it does not apply
    begin_ns: int  # of time.perf_counter_ns()
    end_ns: int
    bytes: int

def check_trace(trace: Trace) -> str:
    """The first thing in it that contradicts itself, so that it cannot be planned; or ""."""

def paper_budgets(
    page_bytes: int, device_bytes: int, host_bytes: int, ssd_bytes: int, grads_rest: bool = True
) -> Budgets:
    """What a plan may use beside what a session with these budgets takes for staging. Raises
    ValueError for pages of no bytes."""

class PaperPlan:
    """A plan as the planner made it, with what it was made for."""

    def __init__(self, trace: Trace, costs: Costs, budgets: Budgets, wishes: Wishes) -> None:
        """Raises ValueError where the trace contradicts itself. An infeasible plan is no error."""
    @property
    def trace(self) -> Trace: ...
    @property
    def plan(self) -> StepPlan: ...
    def check(self) -> str:
        """The first promise that the plan does not keep, replayed on paper; empty: none."""
    def simulate(self, costs: Costs | None = None, spans: bool = False) -> Simulation:
        """The step under this plan, on the machine it was made for or another one."""
    def bound(self, costs: Costs | None = None) -> Bound:
        """The shortest that any plan's step could be with these budgets, on the machine that the
        plan was made for or another one."""
    def followed(self, costs: Costs, measured: tuple[list[float], list[float], float]) -> PaperPlan:
        """The same plan, with times of the trace changed by as much as those `measured` under this
        plan differ from the simulated ones, on a machine as it is known by now. Raises ValueError
        where they are of another step."""

class StepResult(TypedDict):
    norm: float  # of the gradients before clipping, after division; 0.0 if none landed
    finite: bool
    skipped: bool  # nothing was updated because the gradients were not finite
