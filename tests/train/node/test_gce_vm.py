"""A node on a Compute Engine VM: the notices of its end, and its lines in Cloud Logging, as real processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.contract import Exit
from launch_train.node.gce_vm import log_source
from launch_train.runfolder.starts import parse_metrics
from launcher.testing.googlecloud import Fault, GoogleCloud, Stalled, Status
from launcher.testing.googlecloud.logs import WRITE
from tests.train.node.metadata import Metadata
from tests.train.nodes import Machines, Node, cluster_spec, free_port, machines, until

RUN = "runs/demo-1"
TOLD = {"project": "my-project", "zone": "us-central1-a", "name": "demo-1-n1", "instance": "4242"}
STEPS = 60

# The trainer, with steps that take their time while there is a file `slow`.
SLOWLY = """
import os, pathlib, runpy, time
import launch_train.performance.optimizer
real = launch_train.performance.optimizer.learning_rate
def learning_rate(step, *rest):
    if os.path.exists("slow"):
        pathlib.Path(f"step-{step}").touch()
        time.sleep(0.1)
    return real(step, *rest)
launch_train.performance.optimizer.learning_rate = learning_rate
runpy.run_module("launch_train", run_name="__main__")
"""
CONFIG: dict[str, Any] = {
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "dropout": 0.2},
    "data": "synthetic",
    "steps": STEPS,
    "batch_size": 8,
    "micro_batch_size": 2,
    "log_every": 5,
}


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata().serving() as found:
        yield found


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


def vm(metadata: Metadata | None, cloud: GoogleCloud, **told: str) -> dict[str, str]:
    """What the startup script gives the container, and where the cloud is in this test."""
    address = metadata.address if metadata else f"127.0.0.1:{free_port()}"
    environ = {**cloud.environ(), contract.RUN_FOLDER: f"gs://my-bucket/{RUN}", "GCE_METADATA_HOST": address}
    return environ | {contract.MACHINE: json.dumps(TOLD | told)}


def objects(cloud: GoogleCloud, prefix: str = "") -> dict[str, bytes]:
    blobs = {blob.name.removeprefix(f"{RUN}/"): blob.data for blob in cloud.objects.listed("my-bucket")}
    return {name: data for name, data in blobs.items() if name.startswith(prefix)}


def logged(cloud: GoogleCloud, instance: str = "4242") -> list[str]:
    found = [entry for entry in cloud.logs.entries if entry.job == instance]
    return [entry.text for entry in sorted(found, key=lambda entry: entry.place)]


# --- What it is -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{", "[]", "7", '{"project": "p"}'])
def test_a_machine_that_cant_be_read_is_reported_and_none(text: str) -> None:
    said: list[str] = []
    assert log_source({contract.MACHINE: text}, said.append) is None
    assert len(said) == 1
    assert said[0].startswith("LAUNCH_MACHINE is invalid (")
    assert log_source({}, said.append) is None
    assert len(said) == 1


@pytest.mark.parametrize(
    ("spec", "task"),
    [(cluster_spec(4, node, 2222), name) for node, name in ((0, "workerpool0-0"), (1, "workerpool1-0"))]
    + [(cluster_spec(4, 3, 2222), "workerpool1-2"), ("{", "workerpool0-0")],
)
def test_the_labels_of_a_nodes_entries(spec: str, task: str) -> None:
    source = log_source(
        {contract.MACHINE: json.dumps(TOLD), contract.RUN: "demo-1", contract.CLUSTER_SPEC: spec}, print
    )
    assert source
    assert source.labels == {
        "launch-run": "demo-1",
        "task_name": task,
        "compute.googleapis.com/resource_name": "demo-1-n1",
    }
    assert source.resource == {"project_id": "my-project", "instance_id": "4242", "zone": "us-central1-a"}


# --- Cloud Logging ----------------------------------------------------------------------------------------------------


def run_apart(one: Machines, environ: Mapping[str, str], code: str) -> Node:
    """A node whose stdout and stderr lead to two places, as in a container, at its end."""
    work = ("--command", "--", "sh", "-c", code)
    node = one.start(*work, env={"TMPDIR": str(one.folder), **environ}, timing={"text_last": 1.0}, apart=True)
    node.wait()
    return node


def test_what_is_printed_is_in_cloud_logging_and_in_the_run_folder(one: Machines, metadata: Metadata) -> None:
    with GoogleCloud() as cloud:
        node = run_apart(one, vm(metadata, cloud), "echo café; echo; echo oh >&2; exit 9")
        assert node.wait() == Exit.FAILED, node.errors
        shown = [(entry.text, entry.shown["severity"]) for entry in cloud.logs.entries]
        assert {("café", "INFO"), ("", "INFO"), ("oh", "ERROR")} < {*shown}
        assert [text for text, _ in shown if text.startswith("launch: ")][-1].endswith("(exit code 1)")
        assert sorted(logged(cloud)) == sorted((node.text + node.errors).splitlines())
        text = b"".join(objects(cloud, "text/").values()).decode()
        assert sorted(text.splitlines()) == sorted(logged(cloud))


@pytest.mark.slow
@pytest.mark.parametrize("effect", [Status(403, message="no", info="IAM_PERMISSION_DENIED"), Status(503), Stalled()])
def test_without_cloud_logging_and_without_a_metadata_server_a_run_is_the_same(
    one: Machines, effect: Status | Stalled
) -> None:
    with GoogleCloud() as cloud:
        cloud.faults.add(Fault(WRITE, effect, times=None))
        began = time.monotonic()
        node = run_apart(one, vm(None, cloud), "echo fine")
        assert time.monotonic() - began < 10  # it waits for the last lines as long as for the text, and no longer
        assert node.wait() == Exit.OK, node.errors
        assert node.text == "fine\n"
        assert node.errors.count("Cloud Logging") == 1
        assert b"fine\n" in b"".join(objects(cloud, "text/").values())


def test_a_bucket_that_takes_no_text_does_not_keep_it_out_of_cloud_logging(one: Machines, metadata: Metadata) -> None:
    with GoogleCloud() as cloud:
        cloud.faults.add(Fault("storage.objects.insert", Stalled(), name="text/", times=None))
        node = run_apart(one, vm(metadata, cloud), "echo fine")
        assert node.wait() == Exit.OK, node.errors
        assert "fine" in logged(cloud)


def test_who_is_no_vm_writes_nothing_there(one: Machines, metadata: Metadata) -> None:
    with GoogleCloud() as cloud:
        environ = {name: value for name, value in vm(metadata, cloud).items() if name != contract.MACHINE}
        assert run_apart(one, environ, "echo fine").wait() == Exit.OK
        assert (cloud.logs.entries, metadata.requests) == ([], [])


# --- Its end ----------------------------------------------------------------------------------------------------------


def train(one: Machines, environ: Mapping[str, str], disk: str, number: str) -> Node:
    """Two ranks on a VM with a disk of its own."""
    (one.folder / disk).mkdir()
    own = {"TMPDIR": str(one.folder / disk), contract.JOB_ID: number, "OMP_NUM_THREADS": "1"}
    own |= {contract.PROCESSES: "2", contract.CONFIG: json.dumps(CONFIG)}
    script = one.script(SLOWLY)
    return one.start("--launcher", "torchrun", "--script", script, env={**environ, **own}, timing={"text": 0.2})


@pytest.mark.slow
def test_a_preempted_vm_saves_and_another_goes_on_without_a_step_lost(one: Machines, metadata: Metadata) -> None:
    with GoogleCloud() as cloud:
        (one.folder / "slow").touch()
        first = train(one, vm(metadata, cloud), "disk-1", "4242")
        until(lambda: (one.folder / "step-8").exists() or first.process.poll() is not None, "step 8")
        metadata.set("instance/preempted", "TRUE")
        began = time.monotonic()
        assert first.wait() == Exit.PREEMPTED, first.text
        assert time.monotonic() - began < 25  # with time to spare of the 30 s that Compute Engine gives
        notice = "launch: Compute Engine is preempting this VM (instance/preempted is TRUE); saving a checkpoint"
        assert first.text.count(notice) == 1
        assert notice in logged(cloud)
        stopped = parse_metrics(objects(cloud, "metrics/")).event("preempted")
        assert stopped
        assert 8 <= stopped["step"] < STEPS

        (one.folder / "slow").unlink()
        cloud.objects.put("my-bucket", f"{RUN}/{runfolder.attempt_lock(2)}", b"{}")
        with Metadata().serving() as another:
            second = train(one, vm(another, cloud, instance="4343"), "disk-2", "4343")
            assert second.wait() == Exit.OK, second.text
        assert f"resumed from step {stopped['step']}" in second.text
        assert json.loads(objects(cloud)[runfolder.claim(2)]) == {"job": "4343"}
        rows = [json.loads(line) for data in objects(cloud, "metrics/").values() for line in data.splitlines()]
        assert sorted(row["step"] for row in rows if "event" not in row) == list(range(1, STEPS + 1))
        for instance, node in (("4242", first), ("4343", second)):
            assert logged(cloud, instance) == node.text.splitlines()


# --- Several VMs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_several_vms_the_first_claims_the_attempt(tmp_path: Path, metadata: Metadata) -> None:
    """The others don't know the first one's number, and are part of whatever it takes."""
    with machines(tmp_path, 2) as two, GoogleCloud() as cloud:
        work = ("--command", "--", "sh", "-c", "echo node $LAUNCH_NODE of attempt $LAUNCH_ATTEMPT")
        own = [{contract.JOB_ID: "70"}, {}]
        nodes = [
            two.start(*work, node=n, env={**vm(metadata, cloud, instance=str(70 + n)), **own[n]}, timing={"text": 0.2})
            for n in (0, 1)
        ]
        assert [node.wait() for node in nodes] == [Exit.OK, Exit.OK], nodes[0].text + nodes[1].text
        assert json.loads(objects(cloud)[runfolder.claim(1)]) == {"job": "70"}
        assert [name for name in objects(cloud, "attempts/") if name.endswith(".claim")] == [runfolder.claim(1)]
        assert {entry.task: entry.text for entry in cloud.logs.entries if entry.text.startswith("node ")} == {
            "workerpool0-0": "node 0 of attempt 1",
            "workerpool1-0": "node 1 of attempt 1",
        }


@pytest.mark.slow
def test_when_one_is_preempted_all_save_and_leave(tmp_path: Path, metadata: Metadata) -> None:
    saves = (
        "import os, pathlib, signal, sys, time\n"
        "def told(*_):\n    open(os.environ['LAUNCH_EXIT_FILE'], 'a').write('75\\n'); open('save', 'w'); os._exit(75)\n"
        "signal.signal(15, told)\n"
        "pathlib.Path('ready-' + os.environ['LAUNCH_NODE']).touch()\n"
        "while not os.path.exists('save'):\n    time.sleep(0.01)\n"
        "told()\n"
    )
    with machines(tmp_path, 2) as two, GoogleCloud() as cloud, Metadata().serving() as quiet:
        script, servers = two.script(saves), (quiet, metadata)
        nodes = [
            two.start("--launcher", "python", "--script", script, node=n, env=vm(servers[n], cloud)) for n in (0, 1)
        ]
        until(lambda: all((tmp_path / f"ready-{n}").exists() for n in (0, 1)), "the processes")
        metadata.set("instance/preempted", "TRUE")
        assert [node.wait() for node in nodes] == [Exit.PREEMPTED] * 2, nodes[0].text + nodes[1].text
        assert [node.text.count("is preempting this VM") for node in nodes] == [0, 1]
