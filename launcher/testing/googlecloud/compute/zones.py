"""A project's zones, quotas, machine types, images and networks, and Compute Engine's advice on Spot capacity.

The network `default` is as Google creates it: its subnetworks are without Private Google Access, there is no router,
and SSH is allowed from anywhere. `open_out` and `access` change what a VM without an external IP can reach.

Seen (gcloud 528's generated client, compute v1): paths and fields of firewall rules and routers. Assumed: their
operations are done at once; a name that exists is refused with 409 and the reason alreadyExists (documented for all of
Compute Engine). Documented about advice: paths, request and answer, SPOT as the only provisioning model, no history of
N1 with GPUs (REST reference beta/advice/capacity and capacityHistory, and the guide view-spot-preemption-price).
Assumed: a version that does not serve a method answers 404.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from google.cloud import compute_v1
from google.protobuf import json_format

from launcher.testing.googlecloud.compute.api import already_exists, listed, not_found
from launcher.testing.googlecloud.compute.capacity import ATTACHED, Quotas, is_zone, regions, shapes, zones
from launcher.testing.googlecloud.compute.vms import Json, Park
from launcher.testing.googlecloud.protobufs import parse
from launcher.testing.googlecloud.wire import ApiError, Request, Response, Route, json_response, new_route, route

PROJECT = "/compute/v1/projects/{project}"
ZONE = PROJECT + "/zones/{zone}"
REGION = PROJECT + "/regions/{region}"
GLOBAL = PROJECT + "/global"
ADVICE = "/projects/{project}/regions/{region}/advice/"
DLVM = "deeplearning-platform-release"
IMAGE_PROJECTS = (DLVM, "ubuntu-os-cloud", "debian-cloud")
FAMILIES = tuple(
    f"{framework}-{cuda}-ubuntu-{release}-nvidia-{driver}"
    for cuda, release, driver in (("cu129", "2404", "580"), ("cu129", "2204", "580"), ("cu128", "2204", "570"))
    for framework in (("common", "pytorch-2-9") if cuda == "cu129" else ("common", "pytorch-2-7"))
)
"""Families of Deep Learning VM images (2026-04-15)."""


class Zones:
    """The resources of one project. Tests may change their data.

    Of the advice on Spot capacity: `scores` has the obtainability by zone, `versions` are the API versions with a
    history, `rates` the daily preemption rates, newest first, and `prices` pairs of the first day and USD per hour.
    """

    def __init__(self, park: Park, quotas: Quotas, number: str) -> None:
        self.park = park
        self.quotas = quotas
        self.number = number
        self.families: dict[tuple[str, str], str] = {(DLVM, name): f"{name}-v20260819" for name in FAMILIES}
        self.networks: dict[str, Json] = {"default": {"autoCreateSubnetworks": True, "mtu": 1460}}
        self.subnetworks: dict[tuple[str, str], Json] = {(region, "default"): {} for region in regions()}
        self.routers: dict[tuple[str, str], Json] = {}
        self.firewalls: list[Json] = [
            _firewall("default-allow-ssh", ["0.0.0.0/0"], "22"),
            _firewall("default-allow-internal", ["10.128.0.0/9"], "0-65535"),
        ]
        self.hosts: dict[str, set[str]] = {}
        """Host projects of Shared VPCs: the permissions that the caller has on their subnetworks, named as here."""
        self.reservations: dict[tuple[str, str], Json] = {}
        self.scores: dict[str, float] = {}
        self.operations: dict[str, Json] = {}
        self.uptime = "604800s"
        self.versions = ["v1", "beta"]
        self.rates = [0.1, 0.3]
        self.prices = [("2026-10-01", 0.28), ("2026-11-01", 0.28), ("2026-11-20", 0.31)]
        self.more_routes = [
            *self._reads(PROJECT, "zone", self._zones),
            *self._reads(PROJECT, "region", self._regions),
            *self._reads(ZONE, "machineType", self._machines),
            *self._reads(ZONE, "acceleratorType", self._accelerators),
            *self._reads(ZONE, "reservation", self._reservations),
            *self._reads(REGION, "subnetwork", self._subnetworks),
            *self._reads(REGION, "router", self._routers),
            *self._reads(GLOBAL, "image", self._images),
            *self._reads(GLOBAL, "network", self._networks),
            *self._reads(GLOBAL, "firewall", self._firewalls),
        ]

    def open_out(self, region: str) -> None:
        """Add a NAT, through which the VMs of a region reach the internet."""
        nat = {"name": "nat", "natIpAllocateOption": "AUTO_ONLY"}
        nats = [{**nat, "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}]
        self.routers[region, "router"] = {"network": self._link("global/networks/default"), "nats": nats}

    def access(self, region: str, name: str = "default") -> None:
        """Let the VMs of a subnetwork reach Google's APIs (Private Google Access)."""
        self.subnetworks[region, name] = {"privateIpGoogleAccess": True}

    @route("GET", PROJECT, "compute.projects.get")
    def project(self, request: Request, project: str) -> Response:
        account = f"{self.number}-compute@developer.gserviceaccount.com"
        answer: Json = {"kind": "compute#project", "id": self.number, "name": self.park.project}
        answer |= {"commonInstanceMetadata": {"kind": "compute#metadata"}, "defaultServiceAccount": account}
        return json_response({**answer, "quotas": self.quotas.shown(self._used(), "")})

    @route("POST", REGION + "/subnetworks/{name}/testIamPermissions", "compute.subnetworks.testIamPermissions")
    def may_use(self, request: Request, project: str, region: str, name: str) -> Response:
        """Return which of the permissions the caller has on a subnetwork: all in the own project."""
        if (region, name) not in self.subnetworks:
            raise not_found(f"projects/{self.park.project}/regions/{region}/subnetworks/{name}")
        permissions = request.json()["permissions"]
        have = [name for name in permissions if project not in self.hosts or name in self.hosts[project]]
        return json_response({"permissions": have} if have else {})

    @route("GET", GLOBAL + "/images/family/{name}", "compute.images.getFromFamily")
    def family(self, request: Request, project: str, name: str) -> Response:
        for image in self._images(project=project):
            if image["family"] == name:
                return json_response({"kind": "compute#image", **image})
        raise not_found(f"projects/{project}/global/images/family/{name}")

    @route("POST", GLOBAL + "/firewalls", "compute.firewalls.insert")
    def add_firewall(self, request: Request, project: str) -> Response:
        body = request.json()
        parse(body, compute_v1.Firewall.pb()(), "resource")
        if any(rule["name"] == body["name"] for rule in self.firewalls):
            raise already_exists(f"global/firewalls/{body['name']}")
        defaults = {"direction": "INGRESS", "priority": 1000, "network": self._link("global/networks/default")}
        self.firewalls.append({**defaults, **body})
        return self._done(f"global/firewalls/{body['name']}", "global")

    @route("POST", REGION + "/routers", "compute.routers.insert")
    def add_router(self, request: Request, project: str, region: str) -> Response:
        body = request.json()
        parse(body, compute_v1.Router.pb()(), "resource")
        if (region, body["name"]) in self.routers:
            raise already_exists(f"regions/{region}/routers/{body['name']}")
        self.routers[region, body["name"]] = body
        return self._done(f"regions/{region}/routers/{body['name']}", f"regions/{region}")

    @route("PATCH", REGION + "/routers/{name}", "compute.routers.patch")
    def patch_router(self, request: Request, project: str, region: str, name: str) -> Response:
        parse(request.json(), compute_v1.Router.pb()(), "resource")
        self.routers[region, name] |= request.json()
        return self._done(f"regions/{region}/routers/{name}", f"regions/{region}")

    @route("GET", GLOBAL + "/operations/{operation}", "compute.globalOperations.get")
    @route("POST", GLOBAL + "/operations/{operation}/wait", "compute.globalOperations.wait")
    @route("GET", REGION + "/operations/{operation}", "compute.regionOperations.get")
    @route("POST", REGION + "/operations/{operation}/wait", "compute.regionOperations.wait")
    def operation(self, request: Request, project: str, operation: str, region: str = "") -> Response:
        return json_response(self.operations[operation])

    @route("POST", "/compute/v1" + ADVICE + "capacity", "compute.advice.capacity", query="size")
    @route("POST", "/compute/beta" + ADVICE + "capacity", "compute.beta.advice.capacity", query="size")
    def advise(self, request: Request, project: str, region: str) -> Response:
        body = request.json()
        json_format.ParseDict(body, compute_v1.CapacityAdviceRequest.pb()())
        named = [zone["zone"].rpartition("/")[2] for zone in body.get("distributionPolicy", {}).get("zones", ())]
        model = body.get("instanceProperties", {}).get("scheduling", {}).get("provisioningModel", "STANDARD")
        if model != "SPOT":
            raise ApiError(400, "Capacity advice is given for provisioning model SPOT only.", reason="invalid")
        choice = body.get("instanceFlexibilityPolicy", {}).get("instanceSelections", {})
        machines = [machine for selection in choice.values() for machine in selection.get("machineTypes", ())]
        count = int(body.get("size", request.query.get("size", 1)))
        where = sorted(named or zones(region), key=lambda zone: -self.scores.get(zone, 0.5))
        return json_response({"recommendations": [self._advice(zone, machines, count) for zone in where]})

    @route("POST", "/compute/{version}" + ADVICE + "capacityHistory", "compute.advice.capacityHistory")
    def history(self, request: Request, version: str, project: str, region: str) -> Response:
        """Return the preemptions by day and the list prices of a machine type's Spot VMs."""
        if version not in self.versions:
            raise ApiError(404, f"Requested entity was not found: {request.path}", reason="notFound")
        body = request.json()
        json_format.ParseDict(body, compute_v1.CapacityHistoryRequest.pb()())
        wanted = body["instanceProperties"]
        if wanted.get("scheduling", {}).get("provisioningModel") != "SPOT" or wanted["machineType"].startswith("n1-"):
            raise ApiError(400, "Capacity history is available for Spot VMs of this machine type only.")
        answer: dict[str, Any] = {"machineType": wanted["machineType"], "location": f"regions/{region}"}
        if "PREEMPTION" in body.get("types", ()):
            answer["preemptionHistory"] = [
                {"interval": _day(f"2026-11-{22 - n:02}"), "preemptionRate": rate} for n, rate in enumerate(self.rates)
            ]
        if "PRICE" in body.get("types", ()):
            answer["priceHistory"] = []
            for day, usd in self.prices:
                price = {"currencyCode": "USD", "units": str(int(usd)), "nanos": round((usd - int(usd)) * 1e9)}
                answer["priceHistory"].append({"interval": _day(day), "listPrice": price})
        return json_response(answer)

    def _reads(self, scope: str, kind: str, items: Callable[..., Iterable[Json]]) -> list[Route]:
        """Return the routes that get a resource by its name and list all; `items` gets the path's variable parts."""
        path, operation = f"{scope}/{kind}s", f"compute.{kind}s"

        def get(request: Request, name: str, **names: str) -> Response:
            request.only_query()
            for item in items(**names):
                if item["name"] == name:
                    return json_response({"kind": f"compute#{kind}", **item})
            raise not_found(request.path.removeprefix("/compute/v1/"))

        def list_all(request: Request, **names: str) -> Response:
            return listed(
                request, f"compute#{kind}List", [{"kind": f"compute#{kind}", **item} for item in items(**names)]
            )

        return [
            new_route("GET", path, list_all, f"{operation}.list"),
            new_route("GET", path + "/{name}", get, f"{operation}.get"),
        ]

    def _zones(self, **_: str) -> Iterator[Json]:
        for region in regions():
            for zone in zones(region):
                links = {"selfLink": self._link(f"zones/{zone}"), "region": self._link(f"regions/{region}")}
                yield {"name": zone, "status": "UP", **links}

    def _regions(self, **_: str) -> Iterator[Json]:
        used = self._used()
        for region in regions():
            here = {"zones": [self._link(f"zones/{zone}") for zone in zones(region)]}
            quotas = {"quotas": self.quotas.shown(used, region)}
            yield {"name": region, "status": "UP", "selfLink": self._link(f"regions/{region}"), **here, **quotas}

    def _machines(self, zone: str, **_: str) -> Iterator[Json]:
        for machine in shapes().values():
            if not machine.within(zone):
                continue
            gpus = {"guestAcceleratorType": machine.accelerator, "guestAcceleratorCount": machine.gpus}
            ssds = {"defaultInterface": "NVME", "partitionCount": machine.local_ssds}
            yield {
                "name": machine.name,
                "zone": zone,
                "guestCpus": machine.vcpus,
                "memoryMb": int(machine.memory_gb * 1024),
                "selfLink": self.park.link(zone, "machineTypes", machine.name),
                **({"accelerators": [gpus]} if machine.gpus else {}),
                **({"bundledLocalSsds": ssds} if machine.local_ssds else {}),
            }

    def _accelerators(self, zone: str, **_: str) -> Iterator[Json]:
        most: dict[str, int] = dict(ATTACHED) if is_zone(zone) else {}
        for machine in shapes().values():
            if machine.gpus and machine.within(zone):
                most[machine.accelerator] = max(machine.gpus, most.get(machine.accelerator, 0))
        for name, count in sorted(most.items()):
            links = {"zone": self.park.link(zone), "selfLink": self.park.link(zone, "acceleratorTypes", name)}
            yield {"name": name, **links, "maximumCardsPerInstance": count}

    def _reservations(self, zone: str, **_: str) -> Iterator[Json]:
        return ({"name": name, **body} for (where, name), body in self.reservations.items() if where == zone)

    def _subnetworks(self, region: str, **_: str) -> Iterator[Json]:
        """Yield a region's subnetworks, including their privateIpGoogleAccess."""
        usual = {"ipCidrRange": "10.128.0.0/20", "privateIpGoogleAccess": False}
        links = {"network": self._link("global/networks/default"), "region": self._link(f"regions/{region}")}
        for (where, name), body in self.subnetworks.items():
            if where == region:
                yield {"name": name, **usual, **links, **body}

    def _routers(self, region: str, **_: str) -> Iterator[Json]:
        for (where, name), body in self.routers.items():
            if where == region:
                link = self._link(f"regions/{region}/routers/{name}")
                yield {"region": self._link(f"regions/{region}"), "selfLink": link, **body, "name": name}

    def _images(self, project: str, **_: str) -> Iterator[Json]:
        for (owner, family), name in self.families.items():
            if owner == project:
                link = f"{self.park.url()}/compute/v1/projects/{project}/global/images/{name}"
                known = {"name": name, "family": family, "status": "READY", "selfLink": link}
                yield {**known, "architecture": "X86_64", "diskSizeGb": "50"}

    def _networks(self, **_: str) -> Iterator[Json]:
        for name, body in self.networks.items():
            yield {"name": name, "selfLink": self._link(f"global/networks/{name}"), **body}

    def _firewalls(self, **_: str) -> Iterator[Json]:
        network = self._link("global/networks/default")
        for rule in self.firewalls:
            yield {"selfLink": self._link(f"global/firewalls/{rule['name']}"), "network": network, **rule}

    def _done(self, target: str, scope: str) -> Response:
        name = f"operation-{len(self.operations) + 1}"
        link = self._link(f"{scope}/operations/{name}")
        done = {"kind": "compute#operation", "name": name, "status": "DONE", "progress": 100, "selfLink": link}
        where = {"region": self._link(scope)} if scope != "global" else {}
        self.operations[name] = {**done, **where, "targetLink": self._link(target), "operationType": "insert"}
        return json_response(self.operations[name])

    def _advice(self, zone: str, machines: list[str], count: int) -> Json:
        shard = {"zone": self._link(f"zones/{zone}"), "instanceCount": count, "provisioningModel": "SPOT"}
        scores = {"obtainability": self.scores.get(zone, 0.5), "estimatedUptime": self.uptime}
        return {"scores": scores, "shards": [{**shard, "machineType": machines[0] if machines else ""}]}

    def _used(self) -> list[Any]:
        return [vm.wanted for vm in self.park.up()]

    def _link(self, resource: str) -> str:
        return f"{self.park.url()}/compute/v1/projects/{self.park.project}/{resource}"


def _firewall(name: str, sources: list[str], port: str) -> Json:
    allowed = [{"IPProtocol": "tcp", "ports": [port]}]
    return {"name": name, "direction": "INGRESS", "priority": 65534, "sourceRanges": sources, "allowed": allowed}


def _day(start: str) -> dict[str, str]:
    return {"startTime": f"{start}T00:00:00.000-08:00", "endTime": f"{start}T23:59:59.000-08:00"}
