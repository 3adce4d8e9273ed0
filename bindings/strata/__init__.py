"""strata trains PyTorch models whose training state does not fit in device memory.

model, optimizer = strata.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-4),
                               memory={"device": "8GiB", "host": "24GiB"})
"""

from . import nn
from .checkpoint import load, save
from .checkpoint_files import CheckpointError
from .errors import StrataError
from .export import export_safetensors
from .grad_scaler import GradScaler
from .lion import Lion
from .report import PlanReport, Report
from .trace_file import save_trace
from .update_modes import LockFree
from .wrap import gather_grad, plan, report, synchronize, unwrap, wrap

__all__ = [
    "CheckpointError",
    "GradScaler",
    "Lion",
    "LockFree",
    "PlanReport",
    "Report",
    "StrataError",
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
