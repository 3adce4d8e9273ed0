"""A child of the bench vs-deepspeed: trains a Llama by strata or by a peer, a step at a time."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch

from .child import Answer, claim_stdout, memory_peak, serve

ADAMW = {"lr": 1e-5, "weight_decay": 0.01}


# (a step, which returns its loss; seconds of a step between others)
Steps = tuple[Callable[[], float], Callable[[], float]]


def open_deepspeed(options: argparse.Namespace) -> Steps:
    """ZeRO-3 with CPU offload, or with NVMe offload."""
    from transformers import LlamaForCausalLM

    from ..models import tokens
    from .zero import Zero

    model = LlamaForCausalLM.from_pretrained(options.weights, dtype=torch.bfloat16).train()
    batch = tokens(options.tokens, options.seed)
    side = Zero(model, batch, options.folder if options.tier == "ssd" else None, **ADAMW)
    return side.step, side.timed_step


def open_strata(options: argparse.Namespace) -> Steps:
    """Its state in host memory, or on the SSD."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..models import tokens
    from ..sides import Paged, quarter_device, state_on_ssd, steady_step

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(options.weights)).train()
    parameters = sum(p.numel() for p in model.parameters()) * options.room
    on_ssd = options.tier == "ssd"
    side = Paged(
        model,
        tokens(options.tokens, options.seed),
        state_on_ssd(parameters) if on_ssd else quarter_device(parameters),
        options.folder if on_ssd else None,
        {"update": options.update, "weights": options.weights, "dtype": torch.bfloat16},
        **ADAMW,
    )
    return side.step, lambda: steady_step(side)


OPEN = {"strata": open_strata, "deepspeed": open_deepspeed}


def main() -> None:
    """Answers "warm" with the loss of a step, "step" with seconds, "peak" with bytes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=OPEN)
    parser.add_argument("--tier", choices=["host", "ssd"], required=True)
    parser.add_argument("--update", default="on_step", help="of strata")
    parser.add_argument("--room", type=int, default=1, help="budgets for so many times the model")
    for name in ("tokens", "seed", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("weights", "folder"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    answers = claim_stdout()
    torch.set_num_threads(options.threads)
    step, timed_step = OPEN[options.side](options)

    def warm() -> Answer:
        return {"loss": step()}

    def turn() -> Answer:
        return {"seconds": timed_step()}

    serve(answers, {"warm": warm, "step": turn, "peak": memory_peak})
    # Neither side owes anything: the folders are the parent's. Threads of libraries that would
    # wait for each other at exit are not waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
