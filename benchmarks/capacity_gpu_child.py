"""One attempt of the bench capacity-gpu: trains a Llama that is made in the tiers themselves, and
prints its losses.
"""

import argparse
import json

import torch
from transformers import LlamaForCausalLM

from .device import seconds_on, torch_device
from .models import llama_config, tokens
from .sides import Paged

# Three steps are recorded and timed, and a plan is made of them: it has to fit as well.
STEPS = 3 + 3


def main() -> None:
    """Trains and prints {"losses": [...], "seconds": [...]}."""
    parser = argparse.ArgumentParser()
    for name in ("hidden", "layers", "tokens", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for tier in ("device", "host", "ssd"):
        parser.add_argument(f"--{tier}-bytes", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--ssd-path", required=True)
    options = parser.parse_args()
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(options.hidden, options.layers)).train()
    side = Paged(
        model,
        tokens(options.tokens, options.seed).to(torch_device(options.device)),
        {
            "device": options.device_bytes,
            "host": options.host_bytes,
            "ssd": options.ssd_bytes,
        },
        options.ssd_path,
        {
            "update": "in_backward",
            "dtype": torch.bfloat16,
            "weights": "init",
            "seed": options.seed,
            "init_device": torch_device(options.device),
            "activations": "auto",
            "device": options.device,
        },
    )
    losses: list[float] = []
    seconds = [seconds_on(options.device, lambda: losses.append(side.step())) for _ in range(STEPS)]
    side.synchronize()
    side.close()
    print(json.dumps({"losses": losses, "seconds": seconds}))


if __name__ == "__main__":
    main()
