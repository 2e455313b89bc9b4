"""A cluster of Debian's Slurm on this machine: munged, slurmctld and two nodes, each with two GPUs, which are device
files. It needs root, as slurmd does; it needs no systemd. With LAUNCH_TEST_SLURM_ROOT it is the Slurm of the Debian in
that folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.ssh.server import SshServer, free_port

ROOT: Final = os.environ.get("LAUNCH_TEST_SLURM_ROOT", "/")
SLURMCTLD = shutil.which("slurmctld", path="/usr/sbin") or ROOT != "/"
MUNGED = shutil.which("munged", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
"""Debian's packages slurm-wlm and munge."""
NODES: Final = ("127.0.0.2", "127.0.0.3")
"""Names of nodes are addresses, so that they need no entry in /etc/hosts."""

SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
SlurmctldParameters=enable_configless
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
KillWait=10
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{more}
NodeName=DEFAULT CPUs=8 RealMemory=8000 Gres=gpu:h100:2
NodeName=127.0.0.[2-3] NodeAddr=127.0.0.[2-3] NodeHostname={host} Port=[{first}-{second}]
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=20 MaxTime=INFINITE OverTimeLimit=0
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=ALL PriorityTier=1 MaxTime=2
"""


COMMANDS: Final = ("sbatch", "squeue", "scancel", "scontrol", "srun", "sinfo", "sacct")
PROGRAM: Final = """#!/bin/sh
export SLURM_CONF={settings}
[ / -ef {root} ] || exec unshare --mount sh -c '
  for place in /usr/local/ /*/; do
    case $place in /usr/|/etc/|/var/|/bin/|/sbin/|/lib*/) continue ;; esac
    mkdir -p "$0$place" && mount --rbind "$place" "$0$place" || exit
  done
  exec /usr/sbin/chroot "$0" "$@"' {root} {program} "$@"
exec {program} "$@"
"""
"""A program of Slurm. One of another Debian sees the files of this machine, but for the system's."""


class SlurmCluster:
    """A running cluster. `env` is what its commands need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.env: Mapping[str, str] = {"PATH": f"{self.programs}:{os.environ['PATH']}"}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.programs.mkdir(parents=True)
        for name in (*COMMANDS, "slurmctld", "slurmd"):
            program = f"/usr/{'bin' if name in COMMANDS else 'sbin'}/{name}"
            text = PROGRAM.format(settings=folder / "slurm.conf", root=ROOT, program=program)
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start one of its daemons."""
        env = {**os.environ, **self.env}
        with (self.folder / f"{Path(argv[0]).name}.log").open("ab") as log:
            process = subprocess.Popen(  # it ends with the tests, also if these are killed
                ("setpriv", "--pdeathsig", "TERM", *argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def run(self, *argv: str) -> str:
        """Run a command of Slurm and return its output."""
        ran = subprocess.run(
            argv, capture_output=True, text=True, env={**os.environ, **self.env}, timeout=60, check=False
        )
        assert ran.returncode == 0, f"{argv}: {ran.stderr}{ran.stdout}"
        return ran.stdout.strip()

    def states(self) -> dict[str, str]:
        """Return the state of each job by its number."""
        rows = self.run("squeue", "--noheader", "--states=all", "--format=%A %T").splitlines()
        return dict(row.split() for row in rows)

    def let_in(self, host: SshServer) -> None:
        """Make a host its login node."""
        for name in COMMANDS:
            host.program(name, f'exec {self.programs}/{name} "$@"')

    def stop(self) -> None:
        """End its jobs and daemons."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root", "--signal=KILL", "--full")
            self.run("scancel", "--user=root")
            until = time.monotonic() + 15
            while self.run("squeue", "--noheader") and time.monotonic() < until:
                time.sleep(0.2)
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


@contextmanager
def a_cluster(folder: Path, *, more: str = "") -> Iterator[SlurmCluster]:
    """Start a cluster. `more`: further lines of its settings."""
    if not SLURMCTLD or MUNGED is None:
        pytest.skip("Slurm is not installed (Debian: slurm-wlm, munge)")
    if os.getuid():
        pytest.skip("slurmd needs root")
    cluster = SlurmCluster(folder)
    for name in ("state", "gpu"):
        (folder / name).mkdir()
    ports = [free_port() for _ in range(2)]
    first = first_of_two_free_ports()
    spool = Path(tempfile.mkdtemp(prefix="slurm-"))  # the path of a socket there has at most 107 characters
    settings = SETTINGS.format(
        spool=spool,
        host=socket.gethostname().partition(".")[0],
        port=ports[0],
        folder=folder,
        first=first,
        second=first + 1,
        more=more,
    )
    (folder / "slurm.conf").write_text(settings)
    gres = ["AutoDetect=off"]
    for node in NODES:
        for index in range(2):
            device = folder / "gpu" / f"{node}-{index}"
            os.mknod(device, 0o020666, os.makedev(1, 3))
            gres.append(f"NodeName={node} Name=gpu Type=h100 File={device}")
    (folder / "gres.conf").write_text("\n".join(gres) + "\n")
    if ROOT != "/":
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")  # unknown to 22.05
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    # munged may only be reached through folders that others cannot write.
    munged = ("--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket")
    files = tuple(f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed"))
    try:
        cluster.start(MUNGED, *munged, *files)
        until_true((folder / "munge.socket").exists)
        cluster.start("slurmctld", "-D")
        for node in NODES:
            cluster.start("slurmd", "-D", "-N", node)
        until_true(lambda: idle_nodes(cluster) == 2, lambda: (folder / "slurmctld.log").read_text()[-3000:])
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(spool, ignore_errors=True)


def idle_nodes(cluster: SlurmCluster) -> int:
    """Return how many nodes can take a job; 0 while slurmctld does not answer."""
    with suppress(AssertionError, subprocess.TimeoutExpired):
        return cluster.run("sinfo", "--noheader", "--Node", "--partition=low", "--states=idle").count("127.0.0.")
    return 0


def until_true(test: Callable[[], object], report: Callable[[], str] = str, seconds: float = 90.0) -> None:
    """Wait until a test holds."""
    end = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < end, report()
        time.sleep(0.1)


def first_of_two_free_ports() -> int:
    """Return a port that is free, as the next one is: slurm.conf wants a range."""
    while True:
        port = free_port()
        with socket.socket() as second, suppress(OSError):
            second.bind(("127.0.0.1", port + 1))
            return port
