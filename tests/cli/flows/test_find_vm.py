"""Which VM is meant, and what is said of its price and its end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.catalog import Price
from launcher.cli.flows.find_vm import one_machine
from launcher.cli.ui.vm_text import price_and_end
from launcher.errors import UnreachableError, UsageError
from launcher.jobs.vm import VmInstance
from launcher.services.compute.vm_cost import has_local_ssd, price_of, usd_so_far
from tests.cli.vms import HOUR, Vms

NOW = 1_700_000_000.0
"""2023-11-14 22:13:20 UTC, a Tuesday."""
TWO = Price(usd=2.0, approx=False, rule="", excludes=())
DEV = VmInstance(
    id="7",
    name="dev",
    project="p",
    zone="us-central1-a",
    status="RUNNING",
    machine_type="g2-standard-24",
    provisioning="standard",
    created=NOW,
    started=NOW,
    limit_seconds=12 * HOUR,
)


def test_a_vm_is_found_by_all_its_names(vms: Vms) -> None:
    vms.make("other")
    made = vms.make("dev")
    url = f"https://www.googleapis.com/compute/v1/projects/my-project/zones/{made.zone}/instances/dev"
    for text in ("dev", made.id, made.resource, f"zones/{made.zone}/instances/dev", url):
        assert one_machine(vms.compute, text).id == made.id, text


@pytest.mark.parametrize(
    ("text", "zone", "problem", "hint"),
    [
        ("dve", None, "no VM dve in project my-project", "Did you mean dev?"),
        ("zzz", None, "no VM zzz in project my-project", "launch vm list"),
        ("dev", "us-east4-a", "no VM dev in us-east4-a", "It is in us-central1-a."),
        ("theirs", None, "no VM theirs", "launch vm list"),
        ("projects/others/zones/us-central1-a/instances/dev", None, "not in project", "gcloud config set project"),
    ],
)
def test_an_unknown_vm_is_refused(vms: Vms, text: str, zone: str | None, problem: str, hint: str) -> None:
    vms.make("dev")
    vms.make("theirs", labels={})
    with pytest.raises(UsageError) as caught:
        one_machine(vms.compute, text, zone)
    assert problem in caught.value.problem
    assert hint in caught.value.hint


def test_an_ambiguous_name_needs_a_zone(vms: Vms) -> None:
    first, second = vms.make("dev"), vms.make("dev", "us-central1-c")
    with pytest.raises(UsageError) as caught:
        one_machine(vms.compute, "dev")
    assert "us-central1-a" in caught.value.problem
    assert "--zone us-central1-" in caught.value.hint
    assert one_machine(vms.compute, "dev", "us-central1-c").id == second.id
    assert one_machine(vms.compute, first.id).id == first.id


def test_a_vm_in_an_unreadable_zone_is_not_called_missing(vms: Vms) -> None:
    vms.make("dev")
    vms.cloud.compute.unreachable.add("us-central1-a")
    with pytest.raises(UnreachableError, match="no VM dev was found in project my-project, but us-central1-a"):
        one_machine(vms.compute, "dev")


@pytest.mark.parametrize(
    ("machine", "price", "text"),
    [
        (DEV, TWO, "$2.00/h, at most $24.00, stops itself Wed 10:13"),
        (replace(DEV, limit_seconds=HOUR), TWO, "$2.00/h, at most $2.00, stops itself 23:13"),
        (
            replace(DEV, parameters={"lease_seconds": 3600, "on_stop": "delete"}),
            replace(TWO, approx=True),
            "≈$2.00/h, at most ≈$24.00, deletes itself 23:13 (≈$2.00 by then)",
        ),
        (replace(DEV, lease_moved_to=NOW + 99 * HOUR), TWO, "$2.00/h, at most $24.00, stops itself Wed 10:13"),
        (DEV, replace(TWO, usd=None), "price unknown, stops itself Wed 10:13"),
        (
            replace(DEV, lease_moved_to=NOW - 60, started=NOW - HOUR),
            TWO,
            "$2.00/h, at most $24.00, should have ended 22:12",
        ),
        (replace(DEV, limit_seconds=None), TWO, "$2.00/h, never stops itself"),
        (
            replace(DEV, status="TERMINATED", parameters={"lease_seconds": 7200}),
            TWO,
            "$2.00/h, at most $24.00, stops itself 2 h after its start",
        ),
        (
            replace(DEV, started=None, status="PENDING"),
            TWO,
            "$2.00/h, at most $24.00, stops itself 12 h after its start",
        ),
    ],
)
def test_price_and_end_in_a_line(vms: Vms, machine: VmInstance, price: Price, text: str) -> None:
    assert price_and_end(machine, price, NOW) == text


def test_a_price_is_the_catalogs() -> None:
    assert price_of(DEV).usd == pytest.approx(2.0008, abs=0.01)
    scratch = {"disks": [{"type": "SCRATCH"}, {"type": "PERSISTENT"}, {"type": "SCRATCH"}]}
    with_ssds = replace(DEV, request=scratch)
    assert price_of(with_ssds).usd == pytest.approx(2.0008 + 2 * 375 * 0.0001096, abs=0.01)
    assert has_local_ssd(with_ssds)
    assert not has_local_ssd(DEV)
    own = replace(DEV, machine_type="a3-highgpu-2g", provisioning="flex-start")
    assert has_local_ssd(own)
    assert price_of(replace(own, request=scratch)).usd == price_of(own).usd  # they are in its price
    assert price_of(replace(DEV, machine_type="e2-standard-4")).usd is None
    assert price_of(replace(DEV, machine_type="e2-standard-4"), 3.0).usd == 3.0
    n1 = {
        "guestAccelerators": [{"acceleratorType": "https://x/acceleratorTypes/nvidia-tesla-t4", "acceleratorCount": 1}]
    }
    assert price_of(replace(DEV, machine_type="n1-standard-8", request=n1)).usd == pytest.approx(2 * 0.189999 + 0.35)


@pytest.mark.parametrize(
    ("status", "usd"),
    [("RUNNING", 6.0), ("STOPPING", 6.0), ("PROVISIONING", 0.0), ("STAGING", 0.0), ("TERMINATED", 0.0)],
)
def test_cost_counts_from_the_last_start(status: str, usd: float) -> None:
    assert usd_so_far(replace(DEV, status=status), TWO, NOW + 3 * HOUR) == usd
