"""Swap files that killed processes left in SSD folders.

Where the file system can, a swap file has no name and goes with its process. Where it cannot, the
file stays, at its full size, until strata comes to the folder again: for whatever reason.
"""

import logging
import os
from collections.abc import Iterable

from .._core import remove_leftovers as remove_leftovers_in

log = logging.getLogger("strata")


def remove_leftovers(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Removes those in `paths` whose processes are dead, and says so in the log.

    To be called before anybody looks at what the disk has free.
    """
    for path in paths:
        for told in remove_leftovers_in(os.fspath(path)):
            log.warning("%s", told)
