"""What snapshots write beyond the step's own: of state on the SSD, of state in host memory, and of
an adapter over a frozen model."""

from collections.abc import Iterator
from pathlib import Path

import strata
import torch
from torch import nn

from .common import Context, Figure
from .models import llama, llama_166m, llama_config, tokens
from .sides import session_of, train_step

TOKENS = 128
STEPS = 3
TRAINED_BYTES = 12  # of a bfloat16 parameter with its residual and moments
ALL_ON_SSD = {"device": "1GiB", "host": "256MiB", "ssd": "24GiB"}
ALL_IN_HOST = {"device": "1GiB", "host": "8GiB", "ssd": "24GiB"}
QUICK = {"device": "8MiB", "host": "64MiB", "ssd": "1GiB"}


def run(context: Context) -> Iterator[Figure]:
    """Yields bytes of a snapshot beyond the step, as a share of the state that has changed."""
    for name, memory, trained in (
        ("ssd", ALL_ON_SSD, "all"),
        ("host", ALL_IN_HOST, "all"),
        ("adapter", ALL_IN_HOST, "head"),
    ):
        model = llama(llama_config(128, 2), torch.bfloat16, context.seed)
        if not context.quick:
            model = llama_166m(context.seed)
        if trained == "head":
            model.requires_grad_(False)
            model.lm_head.requires_grad_(True)
        with context.scratch() as folder:
            share = _share(model, QUICK if context.quick else memory, folder, context.seed)
        target = None if name == "ssd" else 1.05
        yield Figure("save-bytes", f"{name}_share", share, "of what changed", target)


def _share(model: nn.Module, memory: dict[str, str], folder: Path, seed: int) -> float:
    changed = TRAINED_BYTES * sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = [p for p in model.parameters() if p.requires_grad]
    wrapped, optimizer = strata.wrap(
        model,
        torch.optim.AdamW(parameters, lr=1e-4),
        memory=memory,
        ssd_path=folder,
        device="host",
        activations=None,
    )
    batch = tokens(TOKENS, seed)
    try:
        train_step(wrapped, optimizer, batch)
        strata.snapshot(wrapped, folder / "run").wait()  # has what never changes, too
        first = _written(wrapped)
        for _ in range(STEPS):
            train_step(wrapped, optimizer, batch)
            strata.snapshot(wrapped, folder / "run").wait()
        return (_written(wrapped) - first) / STEPS / changed
    finally:
        strata.unwrap(wrapped)


def _written(model: nn.Module) -> int:
    written: int = session_of(model).stats()["snapshot_bytes"]
    return written
