"""Bandwidth of single pages between host memory and the device, each way and both, through the
port CopyEngine; against one copy of everything, each way at once (on a GPU: of pinned memory).
"""

from collections.abc import Iterator

from . import device_program
from .common import Context, Figure


def run(context: Context) -> Iterator[Figure]:
    """Yields GB/s of each way, and percentages of what one copy reaches."""
    yield from device_program.figures(context, "copy")
