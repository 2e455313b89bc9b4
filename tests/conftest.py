"""For all tests: nothing speaks to another machine, and in CI nothing is skipped."""

from __future__ import annotations

import gc
import ipaddress
import json
import os
import shutil
import signal
import socket
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

import launcher.gcp  # noqa: F401 - Google's packages import only the services in use

if TYPE_CHECKING:
    from launcher.testing.googlecloud import FakeClock, GoogleCloud

NO_SKIPS = "LAUNCH_NO_SKIPS"
"""Set to 1, a skipped test fails the session: a check that did not run must not look like one that passed."""

RAN_ON = "LAUNCH_RAN_ON"
"""A file in which the GPU tests that pass are noted."""

SKIPPED = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Make room for the names of skipped tests, keep google-auth from looking for a metadata server, and let Ctrl-C
    reach what the tests start.

    google-auth reads the variable when it is first imported, in whichever test that is. A shell starts what runs in
    its background with SIGINT ignored, and nohup with SIGHUP, which all processes below would inherit.
    """
    config.stash[SKIPPED] = []
    settings.register_profile("busy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")  # an example that takes longer on a busy machine is no fault
    gc.disable()  # collection creates millions of objects that stay
    os.environ["NO_GCE_CHECK"] = "true"
    os.environ["LAUNCH_OFFLINE"] = "1"  # the prices shipped with launch, whatever the cache has
    os.environ["XDG_CONFIG_HOME"] = "/proc/settings"  # not the developer's own (tests/command.py)
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch here: its threads would wait for the processors that others use
    os.environ["no_proxy"] = "127.0.0.1"  # else requests reads the whole environment twice for each request
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part 1/3`: of the slow tests only a third; `--part none`: none. CI runs another part after each commit."""
    help_text = "of the tests marked `slow`, run only the N-th of OF parts, or none (default: all)"
    parser.addoption("--part", type=part_of, default=(1, 1), metavar="N/OF", help=help_text)


def part_of(text: str) -> tuple[int, int]:
    """Return (1, 4) for `1/4`, and (0, 1) for `none`. Raises ValueError."""
    if text == "none":
        return 0, 1
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise ValueError(text)
    return number, of


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other parts. Run the trainer's tests first: their files take the longest, and the last one
    is waited for by all."""
    number, of = config.getoption("--part")
    others = [item for item, turn in _turns(items) if turn % of != number - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: "/tests/train/" not in str(item.path))


def _turns(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, int]]:
    """Return the slow tests, each with its turn: the marker's own, else its place among those of its file. Not every
    file begins with turn 0, or all files with a single such test would be in the first part. All tests that run the
    gcloud command are slow: each of its processes takes a second."""
    places = Counter[str]()
    for item in items:
        if marker := item.get_closest_marker("slow") or item.get_closest_marker("gcloud"):
            file = item.nodeid.partition("::")[0]
            yield item, marker.kwargs.get("turn", zlib.crc32(file.encode()) + places[file])
            places[file] += 1


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collect garbage again, but seldom, and never among what was there before the first test: else it takes a fourth
    of the CPU time."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep which test was skipped, and why. An expected failure is reported as skipped too."""
    report = yield
    if report.skipped:
        item.config.stash[SKIPPED].append(f"{item.nodeid}: {_reason(report)}")
    if report.when == "call" and report.passed and item.get_closest_marker("gpu") and RAN_ON in os.environ:
        _note_gpu(item.nodeid)
    return report


def _note_gpu(test: str) -> None:
    """Which GPU a test has passed on, and when: docs/train.md says it (tests/features.py)."""
    import torch

    file, device = Path(os.environ[RAN_ON]), torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    known = json.loads(file.read_text()) if file.is_file() else {}
    name = test.removeprefix("tests/train/").partition("[")[0]  # as tests/features.py has it
    known[name] = {"device": device, "date": datetime.now(UTC).date().isoformat()}
    file.write_text(json.dumps(known, indent=2) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A whole file may be skipped while it is collected."""
    report = yield
    if report.skipped:
        collector.config.stash[SKIPPED].append(f"{collector.nodeid}: {_reason(report)}")
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of several processes (pytest -n 2) is done: what it skipped was skipped. All of them collect every file."""
    kept = node.config.stash[SKIPPED]
    kept.extend(line for line in getattr(node, "workeroutput", {}).get("skipped", ()) if line not in kept)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn skips into a failure where they are forbidden."""
    if hasattr(session.config, "workeroutput"):  # the process that started this one decides
        session.config.workeroutput["skipped"] = session.config.stash[SKIPPED]
        return
    passed = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if session.config.stash[SKIPPED] and os.environ.get(NO_SKIPS) == "1" and passed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was skipped against the rule."""
    skipped = config.stash[SKIPPED]
    if skipped and os.environ.get(NO_SKIPS) == "1":
        terminalreporter.section(f"FAILED: {len(skipped)} skipped, and {NO_SKIPS}=1 allows none", red=True)
        for line in skipped:
            terminalreporter.line(line)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    wasxfail = getattr(report, "wasxfail", None)
    if wasxfail is not None:
        return f"expected to fail: {wasxfail}"
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


class NetworkRefusedError(AssertionError):
    """A test tried to reach another machine. Not an OSError: no client may take it for an outage and try again."""


@pytest.fixture(autouse=True, scope="session")
def _loopback_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
        patch.setattr(socket, "getaddrinfo", _guarded_lookup(socket.getaddrinfo))
        yield


def _guarded(connect: Any) -> Any:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family != socket.AF_UNIX and not _is_loopback(address[0]):
            raise NetworkRefusedError(f"a test may only speak to loopback, not to {address}")
        return connect(self, address)

    return guarded


def _guarded_lookup(getaddrinfo: Any) -> Any:
    def guarded(host: Any, *args: Any, **options: Any) -> Any:
        if host not in (None, "") and not _is_loopback(host) and host != socket.gethostname():
            raise NetworkRefusedError(f"a test may not look up {host!r}")
        return getaddrinfo(host, *args, **options)

    return guarded


def _is_loopback(host: Any) -> bool:
    name = host.decode() if isinstance(host, bytes) else str(host)
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name in ("localhost", "", socket.gethostname())
    return address.is_loopback or address.is_unspecified


@pytest.fixture
def clock() -> FakeClock:
    """A clock that a test moves."""
    from launcher.testing.googlecloud import (
        FakeClock,  # Google's libraries cost seconds: only the tests that use them pay
    )

    return FakeClock()


@pytest.fixture
def cloud(clock: FakeClock) -> Iterator[GoogleCloud]:
    """A Google Cloud on loopback, on the fake clock."""
    from launcher.testing.googlecloud import GoogleCloud

    with GoogleCloud(clock=clock) as running:
        yield running


@pytest.fixture(scope="session")
def gcloud() -> str:
    """The gcloud command; without it the test is skipped (in CI: fails)."""
    found = shutil.which("gcloud")
    if found is None:
        pytest.skip("gcloud is not installed: https://cloud.google.com/sdk/docs/install")
    return found
