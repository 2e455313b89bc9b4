"""`launch prices`: which prices plans use, and how to fetch newer ones."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

from launcher import catalog
from launcher.catalog.sku_prices import Rates, price_tables
from launcher.cli.help_page import COST, option
from launcher.cli.options import Output, OutputFormat
from launcher.cli.ui.documents import printed
from launcher.cli.ui.streams import say
from launcher.errors import LaunchError
from launcher.gcp.price_list import PriceList
from launcher.inputs import gcloud_config
from launcher.inputs.price_table import age_days, priced_catalog, store_tables


def prices(
    *,
    update: Annotated[bool, option(COST, "--update", help="Fetch today's prices from Google.")] = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Show the prices that plans use, or fetch newer ones.

    --update reads Compute Engine's public price list from the Cloud Billing API (cloudbilling.googleapis.com), with an
    API key in LAUNCH_API_KEY or your credentials, and stores it in your cache. Plans use the newer of these prices and
    those shipped with launch, and never send a request.
    """

    fetched = fetch_prices() if update else None
    table = priced_catalog().price_table
    days = age_days(table.date, time.time())
    if output_format is not Output.text:
        known = {"date": table.date, "digest": table.digest, "shipped": table.shipped, "age_days": days}
        printed({**known, "update": fetched}, output_format)
        return
    if fetched:
        print(f"{fetched['skus']:,} SKUs read; {fetched['found']:,} prices of {fetched['date']} stored")
        if fetched["kept"]:
            print(f"{fetched['kept']:,} prices are not in the list and keep their shipped value")
    where = "shipped with launch" if table.shipped else f"in {table.folder.replace(os.environ.get('HOME') or '-', '~')}"
    print(f"plans use prices of {table.date} ({days} days old), {where}")
    if not update:
        print("launch prices --update fetches today's prices")


def fetch_prices() -> dict[str, Any]:
    """Fetch the price list and store it in the cache; print what could not be used. Raises LaunchError."""

    listed = PriceList(gcloud_config.setting("core/project", os.environ) or "PROJECT", os.environ)
    rates, count = Rates(), 0
    for sku in listed.skus():
        rates.add(sku)
        count += 1
    tables = price_tables(catalog.load(), rates, listed.date)
    for problem in rates.problems:
        say(f"not used: {problem}")
    if not tables.found:
        raise LaunchError(
            f"Cloud Billing's price list has no price of any machine ({count:,} SKUs); nothing was stored",
            "Try again later. Plans use the prices that they used before.",
        )
    store_tables(tables.csv, os.environ)
    return {"date": listed.date, "skus": count, "found": tables.found, "kept": tables.kept, "ignored": rates.problems}
