"""Check that the hosts of a job reach each other and share the folder of its runs.

The first host opens a meeting: it locks a new file in the folder, and listens. The others join it: each must see the
file and be refused its lock, since every start of a run relies on both, and must reach the first host at one of its
addresses.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from launch_train.host.errors import RefusedError
from launch_train.host.machine import list_interfaces

MEETING_SECONDS: Final = 120.0
"""For so long the first host waits for the next one."""
CONNECT_SECONDS: Final = 3.0
SHARED_SECONDS: Final = 10.0
"""NFS shows a new file once its cache of the folder has expired, after 3 s by default."""
SHARE_FIX: Final = "Name a folder that all hosts share, or a bucket: --output /shared/runs, --output gs://BUCKET/runs"


def open_meeting(request: Mapping[str, Any]) -> dict[str, Any]:
    """Open a meeting in the background, and return this machine's `addresses` and the `port` on which it listens.

    The request has `nonce`, `count` (of the others), and `folder`, in which the run folder is or will be; empty: in a
    bucket. Raises RefusedError: the folder can't be written or locked.
    """
    marker = marker_of(request)
    try:
        if marker:
            marker.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RefusedError(f"{request['folder']} can't be used: {error.strerror}", SHARE_FIX) from error
    server = socket.create_server(("", 0))
    addresses = [address for _, address in list_interfaces() if not address.startswith("127.")]
    if os.fork():
        return {"addresses": addresses, "port": server.getsockname()[1]}
    os.setsid()
    for stream in (0, 1, 2):  # the connection would stay open
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    server.settimeout(MEETING_SECONDS)
    try:
        for _ in range(int(request["count"])):
            with server.accept()[0] as connection:
                connection.sendall(request["nonce"].encode())
    finally:
        if marker:
            marker.unlink(missing_ok=True)
        os._exit(0)


def join_meeting(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the address at which this machine reaches the first host (`first`), and its own in that network
    (`address`). The request is that of `open_meeting`, its answer, and `host`: the first host's name.

    Raises RefusedError: the folder isn't shared, or no address is reached.
    """
    first = str(request["host"])
    if marker := marker_of(request):
        until = time.monotonic() + SHARED_SECONDS
        while not marker.exists():
            if time.monotonic() > until:
                raise RefusedError(f"{request['folder']} is not the folder that {first} has under that name", SHARE_FIX)
            with suppress(OSError):
                os.scandir(marker.parent).close()
            time.sleep(0.2)
        try:
            handle = os.open(marker, os.O_RDWR)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise RefusedError(f"a lock of {first} on a file in {request['folder']} has no effect here", SHARE_FIX)
        except BlockingIOError:
            os.close(handle)
        except OSError as error:
            raise RefusedError(f"{request['folder']} can't be used: {error.strerror}", SHARE_FIX) from error
    for address in request["addresses"]:
        with suppress(OSError), socket.create_connection((address, request["port"]), CONNECT_SECONDS) as connection:
            if connection.recv(len(request["nonce"])).decode() == request["nonce"]:  # else it is another machine
                return {"first": address, "address": connection.getsockname()[0]}
    tried = ", ".join(request["addresses"]) or "no address"
    raise RefusedError(
        f"{first} is not reached from here (tried {tried}, port {request['port']})",
        "The hosts must reach each other at any port: open their firewall, or connect them by a private network.",
    )


def marker_of(request: Mapping[str, Any]) -> Path | None:
    """Return the meeting's file in the folder of the runs; None: the hosts share none."""
    folder = Path(str(request["folder"])).expanduser()
    return folder / f".meeting-{request['nonce']}" if request["folder"] else None
