"""DDP as in PyTorch's own examples, without a line of launch: it saves its own checkpoints and prints its loss."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(steps: int, folder: Path) -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
    forward = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved, first = folder / "checkpoint.pt", 0
    if saved.exists():
        found = torch.load(saved, map_location=device, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"]
    for step in range(first + 1, steps + 1):
        draws = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        x = torch.randn(32, 16, generator=draws).to(device)
        loss = (forward(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if rank == 0 and step % 20 == 0:
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, saved)
    dist.destroy_process_group()


def save(state: dict[str, object], path: Path) -> None:
    """Write under another name, then rename: a process may be killed in the middle of a write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    # On Vertex AI each bucket is a folder below /gcs.
    run = os.environ.get("LAUNCH_RUN_FOLDER", "out").replace("gs://", "/gcs/", 1)
    main(parser.parse_args().steps, Path(run) / "own")
