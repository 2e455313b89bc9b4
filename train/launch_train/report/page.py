"""Write the report of one or several runs: one HTML file that needs no network, no server and no other file."""

from __future__ import annotations

import hashlib
import json
import math
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import islice
from typing import Any, Final

from launch_train import runfolder
from launch_train.common.text import elapsed, plural
from launch_train.report import samples, svg, sweep, tables
from launch_train.report.chart_data import Chart, charts
from launch_train.report.events import clock_text, event_rows
from launch_train.report.goodput import PARTS, AttemptTime, attempt_times
from launch_train.report.settings import differences, flat_settings, machine_text
from launch_train.report.summary import summarize
from launch_train.runfolder.run import RunData
from launch_train.runfolder.starts import Record, is_number

MOST_EVENTS: Final = 300
QUIET: Final = frozenset({"start", "eval", "samples", "checkpoint", "end"})
"""Events that the table of events leaves out: the page shows them elsewhere, or there is one for each save."""

MOST_DETAILED: Final = 12
"""Runs of which the page also has timeline, events and settings."""

COMPARED: Final = ("state", "steps", "loss", "held-out loss", "speed", "time", "goodput", "cost", "starts", "machine")
"""What the table of several runs shows of each."""
COUNTED: Final = " of the time on steps that count"


def page(runs: Sequence[RunData], now: float | None = None) -> str:
    """Return the report as HTML. `now`: Unix seconds at which it is made."""
    created = time.time() if now is None else now
    times = [attempt_times(run, created) for run in runs]
    points = sweep.sweep_of(runs, [flat_settings(run) for run in runs])
    title = points.name if points else ", ".join(run.id for run in runs)
    drawn = charts(runs)
    rows = sum(len(start.rows.steps) for run in runs for start in run.starts)
    detailed = runs if len(runs) <= MOST_DETAILED else ()
    body = "".join(
        [
            f"<h1>{escape(title)}</h1>",
            f"<p class=made>Made {clock_text(created)} UTC by launch. {rows:,} rows of metrics; "
            "curves keep their lowest and highest points.</p>",
            _summary(runs, times),
            _sweep(points) if points and points.settings else "",
            _differences(runs) if 1 < len(runs) <= MOST_DETAILED else "",
            "<div id=controls></div><div id=charts></div>",
            f"<noscript><div class=grid>{''.join(svg.draw_chart(chart, runs) for chart in drawn)}</div></noscript>",
            *map(samples.section, detailed),
            *(_money(run, each) for run, each in zip(detailed, times, strict=False)),
            *map(_profile, detailed),
            *map(_events, detailed),
            *(
                tables.section(
                    f"Settings: {escape(run.id)}", ["setting", "value"], sorted(flat_settings(run).items()), folded=True
                )
                for run in detailed
            ),
            *(
                tables.section(
                    f"Files that could not be read: {escape(run.id)}", ["file"], [[text] for text in run.problems]
                )
                for run in runs
            ),
        ]
    )
    text = _document(title, body, _data(runs, drawn))
    return text.encode(errors="replace").decode()  # a script may log half of a surrogate pair


def _document(title: str, body: str, data: str) -> str:
    def source(text: str) -> str:
        """Return the source expression of an inline script or style for the content security policy."""
        return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assets = files("launch_train.report") / "assets"
    style = "".join((assets / name).read_text(encoding="utf-8") for name in ("uplot.css", "page.css"))
    scripts = [(assets / name).read_text(encoding="utf-8") for name in ("uplot.js", "page.js")]
    allowed = " ".join(map(source, scripts))
    images = "img-src data:; " if "<img " in body else ""  # text of a run has no tag: it is escaped
    policy = f"default-src 'none'; {images}script-src {allowed}; style-src {source(style)}; base-uri 'none'; "
    policy += "form-action 'none'"
    return (
        '<!doctype html><html lang=en><head><meta charset="utf-8">'
        f"{runfolder.PAGE_MARK}"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>{body}"
        f'<script type="application/json" id=data>{data}</script>'
        + "".join(f"<script>{script}</script>" for script in scripts)
        + "</body></html>\n"
    )


