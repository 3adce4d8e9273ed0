"""A plain PyTorch loop. What strata adds is one call; nothing below it knows.

./dev run python examples/plain_loop.py --memory 6MiB
"""

import argparse

import strata
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--memory", default="6MiB", help="of the device; the model needs twice that")
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512)) for _ in range(12)]
model = nn.Sequential(*layers, nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = strata.wrap(model, optimizer, memory={"device": options.memory, "host": "96MiB"})
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

for step in range(options.steps):
    x = torch.randn(64, 512)
    loss = nn.functional.mse_loss(model(x), x.sin().mean(1, keepdim=True))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {loss.item():.4f}, norm {norm.item():.3f}")

print(strata.report(model))
