"""Hosts that share a folder only in part, and an address that is another machine's."""

from __future__ import annotations

import errno
import fcntl
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launch_train.host.errors import RefusedError
from launch_train.host.peers import join_meeting

NONCE = "0123456789abcdef"


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A meeting that this machine has opened, as a request to join it."""
    request = {"nonce": NONCE, "count": 1, "folder": str(tmp_path / "runs"), "host": "first"}
    argv = [sys.executable, "-m", "launch_train.host", str(tmp_path), "open_meeting"]
    opened = subprocess.run(argv, input=json.dumps(request).encode(), capture_output=True, check=True, timeout=60)
    answer = json.loads(opened.stdout.rpartition(b"\x02\n")[2])
    yield {**request, **answer, "addresses": ["127.0.0.1"]}
    with suppress(OSError):  # the meeting ends once all have joined
        socket.create_connection(("127.0.0.1", answer["port"])).close()


@pytest.fixture
def stranger() -> Iterator[int]:
    """The port of a service that is no meeting."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2")

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def test_a_host_that_sees_the_lock_joins(meeting: dict[str, Any]) -> None:
    assert join_meeting(meeting) == {"first": "127.0.0.1", "address": "127.0.0.1"}


def test_a_service_that_is_no_meeting_is_not_the_first_host(stranger: int) -> None:
    request = {"nonce": NONCE, "folder": "", "host": "first", "addresses": ["127.0.0.1"], "port": stranger}
    with pytest.raises(RefusedError, match=rf"first is not reached from here \(tried 127.0.0.1, port {stranger}\)"):
        join_meeting(request)


def test_a_lock_without_effect_is_refused(meeting: dict[str, Any]) -> None:
    marker = Path(meeting["folder"], f".meeting-{NONCE}")
    marker.unlink()
    marker.touch()  # another file: the lock of the first one isn't on it, as on NFS that is mounted with nolock
    with pytest.raises(RefusedError, match=r"a lock of first on a file in .* has no effect here"):
        join_meeting(meeting)


def test_a_folder_without_locks_is_refused(meeting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_handle: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RefusedError, match="can't be used: No locks available"):
        join_meeting(meeting)
