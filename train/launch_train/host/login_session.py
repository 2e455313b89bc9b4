"""Keep a job alive at the logout, also where systemd-logind kills what a session leaves (logind.conf(5),
KillUserProcesses): a scope of the account's own service manager is no part of the session."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from pathlib import Path
from typing import Final

from launch_train.host.errors import RefusedError

CGROUP: Final = Path("/proc/self/cgroup")
LINGER: Final = Path("/var/lib/systemd/linger")
"""Has a file for each account whose service manager does not end with its last session (loginctl enable-linger)."""
BUS_SECONDS, MOVE_SECONDS = 10.0, 5.0
LOGIND: Final = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
MANAGER: Final = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")


def leave_login_session(unit: str) -> None:
    """Move this process to the scope `unit` if logind would kill it at the logout. Raises RefusedError: it can't."""
    user = pwd.getpwuid(os.getuid()).pw_name
    if not is_in_session() or not is_killed_at_logout(user):
        return
    problem = "this host ends all processes of an account when it logs out (KillUserProcesses in logind.conf)"
    if not (LINGER / user).exists():
        raise RefusedError(
            problem, "Let those of your account's services live on, once, on the host: loginctl enable-linger"
        )
    call_bus(
        "--user",
        "call",
        *MANAGER,
        "StartTransientUnit",
        "ssa(sv)a(sa(sv))",
        unit,
        "fail",
        "1",
        "PIDs",
        "au",
        "1",
        str(os.getpid()),
        "0",
    )
    until = time.monotonic() + MOVE_SECONDS
    while is_in_session():
        if time.monotonic() > until:
            raise RefusedError(f"{problem}, and this one can't leave its session", "systemctl --user status")
        time.sleep(0.05)


def is_in_session() -> bool:
    """Return whether this process is part of a login's session."""
    try:
        return "/session-" in CGROUP.read_text(encoding="utf-8")
    except OSError:
        return False


def is_killed_at_logout(user: str) -> bool:
    """Return whether logind kills the processes of an account's sessions at their end."""
    answer = call_bus("get-property", *LOGIND, "KillUserProcesses", "KillExcludeUsers", "KillOnlyUsers").splitlines()
    if len(answer) != 3 or answer[0] != "b true":
        return False
    excluded, only = (line.split()[2:] for line in answer[1:])  # as 2 "root" "me"
    return f'"{user}"' not in (excluded or ['"root"']) and (not only or f'"{user}"' in only)


def call_bus(*words: str) -> str:
    """Return what busctl prints; empty if it fails or there is none."""
    try:
        ran = subprocess.run(("busctl", *words), capture_output=True, text=True, timeout=BUS_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout
