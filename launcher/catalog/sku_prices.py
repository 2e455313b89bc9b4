"""Make price tables from Google's list of SKUs (Cloud Billing Catalog). Pure.

A machine's price is the sum of its parts' SKUs: GPUs, vCPUs, memory and local SSDs, or slices that are whole machines.
data/price_skus.csv has the description of each part's SKU, anchored at its start: a substring would also match
commitments, reservations and other provisioning models, which Google types as OnDemand too. A price counts only if
every part was found in the region. Whatever the list lacks keeps its shipped price, with its source and date.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Final

from msgspec import Struct, field

from launcher.catalog import Catalog, MachineType, tables

MONTH_HOURS: Final = 730
KINDS: Final = ("list", "spot", "flex_start")
SOURCE: Final = "CATALOG"
LIST_BOUNDS: Final = ("flex-list", "flex-bound")
"""Rules by which a Flex-start price is the list price."""
PRICE_COLUMNS: Final = (
    *("machine", "region", "list_usd", "list_rule", "flex_start_usd", "flex_start_rule", "spot_usd", "spot_rule"),
    *("local_ssd_usd", "source", "date", "certainty"),
)
COMPONENT_COLUMNS: Final = ("component", "region", "list_usd", "spot_usd", "source", "date", "certainty")


class Sku(Struct, frozen=True, kw_only=True):
    """A SKU with its current price. `usd` is 0 if the list has no price."""

    id: str
    description: str
    usage_type: str
    regions: tuple[str, ...]
    unit: str
    usd: float


class Key(Struct, frozen=True):
    """A part's price: component, kind (list, spot, flex_start), region."""

    component: str
    kind: str
    region: str


