"""How long the loop is held while its state is saved, and what memory that takes: by snapshots of
state on the SSD and in host memory, by a checkpoint, by torch.save, by DCP's save, and by its
async_save with the DefaultStager and without.

Each side saves behind a step. Held is the time of the call, and what the next step took beyond the
median of those without a save; memory is the most that the process had from the call to the end of
the save, beyond the most that it has in steps ahead of the first one.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import strata
import torch

from .common import MIB, Context, Figure, seconds_of
from .models import llama_166m_or_small, tokens
from .peers.child import memory_peak
from .sides import Paged, Plain, Side, everything_resident, room_of_snapshots, state_on_ssd

TOKENS = 512
CALL_TARGET_S = 0.010
STEP_SHARE_TARGET = 0.01
MEMORY_TARGET = 64 * MIB
# Begins the nth one; what it returns waits for its end.
Save = Callable[[int], Callable[[], object]]


@dataclass
class Measured:
    """What one side's saves took."""

    alone: list[float] = field(default_factory=list)  # steps without a save, in seconds
    calls: list[float] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)  # steps behind one
    peaks_alone: list[int] = field(default_factory=list)  # of the process's memory, in bytes
    peaks: list[int] = field(default_factory=list)

    def figures(self, name: str, targets: bool) -> Iterator[Figure]:
        """The call, the share of a step that a save adds, and memory."""
        step, call = statistics.median(self.alone), statistics.median(self.calls)
        held = call + max(0.0, statistics.median(self.behind) - step)
        memory = max(0, max(self.peaks) - self.peaks_alone[0])  # copies stay for the next save
        yield Figure("save-stall", f"{name}_call", call, "s", CALL_TARGET_S if targets else None)
        wanted = STEP_SHARE_TARGET if targets else None
        yield Figure("save-stall", f"{name}_share", held / step, "of a step", wanted)
        wanted = MEMORY_TARGET / 1e6 if targets else None
        yield Figure("save-stall", f"{name}_memory", memory / 1e6, "MB", wanted)


def run(context: Context) -> Iterator[Figure]:
    """Yields the figures of every side."""
    with context.scratch() as folder:
        yield from _of_torch(context, folder)
        parameters = sum(p.numel() for p in _model(context).parameters())
        room = room_of_snapshots(parameters)
        yield from _of_strata("", state_on_ssd(parameters) | room, context, folder)
        yield from _of_strata("_of_host", everything_resident(parameters) | room, context, folder)


def _of_strata(
    place: str, memory: dict[str, int], context: Context, folder: Path
) -> Iterator[Figure]:
    """A snapshot, and where the state is on the SSD, a checkpoint beside it."""
    side = Paged(_model(context), _batch(context), memory, folder)
    series = folder / f"run{place}"
    try:
        for _ in range(4):
            side.step()
        strata.snapshot(side.model, series).wait()  # sets its room aside
        snapshot = measure(side, context, lambda _: strata.snapshot(side.model, series).wait)
        yield from snapshot.figures(f"snapshot{place}", True)
        if not place:
            saved = measure(
                side, context, _ended(lambda _: strata.save(side.model, folder / "one"))
            )
            yield from saved.figures("save", False)
    finally:
        side.close()


def _of_torch(context: Context, folder: Path) -> Iterator[Figure]:
    """The sides over plain PyTorch."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    side = Plain(_model(context), _batch(context))
    side.step()  # its optimizer has moments from here on
    state = {"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}
    pageable = StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False)  # no GPU
    stager = DefaultStager(pageable)

    def staged(turn: int) -> Callable[[], object]:
        saving: Any = checkpoint.async_save(
            state, checkpoint_id=folder / f"staged-{turn % 2}", async_stager=stager
        )
        return saving.upload_completion.result

    def async_save(turn: int) -> Callable[[], object]:
        saving: Any = checkpoint.async_save(state, checkpoint_id=folder / f"dcp-{turn % 2}")
        return saving.result

    sides: dict[str, Save] = {
        "torch_save": _ended(lambda turn: torch.save(state, folder / f"torch-{turn % 2}.pt")),
        "dcp_save": _ended(
            lambda turn: checkpoint.save(state, checkpoint_id=folder / f"saved-{turn % 2}")
        ),
        "dcp_async_save": async_save,
        "dcp_default_stager": staged,
    }
    for name, save in sides.items():
        yield from measure(side, context, save).figures(name, False)
    stager.close()


def measure(side: Side, context: Context, save: Save) -> Measured:
    """Steps in turns with and without a save."""
    found = Measured()
    for turn in range(context.rounds):
        with _peak(found.peaks_alone):
            found.alone += [seconds_of(side.step) for _ in range(2)]
        with _peak(found.peaks):
            begin = time.perf_counter()
            wait = save(turn)
            found.calls.append(time.perf_counter() - begin)
            found.behind.append(seconds_of(side.step))
            wait()
    return found


@contextmanager
def _peak(peaks: list[int]) -> Iterator[None]:
    """Adds the most memory that the process has meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    yield
    peaks.append(int(memory_peak()["bytes"]))


def _ended(save: Callable[[int], object]) -> Save:
    """Of a save that has ended when it returns."""

    def begin(turn: int) -> Callable[[], object]:
        save(turn)
        return lambda: None

    return begin


def _model(context: Context) -> torch.nn.Module:
    return llama_166m_or_small(context.quick, context.seed)


def _batch(context: Context) -> torch.Tensor:
    return tokens(TOKENS, context.seed)
