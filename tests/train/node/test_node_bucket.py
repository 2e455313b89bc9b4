"""A node whose run folder is a bucket: what its processes left is sent, and no network holds it up."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launch_train.common.contract import Exit
from tests.train.nodes import Machines, Node, machines, until

if TYPE_CHECKING:
    from launcher.testing.googlecloud import GoogleCloud

RUN = "runs/demo-1"
PART = "metrics/0001-0000-0000-000000.jsonl"

# A process that can't reach the bucket, while its node can, and that dies with a row in its spool.
DIES_WITH_A_ROW = f"""
import os
from launch_train.telemetry.upload_queue import open_outbox
from launch_train.common.storage import open_storage
if os.environ["LAUNCH_GENERATION"] == "0":
    os.environ["CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE"] = "http://127.0.0.1:9/storage/v1/"
    outbox = open_outbox(open_storage(os.environ["LAUNCH_RUN_FOLDER"]), os.environ)
    outbox.put("{PART}", b'{{"step": 1}}\\n')
    os.kill(os.getpid(), 9)
"""

SAVES = """
import os, signal, time
def told(*_):
    open(os.environ["LAUNCH_EXIT_FILE"], "a").write("75\\n")
    print("saved", flush=True)
    os._exit(75)
signal.signal(15, told)
print("waiting", flush=True)
time.sleep(100)
"""


class Bucket:
    """One machine, a bucket, and a folder for its spools."""

    def __init__(self, machine: Machines, cloud: GoogleCloud) -> None:
        self.machine = machine
        self.cloud = cloud
        self.spools = machine.folder / "spools"

    def start(self, script: str, **timing: float) -> Node:
        self.spools.mkdir(exist_ok=True)
        env = {**self.cloud.environ(), "LAUNCH_RUN_FOLDER": f"gs://my-bucket/{RUN}", "LAUNCH_SPOOL": str(self.spools)}
        name = self.machine.script(script)
        return self.machine.start("--launcher", "python", "--script", name, env=env, timing={"text": 0.2, **timing})

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """By name in the run folder."""
        blobs = {blob.name.removeprefix(f"{RUN}/"): blob.data for blob in self.cloud.objects.listed("my-bucket")}
        return {name: data for name, data in blobs.items() if name.startswith(prefix)}

    def text(self) -> str:
        return b"".join(data for _, data in sorted(self.objects("text/").items())).decode()


@pytest.fixture
def bucket(tmp_path: Path, cloud: GoogleCloud) -> Iterator[Bucket]:
    with machines(tmp_path) as machine:
        yield Bucket(machine, cloud)


def test_what_a_killed_process_left_is_sent_before_the_next_start(bucket: Bucket) -> None:
    reads = f"else:\n    print(open_storage(os.environ['LAUNCH_RUN_FOLDER']).read('{PART}'))\n"
    node = bucket.start(DIES_WITH_A_ROW + reads)
    assert node.wait() == Exit.OK
    assert "restarting (1 of 3" in node.text
    assert "restarting (2 of 3" not in node.text
    assert bucket.objects("metrics/") == {PART: b'{"step": 1}\n'}
    assert bucket.text() == node.text
    assert list(bucket.spools.iterdir()) == []


def test_what_can_not_be_sent_is_said_and_the_next_start_sends_it(bucket: Bucket) -> None:
    from launcher.testing.googlecloud import Fault, Status

    fault = bucket.cloud.faults.add(Fault("storage.objects.insert", Status(403), name="metrics/", times=None))
    node = bucket.start(DIES_WITH_A_ROW, sweep=0.3, final=0.3)
    assert node.wait() == Exit.OK, node.text
    assert bucket.cloud.faults.used[fault] > 0
    assert bucket.objects("metrics/") == {}
    assert f"1 file did not reach gs://my-bucket/{RUN} and is in {bucket.spools}/" in node.text
    bucket.cloud.faults.clear()
    again = bucket.start("")
    assert again.wait() == Exit.OK
    assert bucket.objects("metrics/") == {PART: b'{"step": 1}\n'}
    assert list(bucket.spools.iterdir()) == []


def test_a_bucket_that_is_gone_does_not_hold_up_a_preempted_node(bucket: Bucket) -> None:
    node = bucket.start(SAVES)
    until(lambda: "waiting\n" in bucket.text(), "the text in the bucket", limit=20)
    bucket.cloud.faults.down(math.inf)
    start = time.monotonic()
    node.send(signal.SIGTERM)
    assert node.wait() == Exit.PREEMPTED, node.text
    assert time.monotonic() - start < 10  # 3 s of its own
    assert "log lines: " in node.text
    assert str(bucket.spools) in node.text


def test_a_bucket_that_is_away_for_a_while_costs_no_text_and_no_time(bucket: Bucket) -> None:
    script = "import time\nfor i in range(20):\n    print('line', i, flush=True)\n    time.sleep(0.05)\n"
    from launcher.testing.googlecloud import Fault, Status

    bucket.cloud.faults.add(Fault("storage.objects.insert", Status(503), name="text/", times=2))
    node = bucket.start(script)
    assert node.wait() == Exit.OK
    assert bucket.text() == node.text


def test_a_bucket_that_can_only_be_read_is_one_line_and_at_once(bucket: Bucket) -> None:
    bucket.cloud.objects.deny("my-bucket", "storage.objects.create")
    start = time.monotonic()
    node = bucket.start("")
    assert node.wait() == Exit.UNFIT
    assert time.monotonic() - start < 10
    assert node.text.count("\n") == 1
    assert "storage.objects.create" in node.text


def test_a_node_that_comes_while_the_bucket_is_away_waits_for_it(bucket: Bucket) -> None:
    bucket.cloud.faults.down(math.inf)
    node = bucket.start("print('works')", ask=0.5, retry_every=0.1)
    node.await_text("; retrying for 600 s")
    time.sleep(0.6)
    bucket.cloud.faults.clear()
    assert node.wait() == Exit.OK, node.text
    assert node.text.count("retrying") == 1
    assert "works\n" in node.text


def test_a_node_whose_bucket_stays_away_gives_up(bucket: Bucket) -> None:
    bucket.cloud.faults.down(math.inf)
    node = bucket.start("", ask=0.3, retry_every=0.1, retry=0.5)
    assert node.wait() == Exit.UNFIT
    assert "is unreachable" in node.text.splitlines()[-1]


def test_a_node_that_waits_for_its_bucket_leaves_when_told(bucket: Bucket) -> None:
    bucket.cloud.faults.down(math.inf)
    node = bucket.start("", ask=0.5, retry_every=100.0)
    node.await_text("retrying")
    start = time.monotonic()
    node.send(signal.SIGTERM)
    assert node.wait() == 143, node.text
    assert time.monotonic() - start < 10


def test_what_a_killed_node_left_is_sent_before_the_first_start(bucket: Bucket) -> None:
    killed = DIES_WITH_A_ROW.replace("os.kill(os.getpid(), 9)", "os.kill(os.getppid(), 9)")
    node = bucket.start(killed)
    assert node.wait() == -signal.SIGKILL
    assert bucket.objects("metrics/") == {}
    reads = "import os\nfrom launch_train.common.storage import open_storage\n"
    reads += f"print(open_storage(os.environ['LAUNCH_RUN_FOLDER']).read('{PART}'))\n"
    again = bucket.start(reads)
    assert again.wait() == Exit.OK, again.text
    assert "restarting" not in again.text
    assert list(bucket.spools.iterdir()) == []
