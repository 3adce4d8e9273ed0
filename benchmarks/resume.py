"""From a snapshot on the disk to the first step: strata.load, and the step behind it."""

import time
from collections.abc import Iterator

import strata
import torch

from .common import Context, Figure
from .models import llama, llama_166m, llama_config, tokens
from .sides import Paged, state_on_ssd

TOKENS = 128
STATE_COPIES = 5
STATE_BYTES = 12  # of a parameter: what a snapshot has


def run(context: Context) -> Iterator[Figure]:
    """Yields seconds of load() and of the step behind it, and bytes read per second."""

    def fresh() -> torch.nn.Module:
        if context.quick:
            return llama(llama_config(128, 2), torch.bfloat16, context.seed)
        return llama_166m(context.seed)

    model = fresh()
    parameters = sum(p.numel() for p in model.parameters())
    memory = state_on_ssd(parameters)
    memory["ssd"] = parameters * 14 * STATE_COPIES + (1 << 28)
    batch = tokens(TOKENS, context.seed)
    with context.scratch() as folder:
        side = Paged(model, batch, memory, folder)
        side.step()
        strata.snapshot(side.model, folder / "run").wait()
        side.close()
        loads, steps = [], []
        for _ in range(context.rounds):
            again = Paged(fresh(), batch, memory, folder)
            begin = time.perf_counter()
            strata.load(again.model, folder / "run")
            loads.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            again.step()
            steps.append(time.perf_counter() - begin)
            again.close()
    load = sorted(loads)[len(loads) // 2]
    yield Figure("resume", "load", load, "s")
    yield Figure("resume", "first_step", sorted(steps)[len(steps) // 2], "s")
    rate = parameters * STATE_BYTES / load
    yield Figure("resume", "load_bytes_s", rate, "B/s", better="higher")
