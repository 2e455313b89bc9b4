"""Scripts in the shapes that public training scripts have, as the files of one folder, with a `run` for each.

None uses launch's package. Each prints one line with RESULT, which must not depend on where the script runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

RESULT: Final = "result:"

FILES: Final[Mapping[str, str]] = {
    # torchrun's variables, a module beside the script, settings from a file that it executes, data by a path relative
    # to the code's folder, and a snapshot that it resumes from if there is one: as in multigpu_torchrun and nanoGPT
    "tutorial/ddp.py": """\
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from numbers_of import numbers

rate = 1.0
exec(Path(sys.argv[1]).read_text())
dist.init_process_group("gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
first = 0
if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt")
    model.load_state_dict(snapshot["model"])
    first = snapshot["epoch"] + 1
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=rate)
x = torch.tensor(numbers("data/numbers.txt")[rank::world]).unsqueeze(1)
for epoch in range(first, 3):
    loss = ((ddp(x) - 2 * x) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        torch.save({"model": model.state_dict(), "epoch": epoch}, "snapshot.pt")
dist.all_reduce(loss)
if rank == 0:
    print(f"result: {world} ranks, from epoch {first}, lr {rate}, loss {loss.item():.6f}")
dist.destroy_process_group()
""",
    "tutorial/numbers_of.py": """\
def numbers(path):
    with open(path) as lines:
        return [float(line) for line in lines]
""",
    "config/small.py": "rate = 0.01\n",
    "data/numbers.txt": "1\n2\n3\n4\n",
    # its own processes, which meet at an address of this machine, and a working directory below the code's folder:
    # as in imagenet and mnist
    "classifier/spawning.py": """\
import os, socket
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    total = torch.tensor(float(len(open("../data/numbers.txt").readlines())))
    dist.all_reduce(total)
    if rank == 0:
        os.makedirs("../data/prepared", exist_ok=True)
        print(f"result: {dist.get_world_size()} ranks, {total.item()}, {sorted(os.listdir('../data'))}", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    assert "RANK" not in os.environ
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, (port,), nprocs=2)
""",
    # a program of a package, without torch, which imports that package by name: as in JAX's examples
    "examples/__init__.py": "",
    "examples/loading.py": "def load():\n    return [line.strip() for line in open('data/numbers.txt')]\n",
    "examples/classifier.py": "from examples import loading\n\nprint('result:', loading.load(), __name__)\n",
}

RUNS: Final[Mapping[str, str]] = {
    "torchrun": "{script: tutorial/ddp.py, args: [config/small.py]}",
    "command": '{command: [sh, -c, "cd classifier && exec python spawning.py"]}',
    "module": "{module: examples.classifier, launcher: python}",
}


def write(folder: Path) -> None:
    """Write the files below a folder."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
