"""Call the spec's webhook (`notify`) when the run is preempted, fails, finishes, hangs, or nears its cost limit.

A thread does it, so that a webhook that hangs or refuses delays nothing. Each event is claimed in the run folder before
it is sent: a restarted node, or another one, never sends it again. The webhook's URL is a secret: no message shows it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from signal import SIGINT, SIGTERM
from typing import Any, Final

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.contract import Exit
from launch_train.common.errors import TrainError, UsageError
from launch_train.common.masking import mask_message
from launch_train.common.secrets import SecretReader
from launch_train.common.storage import Storage
from launch_train.node.exit_status import End
from launch_train.node.generation import StopRequest
from launch_train.runfolder.starts import is_number

TICK: Final = 0.2
"""Poll interval of stop requests, in seconds."""
COST_SECONDS: Final = 60.0
"""Interval at which the cost is checked and recorded."""
ASK_SECONDS: Final = 5.0
"""Time limit of one call to the run folder, to Secret Manager and to the webhook."""
TRIES, AGAIN_SECONDS = 3, 1.0
"""Tries to send an event that the webhook does not accept, and the seconds between two tries."""
CLOSE_SECONDS: Final = 5.0
"""Time limit for sending the last event at the end of a run."""
MOST_PARTS: Final = 5
"""Number of newest parts of the metrics that are searched for the newest step."""

EVENTS: Final[Mapping[str, tuple[str, str]]] = {
    "preempted": ("was preempted", "launch follow {run}"),
    "failed": ("failed", "launch logs {run}"),
    "finished": ("finished", "launch report {run}"),
    "stalled": ("stalled", "launch status {run}"),
    "cost": ("has used much of its limit", "launch cancel {run}"),
}
"""Event -> what has happened to the run, and the command to type next."""


@dataclass(frozen=True)
class Settings:
    """`notify` of the spec. `webhook` is a URL, or a version in Secret Manager."""

    webhook: str
    on: tuple[str, ...]
    format: str = "json"
    usd: float | None = None
    """The run's cost limit (limits.usd)."""

    @property
    def share(self) -> float | None:
        """The share of the cost limit at which `cost>80%` is sent: 0.8."""
        limit = next((event for event in self.on if event.startswith("cost>")), None)
        return None if limit is None else float(limit.removeprefix("cost>").rstrip("%")) / 100


def notify_settings(environ: Mapping[str, str]) -> Settings | None:
    """Return the settings in the request, or None. Raises UsageError."""
    try:
        found = json.loads(environ.get(contract.NOTIFY) or "null")
        return Settings(**{**found, "on": tuple(found["on"])}) if found else None
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{contract.NOTIFY} is invalid") from error  # its text has the URL


class Notifier:
    """Sends the events of one node. `node` 0 also watches the cost."""

    def __init__(
        self,
        wanted: Settings,
        storage: Storage,
        environ: Mapping[str, str],
        *,
        node: int,
        attempt: int,
        stop: StopRequest,
        say: Callable[[str], None],
    ) -> None:
        self._wanted, self._environ, self._say = wanted, environ, say
        self._storage = storage.within(ASK_SECONDS)
        self._node, self._attempt, self._stop = node, attempt, stop
        self._run = environ.get(contract.RUN) or storage.url.rstrip("/").rpartition("/")[2]
        self._url = "" if wanted.webhook.startswith("projects/") else wanted.webhook
        self._cost = CostMeter(self._storage, attempt)
        self._events: deque[tuple[str, str]] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._noticed = False
        self._thread = threading.Thread(target=self._watch, name="notify", daemon=True)
        self._thread.start()

    def note(self, event: str, cause: str) -> None:
        """Queue an event, if the spec lists it."""
        with self._news:
            if event in self._wanted.on:
                self._events.append((event, cause))
                self._news.notify_all()

    def close(self, end: End | None, seconds: float) -> None:
        """Send the event of the run's end, and wait up to `seconds` for that. `end`: None on all nodes but node 0."""
        if end and (event := event_of(end, self._stop)):
            self.note(event, end.reason)
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._say("warning: notify: the webhook did not answer in time")

    def _watch(self) -> None:
        self._find_url()
        due = 0.0
        while True:
            if self._stop.signum == SIGTERM and not self._noticed:
                self._noticed = True
                self.note("preempted", f"node {self._node} must stop: it was preempted, or the job was cancelled")
            if not self._node and time.monotonic() >= due:
                usd, share, limit = self._cost.update(), self._wanted.share, self._wanted.usd
                if share is not None and limit and usd is not None and usd > share * limit:
                    name = next(event for event in self._wanted.on if event.startswith("cost>"))
                    self.note(name, f"${usd:,.2f} of limits.usd, ${limit:,.2f}")
                due = time.monotonic() + COST_SECONDS
            with self._news:
                self._news.wait_for(lambda: self._events or self._closed, TICK)
                if not self._events and self._closed:
                    break
                waiting = [self._events.popleft() for _ in range(len(self._events))]
            for event, cause in waiting:
                self._send(event, cause)
        if not self._node:
            self._cost.update()

    def _send(self, event: str, cause: str) -> None:
        """Claim an event and send it. A failure prints a warning."""
        body = self._body(event, cause)
        if not self._find_url():
            return
        try:
            self._storage.write(runfolder.notified(event), json.dumps(body).encode(), create=True)
        except FileExistsError:  # sent by an earlier start, or by another node
            return
        except (TrainError, OSError) as error:
            self._say(f"warning: notify: {event} not sent, as the run folder does not record it: {self._shown(error)}")
            return
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(AGAIN_SECONDS)
            if not (problem := post(self._url, slack(body) if self._wanted.format == "slack" else body)):
                return
        self._say(f"warning: notify: the webhook did not accept {event!r}: {problem}")

    def _body(self, event: str, cause: str) -> dict[str, Any]:
        """Return the message: the event, the newest step, the cost so far, and the command to type next."""
        row, kind = newest_row(self._storage), event.partition(">")[0]
        return {
            "run": self._run,
            "event": event,
            "cause": mask_message(cause, self._environ),
            "step": row.get("step"),
            "loss": row.get("loss"),
            "usd": self._cost.read() if self._node else self._cost.update(),
            "attempt": self._attempt,
            "node": self._node,
            "time": time.time(),
            "next": EVENTS[kind][1].format(run=self._run),
        }

    def _find_url(self) -> str:
        """Return the URL; empty, with a warning, if Secret Manager does not return it."""
        if not self._url:
            secret = {**self._environ, contract.SECRETS: json.dumps({"notify.webhook": self._wanted.webhook})}
            try:
                self._url = SecretReader(secret, ASK_SECONDS).read()["notify.webhook"].strip()
            except (TrainError, OSError) as error:
                self._say(f"warning: notify: {self._shown(error)}")
        return self._url

    def _shown(self, error: Exception) -> str:
        return mask_message(str(error), self._environ)


