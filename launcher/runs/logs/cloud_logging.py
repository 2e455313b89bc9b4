"""What a job prints, from Cloud Logging.

By REST through google-auth's session, without a client library: google-cloud-logging (3.17) has no public transport
but gRPC for entries, and brings packages that nothing else here needs (OpenTelemetry, App Engine's and audit logs').
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from launch_train.common import contract
from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised
from launcher.gcp.api import Api, Service, UnreachableError, http_date, open_session
from launcher.jobs.job import Job
from launcher.jobs.vm import of_instance
from launcher.runs.logs.line import Line, cut

LOGGING: Final = Service("logging", "Cloud Logging", "roles/logging.viewer")
SECOND: Final = 10**9
"""Times are Unix nanoseconds here, as Cloud Logging keeps them."""
LATE: Final = 65 * SECOND
"""An entry may be readable so long after its time; Date says whole seconds, and a search takes a few."""
RECENT: Final = 5 * SECOND
DEEP_EVERY: Final = 60 * SECOND
"""Most entries are there within seconds. Where there are many, those that are late are looked for less often."""
PAGE: Final = 1000
"""The most that a page may hold: https://cloud.google.com/logging/docs/reference/v2/rest/v2/entries/list."""
PAGES: Final = 5
"""For one look: a project may read 60 times a minute."""
KEPT: Final = 20_000
"""Entries of which is remembered that they were seen, before those that can't come again are forgotten."""


class LogClient:
    """entries.list, in the shape of Google's own clients, which `Api` asks."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises NotAuthorised: there are no credentials."""
        self._session, self._endpoint = open_session(LOGGING, environ)

    def list_log_entries(self, *, request: Mapping[str, Any], retry: None, timeout: float) -> tuple[Any, float | None]:
        """The answer's JSON, and the time of the server's clock."""
        response = self._session.post(f"{self._endpoint}/v2/entries:list", json=request, timeout=timeout)
        if response.status_code != 200:
            raise refused(response)
        try:
            answer = json.loads(response.content.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError) as error:
            raise UnreachableError(f"{LOGGING.title}: the answer is torn: {error}", "Try again in a moment.") from error
        return answer, http_date(response.headers.get("Date", ""))


def refused(response: Any) -> Exception:
    """A refusal as Google's own clients raise it."""
    from google.api_core.exceptions import from_http_response, from_http_status

    try:
        error = from_http_response(response)
    except (AttributeError, TypeError):  # JSON, but not in the shape of Google's errors: a gateway's
        error = from_http_status(response.status_code, response.text, response=response)
    return error  # type: ignore[no-any-return]  # google-api-core has no types


class Entry(NamedTuple):
    """A log entry. `time` is in Unix nanoseconds."""

    time: int
    id: str
    replica: str
    text: str
    severity: str


class CloudLog:
    """The lines of one job. What was read stays read, whatever fails after it.

    A pass reads all entries since a time, page by page, maybe over several looks. The next pass begins before the time
    at which this one did, by Google's clock, because entries may come in late; those that were seen are passed over.
    """

    def __init__(self, job: Job, project: str, environ: Mapping[str, str], clock: Clock) -> None:
        """Raises NotAuthorised: there are no credentials."""
        self._api = Api(LOGGING, project, LogClient(environ), clock)
        self._source = source(job, project)
        # No VM prints before it is there; an attempt before it, in entries of the same run, may until then.
        self._floor = nanoseconds(job.created) - (0 if job.zone else LATE)
        """Older entries are none of ours."""
        self._first = (self._floor, "")
        self._since = self._at = self._floor
        """Where this pass began, and how far it has come."""
        self._token = ""
        self._began: int | None = None
        """When this pass began, by the server's clock."""
        self._deep: int | None = None
        """When the last pass began that looked for late entries too."""
        self._is_deep = True
        self._pages = 0
        self._seen: set[tuple[int, str]] = set()

    @property
    def has_some(self) -> bool:
        """Whether an entry of the job has been met, shown or not."""
        return bool(self._seen)

    def start_at(self, since: float) -> None:
        """Pass over what is older (Unix seconds)."""
        self._floor = self._since = self._at = max(self._floor, nanoseconds(since))
        self._first = (self._floor, "")

    def new(self) -> list[Line]:
        """The next lines, at most `PAGES` pages of them. Raises LaunchError if none could be read."""
        found: list[Line] = []
        for _ in range(PAGES):
            try:
                lines, more = self._page(patient=False)
            except LaunchError:
                if found:
                    break
                raise
            found += lines
            if not more:
                break
        return found

    def past(self) -> Iterator[Line]:
        """All lines that are there. Raises LaunchError: no answer for a minute, or a refusal."""
        more = True
        while more:
            lines, more = self._page(patient=True)
            yield from lines

    def tail(self, count: int) -> list[Line]:
        """The last so many lines that are there; `new` goes on after them. Raises as `past` does."""
        found: list[Line] = []
        token, began = "", None
        while len(found) < max(count, 1):
            body = self._body("desc", self._floor, token, min(PAGE, max(count, 1)))
            answer, date = self._api.ask("list_log_entries", **body)
            began = began or (nanoseconds(date) if date else None)
            for entry in entries(answer):
                self._seen.add((entry.time, entry.id))
                found += reversed(list(lines_of(entry)))
                self._first = (entry.time, entry.id)
            if not (token := token_of(answer)):
                break
        if len(found) < max(count, 1):
            self._first = (self._floor, "")  # that was all: what comes in late is new
        self._floor, self._began = self._first[0], began
        self._at = max((time for time, _ in self._seen), default=self._at)
        self._end_pass()
        return found[:count][::-1]

    def _page(self, *, patient: bool) -> tuple[list[Line], bool]:
        """The new lines of the next page, and whether there are more pages."""
        body = self._body("asc", self._since, self._token, PAGE)
        try:
            answer, date = (self._api.ask if patient else self._api.once)("list_log_entries", **body)
        except (UnreachableError, NotAuthorised):
            raise  # the same page again
        except LaunchError:
            if not self._token:
                raise
            self._token, self._since = "", max(self._since, self._at)  # the token has gone: on without it
            return [], True
        if self._began is None and date is not None:
            self._began = nanoseconds(date)
        lines = [line for entry in entries(answer) if self._is_new(entry) for line in lines_of(entry)]
        self._pages += 1
        self._token = token_of(answer)
        if not self._token:
            self._end_pass()
        self._forget()
        return lines, bool(self._token)

    def _body(self, order: str, since: int, token: str, size: int) -> dict[str, Any]:
        return {
            "resourceNames": [f"projects/{self._api.project}"],
            "filter": f'{self._source} AND timestamp>="{rfc3339(since)}"',
            "orderBy": f"timestamp {order}",
            "pageSize": size,
            **({"pageToken": token} if token else {}),
        }

    def _is_new(self, entry: Entry) -> bool:
        """Whether an entry was not seen before; it is now."""
        key = (entry.time, entry.id)
        self._at = max(self._at, entry.time)
        if key in self._seen or key < self._first:
            return False
        self._seen.add(key)
        return True

    def _end_pass(self) -> None:
        """Decide where the next pass begins."""
        began = self._began if self._began is not None else self._at  # a proxy took the date away
        if self._is_deep or self._deep is None:
            self._deep = began
        self._is_deep = self._pages <= 1 or began - self._deep >= DEEP_EVERY
        self._since = self._at = max(self._floor, self._deep - LATE if self._is_deep else began - RECENT)
        self._began, self._pages = None, 0

    def _forget(self) -> None:
        """Entries that no later pass can meet need not be remembered."""
        if len(self._seen) > KEPT:
            next_pass = (self._deep or self._began or 0) - LATE
            horizon = min(self._at if self._token else self._since, next_pass)
            self._seen = {key for key in self._seen if key[0] >= horizon}


