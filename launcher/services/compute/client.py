"""Compute Engine's VMs and operations through Google's own clients, over REST.

Results are data (`VmInstance`, `Operation`). Every call may be repeated: a create carries its caller's request id, any
other change one of its own, and Google ignores a second request with the same id (for at least an hour;
https://cloud.google.com/compute/docs/reference/rest/v1/instances/insert).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from uuid import uuid4

from msgspec import Struct

from launcher.clock import REAL, Clock
from launcher.diagnosis import Refusal
from launcher.errors import LaunchError, StillRunning, UnreachableError
from launcher.gcp.api import Api, Clients, RestClient, Service, answer_behind, open_client, open_session, status_of
from launcher.gcp.parallel import of_create
from launcher.jobs.orphans import Disk
from launcher.jobs.vm import READY, VmInstance, last_url_part, of_instance, seconds
from launcher.services.base import CreateRefused, GoneError

SERVICE: Final = Service("compute", "Compute Engine", "roles/compute.instanceAdmin.v1")
SEND_SECONDS: Final = 8.0
"""Time limit for repeating a create request: its lock may be given up soon after (launcher/runs/driver.py)."""
POLL_INTERVALS: Final = (0.5, 1.0, 2.0)
"""Seconds between polls of an operation; the last one repeats."""
MAX_CHANGES: Final = 5
"""Maximum number of tries to change metadata while others change it at the same time."""
PAGE_SIZE: Final = 500
"""Compute Engine's upper bound."""


class Fleet(NamedTuple):
    """VMs, newest first, and the zones that could not be read, each with Google's message."""

    machines: tuple[VmInstance, ...]
    unread: dict[str, str]


class DiskList(NamedTuple):
    """Launch's disks, and the zones that could not be read, each with Google's message."""

    disks: tuple[Disk, ...]
    unread: dict[str, str]


COMPANIONS: Final = frozenset({"VM_MIN_COUNT_NOT_REACHED"})
"""Codes that only report the effect of another error of the same operation."""


class Operation(Struct, frozen=True, kw_only=True):
    """A zonal operation. Times are Unix seconds by Google's clock. None: not yet."""

    name: str
    project: str
    zone: str
    kind: str
    """insert, bulkInsert, delete, stop, start, setMetadata, compute.instances.preempted, …"""
    target: str
    """The number of its VM. Empty for an operation on several VMs (bulkInsert)."""
    target_name: str
    status: str
    """PENDING, RUNNING or DONE."""
    group: str
    """The id of its group, which a bulkInsert and its VMs' inserts share. Empty: no group."""
    request_id: str
    """The id of the request. Empty: it had none."""
    user: str
    """The email of the user or service account that requested it, or "system"."""
    inserted: float
    ended: float | None = None
    refusal: Refusal | None = None
    """Its most informative error, if it failed."""

    @property
    def done(self) -> bool:
        """Return whether it has ended, successful or not."""
        return self.status == "DONE"

    def require_success(self) -> Operation:
        """Return it unless it has failed. Raises CreateRefused."""
        if self.refusal:
            raise CreateRefused(f"Compute Engine: {self.refusal.message}", self.refusal)
        return self


