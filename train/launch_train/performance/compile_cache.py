"""Store compiled code in the run folder, so that later starts of the run don't compile again.

On each machine torch also caches it on disk, shared by the ranks of a node (TORCHINDUCTOR_CACHE_DIR).
"""

from __future__ import annotations

import hashlib
import platform

import torch
from torch import nn

from launch_train.common.storage import OutputError, Storage
from launch_train.distributed.process_group import Ranks

FOLDER = "compile/"

TIMEOUT_SECONDS = 30.0
"""Time limit for reading or writing an object. On a timeout the model is just compiled again."""


def object_name(model: nn.Module, mode: str, device: torch.device) -> str:
    """Return `compile/<key>.bin` for this machine type and model; one object per GPU, whose number is in the code.

    The key need not change with the code: torch looks each graph up by its content.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    shapes = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    key = "\n".join([torch.__version__, platform.python_version(), gpu, mode, type(model).__name__, *shapes])
    number = f"-{device.index or 0}" if device.type == "cuda" else ""
    return f"{FOLDER}{hashlib.sha256(key.encode()).hexdigest()[:16]}{number}.bin"


def load(storage: Storage | None, name: str) -> bool:
    """Load the code that an earlier start compiled. Return whether there was any."""
    if storage is None:
        return False
    try:
        content = check_digest(storage.within(TIMEOUT_SECONDS).read(name))
        return torch.compiler.load_cache_artifacts(content) is not None
    except FileNotFoundError:
        return False
    except Exception as error:  # noqa: BLE001 - perhaps from another version of torch: compile again
        ours = isinstance(error, (OutputError, ValueError))
        reason = str(error) if ours else f"{type(error).__name__}: {error}"
        print(f"compile cache {name} is not usable, compiling from scratch: {reason}", flush=True)
        return False


def save(storage: Storage | None, name: str, ranks: Ranks) -> None:
    """Save what this process has compiled, if anything. Only the first node saves, one process per object."""
    if storage is None or ranks.rank != ranks.local_rank or (ranks.device.type != "cuda" and ranks.rank):
        return
    from torch._dynamo.utils import counters

    if not counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]:
        return  # all graphs were in torch's cache
    try:
        if artifacts := torch.compiler.save_cache_artifacts():
            storage.within(TIMEOUT_SECONDS).write(name, add_digest(artifacts[0]))
    except Exception as error:  # noqa: BLE001 - training continues; the next start compiles again
        print(f"compile cache not saved; the next start compiles again: {type(error).__name__}: {error}", flush=True)


def add_digest(content: bytes) -> bytes:
    """Return the content behind its SHA-256: damaged content must not be unpickled."""
    return hashlib.sha256(content).digest() + content


def check_digest(data: bytes) -> bytes:
    """Return the content without its SHA-256. Raises ValueError if it is damaged."""
    digest, content = data[:32], data[32:]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("checksum mismatch")
    return content