class Rates(Struct):
    """USD per hour and unit of each part, and the SKUs that were ignored, each with the reason."""

    usd: dict[Key, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    conflicts: set[Key] = field(default_factory=set)

    def add(self, sku: Sku) -> None:
        """Add a SKU if a machine needs it. A price of 0, another unit, or two prices for one part make it unknown."""
        pattern, names = sku_patterns()
        match = pattern.match(sku.description)
        if match is None or match.lastgroup is None or sku.usage_type not in ("OnDemand", "Preemptible"):
            return
        component, kind = names[match.lastgroup]
        unit = units()[component]
        if sku.unit != unit or not sku.usd > 0:
            why = "has no price" if sku.unit == unit else f"is priced per {sku.unit}, not {unit}"
            self.problems.append(f"{sku.description} ({sku.id}) {why}")
            return
        usd = sku.usd / MONTH_HOURS if unit == "GiBy.mo" else sku.usd
        for key in (Key(component, kind, region) for region in sku.regions):
            if abs(self.usd.setdefault(key, usd) - usd) > 1e-9:
                self.conflicts.add(key)
                self.problems.append(f"{sku.description} ({sku.id}) has two prices in {key.region}")

    def get(self, component: str, kind: str, region: str) -> float | None:
        """Return the price of a part; None: unknown."""
        key = Key(component, kind, region)
        return None if key in self.conflicts else self.usd.get(key)


class PriceTables(Struct, frozen=True, kw_only=True):
    """New tables as CSV text by name. `found` and `kept`: how many prices Google's list gave, and how many it lacks."""

    csv: dict[str, str]
    found: int
    kept: int


@cache
def sku_patterns() -> tuple[re.Pattern[str], dict[str, tuple[str, str]]]:
    """Return one pattern of all SKUs, and the component and kind of each of its groups."""
    cells = [(row, kind) for row in tables.rows("price_skus") for kind in KINDS if row[kind]]
    text = "|".join(f"(?P<k{n}>{row[kind]})" for n, (row, kind) in enumerate(cells))
    return re.compile(text), {f"k{n}": (row["component"], kind) for n, (row, kind) in enumerate(cells)}


@cache
def units() -> dict[str, str]:
    """Component -> the unit that its SKUs are priced in."""
    return {row["component"]: row["unit"] for row in tables.rows("price_skus")}


@cache
def hosts() -> dict[str, str]:
    """Machine family -> the prefix of the components of its vCPUs and memory."""
    return {row["family"]: row["host"] for row in tables.rows("price_hosts")}


def price_tables(catalog: Catalog, rates: Rates, date: str) -> PriceTables:
    """Return the tables of `date`: the prices of these rates, and the shipped ones where a part is missing."""
    shipped = {(row["machine"], row["region"]): row for row in tables.rows("prices")}
    shapes = {name: shape for name, (shape, *_) in catalog.machines.items() if shape.family != "n1"}
    places = {*shipped, *((name, region) for name, shape in shapes.items() for region in catalog.regions(shape))}
    rows = [
        price_row(shapes[name], region, rates, shipped.get((name, region)), date) for name, region in sorted(places)
    ]
    parts = list(component_rows(rates, date))
    cells = [row[f"{kind}_usd"] != "" and not row[f"kept_{kind}"] for row in rows for kind in KINDS]
    kept = [row[f"{kind}_usd"] != "" and bool(row[f"kept_{kind}"]) for row in rows for kind in KINDS]
    return PriceTables(
        csv={
            "prices": to_csv(PRICE_COLUMNS, [row for row in rows if any(row[f"{kind}_usd"] for kind in KINDS)]),
            "price_components": to_csv(COMPONENT_COLUMNS, parts),
            "price_table": to_csv(
                ("date", "source", "certainty"), [{"date": date, "source": SOURCE, "certainty": "A"}]
            ),
        },
        found=sum(cells),
        kept=sum(kept),
    )


def price_row(
    machine: MachineType, region: str, rates: Rates, shipped: Mapping[str, str] | None, date: str
) -> dict[str, str]:
    """Return a row of prices.csv. `kept_KIND` is not empty if the list lacks that price."""
    fresh = {kind: machine_price(machine, region, rates, kind) for kind in KINDS}
    known = {kind: (usd(rated[0]), rated[1]) for kind, rated in fresh.items() if rated}
    old = dict(shipped or {})
    if "flex_start" not in known and "list" in known and old.get("flex_start_rule") in LIST_BOUNDS:
        known["flex_start"] = known["list"][0], old["flex_start_rule"]
    row = {"machine": machine.name, "region": region}
    for kind in KINDS:
        kept = old.get(f"{kind}_usd", ""), old.get(f"{kind}_rule", "")
        row[f"{kind}_usd"], row[f"{kind}_rule"] = known.get(kind, kept)
        row[f"kept_{kind}"] = "" if kind in known or not kept[0] else "yes"
    disks = local_ssds(machine, region, rates, "list")
    row["local_ssd_usd"] = usd(disks) if "list" in known and disks else old.get("local_ssd_usd", "")
    is_mixed = any(row[f"kept_{kind}"] for kind in KINDS)
    row["source"] = "; ".join(filter(None, [SOURCE if known else "", old.get("source", "") if is_mixed else ""]))
    row["date"] = "; ".join(filter(None, [date if known else "", old.get("date", "") if is_mixed else ""]))
    row["certainty"] = "A" if known and not is_mixed else old.get("certainty", "")
    return row


def machine_price(machine: MachineType, region: str, rates: Rates, kind: str) -> tuple[float, str] | None:
    """Return a machine's USD per hour and the rule of the figure; None: a part is unknown."""
    exact = {"list": "list", "spot": "spot", "flex_start": "flex-sku"}[kind]
    if slices := sliced(machine):
        component, count = slices
        each = rates.get(component, kind, region)
        return None if each is None else (count * each, "flex-whole" if kind == "flex_start" else exact)
    host = hosts().get(machine.family)
    gpu, disks = rates.get(machine.gpu, kind, region), local_ssds(machine, region, rates, kind)
    if host is None or gpu is None or disks is None:
        return None
    total, rule = machine.gpus * gpu + disks, exact
    parts: tuple[tuple[str, float | None], ...] = ((f"{host}-core", machine.vcpus), (f"{host}-ram", machine.memory_gb))
    for part, amount in parts:
        each = rates.get(part, kind, region)
        if each is None and kind == "flex_start":
            each, rule = rates.get(part, "list", region), "flex-gpu"
        if each is None or amount is None:
            return None
        total += amount * each
    return total, "as-a3-high" if machine.family == "a3-edge" and kind != "flex_start" else rule


def sliced(machine: MachineType) -> tuple[str, float] | None:
    """Return the SKU of a slice and the number of slices of a machine that is priced as a whole; None: by its parts."""
    if machine.family == "a4":
        return "b200-slice", machine.gpus
    if machine.share:
        return "g4-slice", float(8 * Fraction(machine.share))
    return None


def local_ssds(machine: MachineType, region: str, rates: Rates, kind: str) -> float | None:
    """Return the USD per hour of a machine's included local SSDs; None: unknown. Flex-start: at most the list price."""
    if not machine.local_ssd_auto or sliced(machine):
        return 0.0
    rate = rates.get("local-ssd-gib", kind, region)
    if rate is None and kind == "flex_start":
        rate = rates.get("local-ssd-gib", "list", region)
    return None if rate is None else machine.local_ssd_gib * rate


def component_rows(rates: Rates, date: str) -> Iterator[dict[str, str]]:
    """Yield the rows of price_components.csv."""
    shipped = {(row["component"], row["region"]): row for row in tables.rows("price_components")}
    components = {name for name, _ in shipped}
    fetched = {(key.component, key.region) for key in rates.usd if key.component in components}
    for name, region in sorted({*shipped, *fetched}):
        listed, spot = (rates.get(name, kind, region) for kind in ("list", "spot"))
        old = shipped.get((name, region))
        if listed is None:
            if old:
                yield old
            continue
        kept = old["spot_usd"] if spot is None and old else ""
        yield {
            "component": name,
            "region": region,
            "list_usd": usd(listed, 9),
            "spot_usd": kept if spot is None else usd(spot, 9),
            "source": f"{SOURCE}; {old['source']}" if kept and old else SOURCE,
            "date": f"{date}; {old['date']}" if kept and old else date,
            "certainty": "A",
        }


def usd(price: float, digits: int = 6) -> str:
    return f"{price:.{digits}f}".rstrip("0").rstrip(".")


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
