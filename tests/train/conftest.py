"""What several tests of the trainer need."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.train.forked import Forked


@pytest.fixture(autouse=True, scope="session")
def _no_node_here() -> Iterator[None]:
    """A node ends and buries whatever descends from its process: here that would be what other tests have running."""
    from launch_train.node.process import Child

    start, here = Child.__init__, os.getpid()

    def elsewhere(child: Child, *args: Any, **options: Any) -> None:
        assert os.getpid() != here, "a node ends all children of its process: mark this test @alone"
        start(child, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Child, "__init__", elsewhere)
        yield


@contextmanager
def on_one_thread() -> Iterator[None]:
    """A run in this process: on one thread, and without the deterministic kernels that it leaves switched on."""
    import torch

    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A run in the test's process."""
    with on_one_thread():
        yield


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Runs ranks of the trainer in forks of a process that has torch."""
    from tests.train.forked import forking

    with forking() as running:
        yield running


@pytest.fixture(scope="session")
def switches(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> Path:
    """The run folders of all that tests.train.switches does on two ranks, and what they said (`stdout`).

    Of several processes of pytest (-n 3) the first that asks makes them for all: it takes half a minute.
    """
    from tests.train.sharing import on_two_ranks

    if "PYTEST_XDIST_WORKER" not in os.environ:
        base = tmp_path_factory.mktemp("switches")
        (base / "stdout").write_text(on_two_ranks(forked, "tests.train.switches", base))
        return base
    base = tmp_path_factory.getbasetemp().parent / "switches"
    with base.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / "stdout").exists():
            shutil.rmtree(base, ignore_errors=True)  # where it failed
            base.mkdir()
            (base / "stdout").write_text(on_two_ranks(forked, "tests.train.switches", base))
    return base


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte; only root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
