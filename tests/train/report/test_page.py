"""The page: whole, quiet and harmless, whatever is in the run folder."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.data.token_file import PRETOKENISED
from launch_train.report import page
from launch_train.report.__main__ import main
from tests.train.report.folders import T, preempted, read, rows, write

EVIL = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"


class Reader(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r"id=data>(.*?)</script>", text, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_page_of_one_run(tmp_path: Path) -> None:
    text = page([read(preempted(tmp_path))], T + 1000)
    data = data_of(text)
    assert [chart["title"] for chart in data["charts"]][:2] == ["Loss", "Step time in seconds"]
    loss = data["charts"][0]["curves"]
    assert [curve["label"] for curve in loss] == ["train", "held-out"]
    assert loss[0]["x"]["step"] == [*range(1, 51)]
    assert loss[1]["y"] == [0.2]
    assert [mark["kind"] for mark in data["marks"][0]] == ["preempted", "restart"]
    for words in ("26.2% of the time", "≈$0.21", "50 of 50", "lost", "2 attempts", "bf16"):
        assert words in text


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        ({"data_unit": "byte", "data_bytes": 100}, ["2.72 per byte, held out", "1.443"]),
        (
            {"data_unit": "token", "data_bytes": 400, "data_tokens": 100, "tokenizer": "tiktoken:gpt2"},
            ["2.72 per token, held out", "0.361"],
        ),
        (
            {"data_unit": "token", "data_bytes": 9, "data_tokens": 2, "tokenizer": PRETOKENISED},
            ["2.72 per token, held out"],
        ),
        ({}, []),
    ],
)
def test_perplexity_and_bits_per_byte(tmp_path: Path, facts: dict[str, Any], shown: list[str]) -> None:
    events = [{"event": "start", "time": T, **facts}, {"event": "eval", "time": T, "step": 4, "loss": 1.0}]
    folder = write(tmp_path, {"metrics/0001-0000-0000-000000.jsonl": [*events, *rows(range(1, 9), T)]})
    words = Reader(page([read(folder)])).words
    assert [word for word in words if "held out" in word or word in ("1.443", "0.361")] == shown


def test_accuracy_has_a_chart(tmp_path: Path) -> None:
    right = {"accuracy": 0.5, "accuracy_top5": 0.75}
    times = {4: T + 4, 8: "now"}
    events = [{"event": "eval", "time": at, "step": step, "loss": 1.0, **right} for step, at in times.items()]
    folder = write(tmp_path, {"metrics/0001-0000-0000-000000.jsonl": [*rows(range(1, 9), T), *events]})
    (chart,) = [one for one in data_of(page([read(folder)]))["charts"] if one["title"] == "Accuracy of evaluations"]
    assert [(one["label"], one["y"], one["x"]["step"]) for one in chart["curves"]] == [
        ("first guess", [0.5, 0.5], [4, 8]),
        ("first five", [0.75, 0.75], [4, 8]),
    ]


def test_a_profile_is_shown_with_its_kernels(tmp_path: Path) -> None:
    verdict = {
        "sentences": ["80% of the time: matrix products."],
        "advice": "Compile.",
        "step_s": 0.2,
        "kernels": [{"name": EVIL, "ms": 50.0, "calls": 3}, {"name": "odd", "ms": "much"}, 7],
    }
    events = {"a": {"event": "profile", "time": T, **verdict}, "b": {"event": "profile", "time": T, "error": "no GPU"}}
    part = "metrics/0001-0000-0000-000000.jsonl"
    folders = [write(tmp_path / name, {part: [event, *rows(range(1, 9), T)]}) for name, event in events.items()]
    text = page([*map(read, folders)])
    words = Reader(text).words
    assert {"80% of the time: matrix products.", "Compile.", EVIL, "25.0%"} <= {*words}
    assert "error no GPU" in words
    assert not [word for word in words if "sentences" in word]
    assert not [tag for tag, _ in Reader(text).tags if tag == "img"]


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    text = page([read(preempted(tmp_path))])
    tags = Reader(text).tags
    assert not [
        tag
        for tag, attrs in tags
        if {"src", "href", "action", "style"} & {*attrs} or any(a.startswith("on") for a in attrs)
    ]
    assert not {tag for tag, _ in tags} & {"link", "iframe", "img", "object", "base", "form"}
    policy = next(
        attrs["content"] for tag, attrs in tags if tag == "meta" and "content" in attrs and "http-equiv" in attrs
    )
    assert policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def evil_samples(step: int, kind: str) -> dict[str, Any]:
    fields = dict.fromkeys(("prompt", "text", "predicted", "true", "probability"), EVIL)
    return {"event": "samples", "step": step, "time": T, "kind": kind, "samples": [fields], "thumbnails": [EVIL]}


def test_text_of_the_run_is_text(tmp_path: Path) -> None:
    parts = {
        "plan.json": {"run": EVIL, "spec": {"name": EVIL, "labels": {EVIL: EVIL}}, "machine": {"machine_type": EVIL}},
        "metrics/0001-0000-0000-000000.jsonl": [
            {"event": "start", "time": T, "device": EVIL, "config": {EVIL: EVIL}},
            {"event": EVIL, "time": T, "text": EVIL},
            *rows([1, 2], T, **{EVIL: 1.0}),
        ],
        "attempts/0001.end.json": {"kind": EVIL, "cause": EVIL},
    }
    for number, kind in enumerate(("text", "tokens", "images")):
        parts[f"metrics/0001-0000-0000-00000{number + 1}.jsonl"] = [evil_samples(number + 1, kind)]
    run = read(write(tmp_path, parts))
    for runs in ([run], [run, run]):
        tags = Reader(page(runs)).tags
        assert [tag for tag, _ in tags].count("script") == 3
        assert "img" not in {tag for tag, _ in tags}


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        ({"env": {"A": "canary"}}, False),
        ({"run": {"env": {"A": "canary"}}}, False),
        ({"run": {"args": ["--api-key", "canary"]}}, False),
        ({"run": {"args": ["--password=canary"]}}, False),
        ({"run": {"args": ["--token", "canary", "--lr", "1"]}}, False),
        ({"run": {"config": {"model": {"hub_token": "canary"}}}}, False),
        ({"run": {"command": ["sh", "-c", "python t.py --password canary"]}}, False),
        ({"run": {"command": ["sh", "-c", "--lr=1 --token=canary"]}}, False),
        ({"run": {"args": ["gs://b/x?token=canary"]}}, False),
        ({"run": {"args": ["hf_canaryCANARY0123456789"]}}, False),
        ({"run": {"args": ["https://me:canary@host/x"]}}, False),
        ({"run": {"args": ["--tokens", "canary"]}}, True),
        ({"labels": {"team": "canary"}}, True),
    ],
)
def test_what_may_be_a_secret_is_not_shown(tmp_path: Path, spec: dict[str, Any], shown: bool) -> None:
    parts = {"plan.json": {"run": "a", "spec": spec}, "metrics/0001-0000-0000-000000.jsonl": rows([1], T)}
    assert ("canary" in page([read(write(tmp_path, parts))]).lower()) == shown


def test_several_runs_show_what_differs(tmp_path: Path) -> None:
    other = write(tmp_path / "other", {"metrics/0001-0000-0000-000000.jsonl": rows([1, 2], T)})
    spec = {"run": "b", "spec": {"name": "run", "run": {"args": ["--lr", "0.2"]}, "env": {"WORD": "else"}}}
    runs = [read(preempted(tmp_path / "one")), read(write(other, {"plan.json": spec}))]
    text = page(runs)
    assert "<td>run.args.lr<td>0.1<td>0.2" in text
    assert "<td>env" not in text.partition("Timeline")[0]
    assert {curve["run"] for curve in data_of(text)["charts"][0]["curves"]} == {0, 1}


def test_a_run_without_anything(tmp_path: Path) -> None:
    text = page([read(tmp_path)])
    assert data_of(text)["charts"] == []
    assert "no end recorded" in text
    assert "interrupted" in page([replace(read(tmp_path), is_running=False)])


def test_without_metrics_time_is_counted_from_the_first_sample_and_goodput_is_unknown(tmp_path: Path) -> None:
    samples = [{"time": T + 36 * second, "host": {"cpu": 0.1}} for second in range(3)]
    parts = {"attempts/0001.json": {"time": T - 5}, "attempts/0001.end.json": {"time": T + 90, "seconds": 95.0}}
    text = page([read(write(tmp_path, {**parts, "monitor/0001-0000-0000-000000.jsonl": samples}))])
    [chart] = data_of(text)["charts"]
    assert chart["curves"][0]["x"]["hours"] == [0, 0.01, 0.02]
    assert "goodput" not in text
    assert "<td>1 min 35 s" in text, "as the terminal and launch status say it"


def test_no_sample_of_the_machine_is_before_the_start(tmp_path: Path) -> None:
    samples = [{"time": T - 7.2, "host": {"cpu": 0.1}}]
    parts = {"monitor/0001-0000-0000-000000.jsonl": samples, "metrics/0001-0000-0000-000000.jsonl": rows([1], T)}
    hours = [
        x for chart in data_of(page([read(write(tmp_path, parts))]))["charts"] for x in chart["curves"][0]["x"]["hours"]
    ]
    assert min(hours) == 0


def test_gpus_and_hosts(tmp_path: Path) -> None:
    def samples(gpus: int) -> list[dict[str, Any]]:
        each = [{"gpu": index, "util": 0.5, "power_w": 300.0 + index} for index in range(gpus)]
        return [{"time": T + second, "gpus": each, "host": {"cpu": 0.1, "ram_gb": 3}} for second in range(3)]

    for gpus, labels in ((2, ["GPU 0", "GPU 1"]), (40, ["lowest GPU", "mean", "highest GPU"])):
        run = read(write(tmp_path / str(gpus), {"monitor/0001-0000-0000-000000.jsonl": samples(gpus)}))
        charts = {chart["title"]: chart for chart in data_of(page([run]))["charts"]}
        assert [curve["label"] for curve in charts["GPU utilisation"]["curves"]] == labels
        assert charts["CPU utilisation"]["share"]
        assert "GPU temperature in °C" not in charts


def test_the_nodes_command_writes_it_into_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(preempted(tmp_path))]) == 0
    assert "run-0123abcd" in (tmp_path / runfolder.REPORT).read_text()
    assert main([str(tmp_path / runfolder.REPORT / "below-a-file")]) == 1
    assert "report not written" in capsys.readouterr().err


ODD: list[dict[str, Any]] = [
    {"event": {"a": 1}, "time": T},
    {"step": 2**63, "time": T},
    {"step": 1, "x": 10**400},
    {"event": "half", "text": "\ud800", "time": T},
    {"event": "samples", "time": T, "of": "a script"},
    {"event": "samples", "time": T, "step": 2**70, "kind": "text", "samples": [{"prompt": "a"}]},
    {"event": "samples", "time": T, "step": 2, "kind": ["text"], "samples": {"prompt": 1}},
]


@pytest.mark.parametrize("odd", ODD)
def test_what_a_script_may_log_never_fails_the_node(
    tmp_path: Path, odd: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"metrics/0001-0000-0000-000000.jsonl": [odd, *rows([1, 2], T)]})
    assert (main([str(tmp_path)]), capsys.readouterr().err) == (0, "")
    (curve,) = data_of((tmp_path / runfolder.REPORT).read_text())["charts"][0]["curves"]
    assert curve["y"] == [5.0, 2.5]
