"""Where ranks that no torchrun starts meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it, untyped


@contextmanager
def ranks(world: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each rank. The store is this process's, as torchrun's is its own: a port that is only looked
    up is another's by the time rank 0 wants it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    yield [{**place, "WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
