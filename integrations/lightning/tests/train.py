"""A real, tiny training of Lightning on the CPU: ``python train.py LOG_PATH REPORT_TO``, then a test."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from runmirror_lightning import RunMirrorLogger
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)

    def step(self, batch: Any, name: str) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log(name, loss)
        return loss

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.step(batch, "loss")

    def test_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.step(batch, "test_loss")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.hparams["lr"])


if __name__ == "__main__":
    log_path, report_to, devices = sys.argv[1:]
    lightning.seed_everything(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    data = DataLoader(TensorDataset(x, 2 * x + 1), batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(devices),
        max_epochs=2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=RunMirrorLogger(log_path, report_to=report_to),
    )
    model = Line()
    trainer.fit(model, data)
    trainer.test(model, data)
