"""Derive the catalog's tables of regions, zones and prices from sources/, so that no figure is typed by hand.

`python -m tools.catalog.derive` writes regions.csv, zones.csv, prices.csv and price_components.csv in
launcher/catalog/data. With `--check` it compares them, and fails if a table is out of date. sources/README.md describes
the sources.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "sources"
DATA = Path(__file__).parents[2] / "launcher" / "catalog" / "data"
Row = Mapping[str, str]

PRICE_COLUMNS = (
    *("machine", "region", "list_usd", "list_rule", "flex_start_usd", "flex_start_rule", "spot_usd", "spot_rule"),
    *("local_ssd_usd", "source", "date", "certainty"),
)
COMPONENT_COLUMNS = ("component", "region", "list_usd", "spot_usd", "source", "date", "certainty")
COMPONENTS = ("local-ssd-gib", "n1-vcpu", "n1-ram-gib", "p4", "p100", "t4", "v100")
"""Components that a plan adds up: N1 machines with their GPUs, and the local SSDs of a VM."""
SLICED = ("a4-", "a4x-")
"""Families with one SKU for the whole machine, including local SSDs."""

KEYS = {
    "Cyclenerd/google-cloud-pricing-cost-calculator:pricing.yml@fd66b26f": ("CYC-PRICES", "2026-07-30"),
    "Jumbo2020/gpu_prices:gcp_gpu_prices.json@2e0273be": ("JUM", "2025-06-16"),
    "skypilot-org/skypilot-catalog:catalogs/v9/gcp/vms.csv@2c3d7ea7": ("SK9", "2026-07"),
    "JPLutz7/random:gpu-price-tracker/data/normalized/2026-08-10": ("JPU", "2026-08-10"),
    "JPLutz7/random:gpu-price-tracker/data/normalized/2026-08-11": ("JPL", "2026-08-11"),
    "https://cloud.google.com/products/compute/gpus-pricing as quoted (public files": ("OFF", "2026-09-17"),
    "https://cloud.google.com/products/compute/gpus-pricing as quoted (public file 6": ("OFS", "2026-08/09"),
    "https://cloud.google.com/products/compute/pricing/accelerator-optimized as quoted": ("ACC", "2026-09-13"),
    "https://zenn.dev/google_cloud_jp/articles/dws-flex-new-skus": ("ZENN", "2025-08"),
    "Cloud Billing Catalog as quoted (public file 58711035550)": ("A2D", "2026-08-02"),
    "SpareCores sc-crawler test fixture (public file 68845141508)": ("SPARE", "2026"),
}
"""The start of a source's full name -> its key in README.md and its date."""

LIST_RULES = {
    r"list=sum of SKUs(\+local SSD at the region rate)?$": "list",
    r"list=official page": "list",
    r"list=8 x slice ": "list",
    r"list=\d x slice SKU .*\(Iowa 0\.646880\)$": "list",
    r"list=8 x GPU SKU \S+ \+ A3Ultra host of the SKUs ": "list",
    r"list=.* x (A3|g4-standard-48) regional factor\)": "list-factor",
    r"list=8 x GPU=US price x A3 factor ": "list-factor",
    r"list=8 x (CUD|GPU=1-year CUD)": "list-commitment",
    r"list=1\.05591 x a3-highgpu-8g ": "list-mega",
    r"as a3-highgpu-8g ": "as-a3-high",
}
FLEX_RULES = {
    r"flex=DWS SKUs of GPU, core": "flex-sku",
    r"flex=(published|DWS slice SKU)": "flex-whole",
    r"flex=8 x DWS slice 8\.055$": "flex-whole",
    r"flex=8 x DWS slice 8\.055 \(uniform": "flex-uniform",
    r"flex-gpu:": "flex-gpu",
    r"flex-list:": "flex-list",
    r"flex<=list": "flex-bound",
}
SPOT_RULES = {
    r"spot of 2026-07-30$": "spot",
    r"spot of 2026-07-30 \(host at A3 instead of A3Plus": "spot-mega",
    r"spot of 2026-07: H200 SKU, host at A3 spot rates": "spot-host",
    r"spot=": "spot",
    r"as a3-highgpu-8g ": "as-a3-high",
}
"""Wording in sources/gpu_prices.csv -> the rule's key in data/price_rules.csv."""


def main(args: Sequence[str], sources: Path = SOURCES, data: Path = DATA) -> str | None:
    """Write the tables, or compare them; return an error message, or None."""
    tables = {data / name: text for name, text in derive(sources, data).items()}
    if "--check" not in args:
        for path, text in tables.items():
            path.write_text(text, encoding="utf-8")
        return None
    stale = [path.name for path, text in tables.items() if path.read_text(encoding="utf-8") != text]
    return f"out of date: {', '.join(stale)}; run python -m tools.catalog.derive" if stale else None


