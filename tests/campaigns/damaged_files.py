"""The kinds of files that the campaign damages: how each is made, read, and what holds then."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any, ClassVar

import strata
import torch
from random_training import INPUTS, Setting, Training
from safetensors.torch import save_file
from strata._report.reports import Report
from strata._storage import trace_file
from strata._storage.checkpoint_files import write_manifest
from strata._storage.snapshots.format import LINKS
from strata._storage.snapshots.links import OWNER_MARK
from strata._storage.snapshots.pages import copy_snapshot
from strata._storage.snapshots.series import clean_up
from strata._storage.weights import WeightFiles
from torch import nn

MANIFEST = "manifest.json"


class Kind:
    """A file of one kind. `content` is what its JSON holds, or None where it is none."""

    path: Path
    content: Any = None
    errors: ClassVar[tuple[type[Exception], ...]] = (ValueError,)

    def __init__(self, folder: Path) -> None:
        """Makes a whole one. Subclasses set `path` in prepare()."""
        self.folder = folder
        self.prepare()
        self.whole = self.path.read_bytes()
        with contextlib.suppress(ValueError):
            self.content = json.loads(self.whole)

    def prepare(self) -> None:
        """Makes it, and whatever it takes."""
        raise NotImplementedError

    def packed(self, content: Any) -> bytes:
        """As the file would hold it."""
        return json.dumps(content).encode()

    def write(self, raw: bytes) -> None:
        """In the place of the file."""
        self.path.write_bytes(raw)

    def read(self) -> bool:
        """Whether it was accepted; errors that are documented are no exceptions here."""
        try:
            self.use()
        except self.errors:
            return False
        return True

    def use(self) -> None:
        """As a user does."""
        raise NotImplementedError

    def check(self) -> None:
        """Checks what must hold then; raises AssertionError."""

    def renew(self) -> None:
        """Restores the file after a failure."""
        self.path.write_bytes(self.whole)

    def close(self) -> None:
        """Ends the case."""


class _OfModel(Kind):
    """A file of a model's state: refused as a whole, or loaded as a whole."""

    errors = (strata.CheckpointError, strata.StrataError)

    def prepare(self) -> None:
        (self.folder / "drive0").mkdir()
        self.training = Training(Setting(place="ssd"), self.folder)
        for _ in range(2):
            self.training.step()
        self.place = self.folder / "saved"
        self.save()
        self.digest = self.training.digest()

    def save(self) -> None:
        raise NotImplementedError

    def use(self) -> None:
        self._loaded = False
        strata.load(self.training.model, self.place)
        self._loaded = True

    def check(self) -> None:
        """A refused load has changed nothing, or all else is refused until one comes to its end."""
        if not self._loaded and not self._is_half_loaded():
            assert self.training.digest() == self.digest, "a refused file changed the model"
            return
        self.renew()

    def _is_half_loaded(self) -> bool:
        try:
            with torch.no_grad():
                self.training.model(torch.zeros(1, INPUTS))
        except RuntimeError as error:
            if "half-way" not in str(error):
                raise
            return True
        return False

    def renew(self) -> None:
        super().renew()
        self.training.load(self.place)
        assert self.training.digest() == self.digest, "the whole file does not load any more"

    def close(self) -> None:
        super().renew()
        self.training.load(self.place)
        strata.unwrap(self.training.model)


class Snapshot(_OfModel):
    """The manifest of a snapshot, with a right checksum where its JSON is changed."""

    def save(self) -> None:
        extra = {"step": 2, "seen": torch.arange(3)}
        self.path = strata.snapshot(self.training.model, self.place, extra=extra).wait() / MANIFEST

    def packed(self, content: Any) -> bytes:
        content.pop("checksum", None)
        write_manifest(self.path.parent, content)
        return self.path.read_bytes()


class Checkpoint(_OfModel):
    """The manifest of a checkpoint, with a right checksum, too."""

    def save(self) -> None:
        strata.save(self.training.model, self.place, extra={"step": 2})
        self.path = self.place / MANIFEST

    packed = Snapshot.packed


