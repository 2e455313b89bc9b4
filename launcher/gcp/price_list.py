"""Read Compute Engine's price list from the Cloud Billing Catalog.

https://cloud.google.com/billing/docs/reference/rest/v1/services.skus/list: about 33,000 SKUs on 7 or 8 pages. An API
key is enough, because the prices are public. Pages are decoded one by one into the few fields that matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from launcher.catalog.sku_prices import Sku
from launcher.clock import REAL, Clock
from launcher.gcp.api import Api, RestClient, Service, open_session

BILLING: Final = Service("cloudbilling", "Cloud Billing", "roles/billing.viewer")
COMPUTE: Final = "services/6F81-5844-456A"
"""Compute Engine's id in the Cloud Billing catalog."""
API_KEY: Final = "LAUNCH_API_KEY"
"""The variable with an API key; it is sent as a header, so that no log or error shows it."""
PAGE_SIZE: Final = 5000


class Category(msgspec.Struct, rename="camel"):
    usage_type: str = ""


class Money(msgspec.Struct):
    currencyCode: str = ""  # noqa: N815 -- as in the answer
    units: int | str = 0
    nanos: int = 0


class Tier(msgspec.Struct, rename="camel"):
    unit_price: Money = msgspec.field(default_factory=Money)


class Expression(msgspec.Struct, rename="camel"):
    usage_unit: str = ""
    tiered_rates: list[Tier] = []


class Pricing(msgspec.Struct, rename="camel"):
    pricing_expression: Expression = msgspec.field(default_factory=Expression)


class ListedSku(msgspec.Struct, rename="camel"):
    """A SKU as the API returns it."""

    sku_id: str = ""
    description: str = ""
    category: Category = msgspec.field(default_factory=Category)
    service_regions: list[str] = []
    pricing_info: list[Pricing] = []


class Page(msgspec.Struct, rename="camel"):
    skus: list[ListedSku] = []
    next_page_token: str = ""


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
            page = msgspec.convert(self._api.ask("send", path=f"/v1/{COMPUTE}/skus", params=params), Page)
            self.date = time.strftime("%Y-%m-%d", time.gmtime(self._client.server_time))  # without one: today
            yield from map(sku_of, page.skus)
            if not page.next_page_token:
                return
            params["pageToken"] = page.next_page_token


def sku_of(listed: ListedSku) -> Sku:
    """Return a SKU with the price of its last tier; 0 without one in USD."""
    pricing = listed.pricing_info[-1].pricing_expression if listed.pricing_info else Expression()
    price = pricing.tiered_rates[-1].unit_price if pricing.tiered_rates else Money()
    usd = int(price.units or 0) + price.nanos / 1e9 if price.currencyCode == "USD" else 0.0
    return Sku(
        id=listed.sku_id,
        description=listed.description,
        usage_type=listed.category.usage_type,
        regions=tuple(listed.service_regions),
        unit=pricing.usage_unit,
        usd=usd,
    )
