"""Cloud Billing's catalog: Compute Engine's prices of machines with L4s in one region."""

from __future__ import annotations

from typing import Any

from tests.googlecloud.wire import Request, Response, Route, json_response, page, route

UNITS = {
    "G2 Instance Core running in Iowa": ("OnDemand", 24_988_000),
    "G2 Instance Ram running in Iowa": ("OnDemand", 2_927_000),
    "Nvidia L4 GPU running in Iowa": ("OnDemand", 560_040_000),
    "Spot Preemptible G2 Instance Core running in Iowa": ("Preemptible", 9_996_000),
    "Spot Preemptible G2 Instance Ram running in Iowa": ("Preemptible", 1_170_000),
    "Nvidia L4 GPU attached to Spot Preemptible VMs running in Iowa": ("Preemptible", 224_000_000),
    "Commitment v1: Nvidia L4 GPU running in Iowa for 1 Year": ("Commit1Yr", 352_830_000),
}
"""Nanodollars per hour of one vCPU, GB or GPU (us-central1, 2026)."""


class Billing:
    """The service. Tests may change `units`."""

    def __init__(self) -> None:
        self.units = dict(UNITS)
        self.routes: list[Route] = [
            route("GET", "/v1/services/{service}/skus", self.skus, "cloudbilling.services.skus.list")
        ]

    def skus(self, request: Request, service: str) -> Response:
        """Return a page of the price list."""
        request.only_query("pageSize", "pageToken")
        size = min(int(request.query.get("pageSize", 5000)), 4)  # small, to have several pages
        items, following = page([*self.units.items()], size, request.query.get("pageToken", ""))
        shown = [_sku(number, service, *item) for number, item in enumerate(items)]
        return json_response({"skus": shown, "nextPageToken": following})


def _sku(number: int, service: str, description: str, price: tuple[str, int]) -> dict[str, Any]:
    usage, nanos = price
    tier = {"startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "units": "0", "nanos": nanos}}
    expression = {"usageUnit": "h", "displayQuantity": 1, "tieredRates": [tier], "baseUnit": "s"}
    return {
        "name": f"services/{service}/skus/{number:04X}",
        "skuId": f"{number:04X}",
        "description": description,
        "category": {"serviceDisplayName": "Compute Engine", "resourceFamily": "Compute", "usageType": usage},
        "serviceRegions": ["us-central1"],
        "pricingInfo": [{"summary": "", "pricingExpression": expression, "currencyConversionRate": 1}],
        "serviceProviderName": "Google",
    }