def event_of(end: End, stop: StopRequest) -> str:
    """Return the event of a run's end; empty if another start has the run, or the user has interrupted it."""
    if end.code in (Exit.SUPERSEDED, Exit.TERMINAL) or stop.signum == SIGINT:  # Ctrl-C is the user's own
        return ""
    if end.code == Exit.OK:
        return "finished"
    return "preempted" if end.code == Exit.PREEMPTED or stop.signum else "failed"


class CostMeter:
    """Measures the run's cost so far: the recorded cost of earlier starts, and the time since this start.

    The price is the plan's, for the placement of this attempt. The time before the node started (the image, the boot)
    is not counted.
    """

    def __init__(self, storage: Storage, attempt: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage, self._attempt, self._clock = storage, attempt, clock
        self._began = clock()
        self._before: float | None = None
        self._per_hour: float | None = None

    def update(self) -> float | None:
        """Return the cost so far in USD, and record it for the next start of the node; None: the price is unknown."""
        if self._before is None:
            from launch_train.report.goodput import price_per_hour  # imports the whole report

            names = (runfolder.COST, runfolder.attempt_lock(self._attempt), runfolder.PLAN)
            try:
                before, entry, plan = map(self._read, names)
            except (TrainError, OSError):
                return None  # the next update reads them: a cost that starts at 0 would be wrong
            recorded: Any = before.get("usd")
            self._before = float(recorded) if is_number(recorded) else 0.0
            self._per_hour = price_per_hour(plan, entry)
        if self._per_hour is None:
            return None
        usd = round(self._before + (self._clock() - self._began) / 3600 * self._per_hour, 4)
        with suppress(TrainError, OSError):  # the next update writes it
            self._storage.write(runfolder.COST, json.dumps({"usd": usd}).encode())
        return usd

    def read(self) -> float | None:
        """Return the cost that node 0 has recorded."""
        try:
            recorded = self._read(runfolder.COST)
        except (TrainError, OSError):
            return None
        return float(recorded["usd"]) if is_number(recorded.get("usd")) else None

    def _read(self, name: str) -> dict[str, Any]:
        """Return a file of the run folder; empty if there is none. Raises OSError, TrainError: it can't be read."""
        try:
            data = json.loads(self._storage.read(name))
        except (FileNotFoundError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}


def newest_row(storage: Storage) -> dict[str, Any]:
    """Return the newest row of a step; empty if there is none, or the run folder can't be read.

    In a bucket it may be half a minute old: a list of the metrics of a long run takes longer than its end may.
    """
    try:
        with suppress(FileNotFoundError):  # only runs in a bucket have it
            return dict(json.loads(storage.read(runfolder.PROGRESS))["row"])
        parts = sorted(storage.list(f"{runfolder.METRICS}/"))[-MOST_PARTS:]
        for part in reversed(parts):
            for row in reversed(runfolder.records(storage.read(part))):
                if "event" not in row and type(row.get("step")) is int:
                    return dict(row)
    except (TrainError, OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}
    return {}


def slack(body: Mapping[str, Any]) -> dict[str, str]:
    """Return a message in the format of Slack's incoming webhooks, which Mattermost and others take too.

    https://docs.slack.dev/messaging/formatting-message-text: &, < and > are escaped.
    """
    kind = str(body["event"]).partition(">")[0]
    facts = [f"step {body['step']:,}"] if body["step"] is not None else []
    facts += [f"loss {body['loss']:.4g}"] if isinstance(body["loss"], (int, float)) else []
    facts += [f"${body['usd']:,.2f} so far"] if body["usd"] is not None else []
    lines = [f"*{body['run']}* {EVENTS[kind][0]}: {body['cause']}", ", ".join(facts), f"`{body['next']}`"]
    text = "\n".join(filter(None, lines))
    return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}


def post(url: str, body: Mapping[str, Any]) -> str:
    """Send JSON, and return the error without the URL; empty if it was accepted. Redirects are not followed."""
    import requests

    try:
        # stream: the answer's text is not read, however long it is.
        with requests.post(url, json=body, timeout=ASK_SECONDS, allow_redirects=False, stream=True) as answer:
            return "" if answer.ok and not answer.is_redirect else f"HTTP {answer.status_code}"
    except (requests.RequestException, ValueError, OSError) as error:  # their texts contain the URL
        return type(error).__name__
