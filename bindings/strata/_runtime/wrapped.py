"""What strata knows of one wrapped model: the session of the core, the parameters and the units.

    state = wrapped(model)
    state.session.read(state.index_of(model.lm_head.weight), "master", 0, address, count)

Use from the thread that trains. Autograd's own threads reach it through hooks.py, under the GIL.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .._config.frozen import row_elements
from .._errors import StrataError
from .._profiling.recorder import Recorder
from .._profiling.timeline import StepLog
from .._torch_compat import DisableTorchFunction, is_transformed
from . import coded, own_mapping
from .closing import Calls, Ending, close_behind
from .gradients import Gradients
from .lander import Inline, Lander, Landings, ahead_of
from .ready_codes import ReadyCodes
from .stand_in import StandIn
from .steps import Steps
from .streams import current_stream
from .unit import Unit, units_of
from .visits import Visit, Visits

if TYPE_CHECKING:
    from .._config.ranks import Ranks
    from .._config.wire import Wire
    from .._core import Config, Kind, Session
    from .._planning.planning import Planning
    from .escapes import Views
    from .shards import Shards


CHUNK_NUMEL = 1 << 22  # values that travel through one temporary float32 tensor, which malloc keeps

KDLCPU = 1  # dlpack.h


@dataclass(slots=True, eq=False)
class Slot:
    """What a paged parameter, or an alias of one, knows: whose it is, and its place there."""

    state: Wrapped
    index: int
    unit: Unit


class Wrapped:
    """The state behind a wrapped model. `params[i]` is parameter i of the core's session.

    Invariants:
    1. params[i] has the address of aliases[i] for as long as the session is open.
    2. written[i] is the version counter of params[i] when the core last knew its value.
    """

    def __init__(self, model: nn.Module, session: Session, config: Config) -> None:
        self.model = model
        self.session = session
        self.config = config
        self.params = list(model.parameters())
        self.names = [spec["name"] for spec in config["params"]]
        self.original_dtypes = [p.dtype for p in self.params]
        self.row_elements = [  # modules may be others later, and codes stay
            row_elements(model.get_submodule(name.rpartition(".")[0]), p.shape)
            for name, p in zip(self.names, self.params, strict=True)
        ]
        self.optimizer: torch.optim.Optimizer = cast(torch.optim.Optimizer, None)
        kind, number = session.device
        self.device = torch.device("cpu") if kind == KDLCPU else torch.device("cuda", number)
        self.landings: Landings = (
            Inline() if kind == KDLCPU else Lander(self.device, ahead_of(config["device_bytes"]))
        )
        self.moved_buffers: list[tuple[nn.Module, str, torch.dtype, torch.device]] = []  # as before
        self.hooks: Any = None  # hooks.Hooks, once installed
        self.views: Views = cast("Views", None)  # once the parameters are paged
        self.recorder = Recorder(self.device)
        self.visits = Visits()
        self.log = StepLog(session, config["units"])
        self.may_split = True  # units may be tried on slices of the batch, and run on them
        self.planning: Planning | None = None  # None: activations are PyTorch's affair
        self.units = units_of(config)
        self.unit_of = [self.units[spec["unit"]] for spec in config["params"]]
        self.aliases = [
            torch.from_dlpack(session.tensor(i)).reshape(p.shape) for i, p in enumerate(self.params)
        ]
        self.written = [0] * len(self.params)
        # Parameters that forwards write to through `p.data`, past their version counters.
        self.silent: set[int] = set()
        self.steps = Steps(self)
        self.gradients = Gradients(self)
        self.frozen = {i for i, p in enumerate(self.params) if not p.requires_grad}
        self.snapshots: Any = None  # snapshot.Taker, once there is one
        self.contents: Any = None  # registrations.Contents, as of the last snapshot
        self.last_saved: Path | None = None  # the last checkpoint of the run, or that it loaded
        self.ranks: Ranks | None = None  # none: this process is alone
        self.roll: Any = None  # together.Roll, once ranks have made a call together
        self.wire: Wire | None = None  # none: there are no other machines
        self.shards: Shards | None = None  # none: no parameter is a DTensor elsewhere
        # Pages of other machines come as codes to the computation: see rank_gathers of wrap().
        self.coded_gathers = False
        self.steps_before = 0  # of the run, when it was loaded from a snapshot
        self.given_back = False  # strata.unwrap() has made the model plain, and not ended yet
        self.half_loaded = False  # strata.load() has begun to write, and has not ended
        spans = sorted(
            (alias.data_ptr(), alias.data_ptr() + alias.nbytes, i)
            for i, alias in enumerate(self.aliases)
            if alias.nbytes
        )
        self._begins = [span[0] for span in spans]
        self._spans = spans
        self.low = spans[0][0]  # every address of every parameter lies in [low, high)
        self.high = max(span[1] for span in spans)
        # What waits for threads that use the session. REQUIRES: it does not lead to the model.
        self.before_close: Calls = []
        self.after_leaving: Calls = []  # likewise, once no rank is waited for
        self.after_close: Calls = []  # likewise, of what it used
        # Closes the session when nothing can reach it any more, and at the interpreter's exit.
        ending = Ending(
            session, self.landings, self.recorder, self.before_close, self.after_leaving,
            self.after_close, among_ranks="ranks" in config,
        )  # fmt: skip
        self.close: Callable[[], None] = close_behind(self, ending)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a wrapped model is a plain one."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model is a plain one."""
        return (type(None), ())

    def check_parameters(self) -> None:
        """Raises RuntimeError where the model has other parameters than when it was wrapped."""
        now = dict(self.model.named_parameters())
        changed = sorted(set(now) ^ set(self.names))
        changed += [
            n for n, p in zip(self.names, self.params, strict=True) if now.get(n, p) is not p
        ]
        if changed:
            raise RuntimeError(
                f"parameter {changed[0]!r} was added, removed or exchanged after strata.wrap(), so "
                "the result would not be the model: undo that, or call strata.unwrap(model) first"
            )

    def check_like(self, index: int, value: torch.Tensor) -> None:
        """Raises RuntimeError where a tensor cannot become what a parameter is."""
        alias = self.aliases[index]
        if (value.dtype, value.device, value.shape) != (alias.dtype, alias.device, alias.shape):
            way = f"pass {'device' if value.dtype == alias.dtype else 'dtype'}= to wrap()"
            way = way if value.shape == alias.shape else "resize the model before wrap()"
            way = "drop the model to free its memory" if value.is_meta else way
            raise RuntimeError(
                f"parameter {self.names[index]!r} cannot become {value.dtype} of shape "
                f"{tuple(value.shape)} on {value.device} after strata.wrap(): {way}, or call "
                "strata.unwrap(model) first"
            )

    def index_of(self, parameter: torch.Tensor) -> int:
        """The index of a parameter of this model. Raises ValueError for any other tensor."""
        slot = getattr(parameter, "_strata", None)
        if slot is None or slot.state is not self:
            raise ValueError("this tensor is not a parameter of a model wrapped by strata")
        return cast(Slot, slot).index

    def find(self, address: int) -> int:
        """The parameter whose memory holds `address`, or -1."""
        if not self.low <= address < self.high:
            return -1
        begin, end, index = self._spans[bisect.bisect_right(self._begins, address) - 1]
        return index if begin <= address < end else -1

    def under(self, tensor: torch.Tensor) -> int:
        """The parameter in whose memory a tensor lies, or -1. Call it where the class of the tensor
        does not interfere."""
        has_memory = tensor.layout is torch.strided and not is_transformed(tensor)
        return self.find(tensor.data_ptr()) if has_memory else -1

    def stream(self) -> int:
        """What the session is told of the stream that is computed on now; see current_stream()."""
        return current_stream(self.device)

    def enter(
        self,
        unit: Unit,
        visit: Visit,
        backward: bool = False,
        recorded: bool = True,
        exact: bool = False,
    ) -> None:
        """Waits until the unit is on the device, and keeps it there.

        `recorded`: a use that the next training step will repeat, so that it is planned for.
        `exact`: what other machines hold comes as it is: see rank_gathers of strata.wrap().
        """
        wait_began = self.recorder.now() if recorded else 0.0
        self.session.enter(
            unit.index,
            backward,
            recorded,
            stream=self.stream(),
            visit=visit.number,
            exact=exact,
        )
        self.recorder.enter(unit.index, backward, wait_began, recorded)

    def leave(self, unit: Unit, visit: Visit) -> None:
        """Undoes enter() if that succeeded, and does nothing the second time. Raises StrataError
        where a view of a parameter would stay behind."""
        try:
            if self.views is not None and self.session.entered(unit.index) == 1:
                self.views.check(unit, failing=sys.exception() is not visit.handled)
        finally:
            if self.session.leave(unit.index, stream=self.stream(), visit=visit.number):
                self.recorder.leave(unit.index)

    def check_old(self, index: int) -> None:
        """In a backward, of a parameter that is entered: raises StrataError where it was updated in
        this backward already (update="in_backward")."""
        if self.steps.groups_used is None:
            return
        if self.unit_of[index].completes:
            self.landings.wait()  # the core is to know whether its update has begun
        if self.session.updated(index):
            raise StrataError(
                f"parameter {self.names[index]!r} is needed again in this backward, after its "
                "gradient was complete and its update began; update='on_step' keeps it as it is "
                "until step()"
            )

    def refuse_visits(self) -> None:
        """Raises RuntimeError where another thread is in a forward of the model."""
        for unit in self.units:
            if self.session.entered(unit.index):
                raise RuntimeError(
                    f"step() while {unit.name} is in use by another thread: wait for its forward "
                    "to end"
                )

    def refuse_half_step(self, what: str) -> None:
        """Raises RuntimeError between a backward that has updated parameters and step(), and where
        refuse_half_load() does: parameters are of two states then."""
        self.refuse_half_load(what)
        if self.steps.groups_used is not None:
            raise RuntimeError(
                f"{what} between backward() and step(): update='in_backward' has updated some of "
                "the parameters already, perhaps not all. Call optimizer.step() first, which ends "
                "this step with the gradients that there are, also of a backward that was "
                "interrupted; or return to a checkpoint with strata.load()"
            )

    def refuse_within_step(self, what: str) -> None:
        """Raises RuntimeError where gradients wait for a step(), and where refuse_half_step() does:
        what is kept of a run has none."""
        self.refuse_half_step(what)
        self.landings.wait()
        if self.gradients.any_new():
            raise RuntimeError(
                f"{what} between backward() and step(): it keeps parameters and the optimizer's "
                "state, not gradients. Call it after optimizer.step(), before the next backward(), "
                "or forget the gradients by optimizer.zero_grad() first"
            )

    def refuse_half_load(self, what: str) -> None:
        """Raises RuntimeError where strata.load() has written some of the parameters, not all."""
        if self.half_loaded:
            raise RuntimeError(
                f"{what} after a strata.load() that ended half-way: some parameters are the "
                "checkpoint's and some are not. Call strata.load() again, with that or another"
            )

    def synchronize(self) -> None:
        """Waits for gradients on their way, updates and writes."""
        self.landings.wait()
        self.session.synchronize()

    def catch_up(self) -> None:
        """Waits for the updates that LockFree leaves open: what is read then is the newest."""
        if self.config["update"] == "lock_free":
            self.landings.wait()
            self.session.drain()

    def note_write(self, index: int) -> None:
        """Tells the core that the user changed a parameter in place. REQUIRES: it is entered.

        Raises StrataError where the change cannot be taken over: it is undone.
        """
        with DisableTorchFunction():
            version = self.params[index]._version
        try:
            self.session.device_written(index, stream=self.stream())
        except StrataError:
            self.written[index] = version  # told once
            raise
        self.written[index] = version

    def read(self, index: int, kind: Kind = "master") -> torch.Tensor:
        """A parameter, moment or gradient, as a new float32 tensor of its shape on the CPU."""
        result = own_mapping.empty(self.aliases[index].shape, torch.float32)
        if result.numel():
            self.landings.wait()
            self.session.read(index, kind, 0, result.data_ptr(), result.numel())
        return result

    def write(
        self,
        index: int,
        value: torch.Tensor | ReadyCodes,
        kind: Kind = "master",
        offset: int = 0,
        whole: coded.Whole | None = None,
    ) -> None:
        """Stores values, of any dtype, as the exact master (or moment) from element `offset` on.
        What rests as codes is stored whole; `whole`: what it is a tile of."""
        self.landings.wait()
        if isinstance(value, ReadyCodes):
            if coded.take(self, index, value):
                return
            value = value.dense()
        if coded.quantise(self, index, value, whole):
            return
        if isinstance(value, StandIn):  # parts of it have no memory, and are read one by one
            value = value.clone()
        flat = value.detach().reshape(-1)
        for begin in range(0, flat.numel(), CHUNK_NUMEL):
            values = flat[begin : begin + CHUNK_NUMEL]
            if index in self.frozen:  # there is no master: as PyTorch rounds
                values = values.to(self.aliases[index].dtype)
            part = self._own_part(index, offset + begin, values)
            self.session.write(index, kind, offset + begin, part.data_ptr(), part.numel())

    def _own_part(self, index: int, first: int, values: torch.Tensor) -> torch.Tensor:
        """`values` as the core takes them, which begin with element `first`. Of ranks each stores
        what it owns: the others are not looked at, so that files are not read for them."""
        if "ranks" not in self.config:
            return values.to("cpu", torch.float32).contiguous()
        part = torch.empty(values.numel(), dtype=torch.float32, device="cpu")
        here = self.config["ranks"]["rank"]
        for rank, begin, count in self.session.owners(index, here):
            low, high = max(begin - first, 0), min(begin + count - first, part.numel())
            if rank == here and low < high:
                part[low:high] = values[low:high]
        return part


def wrapped(model: nn.Module) -> Wrapped:
    """The state of a wrapped model. Raises ValueError where the model is not wrapped."""
    state = model.__dict__.get("_strata")
    if state is None:
        raise ValueError(f"this {type(model).__name__} is not wrapped: call strata.wrap() first")
    return cast(Wrapped, state)
