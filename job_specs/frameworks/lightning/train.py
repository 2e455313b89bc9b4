"""A Lightning Trainer under torchrun, with its own checkpoints. One callback of four lines logs to the run folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from launch_train import metrics


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        (x,) = batch
        return (self.net(x) - x.sum(dim=1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Log(Callback):
    def on_train_batch_end(
        self, trainer: Trainer, _module: LightningModule, outputs: Any, _batch: Any, _number: int
    ) -> None:
        metrics.log(trainer.global_step, loss=outputs["loss"].item())


def main(steps: int, folder: Path) -> None:
    seed_everything(0)
    samples = torch.randn(2048, 16, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
        max_steps=steps,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=20, save_last=True, save_top_k=0), Log()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "last.ckpt"
    loader = DataLoader(TensorDataset(samples), batch_size=32, shuffle=True)
    trainer.fit(Regression(), loader, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    # On Vertex AI each bucket is a folder below /gcs.
    run = os.environ.get("LAUNCH_RUN_FOLDER", "out").replace("gs://", "/gcs/", 1)
    main(parser.parse_args().steps, Path(run) / "lightning")
