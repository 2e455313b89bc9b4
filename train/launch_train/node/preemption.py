"""Notices of a VM's end, from its metadata server: a preemption and a host's maintenance mean what SIGTERM means.

Compute Engine gives notice to a VM that asks for it, from 30 s (a preempted Spot VM) to an hour (maintenance under
GPUs) before it presses the power button, of which a container hears last. One hanging request for each of the two keys.
https://cloud.google.com/compute/docs/instances/spot#detecting-preemption,
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
"""

from __future__ import annotations

import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Mapping
from http.client import HTTPException
from typing import Final, NamedTuple
from urllib.parse import quote

from launch_train.node.launch_round import Stop

HOST: Final = "metadata.google.internal"
WAIT_S: Final = 60
"""How long the metadata server holds a request back while nothing changes."""
LATE_S: Final = 10.0
"""After that much more there is no answer."""
PAUSE_S: Final = 1.0
"""Between two requests at least: a server that doesn't hold them back is not run down."""
LONGEST: Final = 5
"""After failures the pause grows to so many times of that: a small part of the 30 s that a preemption leaves."""
PATIENCE: Final = 5
"""Failures in a row before one is told: the server may be away for some seconds while its host is updated."""


class Key(NamedTuple):
    """A key of the metadata server: the value that is the notice, what that means, and the other values."""

    path: str
    notice: str
    meaning: str
    others: Collection[str]


KEYS: Final = (
    Key("instance/preempted", "TRUE", "Compute Engine preempts this VM", ("FALSE",)),
    Key(
        "instance/maintenance-event",
        "TERMINATE_ON_HOST_MAINTENANCE",
        "Compute Engine stops this VM for its host's maintenance",
        ("NONE", "MIGRATE_ON_HOST_MAINTENANCE"),
    ),
)


class Notices:
    """Threads that nobody has to wait for. No answer ends them, and none ends the node; what is wrong is told once."""

    def __init__(
        self, environ: Mapping[str, str], stop: Stop, say: Callable[[str], None], pause: float = PAUSE_S
    ) -> None:
        self._host = environ.get("GCE_METADATA_HOST") or HOST
        self._stop = stop
        self._say = say
        self._pause = pause
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._told = False
        # Without the proxies of the environment, which have a metadata server of their own.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def start(self) -> None:
        """Begin to listen."""
        for key in KEYS:
            threading.Thread(target=self._listen, args=(key,), name=key.path, daemon=True).start()

    def close(self) -> None:
        """Listen no more. A request that is under way ends by itself."""
        self._closed.set()

    def _listen(self, key: Key) -> None:
        """Until the notice comes."""
        etag, failures = "0", 0  # 0 is none: the first answer comes at once
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                value, etag = self._ask(key, etag)
            except (OSError, HTTPException, ValueError) as error:
                failures += 1
                self._complain(failures, error)
                self._closed.wait(self._pause * min(failures, LONGEST))
                continue
            failures = 0
            if value == key.notice:
                self._pass_on(key)
                return
            self._closed.wait(max(0.0, began + self._pause - time.monotonic()))

    def _ask(self, key: Key, etag: str) -> tuple[str, str]:
        """The value and its ETag, once it is another or `WAIT_S` are over. Raises OSError, HTTPException and
        ValueError: no answer, or none that can be understood."""
        query = f"wait_for_change=true&timeout_sec={WAIT_S}&last_etag={quote(etag, safe='')}"
        url = f"http://{self._host}/computeMetadata/v1/{key.path}?{query}"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with self._opener.open(request, timeout=WAIT_S + LATE_S) as answer:
            if answer.headers.get("Metadata-Flavor") != "Google":
                raise ValueError("the answer is not a metadata server's")
            value = answer.read().decode("ascii", "replace").strip()
            if value not in (key.notice, *key.others):  # torn: its ETag must not count as seen
                raise ValueError(f"{key.path} is {value[:40]!r}")
            return value, answer.headers.get("ETag") or "0"

    def _pass_on(self, key: Key) -> None:
        if not self._closed.is_set():
            self._stop.note(signal.SIGTERM, ctrl_c=False)
            self._say(f"{key.meaning} ({key.path} is {key.notice}): saving and leaving")

    def _complain(self, failures: int, error: Exception) -> None:
        with self._lock:
            if failures < PATIENCE or self._told:
                return
            self._told = True
        self._say(f"the metadata server ({self._host}) gives no notice of a preemption for now: {error}; asking on")
