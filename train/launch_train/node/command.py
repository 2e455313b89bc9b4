"""Build the argument lists and environments of what a node starts. Pure but for the NCCL script of the machine's
image."""

from __future__ import annotations

import argparse
import json
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

SITECUSTOMIZE: Final = str(Path(__file__).with_name("sitecustomize"))
"""A folder that contains only sitecustomize.py, which keeps the lines of processes whole."""

TORCHRUN: Final = str(Path(__file__).with_name("torchrun_wrapper.py"))


@dataclass(frozen=True)
class Task:
    """A program to run. `kind` is module, script or command; a command has no `target`, and `args` is all of it."""

    launcher: str
    kind: str
    target: str
    args: tuple[str, ...]


def parse_args(argv: Sequence[str]) -> Task:
    """Parse the node's command line; argparse exits with 2 on errors."""
    parser = argparse.ArgumentParser(
        prog="launch_train.node", description="Run one machine's part of a run.", allow_abbrev=False
    )
    parser.add_argument(
        "--launcher",
        choices=("torchrun", "python"),
        default="torchrun",
        help="start one process per GPU, or a single one (default: torchrun)",
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--module", metavar="M", help="run python -m M (default: launch_train)")
    target.add_argument("--script", metavar="S", help="run python S")
    target.add_argument("--command", action="store_true", help="run ARGS as a command line, once")
    parser.add_argument("args", nargs="*", metavar="ARGS", help="arguments of the program, after --")
    # What follows the first -- is the program's.
    cut = list(argv).index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:cut])
    args = (*options.args, *argv[cut + 1 :])
    if options.command:
        if not args:
            parser.error("--command needs a command after --")
        return Task("python", "command", "", args)
    if options.script:
        return Task(options.launcher, "script", options.script, args)
    return Task(options.launcher, "module", options.module or "launch_train", args)


def missing_target(task: Task, folder: Path) -> str:
    """Return what the task needs and `folder` (the working directory) lacks, in one line; empty if nothing is
    missing."""
    if task.kind == "script" and not (folder / task.target).is_file():
        return f"{task.target}: no such file in {folder}"
    if task.kind == "command" and not shutil.which(task.args[0]):
        return f"{task.args[0]}: no such command"
    if task.kind == "module" and (absent := _missing_module(task.target, folder)):
        return f"{task.target}: no module {absent} in {folder}, and none is installed"
    return ""


def _missing_module(module: str, folder: Path) -> str:
    """Return the first part of a module's name that can't be found, without importing anything; "" if all are found."""
    parts = module.split(".")
    where: Sequence[str] | None = [*sys.path, str(folder)]
    for count, part in enumerate(parts, start=1):
        if where is None:
            return f"{module} ({'.'.join(parts[: count - 1])} is not a package)"
        found = PathFinder.find_spec(part, where) or (find_spec(part) if count == 1 else None)
        if found is None:
            return ".".join(parts[:count])
        inside = found.submodule_search_locations
        where = getattr(inside, "_path", inside)  # iterating a namespace path would import its parent
    return ""


def command(task: Task, cluster: Cluster, order: Order, *, processes: int, run: str, grace: float) -> list[str]:
    """Return the argument list for one generation on this node."""
    target = ["-m", task.target] if task.kind == "module" else [task.target]
    if task.kind == "command":
        return list(task.args)
    if task.launcher == "python":
        return [sys.executable, *target, *task.args]
    return [*_torchrun(cluster, order, processes, run, grace), *target, *task.args]


def _torchrun(cluster: Cluster, order: Order, processes: int, run: str, grace: float) -> list[str]:
    """Return torchrun's arguments, with its own restarts disabled: in torch 2.13 they reuse a stale store and hang.

    https://github.com/pytorch/pytorch/issues/135712 and 167288
    """
    # -P: torchrun must not import a logging.py of the user's folder.
    argv = [sys.executable, "-P", TORCHRUN, f"--nproc-per-node={processes}", "--max-restarts=0"]
    argv += [f"--rdzv-id={run}-{order.attempt}-{order.generation}", f"--shutdown-timeout={max(1, round(grace))}"]
    if cluster.size == 1:  # torchrun picks a free port, without a race
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
    """Files and folders that the node shares with the processes of one generation (see contract).

    `code` is the user's; its modules come after the standard library (sitecustomize/sitecustomize.py). `spool` is None
    without a run folder.
    """

    code: Path
    exit_file: Path
    notice: Path
    spool: Path | None
    watch: Path
    faults: Path


def child_env(environ: Mapping[str, str], order: Order, node: int, *, gpus: int, paths: Paths) -> dict[str, str]:
    """Return the environment of the processes of one generation; `gpus` are visible on this node."""
    return {
        **environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (SITECUSTOMIZE, environ.get("PYTHONPATH")))),
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


def framework_env(task: Task, cluster: Cluster, order: Order, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which TensorFlow and JAX find the nodes, for a program that is started once per node.

    TF_CONFIG is what tf.distribute.cluster_resolver.TFConfigClusterResolver reads: one worker per node, none for a
    single node. JAX_COORDINATOR_ADDRESS is read by jax.distributed.initialize (jax/_src/distributed.py); JAX has no
    names for the other two, which a script passes to it. Workers listen on the ports of CLUSTER_SPEC, which on node 0
    the control store has: worker 0 takes the generation's. A user's own coordinator is kept.
    """
    if task.launcher == "torchrun" or not all(cluster.nodes):
        return {}
    host = cluster.nodes[0].rpartition(":")[0] if cluster.size > 1 else "localhost"
    first = f"{host}:{order.port}"
    found: dict[str, str] = {}
    if "JAX_COORDINATOR_ADDRESS" not in environ:
        found["JAX_COORDINATOR_ADDRESS"] = first
        found |= {"JAX_NUM_PROCESSES": str(cluster.size), "JAX_PROCESS_ID": str(cluster.node)}
    if cluster.size > 1:
        workers = [first, *cluster.nodes[1:]]
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": cluster.node}}
        found["TF_CONFIG"] = json.dumps(config)
    return found


def rehearsal_env(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return `environ` without the settings for the cloud's network, and a line about it, or ""."""
    settings = [name for name in environ if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG")]
    settings += [name for name in (contract.NCCL_SCRIPT, contract.LIBRARY_PATH) if name in environ]
    env = {name: value for name, value in environ.items() if name not in settings}
    line = f"local run: ignored cloud network settings ({', '.join(settings)})"
    return env, line if settings else ""


def machine_env(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return `environ` with the settings of the machine's image (NCCL script and libraries), and a warning, or "".

    a3-mega, a4 and others need NCCL settings that a script in the image sets.
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
        result = subprocess.run(shell, env=dict(environ), capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return dict(environ), f"{script} could not be sourced ({error}): NCCL may be slow"
    if result.returncode:
        last = os.fsdecode(result.stderr).strip().rpartition("\n")[2]
        return dict(environ), f"{script} failed with code {result.returncode} ({last}): NCCL may be slow"
    pairs = (pair.partition("=") for pair in os.fsdecode(result.stdout).split("\0") if pair)
    shell_variables = {"_", "SHLVL", "PWD", "OLDPWD"}
    return {name: value for name, _, value in pairs if name not in shell_variables or name in environ}, ""
