"""What an earlier run left in the output folder: refused, continued or replaced.

    claim(output, options)         # refuses, and removes nothing
    remove_earlier(output)         # the new run is accepted

Only files that a run writes are removed: by their names, and where they carry a mark, by that.
"""

import re
from pathlib import Path

from ..._storage.export import refuse_others, remove_export
from ..._storage.replacing import work_folders
from ...integrations._trainer_checkpoints import STATE_FOLDER, remove_checkpoint
from .data import DATA_NAME, TOKENIZER_NAME
from .options import OPTIONS_NAME, Options
from .origin import TOKENIZER_FILES

MODEL_NAME = "model"
CHECKPOINTS = "checkpoint-[0-9]*"
CHECKPOINT_FILES = {
    *("rng_state.pth", "scaler.pt", "scheduler.pt", "trainer_state.json", "training_args.bin"),
    STATE_FOLDER,
}
ADAPTER_FILES = (  # the configuration last: it says that the folder is an adapter's
    *("README.md", "generation_config.json", "adapter_model.safetensors", "adapter_config.json"),
)


def claim(output: Path, options: Options) -> None:
    """Makes the output folder. Raises ValueError or FileExistsError where the run would take the
    place of an earlier one unasked, or of files that no run wrote."""
    earlier = (output / OPTIONS_NAME).exists()
    if not options.results.resume:
        if earlier:
            _check_overwriting(output, options)
        elif found := sorted(output.glob(CHECKPOINTS)):
            raise ValueError(f"{found[0]} is of no run of strata finetune: give another --output")
    if not (earlier and _is_adapter(output)):
        # At the end it would be too late.
        refuse_others(output / MODEL_NAME, (*TOKENIZER_FILES, *ADAPTER_FILES))
    output.mkdir(parents=True, exist_ok=True)


def remove_earlier(output: Path) -> None:
    """Removes what an earlier run wrote and the new one would not replace before its end.

    Checkpoints go first: killed in between, nothing can be resumed with the wrong data. The
    options stay, as the mark of a run, until those of the new one take their place; so do the
    windows.
    """
    if not (output / OPTIONS_NAME).exists():
        return
    for folder in output.glob(CHECKPOINTS):
        remove_checkpoint(folder)
    if _is_adapter(output):
        for name in (*TOKENIZER_FILES, *ADAPTER_FILES):
            (output / MODEL_NAME / name).unlink(missing_ok=True)
    remove_export(output / MODEL_NAME, TOKENIZER_FILES)
    for name in TOKENIZER_FILES:
        (output / TOKENIZER_NAME / name).unlink(missing_ok=True)


def _is_of_checkpoint(name: str) -> bool:
    """Whether the Trainer calls a file so. Of several ranks each has its random state in one."""
    return name in CHECKPOINT_FILES or re.fullmatch(r"rng_state_\d+\.pth", name) is not None


def _is_adapter(output: Path) -> bool:
    """Whether the model of the earlier run is one; its weights carry no mark of ours."""
    return (output / MODEL_NAME / ADAPTER_FILES[-1]).is_file()


def _check_overwriting(output: Path, options: Options) -> None:
    if not options.results.overwrite:
        raise ValueError(
            f"{output} holds an earlier run: --resume continues it, --overwrite replaces it"
        )
    checkpoints = sorted(output.glob(CHECKPOINTS))
    folders = [*checkpoints, *(output / n for n in (DATA_NAME, TOKENIZER_NAME, MODEL_NAME))]
    for read in (options.start.model, *options.start.data):
        if any(Path(read).resolve().is_relative_to(folder.resolve()) for folder in folders):
            raise ValueError(
                f"--overwrite would remove {read}, which the new run reads: give another --output"
            )
    left = [path for folder in checkpoints for path in work_folders(folder, STATE_FOLDER)]
    for entry in (entry for folder in checkpoints for entry in folder.iterdir()):
        if not _is_of_checkpoint(entry.name) and entry not in left:
            raise ValueError(
                f"{entry} is not a file of the earlier run: move it away, or give another --output"
            )
