"""Cloud Billing: the project's account, and Compute Engine's price list, from the table skus.csv.

https://cloud.google.com/billing/docs/reference/rest/v1/services.skus/list
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from launcher.testing.googlecloud.wire import Request, Response, json_response, page, route

AMERICAS = ("us-central1", "us-east1", "us-west1")


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

    @route("GET", "/v1/projects/{project}/billingInfo", "cloudbilling.projects.getBillingInfo")
    def info(self, request: Request, project: str) -> Response:
        known = {"name": f"projects/{project}/billingInfo", "projectId": project}
        enabled = {"billingAccountName": self.account, "billingEnabled": True} if self.account else {}
        return json_response({**known, **enabled})

    @route(
        "GET", "/v1/services/{service}/skus", "cloudbilling.services.skus.list", query="pageSize pageToken currencyCode"
    )
    def skus(self, request: Request, service: str) -> Response:
        self.keys.append(request.headers.get("x-goog-api-key", ""))
        size = min(int(request.query.get("pageSize", 5000)), 5000, self.most)
        shown, following = page(self.rows, size, request.query.get("pageToken", ""))
        return json_response({"skus": shown, "nextPageToken": following})


def skus() -> list[dict[str, Any]]:
    """Return all SKUs as JSON, the traps first and last: neither the first nor the last match is right by luck."""
    lines = Path(__file__).with_name("skus.csv").read_text(encoding="utf-8").splitlines()
    rows = [*csv.DictReader(line for line in lines if not line.startswith("#"))]
    traps = [row for row in rows if row["kind"] == "trap"]
    return [sku(row["description"], float(row["usd"]), row["usage"]) for row in (*rows, *traps)]


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
