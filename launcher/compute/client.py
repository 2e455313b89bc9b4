"""Compute Engine's VMs and operations by Google's own clients, over REST.

The answers are data (`Machine`, `Operation`). Whatever is asked may be asked twice: a create carries the id that its
caller gives it, anything else that changes a VM one of its own, and Google does nothing twice for the same id (for an
hour at least; https://cloud.google.com/compute/docs/reference/rest/v1/instances/insert).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from uuid import uuid4

from launcher.backend.base import GoneError
from launcher.clock import REAL, Clock
from launcher.compute.messages import Lists, as_json, changed, message_of, origin_only
from launcher.compute.operations import Operation, operation_of
from launcher.errors import LaunchError, StillRunning
from launcher.gcp.api import Api, Service, UnreachableError, answer_behind, open_client, open_session, status_of
from launcher.gcp.parallel import Asking, of_create
from launcher.jobs.vm import READY, Machine, last, of_instance

SERVICE: Final = Service("compute", "Compute Engine", "roles/compute.instanceAdmin.v1")
SEND_SECONDS: Final = 8.0
"""Time limit for repeating a create request: its lock may be given up soon after (launcher/runs/submission.py)."""
LOOKS: Final = (0.5, 1.0, 2.0)
"""Seconds between looks at an operation; the last one from then on."""
CHANGES: Final = 5
"""How often a change is begun anew because somebody else was quicker."""
NOTICE_EVERY: Final = 60.0


class Fleet(NamedTuple):
    """VMs, the newest first, and the zones that could not be read, each with Google's words."""

    machines: tuple[Machine, ...]
    unread: dict[str, str]


