"""Check collectives with known results on all ranks: torchrun … -m benchmarks.gpu_acceptance.ranks"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launch_train.bench.measure import all_reduce
from launch_train.distributed import process_group as ranked
from launch_train.distributed.process_group import Ranks

SIZES = (1, 1000, 1 << 20)


def main() -> None:
    ranks = ranked.join(os.environ)
    found = [one for size in SIZES for one in _checked(ranks, size)]
    figures = all_reduce(ranks, (1, 16), 0.2)
    everybody = ranked.gather(ranks, [name for name, ok in found if not ok])
    if ranks.rank == 0:
        wrong = [f"rank {rank}: {name}" for rank, names in enumerate(everybody) for name in names]
        kept: dict[str, Any] = {"backend": ranks.backend, "world": ranks.world, "wrong": wrong, "checked": len(found)}
        kept["gbs"] = {figure.name: figure.value for figure in figures}
        Path(os.environ["GPU_ACCEPTANCE_OUT"]).write_text(json.dumps(kept))
    ranked.finish(ranks)


def _checked(ranks: Ranks, size: int) -> list[tuple[str, bool]]:
    """Return each collective's name and whether its result is right; each rank contributes its number + 1."""
    mine = torch.full((size,), ranks.rank + 1.0, device=ranks.device)
    total = mine.clone()
    dist.all_reduce(total)
    first = mine.clone()
    dist.broadcast(first, src=0)
    gathered = torch.empty(size * ranks.world, device=ranks.device)
    dist.all_gather_into_tensor(gathered, mine)
    expected = torch.arange(1.0, ranks.world + 1, device=ranks.device).repeat_interleave(size)
    return [
        (f"all-reduce of {size}", bool((total == ranks.world * (ranks.world + 1) / 2).all())),
        (f"broadcast of {size}", bool((first == 1).all())),
        (f"all-gather of {size}", bool(torch.equal(gathered, expected))),
    ]


if __name__ == "__main__":
    main()
