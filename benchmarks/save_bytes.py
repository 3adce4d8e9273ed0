"""What snapshots write beyond the step's own: where everything rests on the SSD, where parameters
do not, where nothing does, and of LoRA over a frozen model."""

from collections.abc import Iterator
from pathlib import Path

import strata
import torch
from torch import nn

from .common import Context, Figure
from .models import llama_166m_or_small, tokens
from .qlora import with_adapters
from .sides import session_of, train_step

TOKENS = 128
STEPS = 3
TRAINED_BYTES = 12  # of a bfloat16 parameter with its residual and moments
MEMORY = {
    "ssd": {"device": "112MiB", "host": "40MiB"},  # what passes through; eight pages rest there
    "state_on_ssd": {"device": "1GiB", "host": "256MiB"},
    "host": {"device": "1GiB", "host": "8GiB"},
    "lora_8": {"device": "1GiB", "host": "8GiB"},
    "lora_64": {"device": "1GiB", "host": "8GiB"},
}
QUICK = {"device": "8MiB", "host": "64MiB"}
TARGETS = {"ssd": 0.02, "host": 1.05, "lora_8": 1.05, "lora_64": 1.05}


def run(context: Context) -> Iterator[Figure]:
    """Yields bytes of a snapshot beyond the step, as a share of the state that has changed."""
    for name, memory in MEMORY.items():
        with context.scratch() as folder:
            limits = {**(QUICK if context.quick else memory), "ssd": "24GiB"}
            share = _share(_model(context, name), limits, folder, context.seed)
        yield Figure("save-bytes", f"{name}_share", share, "of what changed", TARGETS.get(name))


def _model(context: Context, name: str) -> nn.Module:
    model = llama_166m_or_small(context.quick, context.seed)
    lora, _, rank = name.partition("_")
    return with_adapters(model, int(rank)) if lora == "lora" else model


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
