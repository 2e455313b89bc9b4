"""Docker for the startup script, where no engine is needed: the container's command as a process of this machine.

WORLD holds its state: container (the process group's id), log, exit. An entrypoint `python` is PYTHON_HERE. With
ENGINE, an engine's real program, it is that one that runs the container. Either way what this machine doesn't have is
left out: GPUs, of which the node says so as in a rehearsal, and Google, in whose place SITE (JSON) names the loopback
cloud.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WORLD = Path(os.environ["WORLD"]) / "docker"
CONTAINER, LOG, EXIT = WORLD / "container", WORLD / "log", WORLD / "exit"
VALUED = {"--name", "--network", "--ulimit", "--stop-timeout", "--log-driver", "--log-opt", "--volume"}
ENGINE = os.environ.get("ENGINE", "")
SITE: dict[str, str] = json.loads(os.environ["SITE"])


def main(command: str, *arguments: str) -> int:
    if ENGINE:
        return engine(command, list(arguments))
    known = {"run": run, "wait": wait, "stop": stop, "logs": logs, "ps": ps, "inspect": inspect, "start": again}
    return known[command](*arguments) if command in known else 0


def rehearsed(name: str, value: str) -> str:
    """A variable as it is where no GPU is."""
    return value.replace('"environment": "cloud"', '"environment": "here"') if name == "CLUSTER_SPEC" else value


def engine(command: str, arguments: list[str]) -> int:
    """The real one, without the GPUs."""
    if command == "run":
        for missing in ("--gpus", "--ulimit"):  # in a container itself this machine may not lift limits
            at = arguments.index(missing)
            del arguments[at : at + 2]
        for number, word in enumerate(arguments[:-1]):
            if word == "--env":
                name, _, value = arguments[number + 1].partition("=")
                arguments[number + 1] = f"{name}={rehearsed(name, value)}"
        last = arguments.index("--entrypoint")
        arguments[last:last] = [word for name, value in SITE.items() for word in ("--env", f"{name}={value}")]
    os.execv(ENGINE, [ENGINE, command, *arguments])


def run(*arguments: str) -> int:
    env, entrypoint, words = dict(SITE), "", list(arguments)
    while words and words[0].startswith("--"):
        word = words.pop(0)
        if word == "--env":
            name, _, value = words.pop(0).partition("=")
            env[name] = rehearsed(name, value)
        elif word == "--entrypoint":
            entrypoint = words.pop(0)
        elif word in VALUED or word == "--gpus":
            words.pop(0)
    program = os.environ["PYTHON_HERE"] if entrypoint == "python" else entrypoint
    (WORLD / "command").write_text(json.dumps([program, *words[1:]]))
    # WORLD: by that a test finds what is left.
    env |= {"PATH": os.environ["PATH"], "HOME": str(WORLD), "WORLD": os.environ["WORLD"]}
    return begin(env)


def begin(env: dict[str, str]) -> int:
    """The container runs. Its exit code, whatever ends it, is kept."""
    (WORLD / "env").write_text(json.dumps(env))
    keep = f"import subprocess,sys;open({str(EXIT)!r},'w').write(str(subprocess.run(sys.argv[1:]).returncode))"
    with LOG.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", keep, *json.loads((WORLD / "command").read_text())],
            env=env,
            cwd=WORLD,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    CONTAINER.write_text(str(process.pid))
    return 0


def again(*_name: str) -> int:
    EXIT.unlink(missing_ok=True)
    return begin(json.loads((WORLD / "env").read_text()))


def is_running() -> bool:
    return CONTAINER.exists() and not EXIT.exists()


def ps(*_filters: str) -> int:
    if CONTAINER.exists():
        print("running" if is_running() else "exited")
    return 0


def inspect(*_format: str) -> int:
    code = int(EXIT.read_text() or 1)
    print(128 - code if code < 0 else code)
    return 0


def wait(*_name: str) -> int:
    while is_running() or not EXIT.read_text():
        time.sleep(0.02)
    return inspect()


def logs(*_options: str) -> int:
    sys.stdout.write("".join(LOG.read_text(errors="replace").splitlines(keepends=True)[-20:]))
    return 0


def stop(*_options: str) -> int:
    """SIGTERM to its first process alone; after the time that the script gives, the end of all."""
    group, until = int(CONTAINER.read_text()), time.monotonic() + 25
    children = Path(f"/proc/{group}/task/{group}/children")
    for pid in children.read_text().split() if children.exists() else ():
        os.kill(int(pid), signal.SIGTERM)
    while is_running() and time.monotonic() < until:
        time.sleep(0.05)
    if is_running():
        os.killpg(group, signal.SIGKILL)
        EXIT.write_text("137")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
