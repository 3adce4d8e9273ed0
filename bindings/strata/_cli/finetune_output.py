"""The output folder of `strata finetune`: what an earlier run left in it, and what becomes of that.

    claim(output, options)         # refuses, and removes nothing
    ...                            # the new run is accepted
    remove_earlier(output)

Only files that a run writes are removed: by their names, and where they carry a mark, by that.
"""

from pathlib import Path

from .._storage.checkpoint_files import check_replaceable, foreign_files, remove_checkpoint
from .._storage.export_files import refuse_others, remove_export
from .finetune_data import DATA_NAME, TOKENIZER_FILES, TOKENIZER_NAME
from .finetune_options import OPTIONS_NAME, Options

CHECKPOINT_NAME, MODEL_NAME = "checkpoint", "model"
RUN_FOLDERS = (CHECKPOINT_NAME, DATA_NAME, TOKENIZER_NAME, MODEL_NAME)


def claim(output: Path, options: Options) -> None:
    """Makes the output folder. Raises ValueError, FileExistsError or CheckpointError where the run
    would take the place of an earlier one unasked, or of files that no run wrote."""
    if not options.resume:
        if (output / OPTIONS_NAME).exists():
            _check_overwriting(output, options)
        else:
            check_replaceable(output / CHECKPOINT_NAME)
    refuse_others(output / MODEL_NAME, TOKENIZER_FILES)  # at the end it would be too late
    output.mkdir(parents=True, exist_ok=True)


def remove_earlier(output: Path) -> None:
    """Removes what an earlier run wrote and the new one would not replace before its end.

    The checkpoint goes first: killed in between, nothing can be resumed with the wrong text. The
    options stay, as the mark of a run, until those of the new one take their place; so do the
    tokens.
    """
    if not (output / OPTIONS_NAME).exists():
        return
    remove_checkpoint(output / CHECKPOINT_NAME)
    remove_export(output / MODEL_NAME, TOKENIZER_FILES)
    for name in TOKENIZER_FILES:
        (output / TOKENIZER_NAME / name).unlink(missing_ok=True)


def _check_overwriting(output: Path, options: Options) -> None:
    if not options.overwrite:
        raise ValueError(
            f"{output} holds an earlier run: --resume continues it, --overwrite replaces it"
        )
    folders = [(output / name).resolve() for name in RUN_FOLDERS]
    for read in (options.model, *options.data):
        if any(Path(read).resolve().is_relative_to(folder) for folder in folders):
            raise ValueError(
                f"--overwrite would remove {read}, which the new run reads: give another --output"
            )
    if foreign := foreign_files(output / CHECKPOINT_NAME):  # a checkpoint takes the folder's place
        raise ValueError(
            f"{foreign[0]} is not a file of the earlier run: move it away, or give another --output"
        )
