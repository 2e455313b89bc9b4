"""`launch vm extend` and `launch vm status`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest

from launcher.cli.commands.vm.extend import moment
from launcher.clock import Clock
from launcher.jobs.vm import LEASE
from launcher.testing.googlecloud import Fault, Status
from tests.cli.vms import HOUR, RUN, Vms


def lease_of(vms: Vms, name: str = "dev") -> float:
    """The deadline that the watchdog sees."""
    return float(vms.cloud.compute.vm(name).items[LEASE])


def test_a_lease_is_counted_from_now(vms: Vms) -> None:
    vms.make("dev", lease=HOUR)
    vms.clock.advance(HOUR / 2)
    ran = vms.launch("extend", "dev", "--lease", "4h")
    assert lease_of(vms) == vms.clock() + 4 * HOUR
    assert ran.out.startswith("dev: $2.00/h, at most $24.01, stops itself Wed 02:44 ($9.")
    assert len(ran.out.splitlines()) == 1


def test_a_lease_beyond_googles_limit_is_refused(vms: Vms) -> None:
    made = vms.make("dev", hours=3)
    ran = vms.launch("extend", "dev", "--lease", "4h")
    assert lease_of(vms) == int((made.started or 0) + 3 * HOUR)
    assert "Compute Engine ends it Wed 01:13, which cannot change" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_a_start_between_two_seconds(vms: Vms) -> None:
    vms.clock.advance(0.4)
    vms.make("dev", hours=3)
    ran = vms.launch("extend", "dev", "--lease", "4h")
    assert ran.out.startswith("dev: $2.00/h, at most $6.00, stops itself Wed 01:13\n")
    assert "lease " not in vms.launch("status", "dev").out


def test_a_vm_without_a_lease_gets_one(vms: Vms) -> None:
    vms.make("dev")
    vms.launch("extend", "dev", "--lease", "1h")
    assert lease_of(vms) == vms.clock() + HOUR
    assert vms.data("status", "dev")["lease_until"] == lease_of(vms)


def test_until_a_time_of_day(vms: Vms) -> None:
    vms.make("dev")
    vms.launch("extend", "dev", "--until", "23:00")
    assert lease_of(vms) == 1_700_002_800
    vms.launch("extend", "dev", "--until", "06:40")
    assert lease_of(vms) == 1_700_030_400
    vms.launch("extend", "dev", "--until", "2023-11-15T01:00")
    assert lease_of(vms) == 1_700_010_000


BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"


@pytest.fixture
def in_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Set this process's time zone; it is back afterwards."""

    def set_zone(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("zone", "now", "text", "ends", "noted"),
    [
        # Berlin: forward on 2026-03-29 at 02:00, back on 2026-10-25 at 03:00
        (BERLIN, "2026-03-29T00:10+01:00", "22:40", "2026-03-29T22:40+02:00", ""),
        (BERLIN, "2026-10-25T00:10+02:00", "22:40", "2026-10-25T22:40+01:00", ""),
        (BERLIN, "2026-03-28T23:00+01:00", "06:40", "2026-03-29T06:40+02:00", ""),
        (BERLIN, "2026-10-24T23:00+02:00", "06:40", "2026-10-25T06:40+01:00", ""),
        (BERLIN, "2026-03-29T00:10+01:00", "01:59", "2026-03-29T01:59+01:00", ""),
        (BERLIN, "2026-03-29T00:10+01:00", "03:00", "2026-03-29T03:00+02:00", ""),
        (BERLIN, "2026-03-29T12:00+02:00", "12:00", "2026-03-30T12:00+02:00", ""),
        # a time that does not exist, and one that happens twice
        (BERLIN, "2026-03-29T00:10+01:00", "02:30", "2026-03-29T03:30+02:00", "03:30"),
        (BERLIN, "2026-03-01T00:10+01:00", "2026-03-29T02:30", "2026-03-29T03:30+02:00", "03:30"),
        (BERLIN, "2026-10-25T00:10+02:00", "02:30", "2026-10-25T02:30+02:00", "CEST"),
        (BERLIN, "2026-10-25T02:45+02:00", "02:30", "2026-10-25T02:30+01:00", "CET"),
        (BERLIN, "2026-10-25T02:45+01:00", "02:30", "2026-10-26T02:30+01:00", ""),
        (BERLIN, "2026-10-01T00:00+02:00", "2026-10-25T02:30", "2026-10-25T02:30+02:00", "CEST"),
        (BERLIN, "2026-10-01T00:00+02:00", "2026-10-25T02:30+01:00", "2026-10-25T02:30+01:00", ""),
        # New York: forward on 2026-03-08 at 02:00, back on 2026-11-01 at 02:00
        (NEW_YORK, "2026-03-08T00:10-05:00", "22:40", "2026-03-08T22:40-04:00", ""),
        (NEW_YORK, "2026-11-01T00:10-04:00", "22:40", "2026-11-01T22:40-05:00", ""),
        (NEW_YORK, "2026-11-01T00:10-04:00", "01:30", "2026-11-01T01:30-04:00", "EDT"),
    ],
)
def test_until_on_the_day_the_clocks_change(
    in_zone: Callable[[str], None], zone: str, now: str, text: str, ends: str, noted: str
) -> None:
    in_zone(zone)
    found, note = moment(text, datetime.fromisoformat(now).timestamp())
    assert datetime.fromtimestamp(found, UTC) == datetime.fromisoformat(ends)
    assert bool(note) is bool(noted)
    assert noted in note


