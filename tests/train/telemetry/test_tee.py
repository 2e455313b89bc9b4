"""What a process prints goes on as it comes, and is taken."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.train.nodes import REPOSITORY

# A process that stands for the node: what it takes goes to a separate file.
_AROUND = """
import os, subprocess, sys, time
from launch_train.telemetry.tee import Tee
taken = open("taken", "wb", buffering=0)
tee = Tee(lambda data, number: taken.write(data))
{work}
end = time.monotonic() + {limit}
tee.close(lambda: end - time.monotonic())
open("closed", "w").write("x")
"""


@pytest.fixture
def around(tmp_path: Path) -> Iterator[Around]:
    with ExitStack() as stack:
        yield Around(tmp_path, stack)


class Around:
    """Runs some work between the making of a tee and its end."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack

    def start(
        self, work: str, *, limit: float = 20.0, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", _AROUND.format(work=work, limit=limit)]
        env = {"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"]}
        process = subprocess.Popen(argv, cwd=self.folder, env=env, stdout=stdout, stderr=stderr)
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def run(self, work: str) -> tuple[bytes, bytes]:
        """What came out of stdout and stderr."""
        process = self.start(work)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        return out, err

    @property
    def taken(self) -> bytes:
        return (self.folder / "taken").read_bytes()


def test_bytes_are_passed_on_as_they_are_and_the_streams_stay_apart(around: Around) -> None:
    work = (
        "print('from python'); sys.stdout.flush()\n"
        "subprocess.run(['sh', '-c', r\"printf '10%%\\r20%%\\r'; printf '\\377\\0 bad' >&2\"], check=True)\n"
        "os.write(2, b'native\\n')\n"
        "print('no newline at the end', end='')\n"
    )
    out, err = around.run(work)
    assert out == b"from python\n10%\r20%\rno newline at the end"
    assert err == b"\xff\0 badnative\n"
    assert sorted(around.taken) == sorted(out + err)


def test_a_line_that_has_no_end_yet_is_passed_on_at_once(around: Around) -> None:
    process = around.start("os.write(1, b'10%\\r'); time.sleep(100)")
    assert process.stdout
    assert os.read(process.stdout.fileno(), 100) == b"10%\r"
    assert around.taken == b"10%\r"


def test_much_at_once_is_passed_on_whole(around: Around) -> None:
    process = around.start("subprocess.run(['sh', '-c', 'yes 0123456789abcde | head -c 50000000'], check=True)")
    assert process.stdout
    digest, count = hashlib.sha256(), 0
    while block := os.read(process.stdout.fileno(), 1 << 20):
        digest.update(block)
        count += len(block)
    assert process.wait() == 0
    assert (count, digest.hexdigest()) == (50_000_000, hashlib.sha256(around.taken).hexdigest())


@pytest.mark.parametrize(
    ("stderr", "at_once"), [(subprocess.STDOUT, 1), (subprocess.PIPE, 1000)], ids=["one place", "two places, in blocks"]
)
def test_lines_of_both_streams_stay_whole(around: Around, stderr: int, at_once: int) -> None:
    writes = 20_000 // at_once * min(at_once, 10)
    work = (
        f"code = 'import os, sys; lines = (sys.argv[2].encode() * 99 + bytes([10])) * {at_once};'\n"
        f"code += '[os.write(int(sys.argv[1]), lines) for _ in range({writes})]'\n"
        "many = [subprocess.Popen([sys.executable, '-c', code, *how]) for how in (('1', 'o'), ('2', 'e'))]\n"
        "[process.wait() for process in many]\n"
    )
    out, err = around.start(work, stderr=stderr).communicate(timeout=30)
    found = Counter((out + (err or b"")).split(b"\n"))
    assert found == Counter(around.taken.split(b"\n"))
    assert found == {b"e" * 99: writes * at_once, b"o" * 99: writes * at_once, b"": 1}


def test_what_goes_to_one_place_stays_in_its_order(around: Around) -> None:
    process = around.start("[os.write(1 + i % 2, b'%d\\n' % i) for i in range(5000)]", stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=30)
    assert out == around.taken == b"".join(b"%d\n" % i for i in range(5000))


@pytest.mark.parametrize("holds", ["sleep 20", "yes"])
def test_a_process_that_holds_the_pipe_is_not_waited_for(around: Around, holds: str) -> None:
    work = f"os.write(1, b'begin\\n'); subprocess.Popen('exec timeout 20 {holds}', shell=True); time.sleep(0.1)"
    with (around.folder / "out").open("wb") as sink:
        start = time.monotonic()
        process = around.start(work, stdout=sink.fileno(), stderr=sink.fileno())
        assert process.wait(timeout=30) == 0
    assert time.monotonic() - start < 15
    assert (around.folder / "out").read_bytes().startswith(b"begin\n")


def test_a_reader_that_takes_nothing_holds_nobody_for_longer_than_allowed(around: Around) -> None:
    process = around.start("subprocess.Popen(['sh', '-c', 'yes | head -c 200000']); time.sleep(0.3)", limit=0.3)
    assert process.wait(timeout=10) == 0  # its stdout is full
    assert (around.folder / "closed").exists()


def test_a_reader_that_has_gone_holds_nobody(around: Around) -> None:
    process = around.start("time.sleep(0.3); subprocess.run(['sh', '-c', 'yes | head -c 500000'], check=True)")
    assert process.stdout
    process.stdout.close()
    assert process.wait(timeout=10) == 0
    assert len(around.taken) == 500_000
