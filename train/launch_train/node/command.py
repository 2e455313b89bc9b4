"""What a node starts: argument lists and environments. Pure but for the script of the machine's image."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from launch_train.common import contract
from launch_train.node.cluster import Cluster
from launch_train.node.control_store import Order

WHOLE_LINES: Final = str(Path(__file__).with_name("sitecustomize"))
"""A folder that holds nothing but a sitecustomize.py: no process tears another's lines."""

TORCHRUN: Final = str(Path(__file__).with_name("torchrun.py"))


@dataclass(frozen=True)
class Task:
    """What to run: `kind` is module, script or command; with command, `target` is empty and `args` is all of it."""

    launcher: str
    kind: str
    target: str
    args: tuple[str, ...]


def parse_args(argv: Sequence[str]) -> Task:
    """The node's command line; argparse exits with 2 and its own line when it can't be taken."""
    parser = argparse.ArgumentParser(
        prog="launch_train.node", description="One machine's part of a run.", allow_abbrev=False
    )
    parser.add_argument("--launcher", choices=("torchrun", "python"), default="torchrun", help="how to start it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--module", metavar="M", help="started as python -m M (default: launch_train)")
    what.add_argument("--script", metavar="S", help="started as python S")
    what.add_argument("--command", action="store_true", help="ARGS is a command line, started once as it is")
    parser.add_argument("args", nargs="*", metavar="ARGS", help="after --, for what is started")
    # What stands after the first -- is not ours to read.
    cut = list(argv).index("--") if "--" in argv else len(argv)
    ours = parser.parse_args(argv[:cut])
    args = (*ours.args, *argv[cut + 1 :])
    if ours.command:
        if not args:
            parser.error("--command needs a command after --")
        return Task("python", "command", "", args)
    if ours.script:
        return Task(ours.launcher, "script", ours.script, args)
    return Task(ours.launcher, "module", ours.module or "launch_train", args)


def missing(task: Task, folder: Path) -> str:
    """What the task names and `folder` (the working directory) doesn't have, in one line; empty if all is there."""
    if task.kind == "script" and not (folder / task.target).is_file():
        return f"{task.target}: no such file in {folder}"
    if task.kind == "command" and not shutil.which(task.args[0]):
        return f"{task.args[0]}: no such command"
    if task.kind == "module" and (lacking := _lacking(task.target, folder)):
        return f"{task.target}: there is no module {lacking}, neither in {folder} nor installed"
    return ""


def _lacking(module: str, folder: Path) -> str:
    """The first part of a module's name that nothing is found for, without importing any; "" if all of it is there."""
    parts = module.split(".")
    where: Sequence[str] | None = [*sys.path, str(folder)]
    for count, part in enumerate(parts, start=1):
        if where is None:
            return f"{module} ({'.'.join(parts[: count - 1])} is no package)"
        found = PathFinder.find_spec(part, where) or (find_spec(part) if count == 1 else None)
        if found is None:
            return ".".join(parts[:count])
        inside = found.submodule_search_locations
        where = getattr(inside, "_path", inside)  # a namespace's would look for its parent, which isn't imported
    return ""


def command(task: Task, cluster: Cluster, order: Order, *, processes: int, run: str, grace: float) -> list[str]:
    """The argument list for one generation on this node."""
    target = ["-m", task.target] if task.kind == "module" else [task.target]
    if task.kind == "command":
        return list(task.args)
    if task.launcher == "python":
        return [sys.executable, *target, *task.args]
    return [*_torchrun(cluster, order, processes, run, grace), *target, *task.args]


def _torchrun(cluster: Cluster, order: Order, processes: int, run: str, grace: float) -> list[str]:
    """torchrun without restarts of its own: in torch 2.13 they reuse a stale store and hang.

    https://github.com/pytorch/pytorch/issues/135712 and 167288
    """
    # -P: a logging.py in the user's folder must not become torchrun's.
    argv = [sys.executable, "-P", TORCHRUN, f"--nproc-per-node={processes}", "--max-restarts=0"]
    argv += [f"--rdzv-id={run}-{order.attempt}-{order.generation}", f"--shutdown-timeout={max(1, round(grace))}"]
    if cluster.size == 1:  # torchrun finds a port by itself, without a race
        return [*argv, "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    # The static rendezvous keeps the ranks in the order of the nodes.
    return [
        *argv,
        f"--nnodes={cluster.size}",
        f"--node-rank={cluster.node}",
        f"--master-addr={cluster.host}",
        f"--master-port={order.port}",
    ]


@dataclass(frozen=True)
class Paths:
    """Where the node and the processes of one generation meet (see the contract): `code` is the user's, whose modules
    come behind Python's own (sitecustomize/sitecustomize.py); without a run folder there is no `spool`."""

    code: Path
    exit_file: Path
    notice: Path
    spool: Path | None
    watch: Path
    faults: Path


def child_env(environ: Mapping[str, str], order: Order, node: int, *, gpus: int, paths: Paths) -> dict[str, str]:
    """The environment of the processes of one generation; `gpus` are visible on this node."""
    return {
        **environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (WHOLE_LINES, environ.get("PYTHONPATH")))),
        contract.ATTEMPT: str(order.attempt),
        contract.GENERATION: str(order.generation),
        contract.NODE: str(node),
        contract.VISIBLE_GPUS: str(gpus),
        contract.CODE: str(paths.code),
        contract.EXIT_FILE: str(paths.exit_file),
        contract.NOTICE: str(paths.notice),
        contract.WATCH: str(paths.watch),
        contract.FAULTS: str(paths.faults),
        **({contract.SPOOL: str(paths.spool)} if paths.spool else {}),
    }


def rehearsal_env(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """`environ` without what the request says about the cloud's network, which isn't here; and a line, or ""."""
    settings = [name for name in environ if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG")]
    settings += [name for name in (contract.NCCL_SCRIPT, contract.LIBRARY_PATH) if name in environ]
    env = {name: value for name, value in environ.items() if name not in settings}
    line = f"a rehearsal: what the request sets for the cloud's network is left out ({', '.join(settings)})"
    return env, line if settings else ""


def machine_env(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """`environ` with what the machine's image adds: its NCCL script and its libraries; and a warning, or "".

    a3-mega, a4 and others need their own NCCL settings, which a script of the image sets.
    """
    env, warning = _sourced(environ)
    if folders := environ.get(contract.LIBRARY_PATH):
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, (folders, env.get("LD_LIBRARY_PATH"))))
    return env, warning


def _sourced(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    script = environ.get(contract.NCCL_SCRIPT, "")
    if not script or not Path(script).is_file():
        return dict(environ), ""
    shell = ["bash", "-c", 'source "$1" >&2 && exec env -0', "bash", script]
    try:
        done = subprocess.run(shell, env=dict(environ), capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return dict(environ), f"{script} could not be sourced ({error}): NCCL may be slow"
    if done.returncode:
        last = os.fsdecode(done.stderr).strip().rpartition("\n")[2]
        return dict(environ), f"{script} failed with code {done.returncode} ({last}): NCCL may be slow"
    pairs = (pair.partition("=") for pair in os.fsdecode(done.stdout).split("\0") if pair)
    shells_own = {"_", "SHLVL", "PWD", "OLDPWD"}
    return {name: value for name, _, value in pairs if name not in shells_own or name in environ}, ""
