"""Gradients of a snapshot that was taken in the middle of a step, and the steps of its runs.

    gradients = SavedGradients(manifest, state, source)         # raises CheckpointError
    gradients.apply(chunk, pages, run)          # an update that was still to come, on what was read
    gradients.restore(together)                 # behind all values: they land again

What had landed lands again, as one gradient of each parameter, and what was known of it (how often,
its norm, what it was scaled with) is told to the core. Of several ranks each lands what it owns,
with zeros that change no bit for the rest, and all of them add up. A gradient that only waited for
its update (update=LockFree) is not kept apart: its update is made as it is loaded. The format is
described in snapshot_files.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from .._config.choices import DTYPES
from .._config.managed import DTYPE_NAMES
from .._core import adds_in_float32, update_span
from .._runtime.wrapped import Wrapped
from .checkpoint_files import CheckpointError
from .snapshot_elements import Page
from .snapshot_files import GRAD, ROLES
from .snapshot_gradient_pages import GradientPages, PageReader, Piece
from .stored import StoredTensor
from .together import Together

if TYPE_CHECKING:
    from .._core import DtypeName

NONE, LANDED, MERGED = 0, 1, 2  # kinds of runs; a waiting one is a list
SCALINGS_MAX = 3
ADDRESSES = ("param", "master", "moment1", "moment2")  # of roles, as update_span() calls them

Chunk = dict[str, Any]
Pages = dict[int, torch.Tensor]


class SnapshotReader(PageReader, Protocol):
    """Reads a snapshot that is loaded."""

    tensors: list[StoredTensor]

    def scales(self, chunk: Chunk, page: Page, moment: int, at: int, count: int) -> torch.Tensor:
        """As Elements has them."""


def divisor(state: Wrapped) -> int:
    """What an update divides sums of gradients by."""
    if state.ranks is None or state.config["ranks"]["sums"]:
        return 1
    return state.ranks.count


def waits(run: list[Any]) -> bool:
    """Whether an update of its gradient was still to come, though nothing has landed since."""
    return run[5] not in (NONE, LANDED, MERGED)


def waiting_slots(chunk: Chunk) -> list[int]:
    """Of the pages of gradients that apply() uses."""
    return [page[0] for run in filter(waits, chunk["runs"]) for page in _gradient_pages(chunk, run)]


class SavedGradients:
    """See above."""

    def __init__(self, manifest: dict[str, Any], state: Wrapped, source: SnapshotReader) -> None:
        """Raises CheckpointError, KeyError, TypeError, ValueError or IndexError where the manifest
        contradicts its format, and CheckpointError where the session cannot have its gradients."""
        self._manifest = manifest
        self._state = state
        self._source = source
        self._saved = manifest["gradients"]
        zeros = manifest["zeros"]
        parts = len(manifest["parts"])
        if not isinstance(zeros, list) or not all(_is_place(z, parts) for z in zeros):
            raise ValueError("zeros")
        self._known = self._check_saved() if self._saved is not None else {}
        landed, merged = set(), False
        for chunk in manifest["chunks"]:
            for run in chunk["runs"]:
                self._check_run(chunk, run)
                merged |= run[5] == MERGED
                if run[5] in (LANDED, MERGED):
                    landed.add(run[0])
        if landed - self._known.keys():
            raise ValueError("gradients of which nothing is known")
        self._counts: dict[int, int] = {}  # elements by part
        for chunk in manifest["chunks"]:
            for part, _, count, *_ in chunk["runs"]:
                self._counts[part] = self._counts.get(part, 0) + count
        if landed:
            self._refuse_what_cannot_be(landed, merged)

    def _check_saved(self) -> dict[int, list[Any]]:
        params = self._saved["params"]
        for part, count, squares, factors, divisions in params:
            sound = _is_place(part, len(self._manifest["parts"])) and type(count) is int
            if not sound or not 0 < count < 1 << 32 or type(squares) is not float:
                raise ValueError("a gradient")
            if len(factors) > SCALINGS_MAX or any(type(f) is not float for f in factors):
                raise ValueError("factors of a gradient")
            if type(divisions) is not int or not 0 <= divisions < 1 << len(factors):
                raise ValueError("divisions of a gradient")
            if any(f == 0 and divisions >> i & 1 for i, f in enumerate(factors)):
                raise ValueError("a division by zero")
        if type(self._saved["float32"]) is not bool or not isinstance(self._saved["groups"], list):
            raise TypeError("gradients")
        if type(self._saved["divisor"]) is not int or self._saved["divisor"] < 1:
            raise ValueError("what gradients are divided by")
        return {entry[0]: entry for entry in params}

    def _check_run(self, chunk: Chunk, run: list[Any]) -> None:
        step, kind = run[4:]
        if type(step) is not int or not 0 <= step < 1 << 53:
            raise ValueError("steps of a run")
        if kind == NONE:
            return
        if self._saved is None or chunk[GRAD] is None:
            raise ValueError("a gradient without pages")
        per_page, begin, _ = chunk[GRAD]
        dtype = self._dtype(run)
        used = _gradient_pages(chunk, run)
        missing = not used or any(page is None for page in used)
        if (
            type(begin) is not int
            or begin + per_page * dtype.itemsize > self._page_bytes
            or missing
        ):
            raise ValueError("a gradient beyond its pages")
        if kind in (LANDED, MERGED):
            return
        group, update_step, scale = kind
        if type(update_step) is not int or update_step < 1 or type(scale) is not float:
            raise ValueError("a waiting gradient")
        if not _is_place(group, len(self._saved["groups"])):
            raise ValueError("hyperparameters of a waiting gradient")

    def _refuse_what_cannot_be(self, landed: set[int], merged: bool) -> None:
        config = self._state.config
        if self._state.ranks is not None and merged:
            raise CheckpointError(
                "this snapshot was taken in the middle of an accumulation while updates lagged, "
                "which several ranks cannot go on with: load it in one process, and take another "
                "behind step()"
            )
        if config["update"] == "in_backward":
            raise CheckpointError(
                "this snapshot was taken in the middle of an accumulation, and "
                "update='in_backward' keeps no gradients between two backward() calls: wrap with "
                "update='on_step'"
            )
        scalings: dict[int, set[Any]] = {}  # by tensor
        for part, _, _, factors, divisions in self._saved["params"]:
            place = self._manifest["parts"][part][0]
            scalings.setdefault(place, set()).add((*factors, divisions))
        for place in {self._manifest["parts"][part][0] for part in landed}:
            tensor, entry = self._source.tensors[place], self._manifest["params"][place]
            theirs = "float32" if self._saved["float32"] else entry["dtype"]
            dtype = config["params"][tensor.parts[0]]["dtype"]
            ours = "float32" if adds_in_float32(config) else dtype
            if ours not in ("float32", theirs):
                raise CheckpointError(
                    f"this snapshot has sums of gradients of {tensor.name!r} in {theirs}, which "
                    f"{ours} would round: wrap with gradient_accumulation_steps=, which keeps them "
                    "in float32"
                )
            if len(scalings[place]) > 1:
                raise CheckpointError(
                    f"this snapshot has gradients of tiles of {tensor.name!r} that were scaled "
                    "differently: take it behind step()"
                )

    @property
    def _page_bytes(self) -> int:
        size: int = self._manifest["page_bytes"]
        return size

    def _entry(self, part: int) -> dict[str, Any]:
        entry: dict[str, Any] = self._manifest["params"][self._manifest["parts"][part][0]]
        return entry

    def _dtype(self, run: list[Any]) -> torch.dtype:
        name = "float32" if self._saved["float32"] else self._entry(run[0])["dtype"]
        if name not in DTYPES:
            raise ValueError(name)
        found: torch.dtype = getattr(torch, name)
        return found

    # While values are loaded ----------------------------------------------------------------------

    def apply(self, chunk: Chunk, pages: Pages, run: list[Any]) -> None:
        """Updates what was read of a run, where that was still to come. `pages`: with those of
        waiting_slots()."""
        part, first, count, at, _, kind = run
        if not waits(run):
            return
        number, step, scale = kind
        dtype = self._dtype(run)
        entry, group = self._entry(part), self._saved["groups"][number]
        _fill_zeros(chunk, pages, self._page_bytes)
        size = min(chunk[role][0] for role in (*ROLES, GRAD) if chunk[role] is not None)
        sizes = {"param": 4 if entry["dtype"] == "float32" else 2}
        sizes["residual"] = 2 if entry["dtype"] == "bfloat16" else 4
        moment = {"float32": 4, "bfloat16": 2, "block8": 1}[self._manifest["moment_dtype"]]
        done = 0
        while done < count:
            begin = at + done
            length = min(count - done, size - begin % size)
            addresses = {
                name: _place(chunk, pages, role, begin, sizes.get(role, moment)).data_ptr()
                for role, name in zip(ROLES, ADDRESSES, strict=True)
                if chunk[role] is not None
            }
            for i, name in enumerate(("scales1", "scales2")[: len(chunk["scales"])]):
                scales = self._source.scales(chunk, pages.__getitem__, i, begin, length)
                addresses[name] = scales.data_ptr()
            update_span(
                group=group,
                dtype=entry["dtype"],
                grad_dtype=DTYPE_NAMES[dtype],
                count=length,
                **({"master": 0, "moment1": 0, "moment2": 0} | addresses),
                grad=_place(chunk, pages, GRAD, begin, dtype.itemsize).data_ptr(),
                step=step,
                grad_scale=scale,
                threads=1,
                isa="best",
                moment_dtype=self._manifest["moment_dtype"],
                param_id=part,
                first=first + done,
            )
            done += length

    @property
    def _factor(self) -> float:
        """Of what is to land: updates of this run divide by another number. Exact where that is as
        many times a power of two."""
        return divisor(self._state) / int(self._saved["divisor"])

    # Behind all values ----------------------------------------------------------------------------

    def restore(self, together: Together) -> None:
        """What is at another step than the rest of its parameter is told so; what had landed lands,
        one parameter at a time. All ranks call it; see snapshot_gradient_pages.py, Note [All ranks
        ask alike]."""
        pages = GradientPages(self._source, together)
        runs: dict[int, list[tuple[Chunk, list[Any]]]] = {}  # by tensor
        for chunk in self._manifest["chunks"]:
            for run in chunk["runs"]:
                runs.setdefault(self._manifest["parts"][run[0]][0], []).append((chunk, run))
        for place, tensor in enumerate(self._source.tensors):
            first = 0
            for part, numel in zip(tensor.parts, tensor.part_numels, strict=True):
                self._restore_part(part, first, numel, runs.get(place, []), pages)
                first += numel
        self._state.steps.look_at_gradients()
        pages.check()
        self._take_over_zeros()

    def _restore_part(
        self,
        part: int,
        first: int,
        numel: int,
        runs: list[tuple[Chunk, list[Any]]],
        pages: GradientPages,
    ) -> None:
        """`first`: of its elements in the tensor."""
        pieces = []
        for chunk, run in runs:
            begin = self._manifest["parts"][run[0]][1] + run[1]
            low, high = max(begin, first), min(begin + run[2], first + numel)
            if low < high:
                at = run[3] + low - begin
                pieces.append(Piece(chunk, run, low - first, high - low, at))
        if not pieces or not self._state.config["params"][part]["trainable"]:
            return
        for piece in pieces:
            run = piece.run
            step = run[5][1] if waits(run) else run[4]
            if step != self._entry(run[0])["step"]:
                self._state.session.restore_run(part, piece.first, piece.count, step, False)
        landed = [piece for piece in pieces if piece.run[5] in (LANDED, MERGED)]
        if not landed:
            return
        spec = self._state.config["params"][part]
        name = "float32" if adds_in_float32(self._state.config) else spec["dtype"]
        dtype: torch.dtype = getattr(torch, name)
        owners = self._state.session.owners(part, 0)  # what trains has the same for all
        # What others own: added to any value it gives that value, of either zero too.
        values = torch.full((numel,), -0.0, dtype=dtype, device=self._state.device)
        for begin, length in pages.own(owners):
            values[begin : begin + length] = 0.0
        for piece in landed:
            pages.copy(piece, self._dtype(piece.run), owners, values)
        if self._factor != 1:
            values *= self._factor
        self._land(part, values, {piece.run[0] for piece in landed})
        for piece in landed:
            if piece.run[5] == MERGED:
                step = piece.run[4]
                self._state.session.restore_run(part, piece.first, piece.count, step, True)

    def _land(self, part: int, values: torch.Tensor, parts: set[int]) -> None:
        """`parts`: of the snapshot, which the values come from. Where tiles are others, the norm is
        taken anew, and where they are multiplied."""
        session, state = self._state.session, self._state
        name: DtypeName = DTYPE_NAMES[values.dtype]
        session.land_gradient(part, values.data_ptr(), name, stream=state.stream())
        found = [self._known[p] for p in sorted(parts)]
        _, count, squares, factors, divisions = found[0]
        same = len(found) == 1 and self._counts[found[0][0]] == values.numel()
        if not same or self._factor != 1:
            count = max(entry[1] for entry in found)
            if state.ranks is None:  # else they are found as ranks add up
                squares, _ = session.gradient_squares(part)
            for i, factor in enumerate(factors):
                squares *= (1 / factor if divisions >> i & 1 else factor) ** 2
        session.restore_gradient(part, count, squares, factors, divisions)

    def _take_over_zeros(self) -> None:
        tensors = {self._manifest["parts"][part][0] for part in self._manifest["zeros"]}
        parts = {p for place in tensors for p in self._source.tensors[place].parts}
        if parts or self._known:
            self._state.gradients.take_over(parts)


def _gradient_pages(chunk: Chunk, run: list[Any]) -> list[Any]:
    """Those that the gradient of a run lies in."""
    per_page, _, pages = chunk[GRAD]
    _, _, count, at, *_ = run
    found: list[Any] = pages[at // per_page : -(-(at + count) // per_page)]
    return found


def _place(chunk: Chunk, pages: Pages, role: str, at: int, size: int) -> torch.Tensor:
    per_page, begin, found = chunk[role]
    return pages[found[at // per_page][0]][begin + at % per_page * size :]


def _fill_zeros(chunk: Chunk, pages: Pages, page_bytes: int) -> None:
    """Pages that nobody wrote are written now."""
    for role in ROLES:
        for number, page in enumerate(chunk[role][2] if chunk[role] is not None else []):
            if page is None:
                slot = -1 - len(pages)
                pages[slot] = torch.zeros(page_bytes, dtype=torch.uint8)
                chunk[role][2][number] = [slot, 0, 0]


def _is_place(value: Any, end: int) -> bool:
    return type(value) is int and 0 <= value < end