def derive(sources: Path, data: Path) -> dict[str, str]:
    """Return file name -> CSV text, from the sources and from machines.csv of the catalog's data."""
    listed = read(sources / "gcp_gpu_machine_regions.csv")
    scraped = read(sources / "gcp_gpu_prices_by_zone.csv")
    parts = component_rows(read(sources / "gpu_price_components.csv"))
    ssd_rates = {row["region"]: float(row["list_usd"]) for row in parts if row["component"] == "local-ssd-gib"}
    disks = {row["name"]: int(row["local_ssd_gib"]) for row in read(data / "machines.csv")}
    found = [price_row(row, disks[row["machine"]], ssd_rates) for row in read(sources / "gpu_prices.csv")]
    prices = merge(found, read(sources / "prices_named.csv"))
    return {
        "regions.csv": to_csv(("machine", "regions", "source", "certainty"), regions(listed)),
        "zones.csv": to_csv(("machine", "zones", "source", "certainty"), zones(scraped, sources)),
        "prices.csv": to_csv(PRICE_COLUMNS, prices),
        "price_components.csv": to_csv(COMPONENT_COLUMNS, parts),
    }


def regions(listed: Iterable[Row]) -> list[Row]:
    """Return a row per machine with all its regions."""
    places = group((row["InstanceType"], row["Region"]) for row in listed)
    return [{"machine": name, "regions": text, "source": "CYC 2026-08-17", "certainty": "C"} for name, text in places]


def zones(scraped: Iterable[Row], sources: Path) -> list[Row]:
    """Return a row per machine with all its zones in the scraped file and in zones_named.csv."""
    places = group((row["InstanceType"], row["Zone"]) for row in scraped)
    rows = [{"machine": name, "zones": text, "source": "SKYCAT 2026", "certainty": "C"} for name, text in places]
    return sorted([*rows, *read(sources / "zones_named.csv")], key=lambda row: row["machine"])


def group(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Group (machine, place) pairs to one sorted line per machine."""
    found: dict[str, set[str]] = {}
    for machine, place in pairs:
        found.setdefault(machine, set()).add(place)
    return [(machine, " ".join(sorted(places))) for machine, places in sorted(found.items())]


def price_row(row: Row, local_ssd_gib: int, ssd_rates: Mapping[str, float]) -> Row:
    """Return one machine's prices in one region, each with the key of its rule.

    `local_ssd_usd` is the local SSDs' share of the list price: Vertex AI's fee does not apply to it.
    """
    region, sliced = row["zone_or_region"], row["machine"].startswith(SLICED)
    disks = 0.0 if sliced or not local_ssd_gib else local_ssd_gib * ssd_rates[region]
    source, date = source_keys(row["source"])
    return {
        "machine": row["machine"],
        "region": region,
        **figure("list", row["list_usd"], LIST_RULES, row["rule"]),
        **figure("flex_start", row["flex_start_usd"], FLEX_RULES, row["rule"]),
        **figure("spot", row["spot_usd"], SPOT_RULES, row["rule"]),
        "local_ssd_usd": money(disks) if disks and row["list_usd"] else "",
        "source": source,
        "date": row["date"] or date,
        "certainty": row["certainty"],
    }


def figure(name: str, usd: str, rules: Mapping[str, str], text: str) -> Row:
    """Return a price and its rule's key, found in the row's rules; both empty if the price is unknown.

    Raises:
        ValueError: a price without a known rule.
    """
    if not usd:
        return {f"{name}_usd": "", f"{name}_rule": ""}
    pieces = re.split(r"; (?=list|spot|flex)", text)
    for piece in pieces:
        for pattern, key in rules.items():
            if re.match(pattern, piece):
                return {f"{name}_usd": money(float(usd)), f"{name}_rule": key}
    raise ValueError(f"no rule for the {name} price in {text!r}")


def component_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the components that plans need, without Spot prices that their source calls stale: no zone of such a
    region has the GPU."""
    found = [
        {
            "component": row["component"],
            "region": row["region"],
            "list_usd": row["usd_per_hour"],
            "spot_usd": "" if "stale" in row["date"] else row["spot_usd"],
            "source": source_keys(row["source"])[0],
            "date": row["date"].partition("; spot 2025-06-16 (stale)")[0],
            "certainty": row["certainty"],
        }
        for row in rows
        if row["component"] in COMPONENTS
    ]
    return sorted(found, key=lambda row: (row["component"], row["region"]))


def source_keys(text: str) -> tuple[str, str]:
    """Return the keys of sources from their full names, each once, and the date of the first.

    Raises:
        ValueError: a source that KEYS lacks.
    """
    found: dict[str, str] = {}
    for name in text.split(" | "):
        known = [key for start, key in KEYS.items() if name.removeprefix("spot ").startswith(start)]
        if not known:
            raise ValueError(f"no key for the source {name!r}")
        found.setdefault(*known[0])
    return "; ".join(found), next(iter(found.values()))


def merge(found: Iterable[Row], named: Iterable[Row]) -> list[Row]:
    """Fill empty cells with figures from prices_named.csv, without replacing others."""
    rows = {(row["machine"], row["region"]): dict(row) for row in found}
    for row in named:
        key = (row["machine"], row["region"])
        known = rows[key]
        filled = {
            name: row[name]
            for price in ("list", "flex_start", "spot")
            for name in (f"{price}_usd", f"{price}_rule")
            if row[f"{price}_usd"] and not known[f"{price}_usd"]
        }
        rows[key] = {**known, **filled, "source": f"{known['source']}; {row['source']}"}
    return [rows[key] for key in sorted(rows)]


def money(usd: float) -> str:
    return f"{usd:.6f}".rstrip("0").rstrip(".")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def to_csv(columns: Sequence[str], rows: Iterable[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