def test_a_nonexistent_local_time_is_moved_and_reported(vms: Vms, in_zone: Callable[[str], None]) -> None:
    vms.clock.advance(120 * 24 * HOUR)  # 13 March 2024
    vms.make("dev", hours=1000)
    in_zone(BERLIN)
    ran = vms.launch("extend", "dev", "--until", "2024-03-31T02:30")
    assert "03:30" in ran.err
    assert lease_of(vms) == datetime.fromisoformat("2024-03-31T03:30+02:00").timestamp()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "one of --lease and --until is required"),
        (["--lease", "1h", "--until", "22:40"], "one of --lease and --until is required"),
        (["--lease", "soon"], "--lease: invalid duration 'soon'"),
        (["--until", "later"], "--until: invalid time 'later'"),
        (["--until", "25:00"], "--until: invalid time '25:00'"),
        (["--until", "2020-01-01T00:00"], "--until 2020-01-01T00:00 is in the past"),
    ],
)
def test_an_invalid_time_is_refused(vms: Vms, flags: list[str], said: str) -> None:
    vms.make("dev")
    assert said in vms.launch("extend", "dev", *flags, code=2).err
    assert LEASE not in vms.cloud.compute.vm("dev").items


def test_a_stopped_vm_has_no_lease(vms: Vms) -> None:
    vms.make("dev", lease=HOUR)
    vms.launch("stop", "dev")
    ran = vms.launch("extend", "dev", "--lease", "1h", code=2)
    assert "its lease begins when it starts" in ran.err
    assert "launch vm start dev" in ran.err


def test_an_older_lease_is_forgotten_at_the_next_start(vms: Vms) -> None:
    vms.make("dev", lease=2 * HOUR)
    vms.launch("extend", "dev", "--lease", "70m")
    vms.launch("stop", "dev")
    vms.clock.advance(HOUR)
    started = vms.data("start", "dev")["started"]
    assert LEASE not in vms.cloud.compute.vm("dev").items
    assert vms.data("status", "dev")["lease_until"] == started + 2 * HOUR


def test_the_local_clock_does_not_matter(vms: Vms, monkeypatch: pytest.MonkeyPatch) -> None:
    vms.make("dev")
    monkeypatch.setattr("launcher.clock.REAL", Clock(lambda: vms.clock() + 86_400, vms.clock.advance))
    vms.launch("extend", "dev", "--lease", "1h")
    assert lease_of(vms) == vms.clock() + HOUR


def test_a_concurrent_metadata_change_is_kept(vms: Vms) -> None:
    vms.make("dev")
    vms.cloud.faults.add(Fault("compute.instances.setMetadata", Status(412), times=2))
    vms.launch("extend", "dev", "--lease", "1h")
    assert lease_of(vms) == vms.clock() + HOUR


# --- status ----------------------------------------------------------------------------------------------------------


def test_the_status_page(vms: Vms) -> None:
    made = vms.make("dev", lease=4 * HOUR)
    vms.cloud.compute.set_guest("dev", "launch/state", "ready")
    vms.clock.advance(2 * HOUR)
    page = vms.launch("status", "dev").out
    assert page.splitlines() == [
        "dev  running for 2 h 1 min",
        "",
        "price     $2.00/h, at most $24.01, stops itself 02:13 ($8.00 by then)",
        "cost      $4.03 since its last start (Tue 22:13)",
        "disk      200 GB pd-balanced, ≈$20.00 a month, also while stopped",
        "lease     until 02:13, 2 h left; launch vm extend dev --lease 4h changes it",
        "limit     10:13: Compute Engine ends it then; fixed while it runs",
        "state     RUNNING; ready to use",
        "machine   g2-standard-24 (2 × NVIDIA L4), standard in us-central1-a",
        "address   10.128.0.2; no external address (IAP)",
        "account   launch@my-project.iam.gserviceaccount.com",
        f"vm        {made.resource}",
        "reach     launch ssh dev",
    ]


def test_status_shows_startup_errors(vms: Vms) -> None:
    vms.make("dev", model="SPOT")
    vms.cloud.compute.set_guest("dev", "launch/state", "failed")
    vms.cloud.compute.set_guest("dev", "launch/reason", "the driver never came")
    assert "state     RUNNING; setup failed (the driver never came)\n" in vms.launch("status", "dev").out
    vms.cloud.compute.preempt("dev")
    vms.clock.advance(60)
    vms.cloud.compute.capacity.out("us-central1-a", "g2-*")
    vms.launch("start", "dev", code=5)
    page = vms.launch("status", "dev").out
    assert page.startswith("dev  stopped")
    assert "start failed: ZONE_RESOURCE_POOL_EXHAUSTED" in " ".join(page.split())
    assert "preempted" in page
    assert "start     launch vm start dev" in page
    kinds = [one["kind"] for one in vms.data("status", "dev")["operations"]]
    assert kinds == ["start", "compute.instances.preempted"]


def test_a_vm_that_trains_points_to_its_run(vms: Vms) -> None:
    vms.train()
    page = vms.launch("status", RUN).out
    assert f"run       launch status {RUN}" in page
    assert "launch vm extend" not in page


def test_unreadable_parts_are_reported_and_omitted(vms: Vms) -> None:
    vms.make("dev")
    names = ("disks.aggregatedList", "instances.getGuestAttributes", "zoneOperations.list")
    for name in names:
        vms.cloud.faults.add(Fault(f"compute.{name}", Status(403), times=None))
    ran = vms.launch("status", "dev")
    for what in ("disks", "guest attributes", "operations"):
        assert f"cannot read its {what}" in ran.err
    assert "price     $2.00/h" in ran.out
