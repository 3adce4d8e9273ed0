"""1.4 billion parameters in 2 GiB: parameters and AdamW's state, 16 GB, are on an SSD.

    ./dev run python examples/billion.py --ssd /path/on/an/ssd

The first step takes some minutes: it measures. `--small` trains a toy in the same way.
"""

import argparse
import time

import strata
import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--ssd", required=True, help="a folder with 30 GB free")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--tokens", type=int, default=256)
parser.add_argument("--small", action="store_true")
options = parser.parse_args()

width, layers, budgets = 2048, 24, {"device": "512MiB", "host": "1GiB", "ssd": "30GiB"}
if options.small:
    width, layers, budgets = 128, 4, {"device": "4MiB", "host": "8MiB", "ssd": "64MiB"}
with torch.device("meta"):  # no memory yet
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32_000 if not options.small else 256, hidden_size=width,
            intermediate_size=11 * width // 4, num_hidden_layers=layers, num_attention_heads=16,
            num_key_value_heads=16, dtype=torch.bfloat16,
        )
    )  # fmt: skip
print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters")
model, optimizer = strata.wrap(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-4),
    memory=budgets,
    ssd_path=options.ssd,
    dtype=torch.bfloat16,
    weights="init",  # drawn tensor by tensor, where they rest
    update="in_backward",  # gradients need no memory of their own
)
for step in range(options.steps):
    begin = time.perf_counter()
    tokens = torch.randint(model.config.vocab_size, (1, options.tokens))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - begin:.1f} s")
print(strata.report(model))
