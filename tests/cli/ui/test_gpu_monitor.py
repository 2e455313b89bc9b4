"""What the nodes say of their GPUs, as it is shown to who looks at a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common.storage import LocalFolder, open_storage
from launch_train.monitoring.alerts import Alert
from launcher.cli.commands.metrics import event_texts
from launcher.cli.ui.gpu_monitor import gpu_lines
from launcher.runs.metrics.gpu_nodes import Node, newest, nodes, read_nodes
from tests.cli.cloudjobs import Job
from tests.command import launch


def looks(node: int, *gpus: dict[str, Any], count: int = 13, part: int = 0, generation: int = 0) -> dict[str, bytes]:
    """A part with so many looks, 5 s apart."""
    rows = [
        {"time": 1.7e9 + 5.0 * n, "host": {"cpu": 0.35, "ram_gb": 120.3}, "gpus": [one(n) for one in map(_gpu, gpus)]}
        for n in range(count)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return {runfolder.monitor_part(1, generation, node, part): text}


def _gpu(gpu: dict[str, Any]) -> Any:
    """At each look: an Xid is there at the last one alone."""
    usual = {"gpu": 0, "util": 0.97, "memory_gb": 60.0, "temp_c": 61, "power_w": 653.0, "throttle": []}
    return lambda n: usual | {name: value for name, value in gpu.items() if name != "xid" or n == 12}


def test_a_healthy_node_is_one_sentence() -> None:
    [node] = nodes(looks(0, {}, {"gpu": 1, "temp_c": 70}))
    assert (node.number, node.gpus, node.seconds, node.wrong, node.errors) == (0, 2, 60.0, (), ())
    said = "node 0, last 60 s: 2 GPUs, 97% busy, up to 60.0 GB, 70 °C, 653 W; CPUs 35%, RAM up to 120.3 GB"
    assert [*gpu_lines([node])] == [("GPUs", said)]
    assert node.to_dict()["gpu_util_mean"] == 0.97


def test_samples_are_ordered_by_time() -> None:
    [(name, text)] = looks(0, {}).items()
    early, late = text.splitlines(keepends=True)[:6], text.splitlines(keepends=True)[6:]
    variant = name.replace(".jsonl", "-1.jsonl")  # it comes before the name that had been taken
    wanted = newest([name, variant])
    [node] = nodes(dict(zip(wanted, (b"".join(late), b"".join(early)), strict=True)))
    assert node.seconds == 60.0


def test_a_slow_and_a_failing_gpu_are_named() -> None:
    found = nodes(looks(0, {}) | looks(1, {"throttle": ["hw_thermal"], "xid": [94]}))
    assert {label for label, _ in gpu_lines(found)} == {"GPUs"}
    text = [text for _, text in gpu_lines(found)]
    assert [line.partition(",")[0] for line in text] == [
        "node 1",
        "node 0",
        "node 1: GPU 0 is throttled 100% of the time: far too hot (hw_thermal)",
        "node 1",
    ]
    assert text[3].startswith("node 1, GPU 0: Xid 94: an uncorrectable memory error of this program alone")
    assert [text for _, text in gpu_lines(found, reported={1})] == text[:3]


def test_the_worst_of_many_nodes_are_shown() -> None:
    found = [Node(n, 60.0, 8, {"gpu_util_mean": 0.9 - n / 100}) for n in range(6)]
    found[2] = found[2]._replace(wrong=(Alert("node 2: GPU 0 is throttled"),))
    shown = [text for _, text in gpu_lines(found)]
    assert [line.partition(",")[0] for line in shown[:4]] == ["node 2", "node 5", "node 4", "node 3"]
    assert shown[4:] == ["and 2 more nodes", "node 2: GPU 0 is throttled"]
    assert [*gpu_lines([Node(0, 60.0, 0, {"cpu_mean": 1.0})])] == [], "without GPUs there is nothing to say of them"


def test_each_event_is_printed_once() -> None:
    xid = {"event": "gpu_error", "node": 1, "gpu": 3, "xid": 63, "meaning": "a row", "doubtful": False}
    events: list[dict[str, Any]] = [
        {"event": "start"},
        *({"event": "non_finite", "step": step, "samples": [1, 2]} for step in (7, 7, 9)),
        {"event": "out_of_memory", "step": 4, "micro_batch": 8},
        *(xid, xid),
        {"event": "gpu_error", "node": 0, "gpu": None, "lost": True, "meaning": "the GPU is lost", "doubtful": True},
    ]
    assert [*event_texts(events)] == [
        "skipped because of non-finite gradients: steps 7, 9",
        "step 4: out of memory; micro-batch reduced to 8",
        "node 1, GPU 3: Xid 63: a row (2 times)",
        "node 0, a GPU: the GPU is lost; results since then may be wrong",
    ]
    assert next(iter(event_texts([{"event": "non_finite", "step": n} for n in range(12)]))).endswith("8, 9 and 2 more")


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    storage = open_storage(str(tmp_path / "hot-1"))
    assert isinstance(storage, LocalFolder)
    storage.write(runfolder.metrics_part(1, 0, 0, 0), b'{"step": 1, "loss": 2.5, "time": 1}\n')
    for name, text in looks(0, {"throttle": ["sw_thermal"], "xid": [79]}).items():
        storage.write(name, text)
    return storage


def test_metrics_of_a_folder_show_the_gpus(folder: LocalFolder) -> None:
    shown = launch("metrics", "hot-1", cwd=folder.folder.parent).out
    assert "node 0, last 60 s: 1 GPU, 97% busy" in shown
    assert "too hot (sw_thermal)" in " ".join(shown.split())
    assert shown.count("Xid 79") == 1, "beside a script of the user's own no event tells it"
    assert max(map(len, shown.splitlines())) <= 80
    event = {"event": "gpu_error", "node": 0, "gpu": 0, "xid": 79, "meaning": "it is off the bus", "time": 2}
    folder.write(runfolder.metrics_part(1, 0, 0, 1), json.dumps(event).encode() + b"\n")
    assert launch("metrics", "hot-1", cwd=folder.folder.parent).out.count("Xid 79") == 1
    data = json.loads(launch("metrics", "hot-1", "-o", "json", cwd=folder.folder.parent).out)
    assert [node["gpus"] for node in data["nodes"]] == [1]
    assert [node["node"] for node in data["nodes"]] == [one.number for one in read_nodes(folder)]


def test_status_shows_the_gpus(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    run = job.data("vertex", "job.yaml")["run"]
    assert "GPUs" not in job.launch("status", run).out
    for name, value in job.env.items():
        monkeypatch.setenv(name, value)
    storage = open_storage(f"gs://my-bucket/runs/{run}")
    for name, text in looks(0, {"xid": [79]}).items():
        storage.write(name, text)
    shown = job.launch("status", run).out
    assert "GPUs      node 0, last 60 s: 1 GPU, 97% busy" in shown
    assert "Xid 79: the GPU has fallen off the bus" in " ".join(shown.split())
    assert max(map(len, (line for line in shown.splitlines() if "GPU" in line))) <= 80
    assert job.data("status", run)["nodes"][0]["errors"]
