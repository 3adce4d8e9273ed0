"""What adapters take of what they need: LoRA over a Llama of 7 B parameters, on the meta device,
with all pages of what is trained, gradients and optimizer state included."""

from collections.abc import Iterator

import strata
import torch
from transformers import LlamaForCausalLM

from .common import Context, Figure
from .models import llama_config
from .qlora import with_adapters

MEMORY = {"device": "2GiB", "host": "8GiB", "ssd": "200GiB"}
LARGEST = 1.2
LAYERS = {"q,v": ["q_proj", "v_proj"], "all linear": "all-linear"}


def run(context: Context) -> Iterator[Figure]:
    """Yields pages of what is trained over the bytes in them."""
    config = llama_config(128, 2) if context.quick else llama_config(4096, 32)
    with context.scratch() as folder:
        for rank in (8, 64):
            for name, layers in LAYERS.items():
                with torch.device("meta"):
                    model = with_adapters(LlamaForCausalLM(config), rank, layers)
                trained = [p for p in model.parameters() if p.requires_grad]
                found = strata.plan(
                    model,
                    torch.optim.AdamW(trained),
                    memory=MEMORY,
                    ssd_path=folder,
                    dtype=torch.bfloat16,
                )
                taken, needed = found.plan["trained_page_bytes"], found.plan["trained_bytes"]
                what = f"lora of {rank} on {name}"
                yield Figure("lora-bytes", f"{what}, needed", needed, "B")
                yield Figure(
                    "lora-bytes", f"{what}, taken over needed", taken / needed, "x", LARGEST
                )
