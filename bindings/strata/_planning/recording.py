"""How a step runs that is recorded: as it is where that fits, else in as few bytes of the device as
work.

    host, ssd = recording.room(tensors)         # bytes that inputs may need off the device
    recording.begin(tensors, host, ssd)         # ahead of the forward of the whole model
    output = recording.forward(planned, args, kwargs)           # of each unit that it chooses for
    recording.end()                             # the step is over

Note [Estimate]. A unit keeps its activations where those of all units that are still to come are
expected to fit into what is left of the device, with once more those of the largest for its
backward. Of a unit like one that was seen (the same class, and shapes of parameters) what that one
saved is expected. Of another: twice the inputs of its matrices. From the first unit for which
there is no room on, units are computed again. An estimate that was too low has kept units whose
room others need: none is cut into slices for that, unless memory has run out, and then the step is
recorded once more, without.

Note [Smaller]. Where units are computed again,
1. inputs of recomputed units leave for host memory, or the SSD, where all of them would take more
   than half of what is left of the device. Then all leave for which there is room: one that stays
   leaves less to each backward, and makes slices. Room is made before the step, when their size
   can only be guessed: as many bytes a token as the unit's first matrix is wide;
2. a unit whose backward is expected to take more than is left runs its forward again, on slices;
   so does one whose forward ran out of memory. Random numbers go on where the first run ended. A
   backward is expected to take what the forward of a slice saved. Where PyTorch's memory has a
   limit it is also expected to take the gradients of the inputs, three times the largest tensor
   that was saved (a gradient that comes in and two that go out), and the gradients of parameters,
   which on slices are summed in float32 beside those of one slice. Plans then have as many slices,
   so that all steps give the same bits. Elsewhere a step may go over once, rather than have other
   bits than those behind it;
3. an error of memory in the backward cannot be made good from within. The next step, which is
   recorded in its place, starts with all units computed again and inputs away, and from the
   second time on with twice as many slices.

Note [Help]. Slices divide what their own unit saves, and nothing else: not what other units keep,
nor what a forward saves whatever the rows are. What halving the batch does not free will not be
freed by more of it. Where a backward would have no room on SLICES_MAX slices, or on as many as the
batch has rows, its unit is recorded on no more slices than its forward took, and the planner finds
what else there is.

Use from the thread that trains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._activations.slicing import batch_size
from .._config.choices import RECOMPUTES

if TYPE_CHECKING:
    from .._activations.forwards import PlannedForward
    from .._runtime.unit import Unit
    from .._runtime.wrapped import Wrapped
    from .shape_class import Goal

TRIES_MAX = 6  # recorded steps that run out of memory, one after the other
NO_MEMORY = "ran out of memory"
NO_ROOM = "has a backward that needs more than is left of the device"
NO_HELP = "has a backward that has no room on more slices either"
SLICES_MAX = 64  # that an estimate asks for: each takes time, however few rows it has
SLACK = 1.25  # of the room for inputs
WORKING_TENSORS = 3  # of a backward, as large as the largest one that is saved
BYTES_MIN = 4096  # of a tensor that is worth counting
SAVED_FACTOR = 2  # what a forward saves, over the inputs of its matrices

Kind = tuple[type, tuple[torch.Size, ...]]  # of units: class of the module, shapes of parameters

log = logging.getLogger("strata")


class Recording:
    """The recorded steps of one model. `pages`: bytes of the device that pages take now."""

    def __init__(self, state: Wrapped, goal: Goal, pages: Callable[[], int]) -> None:
        self._state = state
        self._goal = goal
        self._pages = pages
        self.slices_min = 1  # fewer ran out of memory: plans have as many
        self._troubles = 0  # steps that ran out of memory, one after the other
        self._less = False  # all units are computed again
        self.squeezed = False  # units that were kept took the room of others
        self._ahead: set[int] = set()  # units whose forward is to come
        self._elements = 0  # of the batch
        self._saved: dict[Kind, tuple[int, int]] = {}  # bytes of a forward; elements of its batch
        self._running = False
        self._ran_out = False
        self._errors = 0  # of the device's allocator, when the step began
        self._room = [0, 0]  # of host memory and the SSD, for inputs
        if not goal.alone:
            log.info(
                "several ranks: batches are cut into slices by split= alone, the same on all of "
                "them, and no unit rests on the device"
            )

    @property
    def may_slice(self) -> bool:
        """Whether the user lets batches be cut, and no other rank would have to do the same."""
        auto = self._goal.activations == "auto"
        return self._goal.alone and (auto or self._goal.split is not None)

    @property
    def may_try_smaller(self) -> bool:
        """Whether the step that is recorded now, and ran out of memory, may be run again."""
        return self._running and self._troubles < TRIES_MAX

    def room(self, batch: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Bytes of host memory and of the SSD to set aside for inputs that leave. Call between two
        steps."""
        self._note_failure()
        units = [unit for unit in self._state.units if self._recomputes(unit)]
        wanted = int(SLACK * sum(self._guess(unit, batch) for unit in units))
        if not self._troubles and wanted <= SLACK * self._left(0) / 2:
            return 0, 0
        config, plan = self._state.config, self._state.session.plan
        host = min(wanted, max(0, config["host_bytes"] - plan["host_bytes"]))
        ssd = min(wanted - host, max(0, config["ssd_bytes"] - plan["ssd_bytes"]))
        return host, ssd

    def begin(self, batch: Sequence[torch.Tensor], host_bytes: int, ssd_bytes: int) -> None:
        """The step begins; so much room was made."""
        self._room = [host_bytes, ssd_bytes]
        self._elements = sum(t.numel() for t in batch)
        self.squeezed = False
        self._ahead = {unit.index for unit in self._state.units}
        slices = self._slices if self.may_slice else 1
        self._state.may_split = self._state.may_split or slices > 1
        less = self._less or self._goal.activations == "recompute" or sum(self._room) > 0
        for unit in self._state.units:
            again = less and self._recomputes(unit)
            unit.activation = "recompute" if again else "keep"
            unit.slices = slices if again else 1
        self._running, self._ran_out = True, False
        self._errors = self._allocator_errors()

    def end(self) -> None:
        """The step is over, and all went well."""
        self._running = self._less = False
        self._troubles = 0

    @property
    def _slices(self) -> int:
        """The first step that runs out of memory is made again without slices."""
        return 2 ** max(0, self._troubles - 1)

    def take_less(self) -> bool:
        """The next recorded step computes all units again. False: the last one did."""
        self._less = True
        return self._kept_any()

    def chooses(self, unit: Unit) -> bool:
        """Whether the forward of this unit is for forward() to run."""
        return self._recomputes(unit)

    def forward(
        self, planned: PlannedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The forward of a unit that may be recomputed: as it is, or on as many slices as it
        takes."""
        unit, recorder = planned.unit, self._state.recorder
        first = enough = unit.slices  # enough: with fewer the forward ran out of memory
        slice_bytes: list[int] = []  # with once, twice, four times as many slices
        settled = False
        while True:
            arguments = planned.arguments(args, kwargs)
            if unit.activation == "keep" and not self._fits(planned, arguments.in_memory):
                self._compute_again()
            batch, repeatable = batch_size(arguments.tensors), not arguments.caches
            if unit.activation == "recompute":
                self._place_inputs(unit, arguments.in_memory)
            found = planned.buffers.taken()
            mark = recorder.mark()
            stayed = planned.hooks.swapping.kept_for_room
            why = ""
            output = None
            keeps = unit.activation == "keep"
            try:
                if keeps:
                    planned.verdict(arguments, batch)
                    output = planned.keeping(args, kwargs)
                else:
                    output = planned.recomputing(arguments, args, kwargs)
            except torch.OutOfMemoryError as error:
                why = NO_MEMORY
                may_cut = repeatable and self._may_cut(planned, args, kwargs, batch)
                if not (may_cut or (keeps and repeatable and unit.may_recompute)):
                    self._ran_out = True
                    error.add_note(self._advice(unit, batch))
                    raise
            if not why:
                if planned.hooks.swapping.kept_for_room > stayed:
                    unit.activation = "recompute"  # what the trace says must be what happened
                saved = recorder.saved_since(mark)
                self._learn(planned, sum(saved))
                inputs = sum(t.nbytes for t in arguments.in_memory)
                if keeps or unit.activation == "keep":
                    return output
                slice_bytes.append(self._slice_bytes(unit, saved))
                needed = self._whole_bytes(unit, inputs, unit.slices) + slice_bytes[-1]
                fits = settled or self._kept_any() or needed <= self._left()
                helps = not fits and self._slices_help(unit, inputs, slice_bytes, batch)
                settled = not (helps and repeatable and self._may_cut(planned, args, kwargs, batch))
                if fits or (settled and unit.slices == enough):
                    self._note_slices(unit, first, enough)
                    return output
                why = (
                    NO_HELP
                    if settled
                    else "has a backward that needs more than the device has left"
                )
            output = None
            found.put_back()
            recorder.drop_to(mark)
            if self._state.device.type == "cuda":
                torch.cuda.empty_cache()
            if keeps and unit.may_recompute:
                self._compute_again()
                continue
            unit.slices = enough if settled else min(2 * unit.slices, batch)
            if why == NO_MEMORY:
                enough = unit.slices
                slice_bytes.clear()
            self.squeezed = self.squeezed or self._kept_any()
            log.info("%s %s: recorded on %d slices", unit.name, why, unit.slices)

    def _compute_again(self) -> None:
        """From this unit on there is no room to keep activations."""
        for unit in self._state.units:
            if unit.index in self._ahead and self._recomputes(unit):
                unit.activation = "recompute"

    def _fits(self, planned: PlannedForward, inputs: Sequence[torch.Tensor]) -> bool:
        """See Note [Estimate]."""
        self._ahead.add(planned.unit.index)
        modules = {p.unit.index: p.module for p in planned.hooks.planned}
        rows = max((_rows(t, planned.module) for t in inputs), default=0)
        wanted = [self._expected(self._state.units[u], modules.get(u), rows) for u in self._ahead]
        params = self._state.params
        grads = max(
            sum(params[i].nbytes for i in unit.params if params[i].requires_grad)
            for unit in self._state.units
        )
        return sum(wanted) + max(wanted) + grads <= self._left()

    def _expected(self, unit: Unit, module: torch.nn.Module | None, rows: int) -> int:
        """Bytes that the unit's forward saves. See Note [Estimate]."""
        params = [self._state.params[i] for i in unit.params]
        if module is not None and (seen := self._saved.get(_kind(module))):
            return seen[0] * self._elements // max(1, seen[1])
        if isinstance(module, torch.nn.Embedding):
            return rows * 8
        width = sum(p.shape[1] for p in params if p.dim() > 1)
        return SAVED_FACTOR * rows * width * max(p.element_size() for p in params)

    def _learn(self, planned: PlannedForward, saved_bytes: int) -> None:
        """What a forward saved is expected of the next ones like it."""
        self._ahead.discard(planned.unit.index)
        self._saved[_kind(planned.module)] = saved_bytes, self._elements

    def note(self, error: torch.OutOfMemoryError) -> None:
        """A backward of the step ran out of memory."""
        if not self._running:
            return
        self._ran_out = True
        error.add_note(
            f"in a step that strata records: {self._drop_it()} and go on with the loop; the next "
            "step will try to take less"
        )

    def _drop_it(self) -> str:
        """What the user does with a step that did not end."""
        if self._state.config["update"] == "in_backward":
            return "some parameters are updated already: end it by optimizer.step()"
        return "drop it by optimizer.zero_grad()"

    def _note_failure(self) -> None:
        """The step before was recorded, and did not end."""
        ran_out = self._ran_out or self._allocator_errors() > self._errors
        if self._running and ran_out and self._troubles < TRIES_MAX:
            self._troubles += 1 if self._less else 1 + (not self._kept_any())
            self._less = True
            if self.may_slice:
                self.slices_min = max(self.slices_min, self._slices)
            log.info("a recorded step ran out of memory: the next one takes less")
        self._running = False

    def _kept_any(self) -> bool:
        """Whether a unit that may be computed again was not."""
        return any(self._recomputes(u) and u.activation == "keep" for u in self._state.units)

    def _recomputes(self, unit: Unit) -> bool:
        return unit.may_recompute and self._goal.activations != "keep"

    def _guess(self, unit: Unit, batch: Sequence[torch.Tensor]) -> int:
        """The bytes of a unit's inputs. See Note [Smaller]."""
        shapes = [self._state.params[i].shape for i in unit.params]
        width = next((shape[1] for shape in shapes if len(shape) > 1), 1)
        itemsize = self._state.params[unit.params[0]].element_size()
        tokens = (
            t.numel() // (t.shape[-1] if t.is_floating_point() else 1) for t in batch if t.dim()
        )
        return max(tokens, default=0) * width * itemsize

    @property
    def _limited(self) -> bool:
        """Whether PyTorch's allocator refuses what passes the budget."""
        return self._state.device.type == "cuda"

    def _slice_bytes(self, unit: Unit, saved: Sequence[int]) -> int:
        """What a backward is expected to take that slices divide. See Note [Smaller]."""
        working = WORKING_TENSORS * max(saved, default=0) if self._limited else 0
        return sum(saved) // unit.slices + working

    def _whole_bytes(self, unit: Unit, inputs: int, slices: int) -> int:
        """What it is expected to take beside that."""
        if not self._limited:
            return 0
        grads = sum(p.nbytes for i in unit.params if (p := self._state.params[i]).requires_grad)
        return inputs + (grads if slices == 1 else 3 * grads)

    def _slices_help(self, unit: Unit, inputs: int, slice_bytes: Sequence[int], batch: int) -> bool:
        """Whether a backward could have room on more slices. See Note [Help].

        `slice_bytes`: what one slice took, with each number of slices that was tried.
        """
        last = slice_bytes[-1]
        least = last * unit.slices // max(1, min(batch, SLICES_MAX))
        if len(slice_bytes) > 1:
            least = max(least, 2 * last - slice_bytes[-2])
        return self._whole_bytes(unit, inputs, 2 * unit.slices) + least <= self._left()

    def _note_slices(self, unit: Unit, first: int, enough: int) -> None:
        """A forward was recorded on slices that plans have to have, too."""
        grown = unit.slices > first and (enough > first or self._limited)
        if grown and not self.squeezed:
            self.slices_min = max(self.slices_min, unit.slices)

    def _left(self, held: int | None = None) -> int:
        """Bytes of the device beside pages and what PyTorch holds, by default now."""
        if held is None:
            held = self._state.recorder.held_bytes()
        return self._goal.device_bytes - self._pages() - held

    def _place_inputs(self, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        if unit.activation != "recompute":
            return
        needed = sum(t.nbytes for t in tensors if t.nbytes >= BYTES_MIN)
        for tier, activation in enumerate(("recompute_host", "recompute_ssd")):
            if needed <= self._room[tier]:
                self._room[tier] -= needed
                unit.activation = activation  # type: ignore[assignment]
                return

    def _may_cut(
        self, planned: PlannedForward, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int
    ) -> bool:
        """Whether the unit may run on more slices; tried where that is not known."""
        if not self.may_slice or planned.unit.slices >= batch:
            return False
        self._state.may_split = True
        try:
            verdict = planned.verdict(planned.arguments(args, kwargs), batch)
        except torch.OutOfMemoryError:
            return False
        return verdict is not None and not verdict.reason

    def _advice(self, unit: Unit, batch: int) -> str:
        why = (
            unit.unsplit_reason
            or "it is as small as it can be, or activations= or other ranks forbid slices"
        )
        return (
            f"{unit.name} runs out of device memory with a batch of {batch}, and is not cut into "
            f"smaller slices: {why}. A smaller batch, or a larger device, would help"
        )

    def _allocator_errors(self) -> int:
        if self._state.device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._state.device).get("num_ooms", 0))


def _kind(module: torch.nn.Module) -> Kind:
    return type(module), tuple(p.shape for p in module.parameters())


def _rows(tensor: torch.Tensor, module: torch.nn.Module) -> int:
    """Of an input: how often the module's matrices are used."""
    weight = next((p for p in module.parameters() if p.dim() > 1), None)
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return tensor.numel()
    features = tensor.shape[1 if weight is not None and weight.dim() > 2 else -1]
    return tensor.numel() // max(1, features)


def recorded_as(unit: Unit) -> tuple[Any, int]:
    """How a unit ran in the step that was recorded: its activations, and slices."""
    if unit.activation not in RECOMPUTES:
        return "keep", 1
    return unit.activation, min(unit.slices, unit.slices_max)
