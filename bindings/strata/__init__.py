"""strata trains PyTorch models whose training state does not fit in device memory.

model, optimizer = strata.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-4),
                               memory={"device": "8GiB", "host": "24GiB"})
"""

from .errors import StrataError
from .report import PlanReport, Report
from .wrap import gather_grad, plan, report, synchronize, unwrap, wrap

__all__ = [
    "PlanReport",
    "Report",
    "StrataError",
    "gather_grad",
    "plan",
    "report",
    "synchronize",
    "unwrap",
    "wrap",
]
