"""Build with BuildKit, through the docker command: Docker's SDK speaks only to the engine's older builder.

A recipe needs BuildKit for build secrets and for a user's own Dockerfile. As with the older builder, the build gets
neither passwords nor proxies of Docker's configuration.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from launch_train.common.scratch import temporary_folder
from launcher.errors import UsageError
from launcher.images.docker_events import LAST_LINES, EngineError, OnLine, hint_for

INSTALL = "Install Docker's command with its buildx plugin: https://docs.docker.com/engine/install/"
NO_BUILDX = "buildx component is missing"
HIDDEN = "***"


def build(
    context: IO[bytes],
    options: Sequence[str],
    *,
    host: str,
    environ: Mapping[str, str],
    secrets: Sequence[str],
    on_line: OnLine,
) -> None:
    """Run `docker build` with a context as tar on its standard input. The values of `secrets` come from `environ`.

    Raises:
        UsageError: a secret is not set.
        EngineError: the docker command or BuildKit is not available, or a step failed (with its last lines).
    """
    if missing := [name for name in secrets if not environ.get(name)]:
        raise UsageError(
            f"image.build_secrets: {missing[0]} is not set in this shell",
            f"Set it where you run launch: export {missing[0]}=VALUE",
            field="image.build_secrets",
        )
    program = shutil.which("docker", path=environ.get("PATH"))
    if program is None:
        raise EngineError("this build needs BuildKit, and the docker command is not installed", INSTALL)
    words = [word for name in secrets for word in ("--secret", f"id={name},env={name}")]
    command = [program, "build", "--progress=plain", *options, *words, "-"]
    masked = {part for name in secrets for part in environ[name].splitlines() if part.strip()}
    last = deque[str](maxlen=LAST_LINES)

    def show(line: str) -> None:
        for part in sorted(masked, key=len, reverse=True):  # one may begin another; programs in the build print them
            line = line.replace(part, HIDDEN)
        last.append(line)
        on_line(line)

    kept = ("DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", *secrets)
    with temporary_folder("docker") as config:
        # The configuration is empty but for the user's plugins (buildx).
        home = environ.get("DOCKER_CONFIG") or os.path.join(environ.get("HOME", ""), ".docker")  # noqa: PTH118 -- may be empty
        if (plugins := Path(home, "cli-plugins")).is_dir():
            Path(config, "cli-plugins").symlink_to(plugins)
        env = {"PATH": environ.get("PATH", os.defpath), "DOCKER_HOST": host, "DOCKER_CONFIG": config}
        env |= {"DOCKER_BUILDKIT": "1", **{name: environ[name] for name in kept if name in environ}}
        status = run(command, env, context, show)
    if status:
        text = "\n  ".join(last)
        hint = INSTALL if NO_BUILDX in text else hint_for(text)
        raise EngineError(f"the build failed (docker build: exit code {status})\n  {text}", hint)


def run(command: Sequence[str], env: Mapping[str, str], stdin: IO[bytes], on_line: OnLine) -> int:
    """Run a command and return its exit code; both of its streams go to `on_line`."""
    with subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env) as process:
        try:
            for line in process.stdout or ():
                on_line(line.decode(errors="replace").rstrip())
            return process.wait()
        except BaseException:
            process.kill()
            raise
