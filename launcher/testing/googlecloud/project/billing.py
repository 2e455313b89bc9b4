"""Cloud Billing: the project's account, and Compute Engine's price list, for the machines with published totals.

Seen: names, units and prices of us-central1, in copies of the Catalog and of Google's price pages
(tools/catalog/sources/README.md). Derived: the memory of A3 from its published total, and the parts of A3 Ultra's host,
of which only the sum is published. Assumed: the name of B200's Flex-start SKU. Documented: the form of the answer
(https://cloud.google.com/billing/docs/reference/rest/v1/services.skus/list).
"""

from __future__ import annotations

from typing import Any

from launcher.testing.googlecloud.wire import Request, Response, Route, json_response, page, route

AMERICAS = ("us-central1", "us-east1", "us-west1")
SSD = 0.08
A3_RAM = (88.49 - 8 * 9.7965506 - 208 * 0.025498 - 6000 * SSD / 730) / 1872
ULTRA_CORE = 0.0105
ULTRA_RAM = (84.806908 - 8 * 9.31174 - 224 * ULTRA_CORE - 12000 * SSD / 730) / 2952

LIST = {
    "Nvidia H100 80GB GPU running in Americas": 9.7965506,
    "A3 Instance Core running in Americas": 0.025498,
    "A3 Instance Ram running in Americas": A3_RAM,
    "Nvidia H100 80GB Plus GPU running in Americas": 10.344275712,
    "A3Plus Instance Core running in Americas": 0.026924,
    "A3Plus Instance Ram running in Americas": 0.002344,
    "H200 141GB GPU running in Americas": 9.31174,
    "A3Ultra Instance Core running in Americas": ULTRA_CORE,
    "A3Ultra Instance Ram running in Americas": ULTRA_RAM,
    "A4 Nvidia B200 (1 gpu slice) running in Americas": 16.11,
    "Nvidia Tesla A100 GPU running in Americas": 2.933908,
    "Nvidia Tesla A100 80GB GPU running in Americas": 3.92808,
    "A2 Instance Core running in Americas": 0.031611,
    "A2 Instance Ram running in Americas": 0.004237,
    "Nvidia L4 GPU running in Americas": 0.5600402,
    "G2 Instance Core running in Americas": 0.024988,
    "G2 Instance Ram running in Americas": 0.002927,
    "RTX 6000 96GB running in Americas": 1.09565,
    "G4 Instance Core running in Americas": 0.04891,
    "G4 Instance Ram running in Americas": 0.00587,
    "1/8 vGPU no lssd running in Americas": 0.64688,
    "N1 Predefined Instance Core running in Americas": 0.031611,
    "N1 Predefined Instance Ram running in Americas": 0.004237,
    "Nvidia Tesla T4 GPU running in Americas": 0.35,
    "SSD backed Local Storage": SSD,
}
SPOT = {
    "A4 Nvidia B200": ("Spot Preemptible A4 Nvidia B200 (1 gpu slice) running in Americas", 4.9542, "OnDemand"),
    "H100": ("Nvidia H100 80GB GPU attached to Spot Preemptible VMs running in Americas", 5.8779, "Preemptible"),
    "A3 core": ("Spot Preemptible A3 Instance Core running in Americas", 0.0153, "Preemptible"),
    "A3 RAM": ("Spot Preemptible A3 Instance Ram running in Americas", 0.001332, "Preemptible"),
    "SSD": ("SSD backed Local Storage attached to Spot Preemptible VMs", 0.0428, "Preemptible"),
    "L4": ("Nvidia L4 GPU attached to Spot Preemptible VMs running in Americas", 0.224, "Preemptible"),
    "G2 core": ("Spot Preemptible G2 Instance Core running in Americas", 0.009996, "Preemptible"),
    "G2 RAM": ("Spot Preemptible G2 Instance Ram running in Americas", 0.00117, "Preemptible"),
    "T4": ("Nvidia Tesla T4 GPU attached to Spot Preemptible VMs running in Americas", 0.1814, "Preemptible"),
}
FLEX = {
    "Nvidia H100 80GB GPU attached to DWS Defined Duration VMs running in Americas": 4.200761,
    "DWS Defined Duration A3 Core running in Americas": 0.010934,
    "DWS Defined Duration A3 Ram running in Americas": 0.000952,
    "Nvidia H100 Mega 80GB GPU attached to DWS Defined Duration VMs running in Americas": 4.423936,
    "H200 141GB GPU attached to DWS Defined Duration VMs running in Americas": 4.575323,
    "DWS Defined Duration A4 Nvidia B200 (1 gpu slice) running in Americas": 8.055,
}
TRAPS = {
    "Commitment v1: Nvidia H100 80GB GPU running in Americas for 1 Year": (6.7988, "Commit1Yr"),
    "Reserved Nvidia H100 80GB GPU in Calendar Mode running in Americas": (4.57, "OnDemand"),
    "Nvidia Tesla T4 GPU attached to Sole Tenancy VMs running in Americas": (0.2, "OnDemand"),
    "A3 Instance Core Premium running in Americas": (9.0, "OnDemand"),
    "Custom A2 Instance Core running in Americas": (9.0, "OnDemand"),
    "SSD backed Local Storage Commitment v1 in Americas for 1 Year": (0.01, "Commit1Yr"),
    "C4D Instance Local SSD running in Americas": (0.16, "OnDemand"),
}
"""SKUs whose names contain another's; none is the price of a machine here."""


class Billing:
    """The service. Tests may change `rows`, the SKUs as JSON."""

    def __init__(self) -> None:
        self.rows = skus()
        self.most = 20
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
        shown, following = page(self.rows, size, request.query.get("pageToken", ""))
        return json_response({"skus": shown, "nextPageToken": following})


def skus() -> list[dict[str, Any]]:
    """Return all SKUs as JSON, the traps first and last: neither the first nor the last match is right by luck."""
    traps = [sku(text, usd, usage) for text, (usd, usage) in TRAPS.items()]
    machines = [sku(text, usd) for text, usd in {**FLEX, **LIST}.items()]
    return [*traps, *machines, *(sku(*spot) for spot in SPOT.values()), *traps]


def sku(
    description: str,
    usd: float,
    usage: str = "OnDemand",
    regions: tuple[str, ...] = AMERICAS,
    unit: str | None = None,
) -> dict[str, Any]:
    """Return a SKU as JSON; `unit` defaults to that of its kind."""
    own = "GiBy.mo" if "Local S" in description else "GiBy.h" if " Ram " in description else "h"
    nanos = round(usd * 1e9)
    price = {"currencyCode": "USD", "units": str(nanos // 10**9), "nanos": nanos % 10**9}
    number = f"{abs(hash(description)) % 16**12:012X}"
    expression = {"usageUnit": unit or own, "tieredRates": [{"startUsageAmount": 0, "unitPrice": price}]}
    return {
        "name": f"services/6F81-5844-456A/skus/{number}",
        "skuId": f"{number[:4]}-{number[4:8]}-{number[8:]}",
        "description": description,
        "category": {"serviceDisplayName": "Compute Engine", "resourceFamily": "Compute", "usageType": usage},
        "serviceRegions": list(regions),
        "pricingInfo": [{"summary": "", "pricingExpression": expression, "currencyConversionRate": 1}],
        "serviceProviderName": "Google",
    }