def _data(runs: Sequence[RunData], drawn: Sequence[Chart]) -> str:
    """Return what page.js draws, as JSON that can't end its script element."""

    def short(value: float) -> float | int | None:
        """Return a number with six digits: more can't be seen. None: not a finite number."""
        if isinstance(value, int):
            return value
        return float(f"{value:.6g}") if math.isfinite(value) else None

    curves = [
        {
            "title": chart.title,
            "log": chart.log,
            "byTime": chart.by_time,
            "share": chart.share,
            "curves": [
                {
                    "run": curve.run,
                    "label": curve.label,
                    "y": [*map(short, curve.y)],
                    "x": {kind: [*map(short, values)] for kind, values in curve.x.items()},
                }
                for curve in chart.curves
            ],
        }
        for chart in drawn
    ]
    data = {"runs": [run.id for run in runs], "charts": curves, "marks": [[*_marks(run)] for run in runs]}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _marks(run: RunData) -> Iterator[dict[str, Any]]:
    """Yield the moments that the charts mark: restarts, preemptions, steps that were not finite."""
    moments: list[tuple[str, Any, Any]] = []
    for place, start in enumerate(run.starts):
        if place and start.begins_after is not None:
            first = start.event("start") or {"time": next(iter(start.rows.times), math.nan)}
            moments.append(("restart", start.begins_after, first.get("time")))
        for event in start.events:
            if event["event"] in ("preempted", "non_finite", "out_of_memory", "slow_rank", "gpu_error"):
                moments.append((event["event"], event.get("step"), event.get("time")))
    for kind, step, at in moments:
        hours = (at - run.begin) / 3600 if is_number(at) else None
        yield {"kind": kind.replace("_", " "), "step": step if type(step) is int else None, "hours": hours}


# --- Tables ----------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[RunData], times: Sequence[Sequence[AttemptTime]]) -> str:
    facts = [_facts(run, each) for run, each in zip(runs, times, strict=True)]
    if len(runs) == 1:
        rows = "".join(f"<tr><th scope=row>{escape(name)}<td>{escape(text)}" for name, text in facts[0].items() if text)
        return f"<section><h2>Summary</h2><div class=scroll><table class=facts>{rows}</table></div></section>"
    names = [name for name in COMPARED if any(fact.get(name) for fact in facts)]
    short = [[fact.get(name, "").partition(" (")[0].removesuffix(COUNTED) for name in names] for fact in facts]
    compared = [[run.id, *values] for run, values in zip(runs, short, strict=True)]
    return tables.section("Runs", ["run", *names], compared)


def _facts(run: RunData, times: Sequence[AttemptTime]) -> dict[str, str]:
    summary = summarize(run, times)
    start, image = summary.start, run.plan.get("image") or {}
    return {
        "state": summary.state,
        "machine": machine_text(run),
        "computed on": ", ".join(str(start[key]) for key in ("device", "precision") if start.get(key))
        + (f", {start['world_size']} processes" if start.get("world_size") else ""),
        "parameters": f"{start['parameters']:,}" if is_number(start.get("parameters")) else "",
        "steps": f"{summary.step:,}{f' of {summary.steps:,}' if summary.steps else ''}"
        if summary.step is not None
        else "",
        "loss": f"{summary.loss:.4f} (mean of the last {plural(summary.loss_rows, 'row')})"
        if summary.loss is not None
        else "",
        "held-out loss": f"{summary.held_out:.4f} (lowest {summary.lowest_held_out:.4f})"
        if summary.held_out is not None
        else "",
        **(_of_text(summary.held_out, start) if summary.held_out is not None else {}),
        "speed": f"{summary.speed:,.0f} {summary.unit}/s (median)" if summary.speed is not None else "",
        "starts": str(summary.starts) if summary.starts > 1 else "",
        "time": f"{elapsed(summary.paid)}{f' in {summary.attempts} attempts' if summary.attempts > 1 else ''}"
        if summary.paid
        else "",
        "goodput": f"{summary.goodput:.1%}{COUNTED}" if summary.goodput is not None else "",
        "cost": "" if summary.is_local else f"≈${summary.usd:,.2f}" if summary.usd is not None else "unknown price",
        "image": str(image.get("uri", "")),
        "torch": str(start.get("torch", "")),
        "folder": run.folder,
    }