class Compute:
    """The VMs of one project. Thread-safe.

    Every method also raises UnreachableError (no answer for a minute) and NotAuthorised or LaunchError (refused).
    """

    def __init__(
        self,
        project: str,
        environ: Mapping[str, str],
        clock: Clock = REAL,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """`notice` receives a line, at most once a minute, while a call waits for an answer."""
        self.project = project
        self.environ = environ
        self.clock = clock
        self._clients = Clients(SERVICE, project, clock, notice)

    # --- Read ------------------------------------------------------------------------------------------------------

    def instances(self, filter_: str = "") -> Fleet:
        """Return the VMs in all zones that match a filter (labels.launch-run="ID", labels.launch-run:*)."""
        listed, unread = self._in_all_zones("instances", filter_)
        by_number = {machine.id: machine for machine in (of_instance(body, self.project) for body in listed)}
        return Fleet(tuple(sorted(by_number.values(), key=lambda machine: (-machine.created, machine.name))), unread)

    def disks(self, filter_: str) -> DiskList:
        """Return the disks in all zones that match a filter (labels.launch-run:*)."""
        listed, unread = self._in_all_zones("disks", filter_)
        return DiskList(tuple(map(Disk.parse, listed)), unread)

    def google_now(self) -> float:
        """Return Unix seconds by Google's clock, which leases are based on. This machine's clock may be wrong."""
        api = self.rest_api()
        try:
            api.ask("send", path=f"/compute/v1/projects/{self.project}", params={"fields": "name"})
        except LaunchError as error:
            if not status_of(error):  # any answer has the time, a refusal too
                raise
        if api.client.server_time is None:
            raise UnreachableError(f"{SERVICE.title}'s answer has no date")
        return float(api.client.server_time)

    def instance(self, zone: str, name: str) -> VmInstance:
        """Return a VM by its name or number. Raises GoneError."""
        where = f"projects/{self.project}/zones/{zone}/instances/{name}"
        return of_instance(as_json(self._of_vm(where, "get")), self.project)

    def guest_attributes(self, machine: VmInstance, namespace: str = READY) -> dict[str, str]:
        """Return the guest attributes that the VM has written in one namespace. Raises GoneError."""
        try:
            attributes = self._of_vm(machine.resource, "get_guest_attributes", query_path=f"{namespace}/")
        except GoneError:
            self.instance(machine.zone, machine.id)  # 404 is also the answer for a VM that has written none
            return {}
        return {item.key: item.value for item in attributes.query_value.items}

    def serial(self, machine: VmInstance, start: int = 0) -> tuple[str, int]:
        """Return the first serial port's text from position `start`, and the next position. Raises GoneError."""
        output = self._of_vm(machine.resource, "get_serial_port_output", port=1, start=start)
        return str(output.contents), int(output.next_)

    # --- Change ----------------------------------------------------------------------------------------------------

    def insert(self, zone: str, body: Mapping[str, Any], request_id: str) -> Operation:
        """Begin to create the VM of an Instance. It exists once the operation is done.

        Raises:
            CreateRefused: nothing was created.
            UnreachableError: unknown whether it is being created; a repeated call can't create a second one.
            LaunchError: the body is invalid; nothing was sent.
        """
        return self._create(zone, "insert_unary", request_id, instance_resource=self._message("Instance", body))

    def bulk_insert(self, zone: str, body: Mapping[str, Any], request_id: str) -> Operation:
        """Begin to create the VMs of a BulkInsertInstanceResource. Raises as `insert` does."""
        resource = self._message("BulkInsertInstanceResource", body)
        return self._create(zone, "bulk_insert_unary", request_id, bulk_insert_instance_resource_resource=resource)

    def delete(self, machine: VmInstance | str) -> Operation:
        """Begin to delete a VM, given as a VmInstance or as projects/P/zones/Z/instances/NAME. Raises GoneError."""
        return self._change(machine, "delete_unary")

    def stop(self, machine: VmInstance, *, discard_local_ssd: bool) -> Operation:
        """Begin to stop a VM. With local SSDs, their data must be discarded. Raises GoneError."""
        return self._change(machine, "stop_unary", **({"discard_local_ssd": True} if discard_local_ssd else {}))

    def start(self, machine: VmInstance) -> Operation:
        """Begin to start a stopped VM. Raises GoneError."""
        return self._change(machine, "start_unary")

    def set_metadata(self, machine: VmInstance, key: str, value: str | None) -> Operation:
        """Begin to set one metadata item, or to remove it (None).

        Concurrent changes of other items are kept. Raises GoneError.
        """
        for attempt in range(MAX_CHANGES):
            now = self.instance(machine.zone, machine.id)
            metadata = now.request.get("metadata", {})
            items = [item for item in metadata.get("items", ()) if item.get("key") != key]
            if value is not None:
                items.append({"key": key, "value": value})
            fingerprint = {"fingerprint": metadata["fingerprint"]} if "fingerprint" in metadata else {}
            try:
                resource = self._message("Metadata", {**fingerprint, "items": items})
                return self._change(machine, "set_metadata_unary", metadata_resource=resource)
            except LaunchError as error:
                if status_of(error) != 412 or attempt == MAX_CHANGES - 1:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    # --- Operations ------------------------------------------------------------------------------------------------

    def operation(self, zone: str, name: str) -> Operation:
        """Return an operation's current state. Raises GoneError: Google has deleted it."""
        api = self.api("ZoneOperationsClient")
        try:
            return operation_of(as_json(api.ask("get", project=self.project, zone=zone, operation=name)))
        except LaunchError as error:
            if status_of(error) != 404:
                raise
            raise GoneError(f"operation {name} does not exist in {zone}") from error

    def operations_of(self, zone: str, number: str) -> tuple[Operation, ...]:
        """Return one VM's operations, newest first. Google keeps them for about two weeks."""
        messages = self.list_all("ZoneOperationsClient", zone=zone, filter=f"targetId={number}")
        # The filter may be ignored.
        matching = [operation for operation in map(operation_of, messages) if operation.target == number]
        return tuple(sorted(matching, key=lambda operation: -operation.inserted))

    def operations_of_group(self, zone: str, group: str) -> tuple[Operation, ...]:
        """Return the operations of a group (a bulkInsert and the inserts of its VMs), newest first."""
        messages = self.list_all("ZoneOperationsClient", zone=zone, filter=f"operationGroupId={group}")
        matching = [operation for operation in map(operation_of, messages) if operation.group == group]
        return tuple(sorted(matching, key=lambda operation: -operation.inserted))

    def wait(self, operation: Operation, seconds: float) -> Operation:
        """Wait until an operation is done, successful or not, and return it. Outages in between are tolerated.

        Raises StillRunning: not done after `seconds`. UnreachableError: no answer at that time. GoneError.
        """
        until, intervals = self.clock.now() + seconds, iter(POLL_INTERVALS)
        while not operation.done:
            outage: UnreachableError | None = None
            if self.clock.now() >= until:
                what = f"{operation.kind} of {operation.target_name or operation.name}"
                raise StillRunning(f"{SERVICE.title} has not finished the {what} after {seconds:.0f} s")
            self.clock.sleep(min(next(intervals, POLL_INTERVALS[-1]), max(until - self.clock.now(), 0.1)))
            try:
                operation = self.operation(operation.zone, operation.name)
            except UnreachableError as error:
                outage = error
            if outage and self.clock.now() >= until:
                raise outage
        return operation

    # --- Clients ---------------------------------------------------------------------------------------------------

    def api(self, client: str) -> Api:
        """Return one of compute_v1's clients by class name; created on first use."""

        def opened() -> Any:
            from google.cloud import compute_v1

            return open_client(getattr(compute_v1, client), SERVICE, self.environ)

        return self._clients.api(client, opened)

    def list_all(self, client: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Yield the items of all pages of one of compute_v1's lists, as canonical JSON."""
        api, token = self.api(client), ""
        while True:
            pager = api.ask("list", project=self.project, **arguments, **({"page_token": token} if token else {}))
            page = next(iter(pager.pages))  # the pager would request further pages without our retries
            yield from map(as_json, page.items)
            if not (token := page.next_page_token):
                return

    def _in_all_zones(self, kind: str, filter_: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return the resources of a kind (instances, disks) as JSON, and the unreadable zones with Google's messages.

        compute_v1 1.56 can't request that a zone that is down is left out.
        """
        resources: list[dict[str, Any]] = []
        unread: dict[str, str] = {}
        params = {"maxResults": PAGE_SIZE, "returnPartialSuccess": "true", **({"filter": filter_} if filter_ else {})}
        while True:
            path = f"/compute/v1/projects/{self.project}/aggregated/{kind}"
            page = self.rest_api().ask("send", path=path, params=params)
            for scope, listed in page.get("items", {}).items():
                resources += listed.get(kind, ())
                warning = listed.get("warning", {})
                if warning and warning.get("code") != "NO_RESULTS_ON_PAGE":
                    unread[last_url_part(scope)] = warning.get("message", "") or warning.get("code", "")
            unread.update({last_url_part(scope): "unreachable" for scope in page.get("unreachables", ())})
            if not (token := page.get("nextPageToken", "")):
                return resources, unread
            params["pageToken"] = token

    def rest_api(self) -> Api:
        """Return the API by plain REST, for requests that compute_v1's clients can't make."""
        return self._clients.api("rest", lambda: RestClient(SERVICE, *open_session(SERVICE, self.environ)))

    def _message(self, name: str, body: Mapping[str, Any]) -> Any:
        from google.cloud import compute_v1

        return message_of(getattr(compute_v1, name), body)

    def _create(self, zone: str, method: str, request_id: str, **resource: Any) -> Operation:
        try:
            api = self.api("InstancesClient")
            arguments = {"project": self.project, "zone": zone, "request_id": request_id, **resource}
            answer = api.ask_soon(method, SEND_SECONDS, **arguments)
        except LaunchError as error:
            cause = answer_behind(error) or error.__cause__ or error
            explained = of_create(cause, SERVICE, self.project)
            raise explained if isinstance(explained, LaunchError) else error from cause
        return operation_of(as_json(answer))

    def _change(self, machine: VmInstance | str, method: str, **arguments: Any) -> Operation:
        resource = machine if isinstance(machine, str) else machine.resource
        return operation_of(as_json(self._of_vm(resource, method, request_id=str(uuid4()), **arguments)))

    def _of_vm(self, resource: str, method: str, **arguments: Any) -> Any:
        """Call a method for one VM. Raises GoneError."""
        _, project, _, zone, _, name = resource.split("/")
        try:
            return self.api("InstancesClient").ask(method, project=project, zone=zone, instance=name, **arguments)
        except LaunchError as error:
            if status_of(error) != 404:
                raise
            raise GoneError(f"VM {name} does not exist in {zone}") from error


def operation_of(operation: Mapping[str, Any]) -> Operation:
    """Parse an Operation in canonical proto3 JSON."""
    return Operation(
        name=operation.get("name", ""),
        project=operation.get("zone", "").rpartition("/zones/")[0].rpartition("/")[2],  # …/projects/PROJECT/zones/ZONE
        zone=last_url_part(operation.get("zone", "")),
        kind=operation.get("operationType", ""),
        target=str(operation.get("targetId", "")),
        target_name=last_url_part(operation.get("targetLink", "")),
        status=operation.get("status", ""),
        group=operation.get("operationGroupId", ""),
        request_id=operation.get("clientOperationId", ""),
        user=operation.get("user", ""),
        inserted=seconds(operation.get("insertTime")) or 0.0,
        ended=seconds(operation.get("endTime")),
        refusal=refusal_of(operation),
    )


def refusal_of(operation: Mapping[str, Any]) -> Refusal | None:
    """Return the most informative error of an Operation; None: it has not failed, or not ended.

    For a quota, the metadata has quota_metric, quota_limit (Cloud Quotas' id), quota_limit_value, and its dimensions
    (region, gpu_family).
    """
    errors, status = operation.get("error", {}).get("errors", ()), int(operation.get("httpErrorStatusCode", 0))
    if operation.get("status") != "DONE" or not (errors or status >= 400):
        return None
    unknown: Mapping[str, Any] = {"message": f"HTTP {status}"}
    first = next(iter(errors), unknown)
    error = next((error for error in errors if error.get("code") not in COMPANIONS), first)
    details = error.get("errorDetails", ())
    info: Mapping[str, Any] = next((each["errorInfo"] for each in details if "errorInfo" in each), {})
    quota: Mapping[str, Any] = next((each["quotaInfo"] for each in details if "quotaInfo" in each), {})
    # A QuotaExceededInfo under the names that a refused request's ErrorInfo uses for the same values.
    quota_facts = {
        **quota.get("dimensions", {}),
        "quota_metric": quota.get("metricName"),
        "quota_limit": quota.get("limitName"),
        "quota_limit_value": f"{quota['limit']:g}" if "limit" in quota else None,
    }
    return Refusal(
        code=status or 400,
        message=error.get("message", ""),
        reason=error.get("code", ""),
        metadata={**texts(info.get("metadatas", {})), **texts(quota_facts)},
        service="compute",
    )


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Convert values to strings, without those that are None or empty."""
    return {str(name): str(value) for name, value in values.items() if value not in (None, "")}


def message_of(kind: Any, body: Mapping[str, Any]) -> Any:
    """Convert JSON to one of compute_v1's messages. Raises LaunchError: the client does not know one of its fields."""
    from google.protobuf.json_format import ParseDict, ParseError

    try:
        return kind.wrap(ParseDict(dict(body), kind.pb()()))
    except ParseError as error:
        message = str(error).partition("\n")[0]  # the other lines list all known fields
        raise LaunchError(
            f"the installed google-cloud-compute is too old for this request: {message}",
            "pip install --upgrade google-cloud-compute",
        ) from error


def as_json(message: Any) -> dict[str, Any]:
    """Convert one of compute_v1's messages to canonical proto3 JSON."""
    from google.protobuf.json_format import MessageToDict

    fields: dict[str, Any] = MessageToDict(type(message).pb(message))
    return fields
