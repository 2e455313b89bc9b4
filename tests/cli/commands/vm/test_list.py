"""`launch vm list`, and what of ours it finds without need."""

from __future__ import annotations

import pytest

from launcher.cli.commands.vm.list import LESS
from launcher.cli.ui.text import fit_columns, table_width
from launcher.testing.googlecloud import Fault, Status
from tests.cli.vms import HOUR, RUN, Vms

DISKS = "compute.disks.aggregatedList"


def test_an_empty_list(vms: Vms) -> None:
    assert vms.launch("list").out == "No VMs.\n"
    assert vms.data("list") == {"machines": []}
    assert vms.launch("list", "--orphans").out == "No orphaned resources found.\n"


def test_the_list(vms: Vms) -> None:
    vms.make("theirs", labels={})
    vms.make("old", model="SPOT")
    vms.launch("stop", "old")
    vms.make("dev", "us-east4-a", lease=4 * HOUR)
    vms.clock.advance(3 * HOUR - 60)
    assert vms.launch("list").out.splitlines() == [
        "NAME  STATE    MACHINE         ZONE           AGE  $/H   COST       ENDS",
        "dev   RUNNING  g2-standard-24  us-east4-a     3 h  1.99  $5.98      02:15",
        "old   STOPPED  g2-standard-24  us-central1-a  3 h  1.12  $20/month  -",
    ]


def test_a_training_vm_is_in_it_and_a_table_never_is_too_wide(vms: Vms) -> None:
    vms.train(machine="a3-highgpu-2g", model="FLEX_START")
    shown = vms.launch("list").out
    assert RUN in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_narrow_terminal_drops_columns() -> None:
    row = {"MACHINE": "a3-highgpu-2g, spot", "AGE": "3 h", "$/H": "≈12.87", "ENDS": "Wed 22:40, in 3 h"}
    assert table_width([row]) == 51
    assert fit_columns([row], 51, LESS) == [row]
    assert fit_columns([row], 50, LESS) == [{**row, "ENDS": "Wed 22:40"}]
    assert fit_columns([row], 42, LESS) == [{**row, "ENDS": "Wed 22:40", "MACHINE": "a3-highgpu-2g"}]
    assert list(fit_columns([row], 35, LESS)[0]) == ["MACHINE", "$/H", "ENDS"]
    assert list(fit_columns([row], 10, LESS)[0]) == ["MACHINE", "ENDS"]


def test_an_unreachable_zone_is_reported(vms: Vms) -> None:
    vms.make("dev")
    vms.make("away", "us-east4-a")
    vms.cloud.compute.unreachable.add("us-east4-a")
    ran = vms.launch("list")
    assert "us-east4-a could not be read" in ran.err
    assert "dev" in ran.out
    assert "away" not in ran.out


def test_unreadable_disks_do_not_hide_the_list(vms: Vms) -> None:
    vms.make("dev")
    vms.launch("stop", "dev")
    vms.cloud.faults.add(Fault(DISKS, Status(403), times=None))
    ran = vms.launch("list")
    assert "cannot read the disks" in ran.err
    assert "?" in ran.out.splitlines()[1]


def test_the_list_as_json(vms: Vms) -> None:
    made = vms.make("dev", lease=4 * HOUR)
    vms.clock.advance(HOUR)
    (found,) = vms.data("list")["machines"]
    assert found["id"] == made.id
    assert found["lease_until"] == (made.started or 0) + 4 * HOUR
    assert found["ceiling"] == (made.started or 0) + 12 * HOUR
    assert found["usd_so_far"] > 2
    assert found["disks"] == [{"name": "dev", "kind": "pd-balanced", "gb": 200}]
    assert found["usd_per_month_of_disks"] == 20


def test_orphans(vms: Vms) -> None:
    vms.end(vms.train(), "it lacks compute.instances.delete:\ngcloud projects \x1b[0m…")
    vms.train("train-89abcdef")
    vms.make("forgotten", hours=200, lease=HOUR)
    vms.make("kept", auto_delete=False)
    vms.launch("delete", "kept", "--yes")
    vms.clock.advance(2 * HOUR)
    vms.make("busy", lease=HOUR)
    found = vms.data("list", "--orphans")["orphans"]
    assert [(one["what"], one["name"]) for one in found] == [("vm", "forgotten"), ("vm", RUN), ("disk", "kept")]
    assert found[0]["usd_per_month"] == pytest.approx(730 * 2.0008 + 20, abs=1)  # with its disk
    assert found[2]["usd_per_month"] == 20
    assert found[2]["remove"] == "gcloud compute disks delete kept --zone=us-central1-a --project=my-project"
    page = vms.launch("list", "--orphans").out
    assert "still running after its lease ended" in page
    assert "launch vm delete forgotten --zone us-central1-a" in page
    assert "    it lacks compute.instances.delete:\n    gcloud projects \\x1b[0m…\n" in page
    assert "total ≈$" in page
    vms.launch("delete", "forgotten", "--zone", "us-central1-a", "--yes")
    vms.launch("delete", RUN, "--yes")
    assert [one["name"] for one in vms.data("list", "--orphans")["orphans"]] == ["kept"]


def test_one_finished_node_makes_the_others_orphans(vms: Vms) -> None:
    names = [f"{RUN}-n0", f"{RUN}-n1"]
    first, second = (vms.train(name, names) for name in names)
    vms.end(first)
    vms.compute.delete(first)
    vms.clock.advance(HOUR)
    assert [one["name"] for one in vms.data("list", "--orphans")["orphans"]] == [second.name]
    vms.launch("delete", second.name, "--yes")
    again = vms.train(second.name, names)
    vms.clock.advance(HOUR)
    assert vms.data("list", "--orphans")["orphans"] == []  # what ended was the attempt before
    vms.launch("delete", again.name, "--yes", code=2)


def test_an_unreadable_run_folder_makes_no_orphan(vms: Vms) -> None:
    vms.end(vms.train())
    vms.cloud.objects.deny("my-bucket", "storage.objects.get")
    ran = vms.launch("list", "--orphans")
    assert f"cannot check whether {RUN} has ended" in ran.err
    assert ran.out == "No orphaned resources found.\n"
