"""A child of the bench ranks: one rank, or one process that is alone, trains a Llama by
strata or by a peer, a step at a time. Its memory is that which an idle process has not, less what
it used of the device, which each rank has of its own."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .common import MIB, seconds_of
from .models import llama, llama_166m, llama_config, tokens
from .peers.child import Answer, claim_stdout, serve
from .sides import Paged, everything_resident, state_on_ssd, steady_step, train_step

ADAMW = {"lr": 1e-5, "weight_decay": 0.01}
QUICK_HOST_BYTES = 24 * MIB  # of 39 that the small model has


def batch_of(count: int, seed: int, rank: int, ranks: int, sequences: int) -> torch.Tensor:
    """This rank's part of the global batch."""
    return tokens(count, seed, sequences=sequences)[rank::ranks]


def open_strata(options: argparse.Namespace, model: Any, batch: torch.Tensor) -> Paged:
    """All state in host memory, or on the SSD; a quarter of the parameters on the device."""
    parameters = sum(p.numel() for p in model.parameters())
    room = 4 if options.quick else 1
    budgets = (everything_resident if options.ssd is None else state_on_ssd)(parameters * room)
    budgets["device"] = parameters * room // 2
    budgets["host"] += 2 * parameters * room  # gradients in float32
    if options.ssd is not None and options.quick:
        budgets["host"] = QUICK_HOST_BYTES
    return Paged(
        model,
        batch,
        budgets,
        options.ssd,
        {"gradient_accumulation_steps": 2, "dtype": torch.bfloat16},
        **ADAMW,
    )


def open_fsdp2(model: Any) -> torch.optim.Optimizer:
    """Sharded over the ranks; its shards are in host memory, for the device is the processor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)  # type: ignore[arg-type]


def open_peer(side: str, model: Any, batch: torch.Tensor) -> Callable[[], object]:
    """A step of it."""
    if side == "deepspeed":
        from .peers.zero import Zero

        return Zero(model, batch, None, **ADAMW).step
    optimizer = open_fsdp2(model)
    return lambda: train_step(model, optimizer, batch)


def proportional_bytes() -> int:
    """This process's memory, what it shares with others divided among them."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return (
        int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1]) << 10
    )


def main() -> None:
    """Answers "step" with seconds, "memory" with bytes, and "ssd" with bytes moved so far."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["strata", "fsdp2", "deepspeed"])
    for name in ("tokens", "seed", "threads", "sequences"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ssd", type=Path, help="a folder where the state rests")
    options = parser.parse_args()
    answers = claim_stdout()
    torch.set_num_threads(options.threads)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and options.side != "deepspeed":  # which does so by itself
        dist.init_process_group("gloo")
    torch.optim.AdamW([torch.zeros(1)])  # for which PyTorch loads its compiler, 90 MB of it
    idle = proportional_bytes()
    dtype = torch.float32 if options.side == "fsdp2" else torch.bfloat16
    model = (
        llama(llama_config(128, 2), dtype, options.seed)
        if options.quick
        else llama_166m(options.seed).to(dtype)
    )
    batch = batch_of(options.tokens, options.seed, rank, ranks, options.sequences)
    if options.side == "strata":
        side = open_strata(options, model, batch)

        def memory() -> Answer:
            stats = side.session.stats()
            process = proportional_bytes() - idle - stats["device_bytes_peak"]
            return {"host": stats["host_bytes"], "process": process}

        def step() -> Answer:
            return {"seconds": steady_step(side)}

        def ssd() -> Answer:
            stats = side.session.stats()
            return {"moved": stats["ssd to host bytes"] + stats["host to ssd bytes"]}

    else:
        train = open_peer(options.side, model, batch)

        def memory() -> Answer:
            return {"host": 0, "process": proportional_bytes() - idle}

        def ssd() -> Answer:
            return {"moved": 0}

        def step() -> Answer:
            return {"seconds": seconds_of(train)}

    serve(answers, {"step": step, "memory": memory, "ssd": ssd})
    os._exit(0)


if __name__ == "__main__":
    main()
