"""Read Compute Engine's price list from the Cloud Billing Catalog.

https://cloud.google.com/billing/docs/reference/rest/v1/services.skus/list: about 33,000 SKUs on 7 or 8 pages. An API
key is enough, because the prices are public.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from launcher.catalog.sku_prices import Sku
from launcher.clock import REAL, Clock
from launcher.gcp.api import Api, RestClient, Service, open_session

BILLING: Final = Service("cloudbilling", "Cloud Billing", "roles/billing.viewer")
COMPUTE: Final = "services/6F81-5844-456A"
"""Compute Engine's id in the Cloud Billing catalog."""
API_KEY: Final = "LAUNCH_API_KEY"
"""The variable with an API key; it is sent as a header, so that no log or error shows it."""
PAGE_SIZE: Final = 5000


class PriceList:
    """The price list of one call. `date` is the day of Google's last answer (UTC), whatever this machine's clock says;
    empty before the first."""

    def __init__(self, project: str, environ: Mapping[str, str], clock: Clock = REAL) -> None:
        """Raises NotAuthorised: there are no credentials and no API key."""
        key = environ.get(API_KEY, "")
        environ = {**environ, "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true"} if key else environ
        self._client = RestClient(BILLING, *open_session(BILLING, environ))
        if key:
            self._client.session.headers["X-Goog-Api-Key"] = key
        self._api = Api(BILLING, project, self._client, clock)
        self.date = ""

    def skus(self) -> Iterator[Sku]:
        """Yield all SKUs. Raises LaunchError."""
        params = {"pageSize": str(PAGE_SIZE), "currencyCode": "USD"}
        while True:
            page = self._api.ask("send", path=f"/v1/{COMPUTE}/skus", params=params)
            self.date = time.strftime("%Y-%m-%d", time.gmtime(self._client.server_time))  # without one: today
            yield from map(sku_of, page.get("skus", ()))
            if not (token := page.get("nextPageToken")):
                return
            params["pageToken"] = token


def sku_of(listed: Mapping[str, Any]) -> Sku:
    """Return a SKU with the price of its last tier; 0 without one in USD."""
    pricing = (listed.get("pricingInfo") or [{}])[-1].get("pricingExpression", {})
    price = (pricing.get("tieredRates") or [{}])[-1].get("unitPrice", {})
    usd = int(price.get("units") or 0) + price.get("nanos", 0) / 1e9 if price.get("currencyCode") == "USD" else 0.0
    return Sku(
        id=listed.get("skuId", ""),
        description=listed.get("description", ""),
        usage_type=listed.get("category", {}).get("usageType", ""),
        regions=tuple(listed.get("serviceRegions", ())),
        unit=pricing.get("usageUnit", ""),
        usd=usd,
    )
