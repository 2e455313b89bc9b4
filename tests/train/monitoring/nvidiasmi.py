"""What nvidia-smi prints, in the words of its drivers: `-q -x` before and since driver 535, and `topo -m`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NEW = """\t<gpu id="00000000:{bus:02X}:00.0">
\t\t<product_name>{name}</product_name>
\t\t<product_brand>NVIDIA</product_brand>
\t\t<product_architecture>{architecture}</product_architecture>
\t\t<persistence_mode>{persistence}</persistence_mode>
\t\t<addressing_mode>HMM</addressing_mode>
\t\t<mig_mode>
\t\t\t<current_mig>{mig}</current_mig>
\t\t\t<pending_mig>{mig}</pending_mig>
\t\t</mig_mode>
\t\t<mig_devices>
\t\t\t{mig_devices}
\t\t</mig_devices>
\t\t<uuid>GPU-{bus:08x}-5a60-059e-348d-b6d7466932e4</uuid>
\t\t<gpu_reset_status>
\t\t\t<reset_required>{reset}</reset_required>
\t\t\t<drain_and_reset_recommended>N/A</drain_and_reset_recommended>
\t\t</gpu_reset_status>
\t\t<gpu_recovery_action>{recovery}</gpu_recovery_action>
\t\t<performance_state>P0</performance_state>
\t\t<clocks_event_reasons>
\t\t\t<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
\t\t\t<clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
\t\t\t<clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
\t\t\t<clocks_event_reason_hw_thermal_slowdown>{hot}</clocks_event_reason_hw_thermal_slowdown>
\t\t\t<clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
\t\t\t<clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
\t\t</clocks_event_reasons>
\t\t<fb_memory_usage>
\t\t\t<total>{total} MiB</total>
\t\t\t<reserved>434 MiB</reserved>
\t\t\t<used>{used} MiB</used>
\t\t\t<free>22601 MiB</free>
\t\t</fb_memory_usage>
\t\t<compute_mode>{mode}</compute_mode>
\t\t<ecc_mode>
\t\t\t<current_ecc>Enabled</current_ecc>
\t\t\t<pending_ecc>Enabled</pending_ecc>
\t\t</ecc_mode>
\t\t<ecc_errors>
\t\t\t<volatile>
\t\t\t\t<sram_correctable>7</sram_correctable>
\t\t\t\t<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
\t\t\t\t<sram_uncorrectable_secded>{sram}</sram_uncorrectable_secded>
\t\t\t\t<dram_correctable>0</dram_correctable>
\t\t\t\t<dram_uncorrectable>{dram}</dram_uncorrectable>
\t\t\t</volatile>
\t\t\t<aggregate>
\t\t\t\t<dram_uncorrectable>9</dram_uncorrectable>
\t\t\t</aggregate>
\t\t</ecc_errors>
\t\t<retired_pages>
\t\t\t<pending_blacklist>N/A</pending_blacklist>
\t\t\t<pending_retirement>N/A</pending_retirement>
\t\t</retired_pages>
\t\t<remapped_rows>
\t\t\t<remapped_row_corr>0</remapped_row_corr>
\t\t\t<remapped_row_unc>0</remapped_row_unc>
\t\t\t<remapped_row_pending>{pending}</remapped_row_pending>
\t\t\t<remapped_row_failure>{failure}</remapped_row_failure>
\t\t</remapped_rows>
\t\t<temperature>
\t\t\t<gpu_temp>45 C</gpu_temp>
\t\t</temperature>
\t\t<gpu_power_readings>
\t\t\t<power_state>P0</power_state>
\t\t\t<power_draw>27.22 W</power_draw>
\t\t\t<current_power_limit>{limit} W</current_power_limit>
\t\t\t<requested_power_limit>{limit} W</requested_power_limit>
\t\t\t<default_power_limit>{usual} W</default_power_limit>
\t\t</gpu_power_readings>
\t\t<module_power_readings>
\t\t\t<default_power_limit>N/A</default_power_limit>
\t\t</module_power_readings>
\t\t<clocks>
\t\t\t<graphics_clock>345 MHz</graphics_clock>
\t\t</clocks>
\t\t<applications_clocks>
\t\t\t<graphics_clock>{clock} MHz</graphics_clock>
\t\t</applications_clocks>
\t\t<default_applications_clocks>
\t\t\t<graphics_clock>1980 MHz</graphics_clock>
\t\t</default_applications_clocks>
\t\t<fabric>
\t\t\t<state>{fabric}</state>
\t\t\t<status>{status}</status>
\t\t</fabric>
\t\t<processes>
{processes}\t\t</processes>
\t</gpu>
"""

FINE: Mapping[str, object] = {
    "bus": 1,
    "name": "NVIDIA H100 80GB HBM3",
    "architecture": "Hopper",
    "persistence": "Enabled",
    "mig": "Disabled",
    "mig_devices": "None",
    "reset": "No",
    "recovery": "None",
    "hot": "Not Active",
    "total": 81559,
    "used": 1,
    "mode": "Default",
    "sram": 0,
    "dram": 0,
    "pending": "No",
    "failure": "No",
    "limit": "700.00",
    "usual": "700.00",
    "clock": 1980,
    "fabric": "Completed",
    "status": "Success",
    "processes": "",
}

T4 = """\t<gpu id="00000000:00:04.0">
\t\t<product_name>Tesla T4</product_name>
\t\t<persistence_mode>Disabled</persistence_mode>
\t\t<mig_mode>
\t\t\t<current_mig>N/A</current_mig>
\t\t</mig_mode>
\t\t<mig_devices>
\t\t\tNone
\t\t</mig_devices>
\t\t<clocks_throttle_reasons>
\t\t\t<clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>
\t\t\t<clocks_throttle_reason_hw_thermal_slowdown>Not Active</clocks_throttle_reason_hw_thermal_slowdown>
\t\t</clocks_throttle_reasons>
\t\t<fb_memory_usage>
\t\t\t<total>15360 MiB</total>
\t\t\t<used>2 MiB</used>
\t\t</fb_memory_usage>
\t\t<compute_mode>Exclusive_Process</compute_mode>
\t\t<ecc_errors>
\t\t\t<volatile>
\t\t\t\t<single_bit>
\t\t\t\t\t<total>4</total>
\t\t\t\t</single_bit>
\t\t\t\t<double_bit>
\t\t\t\t\t<total>2</total>
\t\t\t\t</double_bit>
\t\t\t</volatile>
\t\t</ecc_errors>
\t\t<retired_pages>
\t\t\t<pending_retirement>Yes</pending_retirement>
\t\t</retired_pages>
\t\t<remapped_rows>N/A</remapped_rows>
\t\t<power_readings>
\t\t\t<power_limit>60.00 W</power_limit>
\t\t\t<default_power_limit>70.00 W</default_power_limit>
\t\t\t<enforced_power_limit>60.00 W</enforced_power_limit>
\t\t</power_readings>
\t\t<applications_clocks>
\t\t\t<graphics_clock>585 MHz</graphics_clock>
\t\t</applications_clocks>
\t\t<default_applications_clocks>
\t\t\t<graphics_clock>585 MHz</graphics_clock>
\t\t</default_applications_clocks>
\t\t<processes>
\t\t</processes>
\t</gpu>
"""
"""As drivers before 535 say it."""

PROCESS = """\t\t\t<process_info>
\t\t\t\t<gpu_instance_id>N/A</gpu_instance_id>
\t\t\t\t<compute_instance_id>N/A</compute_instance_id>
\t\t\t\t<pid>{pid}</pid>
\t\t\t\t<type>{kind}</type>
\t\t\t\t<process_name>{name}</process_name>
\t\t\t\t<used_memory>{memory}</used_memory>
\t\t\t</process_info>
"""

MIG_DEVICE = """<mig_device>
\t\t\t\t<index>0</index>
\t\t\t\t<gpu_instance_id>1</gpu_instance_id>
\t\t\t\t<compute_instance_id>0</compute_instance_id>
\t\t\t\t<fb_memory_usage>
\t\t\t\t\t<total>20096 MiB</total>
\t\t\t\t\t<used>107 MiB</used>
\t\t\t\t</fb_memory_usage>
\t\t\t</mig_device>"""

LOST = "Unable to determine the device handle for GPU0000:CB:00.0: GPU is lost.  Reboot the system to recover it\n"
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n\n"
)


def log(*gpus: str, driver: str = "580.95.05", cuda: str = "13.0") -> str:
    """The whole of it."""
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
    about = f"\t<timestamp>Mon Jul 15 13:41:56 2024</timestamp>\n\t<driver_version>{driver}</driver_version>\n"
    about += f"\t<cuda_version>{cuda}</cuda_version>\n\t<attached_gpus>{len(gpus)}</attached_gpus>\n"
    return f"{head}{about}{''.join(gpus)}</nvidia_smi_log>\n"


def gpu(**differences: object) -> str:
    """One that is fine but for these."""
    return NEW.format(**{**FINE, **differences})


def eight(**differences: object) -> str:
    """A machine with eight of them."""
    return log(*(gpu(bus=bus, **differences) for bus in range(1, 9)))


def matrix(words: str = "NV18", odd: str = "NV18", count: int = 8) -> str:
    """`topo -m`; `odd` is between the first and the last."""
    names = [f"GPU{number}" for number in range(count)]
    lines = ["\t\x1b[4m" + "\t".join([*names, "NIC0", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for row in range(count):
        cells = [" X " if row == column else words for column in range(count)]
        if row in (0, count - 1) and count > 1:
            cells[count - 1 - row] = odd
        lines.append("\t".join([names[row], *cells, "PIX", "0-47,96-143", "0", "N/A"]))
    legend = "  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes\n"
    nic = "\t".join(["NIC0", *["PIX"] * count, " X "])
    return "\n".join([*lines, nic, "", "Legend:", "", legend])


def install(folder: Path, *, query: str = "", topo: str = "", names: str = "", code: int = 0) -> str:
    """A nvidia-smi that prints these, and the PATH on which it is."""
    for name, text in (("query", query), ("topo", topo), ("names", names)):
        (folder / name).write_text(text)
    program = folder / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in\n-q) cat {folder}/query; exit {code};;\ntopo) cat {folder}/topo;;\n'
        f"*) cat {folder}/names; exit {code};;\nesac\n"
    )
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"
