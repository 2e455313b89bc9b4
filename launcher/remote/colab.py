"""Google Colab's runtimes as hosts: colab:NAME is a session of Google's program `colab` (google-colab-cli)."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from launcher.errors import LaunchError, NotAuthorised, UnreachableError, UsageError
from launcher.remote import colab_proxy

ADDRESS: Final = re.compile(r"colab:(?!\d{1,5}$)([A-Za-z0-9][\w.-]*)")
"""colab:NAME; with a number it is a port of the host `colab`."""
NEW: Final = "colab new -s NAME --gpu T4"
ERRORS: Final[tuple[tuple[str, type[LaunchError], str, str], ...]] = (
    (
        r"\[colab\] the program is not installed",
        LaunchError,
        "Google's program colab is not installed",
        "Install it (Python 3.12 or later): uv tool install --python 3.12 google-colab-cli",
    ),
    (
        r"\[colab\] unknown session",
        UsageError,
        "the program colab has no session NAME",
        f"Take a runtime, which uses compute units: {NEW}\nTo see all sessions: colab sessions",
    ),
    (r"\[colab\] session '.*' not found", LaunchError, "the runtime of NAME has ended", f"Take another one: {NEW}"),
    (
        r"\[colab\] .*HTTP 429",
        UnreachableError,
        "another SSH connection to NAME is open; Colab allows only one",
        "Close it, such as `colab ssh` or an editor's, and repeat the command.",
    ),
    (
        r"\[colab\] .*HTTP 404",
        LaunchError,
        "the runtime of NAME is older than Colab's support of SSH",
        f"Take another one: colab stop -s NAME && {NEW}",
    ),
    (
        r"\[colab\] .*HTTP 40[13]",
        NotAuthorised,
        "Colab refuses the connection: the session of NAME may have expired",
        f"See what runs: colab sessions\nTake another runtime: {NEW}",
    ),
    (
        r"\[colab\] .*(unsupported key type|no SSH public key found)",
        NotAuthorised,
        "Colab accepts only Ed25519 and ECDSA keys, from ~/.ssh/id_ed25519 or id_ecdsa",
        "Make one: ssh-keygen -t ed25519",
    ),
    (
        r".*(Permission denied|Too many authentication failures)",
        NotAuthorised,
        "NAME refuses the login: ssh does not offer the key that colab sent, ~/.ssh/id_ed25519 or id_ecdsa",
        "Add it: ssh-add ~/.ssh/id_ed25519",
    ),
    (
        r"(To authorize colab-cli|No valid default credentials|\S*DefaultCredentialsError|\S*RefreshError)",
        NotAuthorised,
        "the program colab is not logged in",
        "Log in: colab sessions",
    ),
)
"""The beginning of a line that ssh or `colab` 0.7.5 prints, and the error: its class, the problem and what to do."""


def ssh_options(session: str, log: Path) -> dict[str, str]:
    """Return ssh's options for a session. `log`: the file for the errors of `colab`.

    As in Google's own `colab ssh`, the host key is not checked: each runtime has a new one, and the WebSocket's TLS and
    the session's token say which runtime answers.
    """
    proxy = shlex.join([sys.executable, "-I", colab_proxy.__file__, session, str(log)])
    return {
        "ProxyCommand": proxy.replace("%", "%%"),
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",  # else ssh warns that it has stored the key
        "ControlPersist": "60",  # another client can't connect before its end
    }


def connection_error(session: str, text: str, log: Path) -> LaunchError:
    """Return the error of a connection that failed, from what ssh printed, and `colab` to its log."""
    with suppress(OSError):
        text += "\n" + log.read_text(encoding="utf-8", errors="replace")
        log.unlink()
    for pattern, error, problem, hint in ERRORS:
        if re.search(f"^{pattern}", text, re.MULTILINE):
            return error(problem.replace("NAME", f"colab:{session}"), hint.replace("NAME", session))
    lines = [line for line in text.splitlines() if line.startswith("[colab]")] or text.splitlines() or ["no message"]
    return UnreachableError(
        f"no connection to colab:{session}: {lines[-1].removeprefix('[colab] ')}", "Try: colab sessions"
    )
