"""What a run is made of, by its contents: the files of its data, and those that say what its model
and tokenizer are. A resumed run compares them, so that no name stands for what it was not.

    found = origin(choice, find_sources(["notes/"]))   # JSON
    refuse_other_model(before, choice, output)
    refuse_other_data(before, ["notes/"], output)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..._errors import listed
from ..models import Choice
from .files import Sources, digest, find_sources

# Of a tokenizer, as save_pretrained calls them.
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
ANEW = "--overwrite in place of --resume starts anew"

Digests = dict[str, str]  # of files, by their paths


def origin(choice: Choice, sources: Sources) -> dict[str, Digests]:
    """Of a run that begins."""
    return {"model": _of_model(choice), "data": sources.digests}


def refuse_other_model(before: dict[str, Any], choice: Choice, output: Path) -> None:
    """Raises ValueError where files of the model say something else now."""
    found, recorded = _of_model(choice), before.get("model", {})
    changed = sorted(n for n in found.keys() | recorded if found.get(n) != recorded.get(n))
    if changed:
        raise ValueError(
            f"cannot resume: {listed(changed)} of --model changed since the run in {output} began: "
            f"put back what was there, or {ANEW}"
        )


def refuse_other_data(before: dict[str, Any], data: Sequence[str], output: Path) -> None:
    """Raises ValueError where `data` are not what the run reads. It needs none of them: it has a
    copy of its own."""
    copy = f"leave --data out to go on with the run's own copy, or {ANEW}"
    try:
        found, recorded = find_sources(data).digests, before.get("data", {})
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot resume: {error}: {copy}") from error
    if list(found.values()) == list(recorded.values()):
        return
    new = [path for path, digest in found.items() if digest not in recorded.values()]
    gone = [path for path, digest in recorded.items() if digest not in found.values()]
    what = [f"{listed(new)} is new or changed"] if new else []
    what += [f"{listed(gone)} is missing or changed"] if gone and not new else []
    raise ValueError(
        f"cannot resume: --data names other data than the run in {output} began with "
        f"({what[0] if what else 'the same files in another order'}): {copy}"
    )


def _of_model(choice: Choice) -> Digests:
    files = [choice.config_path] if choice.config_path else []
    if choice.tokenizer is not None:
        files += [file for n in TOKENIZER_FILES if (file := choice.tokenizer / n).is_file()]
    return {file.name: digest(file) for file in files}
