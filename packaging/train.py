"""Trains a small model of plain torch over three tiers and prints the losses, bit for bit: those of
a wheel have to be those of the tree. Also the instructions that its kernels use, and what the
library for GPUs says where there is none."""

import tempfile

import strata
import torch
from strata import _core

torch.set_num_threads(1)
torch.manual_seed(0)
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(192, 192), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(192, 1))
with tempfile.TemporaryDirectory() as folder:
    model, optimizer = strata.wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        memory={"device": "2MiB", "host": "3MiB", "ssd": "64MiB"},
        ssd_path=folder,
    )
    for _ in range(10):
        inputs = torch.randn(32, 192)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
    print(f"strata: {strata.__file__}")
    print(_core.best_isa(), _core.device_error("cuda:0"), sep="\n")
    strata.save(model, f"{folder}/checkpoint")
    strata.load(model, f"{folder}/checkpoint")
