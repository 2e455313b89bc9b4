"""Hugging Face accelerate, with launch's checkpoints and metrics. torchrun starts it: no `accelerate launch`."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from launch_train import checkpoint, metrics


def main(steps: int) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    for step in range(checkpoint.restore(state) + 1, steps + 1):
        draws = torch.Generator().manual_seed(step * accelerator.num_processes + accelerator.process_index)
        x = torch.randn(32, 16, generator=draws).to(accelerator.device)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        metrics.log(step, loss=loss.item())
        if step % 20 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if checkpoint.due(step):
            checkpoint.save(step, state)
        if checkpoint.preempted():
            checkpoint.leave()
    checkpoint.save(steps, state, wait=True)
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    main(parser.parse_args().steps)
