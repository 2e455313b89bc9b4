"""Print an estimate in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launch_train.common.text import elapsed
from launcher.cli.ui.text import columns, labelled
from launcher.plan.estimate import Estimate, Offer, no_speed
from launcher.plan.memory.need import Largest
from launcher.text import plural, size_text, usd_text


def estimate_lines(estimate: Estimate) -> Iterator[str]:
    machine = estimate.machine
    cards = f"{machine.gpus} × {machine.gpu}"
    yield from labelled(
        "machine", f"{machine.nodes} × {machine.machine_type} ({cards}, {estimate.gpu_memory_gb:g} GB each)"
    )
    if estimate.bytes is None:
        yield from labelled("model", estimate.note or "unknown: the program is not the built-in trainer")
        return
    yield from labelled("model", f"{estimate.model}, {count_text(estimate.parameters or 0)} parameters")
    if estimate.note:
        yield from labelled("", estimate.note)
    yield ""
    yield from memory_lines_of(estimate)
    yield ""
    yield from fit_options(estimate)
    yield ""
    yield from time_and_cost(estimate)


def memory_lines_of(estimate: Estimate) -> Iterator[str]:
    yield f"memory of one GPU, micro-batch {estimate.micro_batch}"
    rows = [(f"  {part.name}", signed(part.bytes), part.what) for part in estimate.parts]
    verdict = "fits" if estimate.fits else "does not fit"
    limit = f"{verdict} into {estimate.gpu_memory_gb:g} GB"
    if estimate.compiles:
        limit += "; compiled code needs less"
    rows.append(("  total", signed(estimate.bytes or 0), limit))
    yield from columns([(name, f"{size:>9}", what) for name, size, what in rows], "<><")


def fit_options(estimate: Estimate) -> Iterator[str]:
    """Yield the largest micro-batch with each technique, and the smallest machine that fits."""
    rows = [("largest micro-batch on this machine", "")]
    for choice in estimate.choices:
        flags = choice.flags.replace("--set run.config.", "").replace("=", ": ") or "as in the spec"
        limit = " (limit: batch_size)" if choice.limited_by == "batch_size" else ""
        rows.append((f"  {flags}", f"{choice.micro_batch or 'none fits'}{limit}"))
    yield from columns(rows)
    if estimate.smallest:
        smallest = estimate.smallest
        flags = f", {smallest.flags}" if smallest.flags else ""
        yield from labelled(
            "smallest", f"{estimate.machine.nodes} × {smallest.machine_type} ({smallest.gpus} × {smallest.gpu}){flags}"
        )
    else:
        yield from labelled("smallest", "no machine of the catalog holds this model")


def time_and_cost(estimate: Estimate) -> Iterator[str]:
    """Yield speed, time and cost by provisioning model."""
    if estimate.speed is None:
        yield from labelled("speed", f"unknown: {no_speed(estimate.parameters, fits=estimate.fits)}")
        return
    speed = estimate.speed
    yield from labelled("speed", f"{speed.per_second:,.0f} {speed.unit}/s; {speed.basis}")
    samples = plural(estimate.batch_size or 0, "sample")
    units = f" of {estimate.sample_units:,} {speed.unit}" if (estimate.sample_units or 0) > 1 else ""
    yield from labelled("work", f"{estimate.steps or 0:,} steps of {samples}{units}")
    yield ""
    header = ("provisioning", "region", "USD/h", "time", "cost", "interruptions")
    yield from columns([header, *map(offer_cells, estimate.offers)])
    yield "Time and cost include 15 min for each interruption (assumed)."


def offer_cells(offer: Offer) -> tuple[str, ...]:
    rate = "unknown" if offer.interruptions is None else f"{offer.interruptions:.2f}"
    price = "unknown" if offer.usd_per_hour is None else f"{offer.usd_per_hour:,.2f}"
    time = "unknown" if offer.hours is None else elapsed(offer.hours * 3600)
    cost = "unknown" if offer.usd is None else usd_text(offer.usd)
    return offer.provisioning.partition(":")[0], offer.region, price, time, cost, rate


def largest_page(memory: str, rows: Sequence[Largest]) -> Iterator[str]:
    """Yield the largest models for an amount of memory."""
    yield f"largest model on one GPU with {memory}, 10 % left for activations"
    header = ("use", "parameters", "bytes each", "built-in")
    cells = [(row.use, count_text(row.parameters), f"{row.bytes_per_parameter:g}", row.model or "-") for row in rows]
    yield from columns([header, *cells])


def count_text(number: int) -> str:
    """Return `124 M`, `1.6 B`, `120 T`."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}" if number < 10 * unit else f"{number / unit:,.0f} {name}"
    return str(number)


def signed(size: int) -> str:
    """Return bytes as text, also negative ones."""
    return f"-{size_text(-size)}" if size < 0 else size_text(size)
