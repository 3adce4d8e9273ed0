"""A vision model: a ViT learns which colour noise is tinted with, in a third of its memory.

./dev run python examples/vision.py
"""

import argparse

import strata
import torch
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int, default=16)
options = parser.parse_args()

torch.manual_seed(0)
config = ViTConfig(
    image_size=32, patch_size=8, hidden_size=192, num_hidden_layers=6, num_attention_heads=6,
    intermediate_size=384, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = ViTForImageClassification(config)
model, optimizer = strata.wrap(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    memory={"device": "8MiB", "host": "64MiB"},
)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, a little more of it in one of its three colours: which one is the label."""
    labels = torch.randint(3, (options.batch,))
    tint = 0.3 * F.one_hot(labels, 3)
    return torch.randn(options.batch, 3, 32, 32) + tint[:, :, None, None], labels


for step in range(options.steps):
    images, labels = batch()
    logits = model(pixel_values=images).logits
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == options.steps - 1:
        right = (logits.argmax(1) == labels).float().mean().item()
        print(f"step {step}: loss {loss.item():.3f}, {right:.0%} right")
