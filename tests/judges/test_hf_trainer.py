"""transformers' own Trainer resumes from an export: needs the extra [judges] (accelerate): make judges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from launch_train.common.config import parse
from launch_train.common.storage import open_storage
from launch_train.data import open_data
from launch_train.distributed.process_group import Ranks
from launch_train.export import export, find_checkpoint
from launch_train.models import resolve_task
from tests.train import trials
from tests.train.conftest import on_one_thread

pytestmark = pytest.mark.judges

HALF, STEPS = 4, 10
CONFIG: dict[str, Any] = {
    "data": {"path": "synthetic", "block_size": 16},
    "steps": STEPS,
    "eval": {"every": 0},
    "micro_batch_size": "auto",
    "optimizer": {"lr": 1e-3, "min_lr": 1e-3, "warmup_steps": 0, "grad_clip": 0},
    "loader": {"workers": 0},
    "monitor": 0,
    "log_every": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"name": "gpt", "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16},
    "llama": {
        "name": "hf:llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    },
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with on_one_thread():
        yield


class Samples(Dataset[dict[str, Tensor]]):
    """The samples of all steps, in the trainer's order; transformers shifts the labels itself, so the model is given
    its own tokens and the loss is computed from ours (`loss`)."""

    def __init__(self, config: dict[str, Any]) -> None:
        settings = resolve_task(parse(config))
        source = open_data(settings, Ranks())
        batches = [source.finish(source.train(step, slice(0, settings.batch_size))) for step in range(1, STEPS + 1)]
        self.inputs, self.targets = (torch.cat([batch[part] for batch in batches]) for part in (0, 1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.inputs[index], "labels": self.targets[index]}


def loss(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, -2), labels.flatten())


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MODELS)
def test_its_trainer_resumes_with_the_same_losses(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    config = {**trials.CONFIG, **CONFIG, "model": MODELS[name]}
    folder = tmp_path / "run"
    trials.preempted(folder, HALF - 1, **config)
    trials.train(folder, generation=1, **config)
    storage = open_storage(str(folder))
    exported = tmp_path / f"checkpoint-{HALF}"
    export(storage, find_checkpoint(storage, HALF), "hf", str(exported))

    class InOrder(Trainer):  # type: ignore[misc]  # transformers has no types
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=config["batch_size"],
        lr_scheduler_type="constant",
        learning_rate=1e-3,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = AutoModelForCausalLM.from_pretrained(exported)
    trainer = InOrder(model=model, args=arguments, train_dataset=Samples(config), compute_loss_func=loss)
    trainer.train(resume_from_checkpoint=str(exported))
    theirs = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    ours = trials.losses(folder)
    assert sorted(theirs) == [*range(HALF + 1, STEPS + 1)]
    for step, value in theirs.items():
        assert value == pytest.approx(ours[step], abs=1e-5), step