class State(_OfModel):
    """The bytes of a checkpoint."""

    def save(self) -> None:
        strata.save(self.training.model, self.place, extra={"step": 2})
        self.path = min(self.place.glob("moments-*.safetensors"))


class Pages(_OfModel):
    """The pages of a snapshot, as files of its folder."""

    def save(self) -> None:
        snapshot = strata.snapshot(self.training.model, self.place, extra={"step": 2}).wait()
        copy = self.folder / "copy"
        copy_snapshot(snapshot, copy)
        self.place = copy
        (self.path,) = copy.glob("pages-*.bin")


class Owner(Kind):
    """What is said of links on a drive."""

    errors = ()

    def prepare(self) -> None:
        self.drive = self.folder / "drive0"
        links = self.drive / LINKS
        links.mkdir(parents=True)
        self.path = links / f"{'0' * 16}.json"
        self._series = self.folder / "run" / "step-000001"
        self._series.mkdir(parents=True)
        (self._series / "notes.txt").write_text("the user's")
        content = {
            "strata": OWNER_MARK,
            "folder": str(self._series),
            "pending": True,
        }
        self.path.write_text(json.dumps(content))
        (links / "letter").write_text("the user's")

    def write(self, raw: bytes) -> None:
        links = self.drive / LINKS
        links.mkdir(exist_ok=True)
        self.path.write_bytes(raw)
        (links / f"{'0' * 16}-0.pages").write_bytes(b"pages")
        (links / f"{'1' * 16}-0.pages").write_bytes(b"of another snapshot")

    def use(self) -> None:
        clean_up([str(self.drive)])

    def check(self) -> None:
        links = self.drive / LINKS
        assert (links / "letter").exists(), "a file of the user's is gone"
        assert (links / f"{'1' * 16}-0.pages").exists(), "another snapshot's link is gone"
        assert (self._series / "notes.txt").exists(), "a file of the user's is gone"


class Trace(Kind):
    """A recorded step."""

    def prepare(self) -> None:
        model: nn.Module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
        budgets = {"device": "1MiB", "host": "64MiB"}
        model, optimizer = strata.wrap(
            model, torch.optim.AdamW(model.parameters()), memory=budgets, device="host"
        )
        for _ in range(2):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        self.path = self.folder / "step.trace.json"
        strata.save_trace(model, self.path)
        self.report = strata.report(model)
        strata.unwrap(model)

    def use(self) -> None:
        trace_file.load(self.path)


class ReportFile(Trace):
    """A saved report, and its tables."""

    def prepare(self) -> None:
        super().prepare()
        self.path = self.folder / "report.json"
        self.report.save(self.path)

    def use(self) -> None:
        str(Report.load(self.path))


class Index(Kind):
    """The index of safetensors files."""

    errors = (ValueError, FileNotFoundError)

    def prepare(self) -> None:
        weights = {}
        for i in range(2):
            name = f"model-{i}.safetensors"
            save_file({f"w{i}": torch.arange(4.0)}, self.folder / name)
            weights[f"w{i}"] = name
        self.path = self.folder / "model.safetensors.index.json"
        self.path.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": weights}))

    def use(self) -> None:
        files = WeightFiles(self.folder)
        for name in files.names():
            files.read(name)
        files.close()


class Safetensors(Kind):
    """A safetensors file, with the length of its header."""

    def prepare(self) -> None:
        self.path = self.folder / "model.safetensors"
        save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}, self.path)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        length = struct.unpack_from("<Q", self.whole)[0]
        self.content = json.loads(self.whole[8 : 8 + length])
        self._data = self.whole[8 + length :]

    def packed(self, content: Any) -> bytes:
        header = json.dumps(content).encode()
        return struct.pack("<Q", len(header)) + header + self._data

    def use(self) -> None:
        files = WeightFiles(self.path)
        for name in files.names():
            files.read(name)
        files.close()


KINDS: tuple[type[Kind], ...] = (
    *(Snapshot, Owner, Pages, Checkpoint, State, Trace, ReportFile, Index, Safetensors),
)
