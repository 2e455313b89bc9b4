"""Whether a rank waits for its peers once it got SIGTERM: by facts, not by how long they take."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch_train.common import contract
from launch_train.common.shutdown_signal import ShutdownSignal
from launch_train.distributed import peers
from launch_train.distributed.peers import Peers, Process, this_process
from launch_train.distributed.process_group import Ranks
from launch_train.telemetry.metric_sink import Sink
from launch_train.trainer import shutdown


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def peers_with(monkeypatch: pytest.MonkeyPatch, *others: Process) -> Peers:
    monkeypatch.setattr(peers, "gather", lambda ranks, mine: [mine, *others])
    return Peers(Ranks(world=1 + len(others)))


def process(pid: int) -> Process:
    return Process(this_process().space, pid, peers._start_time(pid))


@pytest.mark.parametrize("buried", [False, True])
def test_a_peer_has_failed_once_its_process_has_exited(
    monkeypatch: pytest.MonkeyPatch, peer: subprocess.Popen[bytes], buried: bool
) -> None:
    here = peers_with(monkeypatch, process(peer.pid))
    assert not here.failed()
    peer.send_signal(signal.SIGSTOP)
    assert not here.failed()
    peer.kill()
    os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    if buried:
        peer.wait()
    assert here.failed()


def test_another_process_with_its_number_is_not_the_peer(
    monkeypatch: pytest.MonkeyPatch, peer: subprocess.Popen[bytes]
) -> None:
    assert peers_with(monkeypatch, process(peer.pid)._replace(started="1")).failed()


def test_numbers_of_another_machine_mean_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not peers_with(monkeypatch, Process("elsewhere", 999_999_999, "1")).failed()


class Waiting:
    """A run whose loop is in a long step; `seconds` is what it waited before it left, None if it stayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: int = 2) -> None:
        monkeypatch.setattr(shutdown, "PEER_SECONDS", 0.2)
        monkeypatch.setattr(contract, "SAVE_SECONDS", 1.6)
        monkeypatch.setattr(shutdown, "exit_process", self._leave)
        self.run: Any = SimpleNamespace(ranks=Ranks(world=world), sink=Sink(), saver=SimpleNamespace(seconds=0.6))
        self.left = threading.Event()
        self.code = 0

    def _leave(self, code: int) -> None:
        self.code = code
        self.left.set()

    def seconds(self, told: ShutdownSignal, failed: bool, most: float) -> float | None:
        told.signum, told.at = signal.SIGTERM, time.monotonic()
        known = SimpleNamespace(failed=lambda: failed)
        thread = threading.Thread(target=shutdown.exit_if_stuck, args=(self.run, known, told))
        thread.start()
        gone = self.left.wait(most)
        seconds = time.monotonic() - told.at
        told.inside = told.saving = False
        thread.join(5)
        assert not thread.is_alive()
        return seconds if gone else None


def test_after_a_notice_it_waits_while_a_save_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch)
    waited = waiting.seconds(ShutdownSignal({}), False, 5)
    assert waited
    assert 1.0 <= waited < 1.6
    assert waiting.code == 143


def test_a_notice_says_how_long_it_may_wait_and_may_become_shorter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "notice"
    monkeypatch.setattr(contract, "NOTICE_SECONDS", 2.0)
    path.write_text(f"{time.time()} {time.time() + 600}\n")
    assert Waiting(monkeypatch).seconds(ShutdownSignal({contract.NOTICE: str(path)}), False, 2) is None
    path.write_text(f"{time.time()} {time.time() + 2}\n")
    waited = Waiting(monkeypatch).seconds(ShutdownSignal({contract.NOTICE: str(path)}), False, 5)
    assert waited
    assert 0.8 <= waited < 1.6


@pytest.mark.parametrize(("notice", "failed"), [(True, True), (False, False)])
def test_after_a_failure_it_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, notice: bool, failed: bool
) -> None:
    """A peer on this machine has exited, or the node's signal came without its notice."""
    path = tmp_path / "notice"
    if notice:
        path.touch()
    waited = Waiting(monkeypatch).seconds(ShutdownSignal({contract.NOTICE: str(path)}), failed, 5)
    assert waited
    assert waited < 0.9


def test_a_notice_that_the_node_takes_back_ends_the_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.touch()
    threading.Timer(0.3, path.unlink).start()
    waited = Waiting(monkeypatch).seconds(ShutdownSignal({contract.NOTICE: str(path)}), False, 5)
    assert waited
    assert waited < 0.9


@pytest.mark.parametrize(("world", "saving"), [(2, True), (1, False)])
def test_who_saves_or_has_no_peers_stays(monkeypatch: pytest.MonkeyPatch, world: int, saving: bool) -> None:
    told = ShutdownSignal({contract.NOTICE: "/nowhere/notice"})
    told.saving = saving
    assert Waiting(monkeypatch, world).seconds(told, True, 0.6) is None


def test_a_notice_that_follows_the_signal_is_a_preemption(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    shutdown = ShutdownSignal({contract.NOTICE: str(notice)})
    shutdown.note(signal.SIGTERM, None)  # of Slurm, which signals the node and its ranks at the same moment
    threading.Timer(0.1, notice.touch).start()
    shutdown.raise_if_peer_failed()
    assert shutdown.preempted
    notice.unlink()  # withdrawn: another node's processes have failed
    with pytest.raises(SystemExit):
        shutdown.raise_if_peer_failed()
