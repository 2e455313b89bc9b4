"""How a node finds node 0, which may come later than it, or come back."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from launch_train.node.cluster import Cluster
from launch_train.node.control_store import Store, Timing, TorchStore
from launch_train.node.launch_round import Stop


def find_store(cluster: Cluster, limit: float, timing: Timing, stop: Stop, say: Callable[[str], None]) -> Store | None:
    """The store of node 0; None if there is none in `limit` seconds.

    A node told to stop looks once more, to tell the others if they are there, and waits no longer.
    """
    host, port = cluster.host, cluster.port
    start = said = time.monotonic()
    while True:
        told = bool(stop.signum)
        with suppress(OSError):  # StoreLostError is one too
            socket.create_connection((host, port), timeout=2).close()
            longest = stop.patience(timing) if told else 20.0
            return TorchStore(host, port, serve=False, timeout=min(longest, timing.lost))
        if told:
            return None
        now = time.monotonic()
        if now - start > limit:
            say(f"node 0 ({host}:{port}) did not answer within {limit:.0f} s")
            return None
        if now - said >= timing.line:
            said = now
            say(f"waiting for node 0 ({host}:{port}, {now - start:.0f} s)")
        time.sleep(0.2)
