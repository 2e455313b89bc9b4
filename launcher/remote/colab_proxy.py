"""ssh's ProxyCommand for colab:NAME: run Google's program `colab`, which reaches the runtime over a WebSocket.

`colab ssh --proxy-mode -s NAME` takes a new runtime, which is billed, if it knows no session NAME, also if another
process has just removed it. So it gets a copy of its list of sessions, which has NAME, and is not run without one.

ssh runs this file by its path: standard library only. It discards the errors of a ProxyCommand whose connection
persists, so they go to a file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path


def main(name: str, log: str) -> int:
    """Connect stdin and stdout to the sshd of a Colab session; return the exit code of `colab`. `log`: its errors."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    search_path = os.pathsep.join([os.environ.get("PATH") or os.defpath, str(Path(sys.executable).parent)])
    program = shutil.which("colab", path=search_path)
    if not program:
        sys.exit("[colab] the program is not installed")
    settings = Path("~/.config/colab-cli").expanduser()
    try:
        session = json.loads((settings / "sessions.json").read_bytes())[name]
    except (OSError, ValueError, LookupError, TypeError):
        sys.exit("[colab] unknown session")
    # Without a login it would ask for a code on stdin, which is ssh's; Application Default Credentials never ask.
    auth = "oauth2" if (settings / "token.json").exists() else "adc"
    with suppress(OSError):
        os.setsid()  # Ctrl-C ends the launch that opened the connection, not the connection, which others share
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        sessions = Path(folder, "sessions.json")
        sessions.write_text(json.dumps({name: session}), encoding="utf-8")
        argv = [program, "--auth", auth, "--config", str(sessions), "ssh", "--proxy-mode", "-s", name]
        return subprocess.call(argv, env={**os.environ, "TYPER_STANDARD_TRACEBACK": "1"})  # errors in one line


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
