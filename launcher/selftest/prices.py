"""Compare Google's price list with the shipped prices, for the machine that the selftest uses.

A machine is priced by its parts (https://cloud.google.com/billing/docs/reference/rest/v1/services.skus/list): so many
vCPUs, GB of memory and GPUs.
"""

from __future__ import annotations

from typing import Final

from launcher import catalog
from launcher.errors import LaunchError
from launcher.gcp.price_list import PriceList
from launcher.selftest.kit import GPU, Kit, NotTried, expect

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
    texts = []
    for model, parts in PARTS.items():
        shipped = known.price(machine, "compute", model, kit.region).usd
        missing = [part for part in parts if part not in units]
        expect(not missing, f"Google's list has no {missing[:1]} in {kit.region}")
        counts = (machine.vcpus, machine.memory_gb or 0.0, machine.gpus)
        usd = sum(count * units[part] for count, part in zip(counts, parts, strict=True))
        wrong = shipped is None or abs(shipped - usd) > SHARE * usd
        text = f"{model} ${usd:.4f}/h" + (f", shipped ${shipped}" if wrong else "")
        expect(not wrong or model == "spot", f"{machine.name} in {kit.region}: {text}")
        texts.append(text)
    return "; ".join(texts)


def unit_prices(kit: Kit) -> dict[str, float]:
    """Return the USD per hour of each part in the kit's region, by the prefix of its description.

    Raises LaunchError.
    """
    wanted = [part for parts in PARTS.values() for part in parts]
    prices: dict[str, float] = {}
    for sku in PriceList(kit.project, kit.environ, kit.clock).skus():
        part = next((prefix for prefix in wanted if sku.description.startswith(prefix)), None)
        if part and kit.region in sku.regions:
            prices[part] = sku.usd
    return prices
