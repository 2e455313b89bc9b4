"""Compare Google's price list with the shipped prices, for the machine that the selftest uses.

A machine is priced by its parts (https://cloud.google.com/billing/docs/reference/rest/v1/services.skus/list): so many
vCPUs, GB of memory and GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from launcher import catalog
from launcher.errors import LaunchError
from launcher.gcp.api import Api, Service, open_session
from launcher.selftest.kit import GPU, Kit, NotTried, expect

BILLING: Final = Service("cloudbilling", "Cloud Billing", "roles/billing.viewer")
COMPUTE: Final = "services/6F81-5844-456A"
"""Compute Engine's id in the Cloud Billing catalog."""
PARTS: Final = {
    "standard": ("G2 Instance Core running", "G2 Instance Ram running", "Nvidia L4 GPU running"),
    "spot": (
        "Spot Preemptible G2 Instance Core running",
        "Spot Preemptible G2 Instance Ram running",
        "Nvidia L4 GPU attached to Spot Preemptible VMs running",
    ),
}
"""Prefixes of the descriptions of a vCPU, a GB and a GPU."""
SHARE: Final = 0.02
"""Largest relative error of the shipped price. Spot prices change up to once a day, so they are only reported."""


def check(kit: Kit) -> str:
    """Check that the machine costs what the catalog says.

    Raises NotTried: the price list can't be read; LaunchError.
    """
    known = catalog.load()
    machine = known.find(GPU, None, None, "compute")
    try:
        units = unit_prices(kit)
    except LaunchError as error:
        raise NotTried(error.problem) from error
    told = []
    for model, parts in PARTS.items():
        shipped = known.price(machine, "compute", model, kit.region).usd
        missing = [part for part in parts if part not in units]
        expect(not missing, f"Google's list has no {missing[:1]} in {kit.region}")
        counts = (machine.vcpus, machine.memory_gb or 0.0, machine.gpus)
        usd = sum(count * units[part] for count, part in zip(counts, parts, strict=True))
        wrong = shipped is None or abs(shipped - usd) > SHARE * usd
        text = f"{model} ${usd:.4f}/h" + (f", shipped ${shipped}" if wrong else "")
        expect(not wrong or model == "spot", f"{machine.name} in {kit.region}: {text}")
        told.append(text)
    return "; ".join(told)


def unit_prices(kit: Kit) -> dict[str, float]:
    """Return the USD per hour of each part in the kit's region, by the prefix of its description.

    Raises LaunchError.
    """
    wanted = [part for parts in PARTS.values() for part in parts]
    found: dict[str, float] = {}
    for sku in skus(kit):
        part = next((one for one in wanted if str(sku["description"]).startswith(one)), None)
        if part and kit.region in sku["serviceRegions"]:
            rate = sku["pricingInfo"][-1]["pricingExpression"]["tieredRates"][-1]["unitPrice"]
            found[part] = int(rate.get("units") or 0) + int(rate.get("nanos") or 0) / 1e9
    return found


def skus(kit: Kit) -> Iterator[dict[str, Any]]:
    """Yield Compute Engine's price list. Raises LaunchError."""
    api = Api(BILLING, kit.project, Skus(*open_session(BILLING, kit.environ)), kit.clock)
    token = ""
    while True:
        page = api.ask("skus", **({"pageToken": token} if token else {}))
        yield from page.get("skus", ())
        if not (token := page.get("nextPageToken", "")):
            return


class Skus:
    """Client for services.skus.list, with the method signature that `Api` expects."""

    def __init__(self, session: Any, endpoint: str) -> None:
        self._session, self._url = session, f"{endpoint}/v1/{COMPUTE}/skus"

    def skus(self, request: Mapping[str, str], retry: None, timeout: float) -> dict[str, Any]:
        """Return one page."""
        from google.api_core.exceptions import from_http_response

        answer = self._session.get(self._url, params={"pageSize": "5000", **request}, timeout=timeout)
        if answer.status_code >= 400:
            raise from_http_response(answer)
        page: dict[str, Any] = answer.json()
        return page
