"""The Hugging Face Trainer under torchrun, with its own checkpoints and TensorBoard files, which the spec picks up."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from launch_train import metrics


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from a random number."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, key: int) -> dict[str, torch.Tensor]:
        first = torch.randint(0, 32, (1,), generator=torch.Generator().manual_seed(key))
        tokens = (first + torch.arange(16)) % 32
        return {"input_ids": tokens, "labels": tokens}


class Log(TrainerCallback):
    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_more: Any) -> None:
        if "loss" in logs:  # not the summary at the end
            metrics.log(state.global_step, **logs)


def main(steps: int, folder: Path) -> None:
    settings = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=5,
        save_steps=20,
        save_total_limit=2,
        report_to=["tensorboard"],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        seed=0,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    trainer = Trainer(model, settings, train_dataset=Counting(), callbacks=[Log()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    # On Vertex AI each bucket is a folder below /gcs.
    run = os.environ.get("LAUNCH_RUN_FOLDER", "out").replace("gs://", "/gcs/", 1)
    main(parser.parse_args().steps, Path(run) / "trainer")
