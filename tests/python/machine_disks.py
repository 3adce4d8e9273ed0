"""Processes of one host that are to count as of several machines do not see each other's disks.

    hide_others("/tmp/test", "a")        # of /tmp/test/a and /tmp/test/b the first is there alone

For bugs by which a rank reads, or looks for, what only another machine has. What Python opens,
lists or looks at is hidden, and page files, which the core opens.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

from strata._storage.snapshots import adopt, pages

WATCHED = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.link")


def hide_others(root: str, machine: str) -> None:
    """From this process, for good: the folders of `root` whose names have one letter, but one."""

    def check(path: Any) -> None:
        if not isinstance(path, str | os.PathLike):
            return
        place = os.path.abspath(os.fspath(path))
        if not isinstance(place, str) or not place.startswith(f"{root}/"):
            return
        name = Path(place).relative_to(root).parts[0]
        if len(name) == 1 and name != machine:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", place)

    def watch(event: str, given: tuple[Any, ...]) -> None:
        if event in WATCHED:
            for path in given[:2]:
                check(path)

    stat = os.stat

    def seen(path: Any, **more: Any) -> os.stat_result:
        check(path)
        return stat(path, **more)

    def guarded(opens: Any) -> Any:
        def opened(folders: list[str], *given: Any) -> Any:
            for folder in folders:
                check(folder)
            return opens(folders, *given)

        return opened

    sys.addaudithook(watch)
    os.stat = seen  # type: ignore[assignment]
    pages.SavedPages = guarded(pages.SavedPages)  # type: ignore[misc]
    adopt.PageFiles = guarded(adopt.PageFiles)  # type: ignore[misc]
