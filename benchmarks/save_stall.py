"""How long the loop is held while its state is saved: snapshots, a checkpoint, and torch's own.

One model, its state on the SSD. Each side saves behind a step; held is the time of the call, and
what the next step took beyond the median of those without a save.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import strata
import torch

from .common import Context, Figure
from .models import llama, llama_166m, llama_config, tokens
from .sides import Paged, Plain, Side, state_on_ssd

TOKENS = 512
STATE_COPIES = 5  # of the state, for two snapshots beside one that begins
CALL_TARGET_S = 0.010
STEP_SHARE_TARGET = 0.01


def run(context: Context) -> Iterator[Figure]:
    """Yields seconds of the call, and the share of a step that a save adds, for every side."""
    model = llama(llama_config(128, 2), torch.bfloat16, context.seed)
    if not context.quick:
        model = llama_166m(context.seed)
    parameters = sum(p.numel() for p in model.parameters())
    batch = tokens(TOKENS, context.seed)
    with context.scratch() as folder:
        memory = state_on_ssd(parameters) | {"ssd": parameters * 14 * STATE_COPIES + (1 << 28)}
        plain = Plain(model, batch)
        plain.step()  # its optimizer has moments from here on
        state: dict[str, Any] = {
            "model": plain.model.state_dict(),
            "optimizer": plain.optimizer.state_dict(),
        }
        yield from _figures("torch_save", plain, context, lambda n: _torch_save(state, folder, n))
        yield from _figures("dcp_async_save", plain, context, lambda n: _dcp(state, folder, n))
        side = Paged(model, batch, memory, folder)
        try:
            for _ in range(4):
                side.step()
            strata.snapshot(side.model, folder / "first").wait()  # sets its room aside
            yield from _figures(
                "snapshot",
                side,
                context,
                lambda n: strata.snapshot(side.model, folder / "run").wait,
                (CALL_TARGET_S, STEP_SHARE_TARGET),
            )
            yield from _figures("save", side, context, lambda n: _save(side, folder / "saved"))
        finally:
            side.close()


def _figures(
    name: str,
    side: Side,
    context: Context,
    save: Callable[[int], Callable[[], object]],
    targets: tuple[float | None, float | None] = (None, None),
) -> Iterator[Figure]:
    """`save` begins one and returns what waits for its end."""
    alone, calls, behind = [], [], []
    for turn in range(context.rounds):
        alone += [_seconds(side.step) for _ in range(2)]
        begin = time.perf_counter()
        wait = save(turn)
        calls.append(time.perf_counter() - begin)
        behind.append(_seconds(side.step))
        wait()
    step = statistics.median(alone)
    held = statistics.median(calls) + max(0.0, statistics.median(behind) - step)
    yield Figure("save-stall", f"{name}_call", statistics.median(calls), "s", targets[0])
    yield Figure("save-stall", f"{name}_share", held / step, "of a step", targets[1])


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _nothing() -> None:
    """It has ended when it returned."""


def _torch_save(state: dict[str, Any], folder: Path, turn: int) -> Callable[[], object]:
    torch.save(state, folder / f"torch-{turn % 2}.pt")
    return _nothing


def _dcp(state: dict[str, Any], folder: Path, turn: int) -> Callable[[], object]:
    from torch.distributed import checkpoint

    saving = checkpoint.async_save(state, checkpoint_id=folder / f"dcp-{turn % 2}")
    assert isinstance(saving, Future)
    return saving.result


def _save(side: Paged, path: Path) -> Callable[[], object]:
    strata.save(side.model, path)
    return _nothing
