"""The samples of evaluations in the report: newest first, few enough, and harmless whatever they hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from launch_train.report import page
from launch_train.report.samples import harmless
from launch_train.trainer.samples import thumbnails
from tests.train.report.folders import T, read, rows, write
from tests.train.report.test_page import Reader

PART = "metrics/0001-0000-0000-000000.jsonl"
(PICTURE,) = thumbnails(torch.arange(3 * 8 * 8).reshape(1, 3, 8, 8).float())


def text(step: int, *pairs: tuple[Any, Any], kind: str = "text") -> dict[str, Any]:
    samples = [{"prompt": prompt, "text": more} for prompt, more in pairs]
    return {"event": "samples", "step": step, "time": T + step, "kind": kind, "samples": samples}


def images(step: int, predicted: str, **more: Any) -> dict[str, Any]:
    samples = [{"true": "cat", "predicted": predicted, "probability": 0.875}]
    return {"event": "samples", "step": step, "time": T + step, "kind": "images", "samples": samples, **more}


def shown(folder: Path, *events: Any) -> str:
    return page([read(write(folder, {PART: [*rows(range(1, 9), T), *events]}))])


def section(page_text: str) -> str:
    found = re.search(r"<section><h2>Samples: .*?</section>", page_text, re.DOTALL)
    return found[0] if found else ""


def test_the_newest_texts_come_first_and_older_ones_are_folded(tmp_path: Path) -> None:
    events = [text(step, (f"prompt {step}", f" text {step}")) for step in (2, 4, 6)]
    found = section(shown(tmp_path, *events))
    newest, *older = found.split("<details>")
    assert "step 6." in newest
    assert "<span class=prompt>prompt 6</span> text 6</pre>" in newest
    assert [re.findall(r"<summary>(.*?)</summary>", part) for part in older] == [["step 4"], ["step 2"]]
    assert "prompt 4</span> text 4" in older[0]


def test_images_have_pictures_once_and_a_table_of_what_they_were(tmp_path: Path) -> None:
    text_of_page = shown(tmp_path, images(2, "dog", thumbnails=[PICTURE]), images(4, "dog"), images(6, "cat"))
    tags = Reader(text_of_page).tags
    (image,) = [attrs for tag, attrs in tags if tag == "img"]
    assert image["src"] == f"data:image/png;base64,{PICTURE}"
    assert image["alt"] == "image 1"
    (policy,) = [attrs["content"] for tag, attrs in tags if tag == "meta" and "http-equiv" in attrs]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; script-src 'sha256-")
    newest, older = section(text_of_page).split("<details>")
    assert "✓ cat 87.5%" in newest
    assert re.findall(r"<td>(.*?)(?=<)", older) == ["4", "dog 87.5% (true: cat)", "2", "dog 87.5% (true: cat)"]


def test_steps_that_a_later_start_repeated_are_its_own(tmp_path: Path) -> None:
    parts = {
        "metrics/0001-0000-0000-000000.jsonl": [*rows(range(1, 9), T), text(4, ("a", "old")), text(8, ("a", "lost"))],
        "metrics/0002-0000-0000-000000.jsonl": [{"event": "resumed", "step": 6, "time": T + 20}, *rows([7], T + 20)],
    }
    found = section(page([read(write(tmp_path, parts))]))
    assert "old" in found
    assert "lost" not in found


def test_an_event_that_was_cut_off_costs_itself_alone(tmp_path: Path) -> None:
    found = section(shown(tmp_path, text(2, ("whole", "")), '{"event": "samples", "step": 4, "kind": "text", "sam'))
    assert "whole" in found
    assert "step 2." in found


@pytest.mark.parametrize(
    "damaged",
    [
        {"samples": "text"},
        {"samples": [1, None, "x"]},
        {"samples": []},
        {"kind": "sounds"},
        {"step": True},
        {"step": "2"},
        {"step": 1 << 70},
        {"step": None},
    ],
)
def test_what_is_no_sample_is_left_out(tmp_path: Path, damaged: dict[str, Any]) -> None:
    assert section(shown(tmp_path, {**text(2, ("a", "b")), **damaged})) == ""


@pytest.mark.parametrize(
    "picture", ["", "x", 7, None, "PHN2Zz4=", PICTURE + '"', PICTURE + "A" * 20_000, "iVBORw0KGgo\n"]
)
def test_only_small_pngs_are_pictures(tmp_path: Path, picture: Any) -> None:
    text_of_page = shown(tmp_path, images(2, "dog", thumbnails=[picture]))
    assert "✗ dog" in text_of_page
    assert not [tag for tag, _ in Reader(text_of_page).tags if tag == "img"]


# --- Text that acts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("tab\tand\nline\r\nend", "tab\tand\nline\nend"),
        ("\x00\x07\x1b[31m\x7f\x85", "\ufffd\ufffd\ufffd[31m\ufffd\ufffd"),
        ("\u202egnp.exe\u2066\u200f\u061c", "\ufffdgnp.exe\ufffd\ufffd\ufffd"),
        ("a\u2028b\ufeffc\U000e0041", "a\ufffdb\ufffdc\ufffd"),
        ("half \ud800 a pair", "half \ufffd a pair"),
        ("عربي שלום 😀 👩\u200d🚀 é", "عربي שלום 😀 👩\u200d🚀 é"),
    ],
)
def test_characters_that_act_are_seen(given: str, seen: str) -> None:
    assert harmless(given, given) == (seen, seen)


@pytest.mark.parametrize(
    ("prompt", "more", "shown_as"),
    [
        ("key = 'hf_canaryCANARY0123456789' # mine", "", ("key = ••• # mine", "")),
        ("key is hf_cana", "ryCANARY0123 and more", ("key is •••", "••• and more")),
        ("train.py --password ", "canary --lr 1", ("train.py --password ", "••• --lr 1")),
        ("train.py --pass", "word=canary x", ("train.py --pass", "word=••• x")),
        ("https://me:canary@host/x ok", " aZ0" + "canaryCANARY01234567", ("••• ok", " •••")),
        ("-----BEGIN PRIVATE KEY-----\ncanary\n", "canary", ("•••", "•••")),
        ("a token of text, tokens=3", " password", ("a token of text, tokens=3", " password")),
    ],
)
def test_what_may_be_a_secret_is_hidden_also_across_the_prompts_end(
    tmp_path: Path, prompt: str, more: str, shown_as: tuple[str, str]
) -> None:
    assert harmless(prompt, more) == shown_as
    assert "canary" not in shown(tmp_path, text(2, (prompt, more))).lower()
    assert "canary" not in shown(tmp_path / "name", images(2, prompt + more)).lower()
