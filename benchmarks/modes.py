"""The ways to update that benches compare, and the memory that each of them needs.

mode = lock_free(2)
side = Paged(model, batch, mode.state_on_ssd(parameters), folder, mode.options())
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from .common import MIB
from .sides import SLACK, STAGING_BYTES, STATE_BYTES

Update = Literal["on_step", "in_backward", "lock_free"]

# Bytes per parameter that rest in host memory while the state rests on the SSD: the 16-bit
# parameter, and its gradient. That only passes through in_backward, and lock_free adds it up in
# float32.
HOST_BYTES: dict[Update, int] = {"on_step": 2 + 2, "in_backward": 2, "lock_free": 2 + 4}
DEVICE_BYTES_MIN = 16 * MIB  # a quarter of a tiny model is less than its largest unit
PAGE_BYTES = 4 * MIB  # the largest
# In passing: what two units' gradients take in_backward; and a chunk's gradient and new parameters,
# of every chunk that lock_free has under way.
UNITS_PASSING_BYTES = 160 * MIB
CHUNK_PASSING_BYTES = 3 * PAGE_BYTES


@dataclass(frozen=True)
class Mode:
    """A way to update. `staleness` is for lock_free: steps that a parameter may lag behind."""

    name: str
    update: Update = "on_step"
    staleness: int = 0
    state_dtype: torch.dtype | str = torch.float32

    def options(self) -> dict[str, Any]:
        """Keywords of strata.wrap()."""
        import strata

        lock_free = self.update == "lock_free"
        update = strata.LockFree(max_staleness=self.staleness) if lock_free else self.update
        return {"update": update, "state_dtype": self.state_dtype}

    def state_on_ssd(self, parameters: int, passing: int | None = None) -> dict[str, int]:
        """A quarter of the 16-bit parameters on the device, and no host memory for the state but
        for `passing` bytes of what is on its way (None: enough for the largest pages)."""
        passing = self.passing_bytes() if passing is None else passing
        return {
            "device": max(parameters // 2, DEVICE_BYTES_MIN),
            "host": int(HOST_BYTES[self.update] * parameters * SLACK) + passing,
            "ssd": int(STATE_BYTES * parameters * SLACK) + 256 * MIB,
        }

    def state_in_host(self, parameters: int) -> dict[str, int]:
        """A quarter of the 16-bit parameters on the device, and no need for an SSD."""
        resting = int((HOST_BYTES[self.update] + STATE_BYTES) * parameters * SLACK)
        return {
            "device": max(parameters // 2, DEVICE_BYTES_MIN),
            "host": resting + self.passing_bytes(),
        }

    def passing_bytes(self) -> int:
        """Host memory for what does not rest there."""
        from strata._config.configure import default_workers

        chunks = 4 + 2 * default_workers()
        buffers = {
            "on_step": 0,
            "in_backward": UNITS_PASSING_BYTES,
            "lock_free": chunks * CHUNK_PASSING_BYTES,
        }
        return STAGING_BYTES + buffers[self.update]


def lock_free(staleness: int) -> Mode:
    """LockFree of so many steps."""
    return Mode(f"lock_free_{staleness}", "lock_free", staleness)