class Compute:
    """The VMs of one project. Any number of threads may use it.

    All of it raises, besides what is said below: UnreachableError: no answer for a minute; NotAuthorised, LaunchError:
    it is refused.
    """

    def __init__(
        self,
        project: str,
        environ: Mapping[str, str],
        clock: Clock = REAL,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """`notice` is told, once a minute at most, that an answer is waited for."""
        self.project = project
        self.environ = environ
        self.clock = clock
        self._notice, self._noticed = notice, float("-inf")
        self._apis: dict[str, Api] = {}
        self._lock = threading.RLock()

    # --- What is there ---------------------------------------------------------------------------------------------

    def instances(self, filter_: str = "") -> Fleet:
        """The VMs of all zones that pass a filter (labels.launch-run="ID", labels.launch-run:*)."""
        found: list[Machine] = []
        unread: dict[str, str] = {}
        for page in self._pages(filter_):
            for scope, listed in page.get("items", {}).items():
                found += [of_instance(instance, self.project) for instance in listed.get("instances", ())]
                warning = listed.get("warning", {})
                if warning and warning.get("code") != "NO_RESULTS_ON_PAGE":
                    unread[last(scope)] = warning.get("message", "") or warning.get("code", "")
            unread.update({last(scope): "it can't be reached" for scope in page.get("unreachables", ())})
        by_number = {machine.id: machine for machine in found}
        return Fleet(tuple(sorted(by_number.values(), key=lambda one: (-one.created, one.name))), unread)

    def instance(self, zone: str, name: str) -> Machine:
        """A VM by its name or number. Raises GoneError."""
        where = f"projects/{self.project}/zones/{zone}/instances/{name}"
        return of_instance(as_json(self._of_vm(where, "get")), self.project)

    def guest_attributes(self, machine: Machine, namespace: str = READY) -> dict[str, str]:
        """What the VM says of itself in one namespace; empty until it does. Raises GoneError."""
        try:
            found = self._of_vm(machine.resource, "get_guest_attributes", query_path=f"{namespace}/")
        except GoneError:
            self.instance(machine.zone, machine.id)  # the same answer as for a VM that has said nothing
            return {}
        return {item.key: item.value for item in found.query_value.items}

    def serial(self, machine: Machine, start: int = 0) -> tuple[str, int]:
        """The first serial port's text from a position on, and the position to go on from. Raises GoneError."""
        found = self._of_vm(machine.resource, "get_serial_port_output", port=1, start=start)
        return str(found.contents), int(found.next_)

    # --- What changes it -------------------------------------------------------------------------------------------

    def insert(self, zone: str, body: Mapping[str, Any], request_id: str) -> Operation:
        """Begin to make the VM of an Instance. The VM is there when the operation says so, and only then.

        Raises:
            CreateRefused: for sure nothing was made.
            UnreachableError: whether it is being made is not known; the same call again can't make a second one.
            LaunchError: the body can't be written down; nothing was sent.
        """
        return self._create(zone, "insert_unary", request_id, instance_resource=self._message("Instance", body))

    def bulk_insert(self, zone: str, body: Mapping[str, Any], request_id: str) -> Operation:
        """Begin to make the VMs of a BulkInsertInstanceResource. Raises as `insert` does."""
        resource = self._message("BulkInsertInstanceResource", body)
        return self._create(zone, "bulk_insert_unary", request_id, bulk_insert_instance_resource_resource=resource)

    def delete(self, machine: Machine | str) -> Operation:
        """Begin to delete a VM (projects/P/zones/Z/instances/NAME where it is known by that alone). Raises
        GoneError."""
        return self._change(machine, "delete_unary")

    def stop(self, machine: Machine, *, discard_local_ssd: bool) -> Operation:
        """Begin to stop a VM. One with local SSDs must discard what is on them. Raises GoneError."""
        return self._change(machine, "stop_unary", **({"discard_local_ssd": True} if discard_local_ssd else {}))

    def start(self, machine: Machine) -> Operation:
        """Begin to start a VM that is stopped. Raises GoneError."""
        return self._change(machine, "start_unary")

    def set_metadata(self, machine: Machine, key: str, value: str | None) -> Operation:
        """Begin to set one metadata item, or to remove it (None); the others stay as they are, whoever changes them
        at the same time. Raises GoneError."""
        for attempt in range(CHANGES):
            now = self.instance(machine.zone, machine.id)
            try:
                resource = self._message("Metadata", changed(now.request.get("metadata", {}), key, value))
                return self._change(machine, "set_metadata_unary", metadata_resource=resource)
            except LaunchError as error:
                if status_of(error) != 412 or attempt == CHANGES - 1:
                    raise
        raise AssertionError("the last change returns or raises")

    # --- How far that is -------------------------------------------------------------------------------------------

    def operation(self, zone: str, name: str) -> Operation:
        """An operation as it is now. Raises GoneError: Google has forgotten it."""
        api, asked = self.api("ZoneOperationsClient"), {"project": self.project, "zone": zone, "operation": name}
        try:
            return operation_of(as_json(api.ask("get", **asked)))
        except LaunchError as error:
            if status_of(error) != 404:
                raise
            raise GoneError(f"there is no operation {name} in {zone}") from error

    def operations_of(self, zone: str, number: str) -> tuple[Operation, ...]:
        """What was done to one VM, the newest first. Google keeps operations for two weeks or so."""
        found = self.listed("ZoneOperationsClient", zone=zone, filter=f"targetId={number}")
        mine = [one for one in map(operation_of, found) if one.target == number]  # whatever is made of the filter
        return tuple(sorted(mine, key=lambda one: -one.inserted))

    def operations_of_group(self, zone: str, group: str) -> tuple[Operation, ...]:
        """What was begun together (a bulkInsert and the inserts of its VMs), the newest first."""
        found = self.listed("ZoneOperationsClient", zone=zone, filter=f"operationGroupId={group}")
        mine = [one for one in map(operation_of, found) if one.group == group]
        return tuple(sorted(mine, key=lambda one: -one.inserted))

    def wait(self, operation: Operation, seconds: float) -> Operation:
        """The operation once it is done, well or not. An outage on the way is waited out.

        Raises:
            StillRunning: it isn't done after so many seconds. UnreachableError: nor is there an answer. GoneError.
        """
        until, looks = self.clock.now() + seconds, iter(LOOKS)
        while not operation.done:
            trouble: UnreachableError | None = None
            if self.clock.now() >= until:
                what = f"{operation.kind} of {operation.target_name or operation.name}"
                raise StillRunning(f"{SERVICE.title} hasn't ended its {what} after {seconds:.0f} s")
            self.clock.sleep(min(next(looks, LOOKS[-1]), max(until - self.clock.now(), 0.1)))
            try:
                operation = self.operation(operation.zone, operation.name)
            except UnreachableError as error:
                trouble = error
            if trouble and self.clock.now() >= until:
                raise trouble
        return operation

    # --- Below -----------------------------------------------------------------------------------------------------

    def api(self, client: str) -> Api:
        """One of compute_v1's clients by its class's name, made when it is first used."""
        with self._lock:
            if client not in self._apis:
                from google.cloud import compute_v1

                made = open_client(getattr(compute_v1, client), SERVICE, origin_only(self.environ))
                self._apis[client] = Asking(SERVICE, self.project, made, self.clock, self._tell)
            return self._apis[client]

    def listed(self, client: str, **asked: Any) -> Iterator[dict[str, Any]]:
        """All pages of one of compute_v1's lists, as canonical JSON."""
        api, token = self.api(client), ""
        while True:
            pager = api.ask("list", project=self.project, **asked, **({"page_token": token} if token else {}))
            page = next(iter(pager.pages))  # the one that is there; the pager itself would ask without our patience
            yield from map(as_json, page.items)
            if not (token := page.next_page_token):
                return

    def _pages(self, filter_: str) -> Iterator[dict[str, Any]]:
        """The pages of the list over all zones, as JSON."""
        api, token = self._lists(), ""
        while True:
            page = api.ask("instances", filter=filter_, page_token=token)
            yield page
            if not (token := page.get("nextPageToken", "")):
                return

    def _lists(self) -> Api:
        with self._lock:
            if "lists" not in self._apis:
                made = Lists(*open_session(SERVICE, origin_only(self.environ)), self.project)
                self._apis["lists"] = Asking(SERVICE, self.project, made, self.clock, self._tell)
            return self._apis["lists"]

    def _message(self, name: str, body: Mapping[str, Any]) -> Any:
        from google.cloud import compute_v1

        return message_of(getattr(compute_v1, name), body)

    def _create(self, zone: str, method: str, request_id: str, **resource: Any) -> Operation:
        try:
            api = self.api("InstancesClient")
            asked = {"project": self.project, "zone": zone, "request_id": request_id, **resource}
            made = api.ask_soon(method, SEND_SECONDS, **asked)
        except LaunchError as error:
            behind = answer_behind(error) or error.__cause__ or error
            told = of_create(behind, SERVICE, self.project)
            raise told if isinstance(told, LaunchError) else error from behind
        return operation_of(as_json(made))

    def _change(self, machine: Machine | str, method: str, **asked: Any) -> Operation:
        resource = machine if isinstance(machine, str) else machine.resource
        return operation_of(as_json(self._of_vm(resource, method, request_id=str(uuid4()), **asked)))

    def _of_vm(self, resource: str, method: str, **asked: Any) -> Any:
        """The answer about one VM. Raises GoneError."""
        _, project, _, zone, _, name = resource.split("/")
        try:
            return self.api("InstancesClient").ask(method, project=project, zone=zone, instance=name, **asked)
        except LaunchError as error:
            if status_of(error) != 404:
                raise
            raise GoneError(f"there is no VM {name} in {zone}") from error

    def _tell(self, text: str) -> None:
        with self._lock:
            due = self.clock.now() - self._noticed >= NOTICE_EVERY
            self._noticed = self.clock.now() if due else self._noticed
        if due and self._notice:
            self._notice(text)