def _of_text(loss: float, start: Record) -> dict[str, str]:
    """Return perplexity and bits per byte of a loss in nats per byte or token. Nothing if the data is no text."""
    unit, size, tokens = start.get("data_unit"), start.get("data_bytes", 0), start.get("data_tokens", 0)
    if unit not in ("byte", "token") or loss > 700:
        return {}
    perplexity = {"perplexity": f"{math.exp(loss):.2f} per {unit}, held out"}
    if unit == "byte":
        return perplexity | {"bits per byte": f"{loss / math.log(2):.3f}"}
    known = not str(start.get("tokenizer") or "none").startswith("none")  # of files with tokens, the text's size is not
    if known and is_number(size) and size and is_number(tokens):
        return perplexity | {"bits per byte": f"{loss / math.log(2) * tokens / size:.3f}"}
    return perplexity


def _sweep(points: sweep.Sweep) -> str:
    best, words = points.best, ""
    if best is not None:
        settings = ", ".join(f"{name} {text}" for name, text in zip(points.settings, best.settings, strict=True))
        words = f"<p>Best point: <strong>{escape(best.run)}</strong> with {escape(settings)}: "
        words += f"{escape(points.measure)} {best.result:.4f}</p>"
    title = f"Sweep: {escape(points.name)}"
    head = ["run", *points.settings, *([points.measure] if points.measure else [])]
    rows = [
        [
            point.run,
            *point.settings,
            *(["" if point.result is None else f"{point.result:.4f}"] if points.measure else []),
        ]
        for point in points.points
    ]
    table = tables.section("Points, the best first", head, rows)
    return f"<section><h2>{title}</h2>{words}{sweep.draw_parallel_coordinates(points)}</section>{table}"


def _money(run: RunData, times: Sequence[AttemptTime]) -> str:
    """Return the timeline of the attempts, and where their time and money went."""
    if not times:
        return ""
    name = f": {escape(run.id)}"
    rows = []
    for attempt in times:
        for part in ("queue", *PARTS):
            if seconds := attempt.parts[part]:
                share = f"{seconds / attempt.paid:.1%}" if part != "queue" and attempt.paid else "not paid"
                cost = (
                    f"${seconds / 3600 * attempt.usd_per_hour:,.2f}" if part != "queue" and attempt.usd_per_hour else ""
                )
                rows.append([str(attempt.number), attempt.place, part, elapsed(seconds), share, cost])
        if attempt.end:
            rows.append([str(attempt.number), attempt.place, f"ended: {attempt.end}", "", "", ""])
    table = tables.section(f"Where the time went{name}", ["attempt", "machine", "part", "time", "share", "cost"], rows)
    return f"<section><h2>Timeline{name}</h2>{svg.draw_timeline(times)}</section>{table}"


def _differences(runs: Sequence[RunData]) -> str:
    rows = [[difference.name, *difference.values] for difference in differences(runs)]
    if not rows:
        return "<section><h2>What differs</h2><p>Nothing in the settings.</p></section>"
    return tables.section("What differs", ["setting", *(run.id for run in runs)], rows)


def _profile(run: RunData) -> str:
    """Return the newest profile's verdict, and the kernels that took most time."""
    profiles = [*filter(_has_verdict, run.events)]
    if not profiles:
        return ""
    profile = profiles[-1]
    lines = [*map(str, profile["sentences"]), str(profile.get("advice") or "")]
    text = "".join(f"<li>{escape(line)}" for line in lines if line)
    step, kernels = profile.get("step_s"), profile.get("kernels")
    rows = [
        [
            str(kernel.get("name", "")),
            f"{kernel['ms']:.3f}",
            f"{kernel['ms'] / step / 10:.1f}%" if is_number(step) and step else "",
            f"{kernel['calls']:g}" if is_number(kernel.get("calls")) else "",
        ]
        for kernel in (kernels if isinstance(kernels, list) else ())
        if isinstance(kernel, Mapping) and is_number(kernel.get("ms"))
    ]
    head = ["kernel or operator", "ms per step", "of the step", "calls per step"]
    table = tables.section(f"Kernels: {escape(run.id)}", head, rows, folded=True)
    return f"<section><h2>Profile: {escape(run.id)}</h2><ul>{text}</ul></section>{table}"


def _has_verdict(event: Record) -> bool:
    return event["event"] == "profile" and isinstance(event.get("sentences"), list)


def _events(run: RunData) -> str:
    hidden = {*QUIET, *(["profile"] if any(map(_has_verdict, run.events)) else [])}
    rows = [*islice(event_rows(run, hidden), MOST_EVENTS)]
    return tables.section(f"Events: {escape(run.id)}", ["time (UTC)", "attempt.start", "step", "event", ""], rows)
