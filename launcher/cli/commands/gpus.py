"""`launch gpus`: the GPUs on offer, with their prices."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import to_builtins

from launcher import catalog
from launcher.catalog.offers import MODELS, OfferQuery, Sort, offers
from launcher.cli.help_page import COST, MACHINE, OUTPUT, WHERE, option
from launcher.cli.options import AcceptHostKey, Offline, Output, OutputFormat
from launcher.cli.ui.documents import printed
from launcher.cli.ui.offer_table import offer_lines, offers_data
from launcher.errors import UsageError, refuse_with
from launcher.inputs.gcloud_config import default_regions
from launcher.inputs.price_table import priced_catalog
from launcher.text import did_you_mean, either, near

if TYPE_CHECKING:
    from launcher.services.compute.capacity import LiveOffer


def gpus(
    *,
    type: Annotated[  # noqa: A002 -- the flag's name
        str | None, option(MACHINE, "--type", help="Only this GPU or machine type.", metavar="TYPE")
    ] = None,
    memory: Annotated[
        str | None, option(MACHINE, "--memory", help="At least this much memory per GPU (40GB).", metavar="SIZE")
    ] = None,
    region: Annotated[
        list[str] | None,
        option(WHERE, "--region", help="Prices in this region, or any: in each; repeatable.", metavar="REGION"),
    ] = None,
    provisioning: Annotated[
        list[str] | None,
        option(MACHINE, "--provisioning", help="standard, spot or flex-start; repeatable.", metavar="MODEL"),
    ] = None,
    max_usd: Annotated[
        float | None, option(COST, "--max-usd", help="At most this much per GPU and hour.", metavar="USD")
    ] = None,
    live: Annotated[
        bool, option(WHERE, "--live", help="Add quotas and Spot capacity of your project; needs credentials.")
    ] = False,
    on: Annotated[
        str | None, option(WHERE, "--on", help="List a host's GPUs over SSH, and who uses them.", metavar="HOST")
    ] = None,
    accept_host_key: AcceptHostKey = False,
    offline: Offline = False,
    sort: Annotated[Sort, option(OUTPUT, "--sort", help="Cheapest, most memory or most FLOP/s first.")] = "price",
    output_format: OutputFormat = Output.text,
) -> None:
    """List GPUs with memory, speed, regions and prices.

    The cheapest comes first, with its machine types. Prices are in USD per GPU and hour on Compute Engine, as a range
    over machine types and regions. Sends no request without --live or --on. --live reads the quotas of your project
    and Google's advice on Spot capacity in the first 12 offers (default: in gcloud's region).
    """
    if accept_host_key and not on:
        raise UsageError("--accept-host-key needs a host", "Name it: --on HOST")
    if on:
        named = {"--type": type, "--memory": memory, "--region": region, "--provisioning": provisioning}
        refuse_with("--on", {**named, "--max-usd": max_usd, "--live": live})
        show_host(on, output_format, accept_host_key=accept_host_key)
        return
    regions = region or (list(default_regions(os.environ)) if live else [])
    if live and not regions:
        raise UsageError("--live needs a region", "Name it: launch gpus --live --region us-central1")
    known = priced_catalog(offline=offline)
    query = query_of(type, memory, regions, provisioning, max_usd, sort)
    shown, total = offers(known, query)
    seen: dict[tuple[str, str], LiveOffer] = {}
    if live:
        from launcher.cli.flows.find_vm import open_compute
        from launcher.project.live_offers import live_offers

        seen = live_offers(open_compute(), known, shown)
    if output_format is Output.text:
        print("\n".join(offer_lines(known, shown, total, seen, query.models)))
    else:
        printed(offers_data(known, shown, total, seen), output_format)


def show_host(name: str, output_format: Output, *, accept_host_key: bool) -> None:
    """Print the GPUs of a host, and who uses them. Raises LaunchError: no connection."""
    from launcher.remote.agent import Agent
    from launcher.remote.connection import connect_to
    from launcher.services.hosts.arrival import used_by
    from launcher.spec.hosts_file import read_hosts

    entry: dict[str, Any] = to_builtins(read_hosts(os.environ).entry(name))
    facts = {
        **Agent(connect_to(name, accept_host_key=accept_host_key)).call("describe"),
        **({"hosts.yaml": entry} if entry else {}),
    }
    if output_format is not Output.text:
        printed(facts, output_format)
        return
    for gpu in facts["gpus"]:
        use = "free" if gpu["free"] else used_by(gpu)
        print(f"{gpu['index']}  {gpu['name']}, {gpu['memory_mb'] / 1024:.0f} GiB, driver {gpu['driver']}: {use}")
    if not facts["gpus"]:
        print(f"no GPU: {facts['gpu_problem']}")
    print(f"{facts['free_gb']:.0f} GB of disk are free")
    if entry:
        print("hosts.yaml: " + ", ".join(f"{field} {value}" for field, value in entry.items()))


def query_of(
    type: str | None,  # noqa: A002 -- the flag's name
    memory: str | None,
    region: list[str],
    provisioning: list[str] | None,
    max_usd: float | None,
    sort: Sort,
) -> OfferQuery:
    """Return the query of these flags. Raises UsageError: a value is invalid."""
    if max_usd is not None and not max_usd > 0:
        raise UsageError(f"--max-usd {max_usd:g}: must be greater than 0", "For example: --max-usd 2.50")
    checked: dict[str, Any] = {"regions": known_regions(region)}
    if provisioning:
        for model in provisioning:
            check_word(model, "--provisioning", MODELS)
        checked["models"] = tuple(model for model in MODELS if model in provisioning)
    size = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*(?:GB?|GiB)?", (memory or "").strip(), re.IGNORECASE)
    if memory and not size:
        raise UsageError(f"--memory: invalid size {memory[:80]!r}", "For example: --memory 40GB")
    memory_gb = float(size[1]) if size else None
    return OfferQuery(type=type, memory_gb=memory_gb, max_usd=max_usd, sort=sort, **checked)


def known_regions(named: list[str]) -> tuple[str, ...]:
    """Return the regions, without duplicates. Raises UsageError: a region has no GPU, or `any` is not alone."""
    if named == ["any"]:
        return ("any",)
    if "any" in named:
        raise UsageError("--region any cannot be combined with another --region", "Use any alone, or list regions.")
    known = catalog.load()
    every = sorted({place for shape in known.shapes for place in known.regions(shape)})
    for name in named:
        check_word(name, "--region", every)
    return tuple(dict.fromkeys(named))


def check_word(word: str, flag: str, known: Any) -> None:
    """Raise UsageError if a flag's value is not a known one."""
    if word not in known:
        every = f"Use {either(known)}" if len(known) < 10 else "launch gpus --region any lists all regions with GPUs"
        raise UsageError(f"{flag}: unknown value {word[:80]!r}", did_you_mean(near(word, known), every))
