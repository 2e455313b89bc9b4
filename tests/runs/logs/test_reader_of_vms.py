"""The lines of VMs that train: what their nodes have written to Cloud Logging, or only to the run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.storage import LocalFolder
from launch_train.node.gce_vm import log_source
from launch_train.telemetry.cloud_logging import Chunk, Entries, EntriesClient
from launcher.clock import Clock
from launcher.jobs.job import Job
from launcher.runs.logs.cloud_logging import CloudLogReader, entry_filter, to_nanoseconds
from launcher.runs.logs.reader import LogReader
from launcher.testing.googlecloud import FakeClock, GoogleCloud

BEGAN = 1_700_000_000.0


class Said(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path / "run")


def vm(number: str, *nodes: str) -> Job:
    told = json.dumps({"kind": "train", "nodes": nodes})
    return Job(
        name=f"projects/my-project/zones/us-central1-a/instances/{number}",
        region="us-central1",
        state="RUNNING",
        created=BEGAN,
        labels={"launch-run": "demo-1"},
        request={"metadata": {"items": [{"key": "launch", "value": told}]}},
    )


def print_on(cloud: GoogleCloud, number: str, node: int, text: str, *, run: str = "demo-1", err: bool = False) -> None:
    """As a node does it, with its own code and on the cloud's clock."""
    told = {"project": "my-project", "zone": "us-central1-a", "name": f"{run}-n{node}", "instance": number}
    seat = {"type": "workerpool1", "index": node - 1} if node else {"type": "workerpool0", "index": 0}
    pools = {"workerpool0": ["h:1"], "workerpool1": ["h:1"] * 4}
    spec = json.dumps({"cluster": pools, "environment": "cloud", "task": seat})
    environ = {**cloud.environ(), contract.MACHINE: json.dumps(told), contract.RUN: run, contract.CLUSTER_SPEC: spec}
    source = log_source(environ, print)
    assert source
    entries = Entries(f"{number}-{len(cloud.logs.entries)}")
    at = to_nanoseconds(cloud.logs.clock())
    wire = EntriesClient(source, environ)
    wire.send(list(entries.from_chunks([Chunk(at, 2 if err else 1, f"{text}\n".encode())], last=True)))


def test_a_vms_lines(cloud: GoogleCloud, clock: FakeClock) -> None:
    clock.advance(-1)
    print_on(cloud, "7", 0, "before it was there")
    clock.advance(1)
    print_on(cloud, "7", 0, "café")
    print_on(cloud, "7", 0, "", err=True)
    print_on(cloud, "8", 0, "another VM's")
    cloud.logs.write("7", "workerpool0-0", "a job's of the same number")
    found = log_of(cloud, vm("7", "demo-1")).read_new()
    assert [(line.text, line.replica, line.severity, line.time) for line in found] == [
        ("café", "workerpool0-0", "INFO", BEGAN),
        ("", "workerpool0-0", "ERROR", BEGAN),
    ]


def test_the_lines_of_several_vms(cloud: GoogleCloud, clock: FakeClock) -> None:
    for node in range(3):
        print_on(cloud, str(70 + node), node, f"node {node}")
        clock.advance(0.1)
    print_on(cloud, "90", 1, "another run's", run="demo-2")
    log = log_of(cloud, vm("70", "demo-1-n0", "demo-1-n1", "demo-1-n2"))
    assert [(line.replica, line.text) for line in log.read_new()] == [
        ("workerpool0-0", "node 0"),
        ("workerpool1-0", "node 1"),
        ("workerpool1-1", "node 2"),
    ]
    assert log.has_entries


def test_what_is_asked_for_a_vm(cloud: GoogleCloud) -> None:
    log = 'resource.type="gce_instance" AND logName="projects/my-project/logs/launch"'
    assert entry_filter(vm("7", "demo-1"), "my-project") == f'{log} AND resource.labels.instance_id="7"'
    run = f'{log} AND labels."launch-run"="demo-1"'
    assert entry_filter(vm("7", "a", "b"), "my-project") == run
    assert entry_filter(vm("7"), "my-project") == run  # it is gone, and with it what it was told
    assert entry_filter(replace(vm("7", "demo-1"), labels={}), "my-project").endswith('instance_id="7"')


def test_another_attempts_lines_are_not_those_of_a_job_that_has_ended(cloud: GoogleCloud, clock: FakeClock) -> None:
    print_on(cloud, "71", 1, "mine")
    clock.advance(10)
    print_on(cloud, "72", 1, "another's")
    assert texts(log_of(cloud, replace(vm("70", "a", "b"), ended=BEGAN + 5)).read_existing()) == ["mine"]


def log_of(cloud: GoogleCloud, job: Job) -> CloudLogReader:
    """On a clock of its own: this machine's time has nothing to do with the cloud's."""
    ours = FakeClock(5.0)
    return CloudLogReader(job, "my-project", cloud.environ(), Clock(ours, ours.advance))


def open_lines(
    cloud: GoogleCloud, said: Said, folder: LocalFolder | None = None, *, ours: FakeClock | None = None, **more: Any
) -> LogReader:
    ours = ours or FakeClock(5.0)
    clock = Clock(ours, ours.advance)
    return LogReader(
        vm("7", "demo-1"), "my-project", cloud.environ(), say=said, folder=folder, attempt=1, clock=clock, **more
    )


def part(folder: LocalFolder, number: int, data: bytes) -> None:
    folder.write(runfolder.text_part(1, 0, number), data, create=True)


def texts(lines: Any) -> list[str]:
    return [line.text for line in lines]


# --- Without roles/logging.logWriter ----------------------------------------------------------------------------------


def test_a_vm_that_may_not_write_to_cloud_logging(cloud: GoogleCloud, said: Said, folder: LocalFolder) -> None:
    ours = FakeClock(5.0)
    lines = open_lines(cloud, said, folder, ours=ours)
    ours.advance(1000)
    assert lines.read_new() == []  # it has not printed yet
    part(folder, 0, b"a\n")
    assert lines.read_new() == []
    ours.advance(59)
    assert lines.read_new() == []
    assert said == []
    ours.advance(1)
    assert texts(lines.read_new()) == ["a"]
    part(folder, 1, b"b\n")
    assert texts(lines.read_new()) == ["b"]
    assert [line.count("roles/logging.logWriter") for line in said] == [1]


def test_what_such_a_vm_has_printed(cloud: GoogleCloud, said: Said, folder: LocalFolder) -> None:
    part(folder, 0, b"a\nb\nc\n")
    assert texts(list(open_lines(cloud, said, folder).read_existing())) == ["a", "b", "c"]
    assert texts(list(open_lines(cloud, said, folder, tail=2).read_existing())) == ["b", "c"]
    assert list(open_lines(cloud, said, folder, since=BEGAN).read_existing()) == []  # text has no times
    assert list(open_lines(cloud, said).read_existing()) == []
    assert len(said) == 2


@pytest.mark.parametrize("tail", [None, 0])
def test_a_quiet_vm_is_not_one_of_them(cloud: GoogleCloud, said: Said, folder: LocalFolder, tail: int | None) -> None:
    print_on(cloud, "7", 0, "a")
    part(folder, 0, b"a\n")
    ours = FakeClock(5.0)
    lines = open_lines(cloud, said, folder, tail=tail, ours=ours)
    assert texts(lines.read_new()) == ([] if tail == 0 else ["a"])
    ours.advance(1000)
    assert lines.read_new() == []
    print_on(cloud, "7", 0, "b")
    assert texts(lines.read_new()) == ["b"]
    assert said == []
