"""A training script of one's own, in DistributedDataParallel: what is launch's in it is `metrics` and `checkpoint`.

By hand: python train_own.py, or torchrun --nproc-per-node 2 train_own.py. It writes nothing then.
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from launch_train import checkpoint, metrics

ARMS = 3


def main(steps: int, batch_size: int, lr: float) -> None:
    rank, world, device = join()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, ARMS)).to(device)
    forward = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "best": math.inf}
    for step in range(checkpoint.restore(state) + 1, steps + 1):  # a new run begins at 1
        points, arms = spirals(batch_size // world, seed=step * world + rank)
        loss = cross_entropy(forward(points.to(device)), arms.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0:
            mean = averaged(loss.detach(), world)
            state["best"] = min(state["best"], mean)
            metrics.log(step, loss=mean, lr=schedule.get_last_lr()[0])
            if rank == 0:
                print(f"step {step}: loss {mean:.4f}, best {state['best']:.4f}")
        if checkpoint.due(step):
            checkpoint.save(step, state)
        if checkpoint.preempted():
            checkpoint.leave()
    checkpoint.save(steps, state, wait=True)
    if world > 1:
        dist.destroy_process_group()


def join() -> tuple[int, int, torch.device]:
    """This process's rank, their number, and its device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1, device
    dist.init_process_group("nccl" if cuda else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def spirals(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points on spirals, and which arm each is on. The seed is the step's: a run that goes on draws what is next."""
    made = torch.Generator().manual_seed(seed)
    arms = torch.randint(ARMS, (samples,), generator=made)
    radius = torch.rand(samples, generator=made).sqrt()
    angle = 2 * math.pi * (arms / ARMS + 0.8 * radius)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms


def averaged(loss: Tensor, world: int) -> float:
    """The loss of the global batch."""
    if world > 1:
        dist.all_reduce(loss)
    return loss.item() / world


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=256, help="over all processes")
    parser.add_argument("--lr", type=float, default=3e-3)
    main(**vars(parser.parse_args()))
