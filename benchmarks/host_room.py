"""Host memory of machines that show it only once it is touched: some virtual machines begin with
little and grow. What is free is asked when this has been here.

    grow(110 * GIB, context.say)          # step by step, by all cores, in a child; gives it back

The child offers itself to be killed, should the machine not have what it says.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .common import GIB, ROOT, seconds_of

STEP = GIB
SECONDS_MAX = 240


def grow(needed: int, say: Callable[[str], None]) -> None:
    """Touches memory until so many bytes were there, or the machine grows no more. No room for them
    is nothing to tell: whoever needs them says so."""
    from strata._config.machine import free_host_bytes, host_bytes

    if free_host_bytes() >= needed:
        return
    before = host_bytes()

    def ask() -> None:
        command = [sys.executable, "-m", "benchmarks.host_room", str(needed)]
        subprocess.run(command, cwd=ROOT, check=False, timeout=SECONDS_MAX)

    seconds = seconds_of(ask)
    say(f"host memory: {before / 1e9:.0f} GB, {host_bytes() / 1e9:.0f} behind {seconds:.0f} s")


def touch(
    needed: int, step: Callable[[], object], free: Callable[[], int], total: Callable[[], int]
) -> int:
    """Takes steps until `needed` bytes are held, or little is left and one more step does not make
    the machine larger. Returns the bytes."""
    held = 0
    while held < needed:
        before, last = total(), free() < 2 * STEP
        step()
        held += STEP
        if last and total() <= before:
            break
    return held


def main() -> None:
    """The child: touches as many bytes as the command line says."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    import torch
    from strata._config.machine import free_host_bytes, host_bytes

    held: list[torch.Tensor] = []
    # fill_() is done by all cores, and so the kernel clears the pages on all of them.
    touch(
        int(sys.argv[1]),
        lambda: held.append(torch.empty(STEP, dtype=torch.uint8).fill_(1)),
        free_host_bytes,
        host_bytes,
    )


if __name__ == "__main__":
    main()
