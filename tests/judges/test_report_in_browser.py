"""The report in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launch_train.report import page
from launch_train.trainer.samples import thumbnails
from tests.train.report.folders import T, preempted, read, rows, write

pytestmark = pytest.mark.judges
EVIL = "</script><img src=x onerror=alert(1)><b>"
SCRIPT = "</pre><script>alert(2)</script><style>*{display:none}</style><iframe src='data:text/html,x'></iframe>"
EVIL_TEXTS = [
    {"prompt": f"Once {EVIL}", "text": f"{SCRIPT} the end\u202e\x1b[2J"},
    {"prompt": "w" * 500, "text": "\n" * 30 + "e\u0301" * 400},
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright import sync_api  # not installed where other tests run

    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """A page, with what its console and its network said."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        self.page = browser.new_context(**options).new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def painted(self, chart: int = 0) -> int:
        """The number of pixels of a chart that are not empty."""
        script = """(at) => { const canvas = document.querySelectorAll("figure canvas")[at];
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          let count = 0; for (let i = 3; i < data.length; i += 4) count += data[i] > 0; return count; }"""
        return int(self.page.evaluate(script, chart))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: one preempted, one of 5,000 steps with a value that was not finite and with images, one with hostile
    names and texts."""
    folder = tmp_path_factory.mktemp("runs")
    values = rows(range(1, 5001), T, 0.5, tokens_per_s=1000.0)
    for row in values:
        row["loss"] = 3 + math.sin(row["step"] / 300)
    values[2500] |= {"loss": 50.0}
    values[3000] |= {"loss": None}
    gpus = [{"time": T + second, "gpus": [{"gpu": 0, "util": 0.9}]} for second in range(0, 2500, 5)]
    guesses = [{"true": "cat", "predicted": name, "probability": 0.9} for name in ("cat", "dog")]
    images = {"event": "samples", "kind": "images", "samples": guesses, "time": T}
    pictures = thumbnails(torch.arange(2 * 3 * 48 * 48).reshape(2, 3, 48, 48).float())
    values += [{**images, "step": 2000, "thumbnails": pictures}, {**images, "step": 4000}]
    long = {
        "plan.json": {"run": "long", "spec": {"name": "long", "seed": 2}},
        "metrics/0001-0000-0000-000000.jsonl": [*values, {"event": "non_finite", "step": 3001, "time": T + 1500}],
        "monitor/0001-0000-0000-000000.jsonl": gpus,
    }
    evil = {
        "plan.json": {"run": EVIL, "spec": {"name": EVIL}},
        "metrics/0001-0000-0000-000000.jsonl": [
            {"event": EVIL, "time": T},
            *rows(range(1, 90), T, **{EVIL: 1.0}),
            *(
                {"event": "samples", "step": step, "kind": "text", "samples": EVIL_TEXTS, "time": T}
                for step in (40, 80)
            ),
        ],
    }
    runs = [preempted(folder / "a"), write(folder / "b", long), write(folder / "c", evil)]
    path = folder / "report.html"
    path.write_text(page([read(run) for run in runs]), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [320, 1600])
def test_it_draws_without_a_word_and_without_a_request(browser: Any, file: Path, width: int) -> None:
    opened = Opened(browser, file, viewport={"width": width, "height": 900})
    assert opened.painted() > 1000
    assert opened.complaints == []
    assert {url for url in opened.requests if not url.startswith("data:image/png;")} == {file.as_uri()}
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.page.locator("figure img").count() == 0


def test_values_under_the_cursor(browser: Any, file: Path) -> None:
    opened = Opened(browser, file, viewport={"width": 1200, "height": 900})
    plot = opened.page.locator("figure .u-over").first
    plot.hover(position={"x": plot.bounding_box()["width"] / 2, "y": 50})
    from playwright import sync_api

    sync_api.expect(opened.page.locator("figure output").first).to_have_text(re.compile("step"))
    shown = [one for one in opened.page.locator("figure").first.locator("output").all_inner_texts() if one]
    assert shown[0].startswith("step ")
    assert any(2 <= float(text) <= 4 for text in shown[1:])
    assert opened.complaints == []


def test_the_keyboard_moves_the_cursor_and_zooms(browser: Any, file: Path) -> None:
    opened = Opened(browser, file, viewport={"width": 1200, "height": 900})
    plot = opened.page.locator("figure .plot").first
    plot.focus()
    for _ in range(3):
        opened.page.keyboard.press("ArrowRight")
    assert opened.page.locator("figure output").first.inner_text() == "step 4"
    before = opened.painted()
    for _ in range(4):
        opened.page.keyboard.press("+")
    opened.page.wait_for_timeout(100)
    assert opened.painted() != before
    opened.page.keyboard.press("Escape")
    opened.page.wait_for_timeout(100)
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.type") == "checkbox"


def test_smoothing_axes_and_curves_can_be_changed(browser: Any, file: Path) -> None:
    opened = Opened(browser, file, viewport={"width": 1200, "height": 900})
    counts = [opened.painted()]
    for change in (
        lambda: opened.page.locator("#smooth").fill("0.9"),
        opened.page.locator("figure button", has_text="log").first.click,
        lambda: opened.page.locator("#x").select_option("hours"),
        lambda: opened.page.locator("figure .curves input").nth(2).uncheck(),
        lambda: opened.page.locator("#controls input[type=checkbox]").nth(1).uncheck(),
    ):
        change()
        counts.append(opened.painted())
        assert counts[-1] != counts[-2]
    assert opened.complaints == []


def test_a_table_is_sorted(browser: Any, file: Path) -> None:
    opened = Opened(browser, file)
    table = opened.page.locator("table.sortable").first
    steps = table.locator("thead th").all_inner_texts().index("steps")
    column = table.locator(f"tbody td:nth-child({steps + 1})")
    for expected in (["50 of 50", "89", "5,000"], ["5,000", "89", "50 of 50"]):
        table.locator("thead button").nth(steps).click()
        assert column.all_inner_texts() == expected


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes(browser: Any, file: Path, scheme: str) -> None:
    opened = Opened(browser, file, color_scheme=scheme)
    back = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(13, 17, 23)")
    assert opened.painted() > 1000


@pytest.mark.parametrize("options", [{}, {"java_script_enabled": False}, {"color_scheme": "dark"}], ids=str)
@pytest.mark.parametrize("width", [320, 1600])
def test_samples_are_shown_and_nothing_in_them_acts(
    browser: Any, file: Path, options: dict[str, Any], width: int
) -> None:
    opened = Opened(browser, file, viewport={"width": width, "height": 900}, **options)
    texts = opened.page.locator("pre.sample")
    shown = texts.first.inner_text()
    assert shown == f"Once {EVIL}{SCRIPT} the end\ufffd\ufffd[2J"
    assert [one.is_visible() for one in texts.all()] == [True, True, False, False]
    opened.page.locator("summary", has_text="step 40").click()
    assert all(one.is_visible() for one in texts.all())
    if options.get("java_script_enabled", True):
        loaded = opened.page.locator("ol.images img").evaluate_all("all => all.map((one) => one.naturalWidth)")
        assert loaded == [48, 48]
    assert opened.page.locator("ol.images li").all_inner_texts() == [
        "✓ cat 90.0%\nimage 1",
        "✗ dog 90.0%\nimage 2, true: cat",
    ]
    boxes = [one.bounding_box() for one in (*texts.all(), *opened.page.locator("ol.images li").all())]
    assert all(box["x"] + box["width"] <= width for box in boxes)
    assert opened.complaints == []
    assert {url for url in opened.requests if not url.startswith("data:image/png;")} == {file.as_uri()}
    opened.page.emulate_media(media="print")
    assert texts.first.is_visible()


def test_without_a_script_there_are_tables_and_pictures(browser: Any, file: Path) -> None:
    opened = Opened(browser, file, java_script_enabled=False)
    assert opened.page.locator("noscript svg polyline").count() + opened.page.locator("figure polyline").count() > 5
    assert opened.page.locator("table").count() > 3
