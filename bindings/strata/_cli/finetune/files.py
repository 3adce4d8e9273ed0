"""What `strata finetune` reads: text files, and files of records, as rows of the datasets library.

    sources = find_sources(["notes/", "chats.jsonl"])
    for rows in read_sources(sources, piece_share=0.05):     # datasets.Dataset
        rows[0]["text"]

A file that ends in .jsonl or .parquet holds records. Everything else that reads as UTF-8 is text: a
document. Rows are in the cache of the datasets library. Folders are searched recursively; hidden
files and what is not text are passed over. Documents are cut into pieces at ends of lines, so that
none of them is in memory as a whole, and so that a part of a single one can be held out.
"""

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, Features, Value, load_dataset
from datasets.fingerprint import Hasher

from ..._errors import listed
from ..._storage.replacing import no_room

SOURCE = Path(__file__).read_bytes()
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "node_modules", "site-packages"})
RECORDS = {".jsonl": "json", ".parquet": "parquet"}  # what the library calls their formats
PIECE_CHARACTERS = 16_384
TEXT = Features({"text": Value("large_string"), "ends": Value("bool")})


class DataError(ValueError):
    """The data cannot be used. The message names the files."""


@dataclass(frozen=True)
class Sources:
    """Files in the order of their names."""

    texts: list[Path]
    records: list[Path]

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """The digests of all files by their paths, in the order in which they are read."""
        return {str(file): digest(file) for file in (*self.texts, *self.records)}


def find_sources(paths: Iterable[str | Path]) -> Sources:
    """The files under `paths`.

    Raises FileNotFoundError for a path that is not there, and DataError where a file that was named
    itself is not text or where nothing remains.
    """
    places = [Path(path) for path in paths]
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"no data at {place}")
    texts, records, refused = [], [], []
    for file in sorted({file for place in places for file in _files(place)}):
        if file.suffix in RECORDS:
            records.append(file)
        elif not (problem := _problem(file)):
            texts.append(file)
        elif file in places:
            raise DataError(f"{file} {problem}")
        else:
            refused.append(f"{file} ({problem})")
    if not texts and not records:
        found = listed(refused) or "no files"
        raise DataError(f"no text in {', '.join(map(str, places))}; found {found}")
    return Sources(texts, records)


def read_sources(sources: Sources, piece_share: float) -> Iterator[Dataset]:
    """Rows of all texts, with `text` and whether it `ends` a document, then those of each file of
    records. A piece of text is no more than `piece_share` of all."""
    if sources.texts:
        total = sum(file.stat().st_size for file in sources.texts)
        size = max(1, min(PIECE_CHARACTERS, int(piece_share * total)))
        files = list(map(str, sources.texts))
        yield Dataset.from_generator(
            _pieces,
            features=TEXT,
            gen_kwargs={"files": files, "size": size},
            # The library's own would know names and not contents.
            fingerprint=Hasher.hash([[sources.digests[file] for file in files], size, SOURCE]),
        )
    for file in sources.records:
        try:
            yield load_dataset(RECORDS[file.suffix], data_files=str(file), split="train")
        except Exception as error:  # the library raises whatever its parsers do
            if no_room(error):
                raise
            why = " ".join(str(error.__cause__ or error).split())
            raise DataError(f"{file} cannot be read as records: {why}") from error


def digest(file: Path) -> str:
    """Of its contents."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = [n for n in subfolders if n not in SKIPPED_FOLDERS and n[0] != "."]
        for name in names:
            file = Path(folder, name)
            if name[0] != "." and file.is_file():
                yield file


def _problem(file: Path) -> str:
    """Why there is no text in a file, or ""."""
    blank = True
    try:
        for text in _read(file, PIECE_CHARACTERS):
            if "\0" in text:
                return "is not text"
            blank = blank and not text.strip()
    except UnicodeDecodeError:
        return "is not text in UTF-8"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "is empty" if blank else ""


def _pieces(files: list[str], size: int) -> Iterator[dict[str, object]]:
    for file in files:
        pieces = _read(Path(file), size)
        text = next(pieces)
        for following in pieces:
            yield {"text": text, "ends": False}
            text = following
        yield {"text": text, "ends": True}


def _read(file: Path, size: int) -> Iterator[str]:
    """The text in pieces of about so many characters, each up to the end of a line."""
    with open(file, encoding="utf-8-sig", newline="") as opened:
        while text := opened.read(size):
            yield text + ("" if text.endswith("\n") else opened.readline(size))
