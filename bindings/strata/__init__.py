"""strata trains PyTorch models whose training state does not fit in device memory.

model, optimizer = strata.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-4),
                               memory={"device": "8GiB", "host": "24GiB"})

A public name is imported when it is first asked for: the command line answers without torch.
Modules whose names begin with an underscore are private.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import checkpoint, integrations, nn, optim
    from ._api import gather_grad, plan, report, synchronize, unwrap, wrap
    from ._config.update_modes import LockFree
    from ._core import __version__
    from ._errors import StrataError
    from ._report.reports import PlanReport, Report
    from ._storage.trace_file import save_trace
    from .checkpoint import CheckpointError, export_safetensors, load, save, snapshot
    from .integrations.deepspeed import from_deepspeed
    from .optim import GradScaler, Lion
else:
    # Public names, by the module that has them; "": they are modules themselves.
    _HOMES = {
        "": ("checkpoint", "integrations", "nn", "optim"),
        "_api": ("gather_grad", "plan", "report", "synchronize", "unwrap", "wrap"),
        "_config.update_modes": ("LockFree",),  # needs no torch
        "_core": ("__version__",),
        "_errors": ("StrataError",),
        "_report.reports": ("PlanReport", "Report"),
        "_storage.trace_file": ("save_trace",),
        "checkpoint": ("CheckpointError", "export_safetensors", "load", "save", "snapshot"),
        "integrations.deepspeed": ("from_deepspeed",),
        "optim": ("GradScaler", "Lion"),
    }

    def __getattr__(name):
        """Called by Python for a name that the package does not have yet."""
        import importlib

        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f".{home or name}", __name__)
        globals()[name] = getattr(module, name) if home else module
        return globals()[name]

    def __dir__():
        """Called by dir(): what is there, and what would come."""
        return sorted({*globals(), *__all__})


__all__ = [
    "CheckpointError",
    "GradScaler",
    "Lion",
    "LockFree",
    "PlanReport",
    "Report",
    "StrataError",
    "__version__",
    "checkpoint",
    "export_safetensors",
    "from_deepspeed",
    "gather_grad",
    "integrations",
    "load",
    "nn",
    "optim",
    "plan",
    "report",
    "save",
    "save_trace",
    "snapshot",
    "synchronize",
    "unwrap",
    "wrap",
]
