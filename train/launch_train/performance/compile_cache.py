"""What torch.compile has made, kept in the run folder, so that another start of the run compiles nothing again.

On a machine torch itself keeps all of it on the disk, where the ranks of a node share it (TORCHINDUCTOR_CACHE_DIR).
"""

from __future__ import annotations

import hashlib
import platform

import torch
from torch import nn

from launch_train.common.storage import OutputError, Storage
from launch_train.distributed.process_group import Ranks

FOLDER = "compile/"

SECONDS = 30.0
"""For reading or writing an object: without it nothing worse happens than that the compiler works again."""


def name(model: nn.Module, mode: str, device: torch.device) -> str:
    """`compile/<key>.bin`, for this kind of machine and model. Each GPU of a node has its own: its number is in what is
    made for it. A key that stays the same for other code does no harm: torch finds each graph by its content."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    shapes = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    whole = "\n".join([torch.__version__, platform.python_version(), gpu, mode, type(model).__name__, *shapes])
    number = f"-{device.index or 0}" if device.type == "cuda" else ""
    return f"{FOLDER}{hashlib.sha256(whole.encode()).hexdigest()[:16]}{number}.bin"


def load(storage: Storage | None, name: str) -> bool:
    """Hand torch what an earlier start has kept. Whether there was something."""
    if storage is None:
        return False
    try:
        content = unsealed(storage.within(SECONDS).read(name))
    except FileNotFoundError:
        return False
    except (OutputError, ValueError) as error:
        print(f"compiling anew: {name}: {error}", flush=True)
        return False
    return _handed_over(name, content)


def _handed_over(name: str, content: bytes) -> bool:
    try:
        return torch.compiler.load_cache_artifacts(content) is not None
    except Exception as error:  # noqa: BLE001 - of another version, perhaps: the compiler works again
        print(f"compiling anew: {name}: {type(error).__name__}: {error}", flush=True)
        return False


def keep(storage: Storage | None, name: str, ranks: Ranks) -> None:
    """Keep what the compiler has made since this process began, if it has made something: the first node does, one
    process for each object."""
    if storage is None or ranks.rank != ranks.local_rank or (ranks.device.type != "cuda" and ranks.rank) or not _made():
        return
    try:
        if found := torch.compiler.save_cache_artifacts():
            storage.within(SECONDS).write(name, sealed(found[0]))
    except Exception as error:  # noqa: BLE001 - the run goes on: another start's compiler works again
        print(f"what was compiled is not kept: {type(error).__name__}: {error}", flush=True)


def _made() -> bool:
    """Whether a graph was compiled in this process, and not found."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"] > 0


def sealed(content: bytes) -> bytes:
    """With its digest before it: what is damaged must not be unpickled."""
    return hashlib.sha256(content).digest() + content


def unsealed(data: bytes) -> bytes:
    """Raises ValueError: it is damaged."""
    digest, content = data[:32], data[32:]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("it is damaged")
    return content