def source(job: Job, project: str) -> str:
    """The filter that finds a job's entries: on a VM its node has written them
    (train/launch_train/telemetry/cloud_logging.py). Where there are several VMs, or nobody knows any more, their
    entries have the run in common, until the job's end."""
    if job.zone is None:
        return f'resource.type="ml_job" AND resource.labels.job_id="{job.id}"'
    log = f'resource.type="gce_instance" AND logName="projects/{project}/logs/{contract.LOG}"'
    if not job.run or len(of_instance(job.request, project).parameters.get("nodes") or ()) == 1:
        return f'{log} AND resource.labels.instance_id="{job.id}"'
    until = f' AND timestamp<"{rfc3339(nanoseconds(job.ended) + SECOND)}"' if job.ended else ""
    return f'{log} AND labels."{contract.LOG_RUN}"="{job.run}"{until}'


def entries(answer: Any) -> Iterator[Entry]:
    """What an answer holds, as far as it can be understood."""
    found = answer.get("entries") if isinstance(answer, Mapping) else None
    for raw in found if isinstance(found, list) else ():
        if isinstance(raw, Mapping) and (entry := entry_of(raw)):
            yield entry


def entry_of(raw: Mapping[str, Any]) -> Entry | None:
    """google.logging.v2.LogEntry; None where it has no time."""
    time = parsed(raw.get("timestamp")) or parsed(raw.get("receiveTimestamp"))
    if time is None:
        return None
    labels = (mapping(mapping(raw.get("resource")).get("labels")), mapping(raw.get("labels")))  # Vertex AI's; a VM's
    task = next((str(found[contract.LOG_TASK]) for found in labels if contract.LOG_TASK in found), "")
    text = text_of(raw)
    name = str(raw.get("insertId") or text)
    return Entry(time, name, task, text, str(raw.get("severity") or "DEFAULT"))


def text_of(raw: Mapping[str, Any]) -> str:
    """What was printed: jsonPayload.message, as Vertex AI writes it, or a plain text; else whatever is there."""
    if isinstance(text := raw.get("textPayload"), str):
        return text
    payload = mapping(raw.get("jsonPayload") or raw.get("protoPayload"))
    message = payload.get("message")
    return message if isinstance(message, str) else json.dumps(payload, ensure_ascii=False)


def lines_of(entry: Entry) -> Iterator[Line]:
    """An entry may hold several lines."""
    for text in cut(entry.text):
        yield Line(entry.time / SECOND, entry.replica, text, entry.severity)


def mapping(value: Any) -> Mapping[str, Any]:
    """`value`, if it is a mapping."""
    return value if isinstance(value, Mapping) else {}


def token_of(answer: Any) -> str:
    """With which the next page is asked for; empty at the end. A page may be empty and not the last one."""
    return str(mapping(answer).get("nextPageToken") or "")


TIME: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


def parsed(text: Any) -> int | None:
    """RFC 3339 as Unix nanoseconds; None if it isn't that."""
    found = TIME.fullmatch(text) if isinstance(text, str) else None
    if not found:
        return None
    try:
        whole = datetime.fromisoformat(found[1] + found[3].replace("Z", "+00:00"))
    except ValueError:
        return None
    return nanoseconds(whole.timestamp()) + int((found[2] or "0").ljust(9, "0"))


def nanoseconds(seconds: float) -> int:
    """To the microsecond: a float of today's seconds holds no more."""
    return round(seconds * 1_000_000) * 1000


def rfc3339(time: int) -> str:
    """Unix nanoseconds as RFC 3339."""
    whole, rest = divmod(max(time, 0), SECOND)
    return f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
