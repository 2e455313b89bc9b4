"""A VM's metadata server on its own port: identity, metadata, tokens, and the notice of preemption.

    with MetadataServer(cloud, "us-central1-a", "train-n0") as server:
        environment = {**os.environ, **cloud.environ(), **server.environ()}

The answers follow the VM's state in the cloud: its metadata and `cloud.compute.preempt`. After
the VM is deleted, the server no longer answers.
Source: https://docs.cloud.google.com/compute/docs/metadata/predefined-metadata-keys and /querying-metadata.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from launcher.testing.googlecloud.compute.instance_checks import last
from launcher.testing.googlecloud.compute.instances import enabled
from launcher.testing.googlecloud.compute.vms import Vm, fingerprint
from launcher.testing.googlecloud.server import GoogleCloud
from launcher.testing.googlecloud.wire import Request, Response
from launcher.testing.httpserver import LoopbackServer

ROOT = "/computeMetadata/v1"
FLAVOR = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
GUEST = re.compile(ROOT + r"/instance/guest-attributes/([\w.-]{1,128})/([\w.-]{1,128})")
LOOK = 0.02
"""Poll interval in seconds, while a request waits for a change."""
GONE = Response(head=False, shown=0, then="reset")

Tree = dict[str, Any]


class MetadataServer(LoopbackServer):
    """The metadata server of one VM, as a context manager. `expires_in` is the reported lifetime of a token."""

    def __init__(self, cloud: GoogleCloud, zone: str, name: str, *, expires_in: int = 3599) -> None:
        self.cloud = cloud
        self.number = cloud.compute.vm(name, zone).number
        self.expires_in = expires_in
        self.requests: list[Request] = []
        clock = cloud.compute.timeline.now
        super().__init__(lambda head: self._serve(Request.of(head)), "metadata-server", clock=clock)

    @property
    def token(self) -> str:
        """Return the access token of the VM's service account. The cloud accepts it."""
        token = f"ya29.of-vm-{self.number}"
        self.cloud.compute.actors[token] = self.cloud.compute.vm(self.number).email
        if self.cloud.tokens is not None:
            self.cloud.tokens.add(token)
        return token

    def environ(self) -> dict[str, str]:
        """Return the environment that leads Google's libraries here. NO_GCE_CHECK must not be set in it."""
        return dict.fromkeys(("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"), self.host)

    def _serve(self, request: Request) -> Response:
        self.requests.append(request)
        if request.headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in request.headers:
            return _page(
                403, "Your client does not have permission to get URL from this server. Missing Metadata-Flavor"
            )
        if request.query.get("wait_for_change", "").lower() == "true":
            return self._changed(request)
        return self._answer(request)

    def _changed(self, request: Request) -> Response:
        """Return the answer once it differs from the client's ETag (or the current one), or at the timeout."""
        first = self._answer(request)
        known = request.query.get("last_etag") or first.headers.get("ETag", "")
        end = time.monotonic() + float(request.query.get("timeout_sec", 86400))
        response = first
        while response.headers.get("ETag") == known and time.monotonic() < end and response.status == 200:
            if self._server.stopping.wait(LOOK):
                return GONE
            response = self._answer(request)
        return response

    def _answer(self, request: Request) -> Response:
        try:
            vm = self.cloud.compute.vm(self.number)
        except KeyError:
            return GONE
        if request.path == "/":
            return Response(b"computeMetadata/\n", headers={**FLAVOR, "Content-Type": "application/text"})
        if request.method in ("PUT", "DELETE"):
            return self._set(request, vm)
        if request.path == f"{ROOT}/instance/service-accounts/default/token" and vm.email:
            return _shown(self._token(), as_json=True)
        return _found(request, {"instance": _instance(vm, self.cloud), "project": self._project()})

    def _token(self) -> Tree:
        return {"access_token": self.token, "expires_in": self.expires_in, "token_type": "Bearer"}

    def _project(self) -> Tree:
        number = int(self.cloud.compute.number)
        return {"project-id": self.cloud.project, "numeric-project-id": number, "attributes": {}}

    def _set(self, request: Request, vm: Vm) -> Response:
        guest = GUEST.fullmatch(request.path)
        if not guest or not enabled(vm):
            return _page(403 if guest else 405, "Guest attributes endpoint access is disabled.")
        key = guest[1], guest[2]
        if request.method == "DELETE":
            vm.guest.pop(key, None)
        else:
            vm.guest[key] = request.body.decode("utf-8", "replace")
        return Response(headers={**FLAVOR, "Content-Type": "text/html; charset=UTF-8"})


