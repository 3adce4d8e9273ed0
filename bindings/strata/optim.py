"""What users construct for optimizers, beside the classes of torch.optim.

optimizer = strata.optim.Lion(model.parameters(), lr=1e-4)        # also strata.Lion
model, optimizer = strata.wrap(model, optimizer, update=strata.optim.LockFree(max_staleness=1))
scaler = strata.optim.GradScaler()                                # for float16
"""

from ._config.update_modes import LockFree
from ._optim.lion import Lion
from ._runtime.grad_scaler import GradScaler

__all__ = ["GradScaler", "Lion", "LockFree"]
