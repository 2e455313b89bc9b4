"""Node on a Compute Engine VM: preemption notices and Cloud Logging, which on Vertex AI the platform provides.

A preemption or host maintenance is treated like SIGTERM. Compute Engine gives notice in the VM's metadata server, 30 s
(a preempted Spot VM) or an hour (maintenance of a VM with GPUs) before it shuts the VM down, of which a container hears
last. Each of the two keys has one hanging request.
https://cloud.google.com/compute/docs/instances/spot#detecting-preemption,
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice,
https://cloud.google.com/compute/docs/gpus/gpu-host-maintenance
"""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Mapping
from http.client import HTTPException
from typing import Final, NamedTuple
from urllib.parse import quote

from launch_train.common import contract
from launch_train.node.cluster import ClusterError, parse_cluster
from launch_train.node.generation import StopRequest
from launch_train.telemetry.cloud_logging import LogSource, LogUploader

Say = Callable[[str], None]

HOST: Final = "metadata.google.internal"
WAIT_S: Final = 60
"""Time for which the metadata server holds a request while nothing changes."""
LATE_S: Final = 10.0
"""Additional seconds after which a request has failed."""
PAUSE_S: Final = 1.0
"""Least time between two requests, for a server that doesn't hold them."""
MAX_BACKOFF: Final = 5
"""Factor up to which the pause grows after failures: it stays a small part of the 30 s of a preemption."""
REPORT_AFTER: Final = 5
"""Consecutive failures before one is reported: the server may be away for some seconds while its host is updated."""

MAINTENANCE_SECONDS: Final = 600.0
"""Used of the hour for which a VM with GPUs still runs: a step that takes longer is stuck."""


class MetadataKey(NamedTuple):
    """A key of the metadata server: the value that is a notice, its meaning, all other values, and the seconds for
    which the VM still runs."""

    path: str
    notice: str
    meaning: str
    others: Collection[str]
    seconds: float


KEYS: Final = (
    MetadataKey(
        "instance/preempted", "TRUE", "Compute Engine is preempting this VM", ("FALSE",), contract.NOTICE_SECONDS
    ),
    MetadataKey(
        "instance/maintenance-event",
        "TERMINATE_ON_HOST_MAINTENANCE",
        "Compute Engine is stopping this VM for host maintenance",
        ("NONE", "MIGRATE_ON_HOST_MAINTENANCE"),
        MAINTENANCE_SECONDS,
    ),
)


def watch_vm(environ: Mapping[str, str], stop: StopRequest, say: Say) -> LogUploader | None:
    """On a VM, treat its preemption as SIGTERM and return the uploader of its log lines to Cloud Logging.

    Returns None without a VM, and without a run folder, where output isn't kept.
    """
    source = log_source(environ, say)
    if source is None:
        return None
    PreemptionListener(environ, stop, say).start()
    return LogUploader(source, environ, say) if environ.get(contract.RUN_FOLDER) else None


def log_source(environ: Mapping[str, str], say: Say) -> LogSource | None:
    """Return the resource and labels of this node's log entries; None if contract.MACHINE isn't set, or can't be
    parsed. The latter only costs extras, so it is reported and doesn't end the run."""
    text = environ.get(contract.MACHINE)
    if not text:
        return None
    try:
        described = json.loads(text)
        project, zone, name, instance = (str(described[key]) for key in ("project", "zone", "name", "instance"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        kind = type(error).__name__
        say(f"{contract.MACHINE} is invalid ({kind}: {error}): no preemption notices, no Cloud Logging")
        return None
    try:
        node = parse_cluster(environ.get(contract.CLUSTER_SPEC), environ).node
    except ClusterError:  # reported elsewhere
        node = 0
    labels = {
        contract.LOG_RUN: environ.get(contract.RUN, ""),
        contract.LOG_TASK: contract.task_name(node),
        "compute.googleapis.com/resource_name": name,  # under which Google's own agents write the VM's name
    }
    resource = {"project_id": project, "instance_id": instance, "zone": zone}
    return LogSource(resource, {label: value for label, value in labels.items() if value})


class PreemptionListener:
    """Daemon threads that listen for notices. They retry forever; a problem is reported once and never ends the
    node."""

    def __init__(
        self, environ: Mapping[str, str], stop: StopRequest, say: Callable[[str], None], pause: float = PAUSE_S
    ) -> None:
        self._host = environ.get("GCE_METADATA_HOST") or HOST
        self._stop = stop
        self._say = say
        self._pause = pause
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._reported = False
        # Without the environment's proxies, which have another metadata server.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def start(self) -> None:
        for key in KEYS:
            threading.Thread(target=self._listen, args=(key,), name=key.path, daemon=True).start()

    def close(self) -> None:
        """Stop listening. A pending request ends by itself."""
        self._closed.set()

    def _listen(self, key: MetadataKey) -> None:
        """Listen until the notice comes."""
        etag, failures = "0", 0  # 0 is no ETag: the first answer comes at once
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                value, etag = self._request(key, etag)
            except (OSError, HTTPException, ValueError) as error:
                failures += 1
                self._report_failure(failures, error)
                self._closed.wait(self._pause * min(failures, MAX_BACKOFF))
                continue
            failures = 0
            if value == key.notice:
                if not self._closed.is_set():
                    self._stop.note(signal.SIGTERM, ctrl_c=False, seconds=key.seconds)
                    self._say(f"{key.meaning} ({key.path} is {key.notice}); saving a checkpoint")
                return
            self._closed.wait(max(0.0, began + self._pause - time.monotonic()))

    def _request(self, key: MetadataKey, etag: str) -> tuple[str, str]:
        """Return the value and its ETag, once it has changed or after `WAIT_S`.

        Raises OSError, HTTPException and ValueError: no answer, or an invalid one.
        """
        query = f"wait_for_change=true&timeout_sec={WAIT_S}&last_etag={quote(etag, safe='')}"
        url = f"http://{self._host}/computeMetadata/v1/{key.path}?{query}"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with self._opener.open(request, timeout=WAIT_S + LATE_S) as answer:
            if answer.headers.get("Metadata-Flavor") != "Google":
                raise ValueError("the answer is not from a metadata server")
            value = answer.read().decode("ascii", "replace").strip()
            if value not in (key.notice, *key.others):  # truncated: its ETag must not count as seen
                raise ValueError(f"{key.path} is {value[:40]!r}")
            return value, answer.headers.get("ETag") or "0"

    def _report_failure(self, failures: int, error: Exception) -> None:
        with self._lock:
            if failures < REPORT_AFTER or self._reported:
                return
            self._reported = True
        self._say(f"no preemption notices for now: metadata server {self._host}: {error}; retrying")
