"""What nvidia-smi prints, read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launch_train.monitoring.nvidia_smi import GpuProcess, links, parse_smi_report
from tests.train.monitoring.nvidiasmi import LOST, MIG_DEVICE, NO_DRIVER, PROCESS, T4, eight, gpu, log, matrix


def test_eight_gpus_that_are_fine() -> None:
    report = parse_smi_report(eight())
    assert report is not None
    assert (report.driver, report.cuda, report.lost, len(report.cards)) == ("580.95.05", "13.0", (), 8)
    assert [card.number for card in report.cards] == list(range(8))
    card = report.cards[7]
    assert (card.name, card.memory_gb, card.used_gb) == ("NVIDIA H100 80GB HBM3", 85.52, 0.0)
    assert (card.persistence, card.mig, card.mig_devices, card.compute_mode) == (True, False, 0, "Default")
    assert (card.recovery, card.uncorrectable, card.remap_pending, card.remap_failed) == ("", 0, False, False)
    assert (card.power_limit_w, card.usual_power_w) == (700.0, 700.0)
    assert (card.clock_mhz, card.usual_clock_mhz) == (1980.0, 1980.0)
    assert (card.slowed, card.fabric, card.processes) == ((), "Completed", ())


def test_an_older_driver_says_it_in_other_words() -> None:
    report = parse_smi_report(log(T4, driver="470.57.02", cuda="11.4"))
    assert report is not None
    card = report.cards[0]
    assert (card.name, card.persistence, card.compute_mode) == ("Tesla T4", False, "Exclusive_Process")
    assert (card.uncorrectable, card.remap_pending, card.remap_failed) == (2, True, False)
    assert (card.power_limit_w, card.usual_power_w, card.slowed) == (60.0, 70.0, ("hw_slowdown",))
    assert card.fabric == ""


def test_faults_are_read() -> None:
    text = gpu(sram=1, dram=2, pending="Yes", failure="Yes", hot="Active", reset="Yes", fabric="In Progress")
    report = parse_smi_report(log(text))
    assert report is not None
    card = report.cards[0]
    assert (card.uncorrectable, card.remap_pending, card.remap_failed) == (3, True, True)
    assert (card.slowed, card.recovery, card.fabric) == (("hw_thermal_slowdown",), "Reset", "In Progress")
    deprecated = parse_smi_report(log(gpu(reset="Requested functionality has been deprecated", recovery="Reboot")))
    assert deprecated is not None
    assert deprecated.cards[0].recovery == "Reboot"


def test_processes_that_compute() -> None:
    ours = PROCESS.format(pid=4321, kind="C", name="/usr/bin/python3", memory="3052 MiB")
    desktop = PROCESS.format(pid=7, kind="G", name="/usr/lib/xorg/Xorg", memory="20 MiB")
    silent = PROCESS.format(pid=9, kind="M+C", name="", memory="[N/A]")
    report = parse_smi_report(log(gpu(name="NVIDIA L4", processes=ours + desktop + silent)))
    assert report is not None
    assert report.cards[0].processes == (GpuProcess(4321, "/usr/bin/python3", 3.2), GpuProcess(9, "a process", None))


def test_mig() -> None:
    report = parse_smi_report(log(gpu(mig="Enabled", mig_devices=MIG_DEVICE * 2), gpu(mig="Enabled")))
    assert report is not None
    assert [(card.mig, card.mig_devices) for card in report.cards] == [(True, 2), (True, 0)]


def test_a_lost_gpu_is_a_line_before_the_rest_or_all_there_is() -> None:
    report = parse_smi_report(LOST + log(gpu()))
    assert report is not None
    assert (len(report.cards), report.lost) == (1, (LOST.strip(),))
    alone = parse_smi_report(LOST)
    assert alone is not None
    assert (alone.cards, alone.lost) == ((), (LOST.strip(),))


def test_what_is_no_report() -> None:
    for text in ("", NO_DRIVER, "NVIDIA L4, 550.90.07\n", eight()[:4000], "No devices were found\n"):
        assert parse_smi_report(text) is None


@given(st.text())
def test_no_text_breaks_it(text: str) -> None:
    report = parse_smi_report(text)
    assert report is None or not report.cards


@given(st.lists(st.lists(st.sampled_from(["GPU0", "GPU1", "NIC0", "X", "NV18", "SYS", "N/A"]))))
def test_a_matrix_is_square_or_none(lines: list[list[str]]) -> None:
    wires = links("\n".join("\t".join(words) for words in lines))
    assert all(len(row) == len(wires) for row in wires)


def test_the_matrix_of_links() -> None:
    wires = links(matrix("NV18", odd="SYS", count=4))
    assert wires[0] == ("X", "NV18", "NV18", "SYS")
    assert wires[3] == ("SYS", "NV18", "NV18", "X")
    assert len(wires) == 4
    assert links(matrix(count=1)) == (("X",),)
    assert links(NO_DRIVER) == ()
