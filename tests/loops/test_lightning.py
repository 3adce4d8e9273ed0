"""Lightning over wrapped models: its Trainer, whose module is the model, and Fabric."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from toys import same, wrapped

FEATURES = 64
BATCHES = torch.utils.data.TensorDataset(
    torch.randn(32, FEATURES, generator=torch.Generator().manual_seed(0)),
    torch.randn(32, 1, generator=torch.Generator().manual_seed(1)),
)


def layers() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(FEATURES, 1))


class Module(lightning.LightningModule):
    def __init__(self, over: bool) -> None:
        super().__init__()
        self.layers = layers()
        self.over = over
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return wrapped(self, optimizer)[1] if self.over else optimizer


@pytest.mark.parametrize("windows", [1, 2])
def test_its_trainer(tmp_path: Path, windows: int) -> None:
    losses = []
    for over in (False, True):
        module = Module(over)
        lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, gradient_clip_val=0.5,
            accumulate_grad_batches=windows,
        ).fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=4))  # fmt: skip
        losses.append(module.losses)
    assert same(*losses, 1e-5)


@pytest.mark.representative
def test_fabric(tmp_path: Path) -> None:
    losses = []
    for over in (False, True):
        fabric = lightning.Fabric(accelerator="cpu")
        model: Any = layers()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if over:
            model, optimizer = wrapped(model, optimizer)
        model, optimizer = fabric.setup(model, optimizer)
        found = []
        for step, (x, y) in enumerate(torch.utils.data.DataLoader(BATCHES, batch_size=8)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            found.append(loss.item())
            if step == 1:
                fabric.save(tmp_path / "it", {"model": model, "optimizer": optimizer})
                fabric.load(tmp_path / "it", {"model": model, "optimizer": optimizer})
        losses.append(found)
    assert same(*losses, 1e-5)
