"""Find the control store of node 0, which may start later than this node, or be replaced."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from launch_train.node.cluster import Cluster
from launch_train.node.control_store import Store, Timing, TorchStore
from launch_train.node.generation import StopRequest


def find_store(
    cluster: Cluster, limit: float, timing: Timing, stop: StopRequest, say: Callable[[str], None]
) -> Store | None:
    """Connect to the store of node 0; None if it doesn't respond within `limit` seconds.

    A node that must stop tries once, to report that to the others.
    """
    host, port = cluster.host, cluster.port
    start = reported = time.monotonic()
    while True:
        is_stopping = bool(stop.signum)
        with suppress(OSError):  # StoreLostError is one too
            socket.create_connection((host, port), timeout=2).close()
            longest = stop.leave_seconds(timing) if is_stopping else 20.0
            return TorchStore(host, port, serve=False, timeout=min(longest, timing.lost))
        if is_stopping:
            return None
        now = time.monotonic()
        if now - start > limit:
            say(f"node 0 ({host}:{port}) did not answer within {limit:.0f} s")
            return None
        if now - reported >= timing.line:
            reported = now
            say(f"waiting for node 0 ({host}:{port}, {now - start:.0f} s)")
        time.sleep(0.2)