def _instance(vm: Vm, cloud: GoogleCloud) -> Tree:
    """Return the metadata tree. Folder names have no slash; leaves are strings, numbers or lists of words."""
    number, body = cloud.compute.number, vm.body
    scheduling, nic = body["scheduling"], body["networkInterfaces"][0]
    return {
        "id": int(vm.number),
        "name": vm.name,
        "hostname": f"{vm.name}.{vm.zone}.c.{cloud.project}.internal",
        "zone": f"projects/{number}/zones/{vm.zone}",
        "machine-type": f"projects/{number}/machineTypes/{last(body['machineType'])}",
        "cpu-platform": body["cpuPlatform"],
        "attributes": vm.items,
        "preempted": str(vm.preempted).upper(),
        "maintenance-event": "NONE",
        "scheduling": {
            "automatic-restart": str(scheduling["automaticRestart"]).upper(),
            "on-host-maintenance": scheduling["onHostMaintenance"],
            "preemptible": str(scheduling["preemptible"] or scheduling["provisioningModel"] == "SPOT").upper(),
        },
        "network-interfaces": {"0": {"ip": nic["networkIP"], "network": f"projects/{number}/networks/default"}},
        "service-accounts": _accounts(vm),
        "guest-attributes": {
            space: {key: value for (own, key), value in vm.guest.items() if own == space} for space, _ in vm.guest
        },
    }


def _accounts(vm: Vm) -> Tree:
    if not vm.email:
        return {}
    scopes = [scope for account in vm.body["serviceAccounts"] for scope in account.get("scopes", ())]
    account = {"aliases": ["default"], "email": vm.email, "scopes": scopes}
    return {"default": account, vm.email: account}


def _found(request: Request, tree: Tree) -> Response:
    """Return a value as text, a folder as a list of its entries, or everything below it as JSON."""
    path = unquote(request.path).removeprefix(ROOT)
    value: Any = tree if request.path.startswith(ROOT) else None
    for name in filter(None, path.split("/")):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None or (path.endswith("/") and not isinstance(value, Mapping)):
        return _page(404, f"The requested URL {request.path} was not found on this server.")
    if not isinstance(value, Mapping):
        return _shown(value, as_json=request.query.get("alt") == "json")
    if not request.path.endswith("/"):
        return Response(status=301, headers={**FLAVOR, "Location": f"{request.path}/"})
    if request.query.get("recursive", "").lower() == "true":
        return _shown(_camel(value, plain="/attributes" in path or "/guest-attributes" in path), as_json=True)
    return _shown([name + "/" * isinstance(entry, Mapping) for name, entry in value.items()], as_json=False)


def _shown(value: Any, *, as_json: bool) -> Response:
    if as_json:
        body, kind = json.dumps(value).encode(), "application/json"
    else:
        body, kind = _text(value).encode(), "application/text"
    return Response(body, headers={**FLAVOR, "Content-Type": kind, "ETag": fingerprint(value)})


def _text(value: Any) -> str:
    return "".join(f"{line}\n" for line in value) if isinstance(value, list) else str(value)


def _camel(tree: Mapping[str, Any], *, plain: bool = False) -> Tree:
    """Convert Google's names to camelCase for JSON. Names that users chose are unchanged."""
    return {
        name if plain else re.sub(r"-(\w)", lambda match: match[1].upper(), name): _camel(
            value, plain=plain or name in ("attributes", "guest-attributes", "service-accounts")
        )
        if isinstance(value, Mapping)
        else value
        for name, value in tree.items()
    }


def _page(status: int, text: str) -> Response:
    page = f"<!DOCTYPE html><html lang=en><title>Error {status}</title><p>{text}".encode()
    return Response(page, status, {**FLAVOR, "Content-Type": "text/html; charset=UTF-8"})
