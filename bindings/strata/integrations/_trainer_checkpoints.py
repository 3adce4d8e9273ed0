"""Checkpoints of a Trainer on the disk, whose training state is a snapshot or a saved one: which
are complete, which may go, and how many snapshots there are at once.

    newest_checkpoint("runs")                  # what to go on from
    for folder in outdated(Path("runs"), limit=2, best=None):
        remove_checkpoint(folder)

A checkpoint is complete when trainer_state.json can be read, which the Trainer writes last, and its
training state is whole. A snapshot may become so later, so its folder is there from the beginning.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

from .._storage.checkpoint_files import CheckpointError, find
from .._storage.checkpoint_files import remove_checkpoint as remove_saved
from .._storage.snapshots.series import remove_snapshot, snapshots_of

STATE_FOLDER = "strata"  # of a checkpoint
TRAINER_STATE = "trainer_state.json"


def checkpoints_in(output_dir: str | Path) -> list[tuple[int, Path]]:
    """All of a Trainer, complete or not, with their numbers."""
    return [
        (int(match.group(1)), path)
        for path in Path(output_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir()
    ]


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest checkpoint of a Trainer that was written to its end.

    Args:
        output_dir: that of the training arguments.

    Returns:
        Its folder, `checkpoint-N`; None: there is none.
    """
    complete = [(n, path) for n, path in checkpoints_in(output_dir) if is_complete(path)]
    return max(complete, key=lambda each: (_written(each[1]), each[0]), default=(0, None))[1]


def _written(checkpoint: Path) -> int:
    """When the Trainer came to the end of it. Numbers say less: a run that went back to an older
    checkpoint counts on from that one's."""
    return (checkpoint / TRAINER_STATE).stat().st_mtime_ns


def is_complete(checkpoint: Path) -> bool:
    """Whether the Trainer came to the end of writing it, and its training state is whole."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE).read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(state, dict) or "global_step" not in state:
        return False
    folder = checkpoint / STATE_FOLDER
    return not folder.is_dir() or find(folder) is not None or bool(snapshots_of(folder))


def outdated(output_dir: Path, limit: int | None, best: str | None) -> list[Path]:
    """Those that need not stay beside the newest complete one: `limit` stay, the best among them.
    One that is under way is newer, and stays."""
    all_of_them = [path for _, path in checkpoints_in(output_dir)]
    found = sorted((p for p in all_of_them if (p / TRAINER_STATE).is_file()), key=_written)
    complete = [path for path in found if is_complete(path)]
    if not limit or limit < 1 or not complete:
        return []
    stay = {complete[-1], *(path for path in complete if best and path.samefile(best))}
    for path in reversed(complete):
        if len(stay) < limit:
            stay.add(path)
    cut = [path for path in all_of_them if _was_cut(path, _written(complete[-1]))]
    return [path for path in found[: found.index(complete[-1])] if path not in stay] + cut


def _was_cut(checkpoint: Path, since: int) -> bool:
    """Whether a process was killed while it wrote or removed this one: the Trainer did not come to
    its end, and nothing in it is newer than that time."""
    if (checkpoint / TRAINER_STATE).exists() or not (checkpoint / STATE_FOLDER).is_dir():
        return False
    return all(p.lstat().st_mtime_ns < since for p in [checkpoint, *checkpoint.rglob("*")])


def remove_checkpoint(checkpoint: Path) -> None:
    """Removes it with what its snapshots have on the drives. Killed meanwhile, it is not complete
    any more."""
    (checkpoint / TRAINER_STATE).unlink(missing_ok=True)
    clear_state(checkpoint / STATE_FOLDER)
    shutil.rmtree(checkpoint, ignore_errors=True)


def clear_state(folder: Path) -> None:
    """Removes the training state in a checkpoint, saved or snapshots."""
    for snapshot in snapshots_of(folder):
        try:
            remove_snapshot(snapshot)
        except CheckpointError:  # damaged: what it has on drives is not known
            shutil.rmtree(snapshot, ignore_errors=True)
    if folder.is_dir():
        remove_saved(folder)


def snapshots_at_once(args: Any, steps: int) -> int:
    """How many complete snapshots there are beside the one that is being taken. `args`: of the
    Trainer; `steps`: that it trains."""
    limit = args.save_total_limit
    if limit and limit > 0:
        return max(int(limit), 2 if args.load_best_model_at_end else 1)
    strategy, every = args.save_strategy, args.save_steps
    if strategy == "best":  # at most behind every evaluation
        strategy, every = args.eval_strategy, args.eval_steps or 1
    if every < 1:  # a part of all steps
        every = max(1, math.ceil(steps * every))
    saves = args.num_train_epochs if strategy == "epoch" else steps / every
    return max(1, math.ceil(saves) - 1)
