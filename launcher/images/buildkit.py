"""Build with BuildKit, through the docker command: Docker's SDK speaks only to the engine's older builder.

A recipe needs BuildKit for build secrets and for a user's own Dockerfile. As with the older builder, the build gets
neither passwords nor proxies of Docker's configuration.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

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
    values = secret_values(secrets, environ)
    program = shutil.which("docker", path=environ.get("PATH"))
    if program is None:
        raise EngineError("this build needs BuildKit, and the docker command is not installed", INSTALL)
    words = [word for name in secrets for word in ("--secret", f"id={name},env={name}")]
    command = [program, "build", "--progress=plain", *options, *words, "-"]
    last = deque[str](maxlen=LAST_LINES)

    def show(line: str) -> None:
        last.append(mask_secrets(line, values.values()))
        on_line(last[-1])

    with tempfile.TemporaryDirectory(prefix="launch-docker-") as config:
        keep_plugins(Path(config), environ)
        status = run(command, client_environment(environ, host, config) | values, context, show)
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


def client_environment(environ: Mapping[str, str], host: str, config: str) -> dict[str, str]:
    """Return all that the docker command gets of this machine's environment, besides the secrets."""
    return {
        "PATH": environ.get("PATH", os.defpath),
        "DOCKER_HOST": host,
        "DOCKER_CONFIG": config,
        "DOCKER_BUILDKIT": "1",
        **{name: environ[name] for name in ("DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY") if name in environ},
    }


def secret_values(secrets: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of build secrets. Raises UsageError: one is not set."""
    if missing := [name for name in secrets if not environ.get(name)]:
        raise UsageError(
            f"image.build_secrets: {missing[0]} is not set in this shell",
            f"Set it where you run launch: export {missing[0]}=VALUE",
            field="image.build_secrets",
        )
    return {name: environ[name] for name in secrets}


def keep_plugins(config: Path, environ: Mapping[str, str]) -> None:
    """Link the user's plugins (buildx) into an otherwise empty configuration."""
    home = environ.get("DOCKER_CONFIG") or os.path.join(environ.get("HOME", ""), ".docker")  # noqa: PTH118 -- may be empty
    plugins = Path(home, "cli-plugins")
    if plugins.is_dir():
        (config / "cli-plugins").symlink_to(plugins)


def mask_secrets(line: str, secrets: Iterable[str]) -> str:
    """Return a line of output with each line of a secret masked; programs in the build may print them."""
    parts = {part for value in secrets for part in value.splitlines() if part.strip()}
    for part in sorted(parts, key=len, reverse=True):  # one may begin another
        line = line.replace(part, HIDDEN)
    return line
