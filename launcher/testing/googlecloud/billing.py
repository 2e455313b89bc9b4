"""Cloud Billing's catalog: Compute Engine's prices of machines with L4s in one region."""

from __future__ import annotations

from typing import Any

from launcher.testing.googlecloud.wire import Request, Response, Route, json_response, page, route

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
        self.rows: list[dict[str, Any]] = []
        """SKUs as JSON (launcher.testing.googlecloud.price_list); if empty, those of `units`."""
        self.most = 4
        """The largest page."""
        self.keys: list[str] = []
        """The API key of each request, or an empty text."""
        self.account = "billingAccounts/012345-6789AB-CDEF01"
        """The project's billing account; empty: none."""
        self.routes: list[Route] = [
            route("GET", "/v1/services/{service}/skus", self.skus, "cloudbilling.services.skus.list"),
            route("GET", "/v1/projects/{project}/billingInfo", self.info, "cloudbilling.projects.getBillingInfo"),
        ]

    def info(self, request: Request, project: str) -> Response:
        """Return a project's billing account. Without one, `billingEnabled` is left out, as proto3 JSON does."""
        known = {"name": f"projects/{project}/billingInfo", "projectId": project}
        enabled = {"billingAccountName": self.account, "billingEnabled": True} if self.account else {}
        return json_response({**known, **enabled})

    def skus(self, request: Request, service: str) -> Response:
        """Return a page of the price list."""
        request.only_query("pageSize", "pageToken", "currencyCode")
        self.keys.append(request.headers.get("x-goog-api-key", ""))
        size = min(int(request.query.get("pageSize", 5000)), 5000, self.most)
        every = self.rows or [_sku(number, service, *item) for number, item in enumerate(self.units.items())]
        shown, following = page(every, size, request.query.get("pageToken", ""))
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
