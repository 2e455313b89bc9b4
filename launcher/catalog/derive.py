"""Derive the tables of regions, zones and prices from sources/, so that none of their figures is typed by hand.

`python -m launcher.catalog.derive` writes data/{regions,zones,prices}.csv; with `--check` it compares and fails when a
table isn't what its sources say. Figures known from text alone stand in data/*_named.csv and data/rates.csv, with
their sources, and are merged in here.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
Row = Mapping[str, str]

PRICE_COLUMNS = (
    *("machine", "zone", "list_usd", "list_rule", "flex_start_usd", "flex_start_rule", "spot_usd", "spot_rule"),
    *("source", "date", "certainty"),
)


def main(args: Sequence[str], folder: Path = HERE) -> str | None:
    """Write the tables, or compare them; the text returned is what is wrong."""
    tables = {folder / "data" / name: text for name, text in derive(folder).items()}
    if "--check" not in args:
        for path, text in tables.items():
            path.write_text(text, encoding="utf-8")
        return None
    stale = [path.name for path, text in tables.items() if path.read_text(encoding="utf-8") != text]
    return f"not what sources/ give: {', '.join(stale)}; run python -m launcher.catalog.derive" if stale else None


def derive(folder: Path) -> dict[str, str]:
    """File name -> CSV text, from folder/sources and the hand-kept tables of folder/data."""
    listed = read(folder / "sources" / "gcp_gpu_machine_regions.csv")
    scraped = read(folder / "sources" / "gcp_gpu_prices_by_zone.csv")
    rates = {row["rate"]: float(row["usd"]) for row in read(folder / "data" / "rates.csv")}
    named_zones = read(folder / "data" / "zones_named.csv")
    named_prices = read(folder / "data" / "prices_named.csv")
    prices = merge([price_row(row, rates) for row in scraped], named_prices)
    return {
        "regions.csv": to_csv(("machine", "regions", "source", "certainty"), regions(listed)),
        "zones.csv": to_csv(("machine", "zones", "source", "certainty"), zones(scraped, named_zones)),
        "prices.csv": to_csv(PRICE_COLUMNS, prices),
    }


def regions(listed: Iterable[Row]) -> list[Row]:
    """Each machine once, with all regions where it is listed."""
    places = group((row["InstanceType"], row["Region"]) for row in listed)
    return [{"machine": name, "regions": text, "source": "CYC 2026-08-17", "certainty": "C"} for name, text in places]


def zones(scraped: Iterable[Row], named: Iterable[Row]) -> list[Row]:
    """Each machine once, with all zones that have a price or are named in zones_named.csv."""
    places = group((row["InstanceType"], row["Zone"]) for row in scraped)
    rows = [{"machine": name, "zones": text, "source": "SKYCAT 2026", "certainty": "C"} for name, text in places]
    return sorted([*rows, *named], key=lambda row: row["machine"])


def group(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(machine, place) pairs -> one sorted line for each machine."""
    found: dict[str, set[str]] = {}
    for machine, place in pairs:
        found.setdefault(machine, set()).add(place)
    return [(machine, " ".join(sorted(places))) for machine, places in sorted(found.items())]


def price_row(row: Row, rates: Mapping[str, float]) -> Row:
    """One zone's list, Flex-start and Spot price, with the scraped file's flags taken into account.

    The file's "on-demand" figure is a Flex-start or a calendar-mode one where its flag says so; such a zone's list
    price is unknown.
    """
    listed, list_rule = list_price(row)
    flex_start, flex_rule = flex_price(row, rates)
    return {
        "machine": row["InstanceType"],
        "zone": row["Zone"],
        "list_usd": listed,
        "list_rule": list_rule,
        "flex_start_usd": flex_start,
        "flex_start_rule": flex_rule,
        "spot_usd": money(float(row["SpotPriceUSDh"])),
        "spot_rule": "spot",
        "source": f"SKYCAT {row['SkypilotCatalogCommit']}" + ("; ZENN" if flex_rule == "flex-sku" else ""),
        "date": "2026",
        "certainty": "C",
    }


def list_price(row: Row) -> tuple[str, str]:
    """The list price and its rule; both empty when the file holds another kind of price."""
    flag = row["Flag"]
    if "DWS_flex_start" in flag or "calendar" in flag:
        return "", ""
    return money(float(row["PriceUSDh"])), "list-corrected" if "corrected" in flag else "list"


def flex_price(row: Row, rates: Mapping[str, float]) -> tuple[str, str]:
    """The Flex-start price of the whole machine and its rule; both empty when unknown."""
    gpu = flex_gpu_price(row)
    count = int(row["AcceleratorCount"])
    if gpu is not None and "price includes host" in row["Flag"]:
        return money(gpu * count), "flex-whole"
    if gpu is not None and row["AcceleratorName"] == "H100" and row["Region"] == "us-central1":
        host = int(row["vCPUs"]) * rates["flex-start-a3-core"] + int(row["MemoryGiB"]) * rates["flex-start-a3-ram"]
        return money(gpu * count + host), "flex-sku"
    if gpu is not None:
        return money(gpu * count + float(row["HostPrice"])), "flex-gpu"
    if row["AcceleratorName"] == "L4":
        return money(float(row["PriceUSDh"])), "flex-list"
    return "", ""


def flex_gpu_price(row: Row) -> float | None:
    """One GPU's Flex-start (Defined Duration) price, where the flag says that it was found."""
    if "DWS_flex_start" in row["Flag"]:
        return float(row["GpuPriceEach"])
    found = re.search(r"scraped value was DWS ([0-9.]+)", row["Flag"])
    return float(found[1]) if found else None


def merge(scraped: Iterable[Row], named: Iterable[Row]) -> list[Row]:
    """Figures known from text fill the cells that the file leaves empty, never another."""
    rows = {(row["machine"], row["zone"]): dict(row) for row in scraped}
    for row in named:
        key = (row["machine"], row["zone"])
        known = rows.setdefault(key, dict.fromkeys(PRICE_COLUMNS, ""))
        filled = {
            name: row[name]
            for price in ("list", "flex_start", "spot")
            for name in (f"{price}_usd", f"{price}_rule")
            if row[f"{price}_usd"] and not known[f"{price}_usd"]
        }
        source = "; ".join(filter(None, (known["source"], row["source"])))
        rows[key] = {**known, **filled, "machine": key[0], "zone": key[1], "source": source}
        rows[key].update({name: known[name] or row[name] for name in ("date", "certainty")})
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
