"""One attempt of the capacity bench, run inside the memory limit: trains a Llama for a few steps
and prints its losses. Imports little, for every megabyte counts.
"""

import argparse
import json
import time

import torch
from transformers import LlamaForCausalLM

from .models import llama_config, tokens

STEPS = 3
MIB = 1 << 20
# Of the 2 GiB, Python and PyTorch take about 0.5; activations, gradients of one unit on their way
# out and the logits take the rest of what is not listed here.
DEVICE_BYTES = 256 * MIB
HOST_BYTES = 640 * MIB


def main() -> None:
    """Trains and prints {"losses": [...], "seconds": [...]}."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["plain", "strata"])
    for name in ("hidden", "layers", "tokens", "seed", "ssd-bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--ssd-path", required=True)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    config = llama_config(options.hidden, options.layers)
    if options.side == "plain":
        torch.set_default_dtype(torch.bfloat16)  # built in 16 bit, never in 32
        model = LlamaForCausalLM(config).train()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        import strata

        with torch.device("meta"):
            model = LlamaForCausalLM(config).train()
        model, optimizer = strata.wrap(
            model,
            torch.optim.AdamW(model.parameters()),
            memory={"device": DEVICE_BYTES, "host": HOST_BYTES, "ssd": options.ssd_bytes},
            ssd_path=options.ssd_path,
            dtype=torch.bfloat16,
            weights="init",
            seed=options.seed,
            device="host",
            activations=None,  # the limit of the whole process holds for them
        )
    batch = tokens(options.tokens, options.seed)
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
    if options.side == "strata":
        strata.synchronize(model)
    print(json.dumps({"losses": losses, "seconds": seconds}))


if __name__ == "__main__":
    main()
