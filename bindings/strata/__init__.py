"""strata trains PyTorch models whose training state does not fit in device memory.

model, optimizer = strata.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-4),
                               memory={"device": "8GiB", "host": "24GiB"})

A public name is imported when it is first asked for: the command line answers without torch. No
module of the package may have the name of a public function, which it would take the place of.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import nn
    from ._core import __version__
    from .api import gather_grad, plan, report, synchronize, unwrap, wrap
    from .checkpoint import load, save
    from .checkpoint_files import CheckpointError
    from .errors import StrataError
    from .export import export_safetensors
    from .grad_scaler import GradScaler
    from .lion import Lion
    from .reports import PlanReport, Report
    from .trace_file import save_trace
    from .update_modes import LockFree
else:
    # Public names, by the module that has them; nn is one itself.
    _HOMES = {
        "CheckpointError": "checkpoint_files",
        "GradScaler": "grad_scaler",
        "Lion": "lion",
        "LockFree": "update_modes",
        "PlanReport": "reports",
        "Report": "reports",
        "StrataError": "errors",
        "__version__": "_core",
        "export_safetensors": "export",
        "gather_grad": "api",
        "load": "checkpoint",
        "nn": "nn",
        "plan": "api",
        "report": "api",
        "save": "checkpoint",
        "save_trace": "trace_file",
        "synchronize": "api",
        "unwrap": "api",
        "wrap": "api",
    }

    def __getattr__(name):
        """Called by Python for a name that the package does not have yet."""
        import importlib

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = importlib.import_module(f".{_HOMES[name]}", __name__)
        value = home if name == "nn" else getattr(home, name)
        globals()[name] = value
        return value

    def __dir__():
        """Called by dir(): what is there, and what would come."""
        return sorted(globals() | _HOMES)


__all__ = [
    "CheckpointError",
    "GradScaler",
    "Lion",
    "LockFree",
    "PlanReport",
    "Report",
    "StrataError",
    "__version__",
    "export_safetensors",
    "gather_grad",
    "load",
    "nn",
    "plan",
    "report",
    "save",
    "save_trace",
    "synchronize",
    "unwrap",
    "wrap",
]
