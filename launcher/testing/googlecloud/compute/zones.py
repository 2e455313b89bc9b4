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

from collections.abc import Iterable, Iterator
from typing import Any

from google.cloud import compute_v1
from google.protobuf import json_format

from launcher.testing.googlecloud.compute.capacity import Quotas
from launcher.testing.googlecloud.compute.lists import aggregated, listed
from launcher.testing.googlecloud.compute.machine_types import ATTACHED, Shape, is_zone, regions, shape, shapes, zones
from launcher.testing.googlecloud.compute.operations import already_exists, not_found
from launcher.testing.googlecloud.compute.vms import Json, Park
from launcher.testing.googlecloud.protobufs import parse
from launcher.testing.googlecloud.wire import ApiError, Request, Response, Route, json_response, route

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

    `scores` has AdviceClient.capacity's obtainability by zone.
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
        self.routes: list[Route] = [
            route("GET", PROJECT, self.project, "compute.projects.get"),
            route("GET", ZONE, self.zone, "compute.zones.get"),
            route("GET", PROJECT + "/zones", self.zone_list, "compute.zones.list"),
            route("GET", REGION, self.region, "compute.regions.get"),
            route("GET", PROJECT + "/regions", self.region_list, "compute.regions.list"),
            route("GET", ZONE + "/machineTypes/{name}", self.machine, "compute.machineTypes.get"),
            route("GET", ZONE + "/machineTypes", self.machine_list, "compute.machineTypes.list"),
            route("GET", ZONE + "/acceleratorTypes", self.accelerator_list, "compute.acceleratorTypes.list"),
            route("GET", ZONE + "/acceleratorTypes/{name}", self.accelerator, "compute.acceleratorTypes.get"),
            route(
                "GET", PROJECT + "/aggregated/acceleratorTypes", self.accelerators,
                "compute.acceleratorTypes.aggregatedList",
            ),
            route("GET", GLOBAL + "/images/family/{name}", self.family, "compute.images.getFromFamily"),
            route("GET", GLOBAL + "/images/{name}", self.image, "compute.images.get"),
            route("GET", GLOBAL + "/networks/{name}", self.network, "compute.networks.get"),
            route("GET", REGION + "/subnetworks/{name}", self.subnetwork, "compute.subnetworks.get"),
            route(
                "POST", REGION + "/subnetworks/{name}/testIamPermissions", self.may_use,
                "compute.subnetworks.testIamPermissions",
            ),
            route("GET", REGION + "/routers", self.router_list, "compute.routers.list"),
            route("GET", PROJECT + "/aggregated/routers", self.all_routers, "compute.routers.aggregatedList"),
            route("GET", ZONE + "/reservations/{name}", self.reservation, "compute.reservations.get"),
            route("GET", GLOBAL + "/firewalls", self.firewall_list, "compute.firewalls.list"),
            route("POST", GLOBAL + "/firewalls", self.add_firewall, "compute.firewalls.insert"),
            route("GET", GLOBAL + "/firewalls/{name}", self.firewall, "compute.firewalls.get"),
            route("POST", REGION + "/routers", self.add_router, "compute.routers.insert"),
            route("GET", REGION + "/routers/{name}", self.router, "compute.routers.get"),
            route("PATCH", REGION + "/routers/{name}", self.patch_router, "compute.routers.patch"),
            route("GET", GLOBAL + "/operations/{operation}", self.operation, "compute.globalOperations.get"),
            route("POST", GLOBAL + "/operations/{operation}/wait", self.operation, "compute.globalOperations.wait"),
            route("GET", REGION + "/operations/{operation}", self.operation, "compute.regionOperations.get"),
            route("POST", REGION + "/operations/{operation}/wait", self.operation, "compute.regionOperations.wait"),
            route("POST", REGION + "/advice/capacity", self.advise, "compute.advice.capacity"),
        ]  # fmt: skip

    def open_out(self, region: str) -> None:
        """Add a NAT, through which the VMs of a region reach the internet."""
        nat = {"name": "nat", "natIpAllocateOption": "AUTO_ONLY"}
        nats = [{**nat, "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}]
        self.routers[region, "router"] = {"network": self._global("networks", "default"), "nats": nats}

    def access(self, region: str, name: str = "default") -> None:
        """Let the VMs of a subnetwork reach Google's APIs (Private Google Access)."""
        self.subnetworks[region, name] = {"privateIpGoogleAccess": True}

    def project(self, request: Request, project: str) -> Response:
        """Return the project, with its global quotas."""
        account = f"{self.number}-compute@developer.gserviceaccount.com"
        answer: Json = {"kind": "compute#project", "id": self.number, "name": self.park.project}
        answer |= {"commonInstanceMetadata": {"kind": "compute#metadata"}, "defaultServiceAccount": account}
        return json_response({**answer, "quotas": self.quotas.shown(self._used(), "")})

    def may_use(self, request: Request, project: str, region: str, name: str) -> Response:
        """Return which of the permissions the caller has on a subnetwork: all in the own project."""
        if (region, name) not in self.subnetworks:
            raise self._gone(f"regions/{region}/subnetworks", name)
        permissions = request.json()["permissions"]
        have = [name for name in permissions if project not in self.hosts or name in self.hosts[project]]
        return json_response({"permissions": have} if have else {})

    def zone(self, request: Request, project: str, zone: str) -> Response:
        """Return a zone, which is up."""
        if not is_zone(zone):
            raise self._gone("zones", zone)
        return json_response(self._zone(zone))

    def zone_list(self, request: Request, project: str) -> Response:
        """Return all zones."""
        return listed(request, "compute#zoneList", [self._zone(zone) for region in regions() for zone in zones(region)])

    def region(self, request: Request, project: str, region: str) -> Response:
        """Return a region with its quotas."""
        if region not in regions():
            raise self._gone("regions", region)
        return json_response(self._region(region))

    def region_list(self, request: Request, project: str) -> Response:
        """Return all regions."""
        return listed(request, "compute#regionList", [self._region(region) for region in regions()])

    def machine(self, request: Request, project: str, zone: str, name: str) -> Response:
        """Return a machine type, if the zone has it."""
        machine = shape(name, zone)
        if machine is None:
            raise self.park.gone(zone, "machineTypes", name)
        return json_response(self._machine(machine, zone))

    def machine_list(self, request: Request, project: str, zone: str) -> Response:
        """Return the zone's machine types."""
        here = [self._machine(machine, zone) for machine in shapes().values() if machine.within(zone)]
        return listed(request, "compute#machineTypeList", here)

    def accelerator(self, request: Request, project: str, zone: str, name: str) -> Response:
        """Return an accelerator type, if the zone has it."""
        for accelerator in self._accelerators(zone):
            if accelerator["name"] == name:
                return json_response(accelerator)
        raise self.park.gone(zone, "acceleratorTypes", name)

    def accelerator_list(self, request: Request, project: str, zone: str) -> Response:
        """Return the zone's accelerator types."""
        return listed(request, "compute#acceleratorTypeList", self._accelerators(zone))

    def accelerators(self, request: Request, project: str) -> Response:
        """Return the accelerator types of all zones."""
        every = [zone for region in regions() for zone in zones(region)]
        pairs = [(f"zones/{zone}", accelerator) for zone in every for accelerator in self._accelerators(zone)]
        kind = "compute#acceleratorTypeAggregatedList"
        return aggregated(request, kind, "acceleratorTypes", pairs, [f"zones/{zone}" for zone in every])

    def family(self, request: Request, project: str, name: str) -> Response:
        """Return the newest image of a family."""
        if (project, name) not in self.families:
            raise not_found(f"projects/{project}/global/images/family/{name}")
        return json_response(self._image(project, name))

    def image(self, request: Request, project: str, name: str) -> Response:
        """Return an image by name."""
        for (owner, family), newest in self.families.items():
            if (owner, newest) == (project, name):
                return json_response(self._image(project, family))
        raise not_found(f"projects/{project}/global/images/{name}")

    def network(self, request: Request, project: str, name: str) -> Response:
        """Return a network."""
        if name not in self.networks:
            raise self._gone("global/networks", name)
        link = self._global("networks", name)
        return json_response({"kind": "compute#network", "name": name, "selfLink": link, **self.networks[name]})

    def subnetwork(self, request: Request, project: str, region: str, name: str) -> Response:
        """Return a subnetwork, including its privateIpGoogleAccess."""
        if (region, name) not in self.subnetworks:
            raise self._gone(f"regions/{region}/subnetworks", name)
        defaults: Json = {"kind": "compute#subnetwork", "name": name, "ipCidrRange": "10.128.0.0/20"}
        defaults |= {"privateIpGoogleAccess": False, "network": self._global("networks", "default")}
        where = {"region": self._root(f"regions/{region}")}
        return json_response({**defaults, **where, **self.subnetworks[region, name]})

    def router_list(self, request: Request, project: str, region: str) -> Response:
        """Return a region's routers."""
        return listed(request, "compute#routerList", [router for where, router in self._routers() if where == region])

    def all_routers(self, request: Request, project: str) -> Response:
        """Return the routers of all regions."""
        pairs = [(f"regions/{region}", router) for region, router in self._routers()]
        scopes = [f"regions/{region}" for region in regions()]
        return aggregated(request, "compute#routerAggregatedList", "routers", pairs, scopes)

    def reservation(self, request: Request, project: str, zone: str, name: str) -> Response:
        """Return a reservation."""
        if (zone, name) not in self.reservations:
            raise self._gone(f"zones/{zone}/reservations", name)
        return json_response({"kind": "compute#reservation", "name": name, **self.reservations[zone, name]})

    def firewall_list(self, request: Request, project: str) -> Response:
        """Return the firewall rules of all networks."""
        rules = [
            {"kind": "compute#firewall", "network": self._global("networks", "default"), **r} for r in self.firewalls
        ]
        return listed(request, "compute#firewallList", rules)

    def add_firewall(self, request: Request, project: str) -> Response:
        """Create a firewall rule."""
        body = request.json()
        parse(body, compute_v1.Firewall.pb()(), "resource")
        if any(rule["name"] == body["name"] for rule in self.firewalls):
            raise already_exists(f"global/firewalls/{body['name']}")
        defaults = {"direction": "INGRESS", "priority": 1000, "network": self._global("networks", "default")}
        self.firewalls.append({**defaults, **body})
        return self._done(f"global/firewalls/{body['name']}", "global")

    def firewall(self, request: Request, project: str, name: str) -> Response:
        """Return a firewall rule."""
        firewall = next((rule for rule in self.firewalls if rule["name"] == name), None)
        if firewall is None:
            raise self._gone("global/firewalls", name)
        link = self._global("firewalls", name)
        return json_response({"kind": "compute#firewall", "selfLink": link, **firewall})

    def add_router(self, request: Request, project: str, region: str) -> Response:
        """Create a router."""
        body = request.json()
        parse(body, compute_v1.Router.pb()(), "resource")
        if (region, body["name"]) in self.routers:
            raise already_exists(f"regions/{region}/routers/{body['name']}")
        self.routers[region, body["name"]] = body
        return self._done(f"regions/{region}/routers/{body['name']}", f"regions/{region}")

    def router(self, request: Request, project: str, region: str, name: str) -> Response:
        """Return a router."""
        if (region, name) not in self.routers:
            raise self._gone(f"regions/{region}/routers", name)
        link = self._root(f"regions/{region}/routers/{name}")
        return json_response({"kind": "compute#router", "selfLink": link, **self.routers[region, name], "name": name})

    def patch_router(self, request: Request, project: str, region: str, name: str) -> Response:
        """Change a router's fields."""
        self.router(request, project, region, name)
        parse(request.json(), compute_v1.Router.pb()(), "resource")
        self.routers[region, name] |= request.json()
        return self._done(f"regions/{region}/routers/{name}", f"regions/{region}")

    def operation(self, request: Request, project: str, operation: str, region: str = "") -> Response:
        """Return an operation, which is done."""
        return json_response(self.operations[operation])

    def advise(self, request: Request, project: str, region: str) -> Response:
        """Return the requested zones with their Spot capacity scores, best first."""
        request.only_query("size")
        body = request.json()
        named = [zone["zone"].rpartition("/")[2] for zone in body.get("distributionPolicy", {}).get("zones", ())]
        model = body.get("instanceProperties", {}).get("scheduling", {}).get("provisioningModel", "STANDARD")
        if model != "SPOT":
            raise ApiError(400, "Capacity advice is given for provisioning model SPOT only.", reason="invalid")
        choice = body.get("instanceFlexibilityPolicy", {}).get("instanceSelections", {})
        machines = [machine for selection in choice.values() for machine in selection.get("machineTypes", ())]
        count = int(body.get("size", request.query.get("size", 1)))
        where = sorted(named or zones(region), key=lambda zone: -self.scores.get(zone, 0.5))
        return json_response({"recommendations": [self._advice(zone, machines, count) for zone in where]})

    def _done(self, target: str, scope: str) -> Response:
        name = f"operation-{len(self.operations) + 1}"
        link = self._root(f"{scope}/operations/{name}")
        done = {"kind": "compute#operation", "name": name, "status": "DONE", "progress": 100, "selfLink": link}
        where = {"region": self._root(scope)} if scope != "global" else {}
        self.operations[name] = {**done, **where, "targetLink": self._root(target), "operationType": "insert"}
        return json_response(self.operations[name])

    def _advice(self, zone: str, machines: list[str], count: int) -> Json:
        shard = {"zone": self._root(f"zones/{zone}"), "instanceCount": count, "provisioningModel": "SPOT"}
        scores = {"obtainability": self.scores.get(zone, 0.5), "estimatedUptime": self.uptime}
        return {"scores": scores, "shards": [{**shard, "machineType": machines[0] if machines else ""}]}

    def _zone(self, zone: str) -> Json:
        region = self._root(f"regions/{zone.rpartition('-')[0]}")
        links = {"selfLink": self._root(f"zones/{zone}"), "region": region}
        return {"kind": "compute#zone", "name": zone, "status": "UP", **links}

    def _region(self, region: str) -> Json:
        here = {"zones": [self._root(f"zones/{zone}") for zone in zones(region)]}
        named = {"kind": "compute#region", "name": region, "status": "UP", "selfLink": self._root(f"regions/{region}")}
        return {**named, **here, "quotas": self.quotas.shown(self._used(), region)}

    def _machine(self, machine: Shape, zone: str) -> Json:
        gpus = {"guestAcceleratorType": machine.accelerator, "guestAcceleratorCount": machine.gpus}
        own = {"bundledLocalSsds": {"defaultInterface": "NVME", "partitionCount": machine.local_ssds}}
        return {
            "kind": "compute#machineType",
            "name": machine.name,
            "zone": zone,
            "guestCpus": machine.vcpus,
            "memoryMb": int(machine.memory_gb * 1024),
            "selfLink": self.park.link(zone, "machineTypes", machine.name),
            **({"accelerators": [gpus]} if machine.gpus else {}),
            **(own if machine.local_ssds else {}),
        }

    def _accelerators(self, zone: str) -> list[Json]:
        most: dict[str, int] = dict(ATTACHED) if is_zone(zone) else {}
        for machine in shapes().values():
            if machine.gpus and machine.within(zone):
                most[machine.accelerator] = max(machine.gpus, most.get(machine.accelerator, 0))
        return [
            {
                "kind": "compute#acceleratorType",
                "name": name,
                "zone": self.park.link(zone),
                "selfLink": self.park.link(zone, "acceleratorTypes", name),
                "maximumCardsPerInstance": count,
            }
            for name, count in sorted(most.items())
        ]

    def _image(self, project: str, family: str) -> Json:
        name = self.families[project, family]
        link = f"{self.park.url()}/compute/v1/projects/{project}/global/images/{name}"
        known = {"kind": "compute#image", "name": name, "family": family, "status": "READY", "selfLink": link}
        return {**known, "architecture": "X86_64", "diskSizeGb": "50"}

    def _routers(self) -> Iterator[tuple[str, Json]]:
        for (region, name), router in self.routers.items():
            yield region, {"kind": "compute#router", "name": name, "region": self._root(f"regions/{region}"), **router}

    def _used(self) -> Iterable[Any]:
        return [vm.wanted for vm in self.park.up()]

    def _root(self, rest: str) -> str:
        return f"{self.park.url()}/compute/v1/projects/{self.park.project}/{rest}"

    def _global(self, kind: str, name: str) -> str:
        return self._root(f"global/{kind}/{name}")

    def _gone(self, kind: str, name: str) -> ApiError:
        return not_found(f"projects/{self.park.project}/{kind}/{name}")


def _firewall(name: str, sources: list[str], port: str) -> Json:
    allowed = [{"IPProtocol": "tcp", "ports": [port]}]
    return {"name": name, "direction": "INGRESS", "priority": 65534, "sourceRanges": sources, "allowed": allowed}


class Advice:
    """Capacity in the beta API, and its history in the API's `versions`.

    `rates`: daily preemption rates, newest first. `prices`: (first day, USD per hour).
    """

    def __init__(self, zones: Zones) -> None:
        self.zones = zones
        self.versions = ["v1", "beta"]
        self.rates = [0.1, 0.3]
        self.prices = [("2026-10-01", 0.28), ("2026-11-01", 0.28), ("2026-11-20", 0.31)]
        self.routes: list[Route] = [
            route("POST", "/compute/beta" + ADVICE + "capacity", self.capacity, "compute.beta.advice.capacity"),
            route(
                "POST",
                "/compute/{version}" + ADVICE + "capacityHistory",
                self.history,
                "compute.advice.capacityHistory",
            ),
        ]

    def capacity(self, request: Request, project: str, region: str) -> Response:
        """Return the advice as v1 does (`Zones.advise`)."""
        json_format.ParseDict(request.json(), compute_v1.CapacityAdviceRequest.pb()())
        return self.zones.advise(request, project, region)

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


def _day(start: str) -> dict[str, str]:
    return {"startTime": f"{start}T00:00:00.000-08:00", "endTime": f"{start}T23:59:59.000-08:00"}
