"""A VM brought up, down or away, with what is told on the way; Google's own time; and our disks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from launcher.backend.base import CreateRefused, GoneError
from launcher.compute import end_record
from launcher.compute.client import SERVICE, Compute
from launcher.compute.end_record import Record
from launcher.compute.messages import PAGE, origin_only
from launcher.compute.node_set import nodes_of
from launcher.compute.operations import Operation
from launcher.errors import LaunchError, StillRunning
from launcher.gcp.api import UnreachableError, answer_behind, http_date, open_session, refusal_of
from launcher.gcp.parallel import Asking
from launcher.jobs.orphans import Disk, of_disk
from launcher.jobs.vm import Machine, last

Say = Callable[[str], None]
LONGEST_SECONDS: Final = 900.0
"""For a VM to start or to stop: a machine with many GPUs takes minutes."""
SAY_SECONDS: Final = 20.0
"""Between two lines about how far it is."""
SETTLE_SECONDS: Final = 2.0
FOLDER_SECONDS: Final = 20.0
"""For one question to a run's folder."""


class Stock(NamedTuple):
    """Launch's disks, and the zones that could not be read, each with Google's words."""

    disks: tuple[Disk, ...]
    unread: dict[str, str]


# --- A VM's change ---------------------------------------------------------------------------------------------------


def changed(
    compute: Compute, machine: Machine, change: Callable[[], Operation], wanted: frozenset[str], say: Say
) -> Machine:
    """The VM once a change has brought it into a state that is wanted. `say` hears how it goes.

    Raises:
        CreateRefused: Google didn't do it, at once or after a while.
        GoneError: there is no such VM any more.
        StillRunning: it hasn't happened after a quarter of an hour.
    """
    finished(compute, begun(change), say)
    return settled(compute, machine, wanted, say)


def begun(change: Callable[[], Operation]) -> Operation:
    """The operation that a change has begun. Raises CreateRefused; GoneError; UnreachableError: whether it was begun
    isn't known."""
    from google.api_core.exceptions import GoogleAPICallError

    try:
        return change()
    except (GoneError, UnreachableError):
        raise
    except LaunchError as error:
        answer = answer_behind(error)
        if not isinstance(answer, GoogleAPICallError) or answer.code == 401:
            raise
        raise CreateRefused(error.problem, refusal_of(answer, SERVICE)) from error


def finished(compute: Compute, operation: Operation, say: Say) -> Operation:
    """The operation once it has done what it should. An outage is waited out. Raises CreateRefused, StillRunning."""
    began = compute.clock.now()
    while not operation.done:
        waited = compute.clock.now() - began
        if waited >= LONGEST_SECONDS:
            raise StillRunning(f"Compute Engine is at it for {waited / 60:.0f} minutes, and goes on")
        try:
            operation = compute.wait(operation, SAY_SECONDS)
        except StillRunning:
            say(f"still waiting for Compute Engine ({compute.clock.now() - began:.0f} s)")
        except UnreachableError as error:
            say(f"can't be seen just now, trying on: {error.problem}")
    if operation.failed:
        raise CreateRefused(f"Compute Engine: {operation.refusal.message}", operation.refusal)
    return operation


def settled(compute: Compute, machine: Machine, wanted: frozenset[str], say: Say) -> Machine:
    """The VM once it is in a state that is wanted: a moment after the operation, or later if it is on its way
    anyhow. Raises GoneError, StillRunning."""
    began = told = compute.clock.now()
    while True:
        try:
            machine = compute.instance(machine.zone, machine.id)
        except UnreachableError as error:
            say(f"can't be seen just now, trying on: {error.problem}")
        else:
            if machine.status in wanted:
                return machine
        now = compute.clock.now()
        if now - began >= LONGEST_SECONDS:
            raise StillRunning(f"{machine.name} is {machine.status} for {(now - began) / 60:.0f} minutes, and goes on")
        if now - told >= SAY_SECONDS:
            say(f"it is {machine.status}")
            told = now
        compute.clock.sleep(SETTLE_SECONDS)


# --- Beside it -------------------------------------------------------------------------------------------------------


def google_now(compute: Compute) -> float:
    """Unix seconds by Google's clock, which leases are counted by; this machine's may be a day off.

    Raises UnreachableError.
    """
    return float(_plainly(compute).ask("now"))


def stock(compute: Compute, filter_: str) -> Stock:
    """The disks of all zones that pass a filter (labels.launch-run:*)."""
    api, token = _plainly(compute), ""
    disks: list[Disk] = []
    unread: dict[str, str] = {}
    while True:
        page = api.ask("disks", filter=filter_, page_token=token)
        for scope, listed in page.get("items", {}).items():
            disks += map(of_disk, listed.get("disks", ()))
            warning = listed.get("warning", {})
            if warning and warning.get("code") != "NO_RESULTS_ON_PAGE":
                unread[last(scope)] = warning.get("message", "") or warning.get("code", "")
        unread.update({last(scope): "it can't be reached" for scope in page.get("unreachables", ())})
        if not (token := page.get("nextPageToken", "")):
            return Stock(tuple(disks), unread)


def end_of(machine: Machine) -> Record | None:
    """How the training of a VM has ended, as its run's folder says: of several, how the first of them did. None: it
    hasn't. Raises LaunchError: the folder can't be read."""
    from launcher.gcp.storage import open_folder

    folder = str(machine.parameters.get("run_folder", ""))
    if not folder:
        return None
    found = end_record.read_all(open_folder(folder).within(FOLDER_SECONDS))
    if own := found.get(machine.id):
        return own
    if len(names := nodes_of(machine)) == 1:
        return None
    together = [one for one in found.values() if one.zone == machine.zone and one.name in names]
    later = [one for one in together if (one.ended or 0.0) > machine.created]  # an earlier attempt has the same names
    return min(later, key=lambda one: one.ended or 0.0, default=None)


def _plainly(compute: Compute) -> Asking:
    """What compute_v1's clients can't be asked."""
    asked = Plain(*open_session(SERVICE, origin_only(compute.environ)), compute.project)
    return Asking(SERVICE, compute.project, asked, compute.clock, lambda _text: None)


class Plain:
    """Requests of a session, with the methods of a client."""

    def __init__(self, session: Any, endpoint: str, project: str) -> None:
        self._session = session
        self._url = f"{endpoint}/compute/v1/projects/{project}"

    def now(self, request: Mapping[str, str], retry: None, timeout: float) -> float:
        """The time of an answer: any will do, be it a refusal."""
        answer = self._session.get(self._url, params={"fields": "name"}, timeout=timeout)
        at = http_date(answer.headers.get("Date", ""))
        if at is None:
            raise ValueError("an answer without a date")
        return at

    def disks(self, request: Mapping[str, str], retry: None, timeout: float) -> dict[str, Any]:
        """A page of the disks of all zones; a zone that is down costs no other."""
        from google.api_core.exceptions import from_http_response

        wanted = {"filter": request["filter"], "pageToken": request["page_token"]}
        params = {"maxResults": PAGE, "returnPartialSuccess": "true", **{k: v for k, v in wanted.items() if v}}
        answer = self._session.get(f"{self._url}/aggregated/disks", params=params, timeout=timeout)
        if answer.status_code >= 400:
            raise from_http_response(answer)
        page = answer.json()
        if not isinstance(page, dict):
            raise ValueError("a list that is none")
        return page
