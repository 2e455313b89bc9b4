"""Compute Engine's advice on Spot capacity in the beta API, and its history in v1 and beta.

Documented: paths, request and answer, SPOT as the only provisioning model, no history of N1 with GPUs (REST reference
beta/advice/capacity and capacityHistory, and the guide view-spot-preemption-price; requests are parsed by
google-cloud-compute's messages). Assumed: that a version which does not serve a method answers 404. Seen: nothing yet.
"""

from __future__ import annotations

from typing import Any

from google.cloud import compute_v1
from google.protobuf import json_format

from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.wire import Request, Response, Route, json_response, route
from launcher.testing.googlecloud.zones import Zones

REGION = "/projects/{project}/regions/{region}/advice/"


class Advice:
    """The service. `rates`: daily preemption rates, newest first; `prices`: (first day, USD per hour); `versions`: the
    API versions that have the history."""

    def __init__(self, zones: Zones) -> None:
        self.zones = zones
        self.versions = ["v1", "beta"]
        self.rates = [0.1, 0.3]
        self.prices = [("2026-10-01", 0.28), ("2026-11-01", 0.28), ("2026-11-20", 0.31)]
        self.routes: list[Route] = [
            route("POST", "/compute/beta" + REGION + "capacity", self.capacity, "compute.beta.advice.capacity"),
            route(
                "POST",
                "/compute/{version}" + REGION + "capacityHistory",
                self.history,
                "compute.advice.capacityHistory",
            ),
        ]

    def capacity(self, request: Request, project: str, region: str) -> Response:
        """Return the advice as v1 does (launcher.testing.googlecloud.zones)."""
        json_format.ParseDict(request.json(), compute_v1.CapacityAdviceRequest.pb()())
        return self.zones.advise(request, project, region)

    def history(self, request: Request, version: str, project: str, region: str) -> Response:
        """Return the preemptions by day and the list prices of a machine type's Spot VMs."""
        if version not in self.versions:
            raise ApiError(404, f"Requested entity was not found: {request.path}", reason="notFound")
        asked = request.json()
        json_format.ParseDict(asked, compute_v1.CapacityHistoryRequest.pb()())
        wanted = asked["instanceProperties"]
        if wanted.get("scheduling", {}).get("provisioningModel") != "SPOT" or wanted["machineType"].startswith("n1-"):
            raise ApiError(400, "Capacity history is available for Spot VMs of this machine type only.")
        answer: dict[str, Any] = {"machineType": wanted["machineType"], "location": f"regions/{region}"}
        if "PREEMPTION" in asked.get("types", ()):
            answer["preemptionHistory"] = [
                {"interval": _day(f"2026-11-{22 - n:02}"), "preemptionRate": rate} for n, rate in enumerate(self.rates)
            ]
        if "PRICE" in asked.get("types", ()):
            answer["priceHistory"] = []
            for day, usd in self.prices:
                price = {"currencyCode": "USD", "units": str(int(usd)), "nanos": round((usd - int(usd)) * 1e9)}
                answer["priceHistory"].append({"interval": _day(day), "listPrice": price})
        return json_response(answer)


def _day(start: str) -> dict[str, str]:
    return {"startTime": f"{start}T00:00:00.000-08:00", "endTime": f"{start}T23:59:59.000-08:00"}
