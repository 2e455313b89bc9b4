"""Build the container's command, arguments and environment, which are the same on every service."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from msgspec import to_builtins
from msgspec.structs import replace

from launch_train.common import contract
from launcher.catalog import Gpu, Nccl
from launcher.plan.model import Chosen, Container, Image, Shared
from launcher.spec.models import BUILTIN, JobSpec

ENTRYPOINT = ("python", "-m", "launch_train.node")


def container(spec: JobSpec, chosen: Chosen, shared: Shared, nccl: Nccl | None) -> Container:
    """Return the container of each node. `nccl` is None if the machine's network needs no settings."""
    run = spec.run
    if run.node == "none":
        # The image's entrypoint starts without launch's node; the run folder is for the program's own use.
        folder = {contract.RUN_FOLDER: shared.run_folder} if shared.run_folder else {}
        env = {contract.RUN: shared.run, **folder, **nccl_env(nccl), **spec.env}
        return Container(command=run.command or (), args=run.args, env=env)
    if run.command:
        program: tuple[str, ...] = ("--command", "--", *run.command, *run.args)
    else:
        named = ("--script", run.script) if run.script else ("--module", run.module or BUILTIN)
        launcher = ("--launcher", run.launcher) if run.launcher == "python" else ()
        program = (*launcher, *named, *(("--", *run.args) if run.args else ()))
    resume = {"glob": run.resume_glob, "args": run.resume_args}
    gpu_memory = {}
    if (gb := spec.machine.gpu_memory_gb) is not None:  # launch_train's own limit, and JAX's
        share = f"{gb / chosen.gpu.memory_gb:.3f}"
        gpu_memory = {contract.GPU_MEMORY: f"{gb:g}", "XLA_PYTHON_CLIENT_MEM_FRACTION": share}
    notify = {}
    if wanted := spec.notify:  # as train/launch_train/node/notify.py reads it
        settings = {"webhook": wanted.webhook, "on": wanted.on, "format": wanted.format, "usd": spec.limits.usd}
        notify = {contract.NOTIFY: as_json(settings)}
    return Container(
        command=ENTRYPOINT,
        args=program,
        env={
            # A user's launch_train.py must not shadow the package: Python then adds no script folder to sys.path.
            "PYTHONSAFEPATH": "1",
            contract.RUN: shared.run,
            **({contract.RUN_FOLDER: shared.run_folder} if shared.run_folder else {}),
            **({contract.CONFIG: as_json(run.config)} if run.config else {}),
            contract.PROCESSES: str(chosen.gpus),
            contract.RESTARTS: str(spec.limits.restarts),
            contract.HOURS: f"{shared.hours:g}",
            **({contract.MTBF: f"{shared.mtbf_hours:.4g}"} if shared.mtbf_hours else {}),
            contract.GPU: as_json(gpu_facts(chosen.gpu, shared.image)),
            **({contract.PREFLIGHT: run.preflight} if run.preflight != "off" else {}),
            **({contract.HANG_AFTER: f"{run.hang_after:g}"} if run.hang_after else {}),
            **({contract.SCRIPT_METRICS: as_json(to_builtins(run.metrics))} if run.metrics else {}),
            **({contract.RESUME: as_json(resume)} if run.resume_glob else {}),
            **({contract.LOGGERS: ",".join(run.loggers)} if run.loggers is not None else {}),
            **notify,
            **gpu_memory,
            **({contract.SECRETS: as_json(spec.secrets)} if spec.secrets else {}),
            **nccl_env(nccl),
            **{contract.PYTHON_PATH if name == "PYTHONPATH" else name: value for name, value in spec.env.items()},
        },
    )


def gpu_facts(gpu: Gpu, image: Image | None) -> dict[str, object]:
    """Return the GPU's figures for launch_train, which has no catalog. The driver is that of the image's own PyTorch,
    if the spec brings one."""
    return {
        "name": gpu.name,
        "memory_gb": gpu.memory_gb,
        "min_driver": image.min_driver if image and image.dockerfile else gpu.min_driver,
        "peak_tflops": dict(gpu.peak_tflops),
    }


def nccl_env(nccl: Nccl | None) -> dict[str, str]:
    """Return the variables of the machine's NCCL settings, setup script and plugin folder."""
    if nccl is None:
        return {}
    return {
        **({contract.NCCL_SCRIPT: nccl.script} if nccl.script else {}),
        **({contract.LIBRARY_PATH: nccl.library_path} if nccl.library_path else {}),
        **nccl.env,
    }


def escaped(value: str) -> str:
    """Escape a value so that Vertex AI's `$(NAME)` expansion leaves it unchanged.

    Vertex AI expands as Kubernetes does: `$(NAME)` is replaced, `$$` becomes `$`, any other `$` stays.
    """
    return re.sub(r"\$(?=[$(])", "$$", value)


def expand(text: str, env: Mapping[str, str]) -> str:
    """Expand `$(NAME)` as Kubernetes and Vertex AI do.

    `$(NAME)` is replaced by the variable's value and `$$` by `$`; unknown names and any other `$` stay unchanged.
    """

    def replacement(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replacement, text)


def expanded(container: Container) -> Container:
    """Return the container with `$(NAME)` expanded, for services that do not expand it themselves."""
    env: dict[str, str] = {}
    for name, value in container.env.items():
        env[name] = value if name in contract.VERBATIM else expand(value, env)
    return replace(container, args=tuple(expand(word, env) for word in container.args), env=env)


def as_json(data: object) -> str:
    """Return canonical JSON: equal data gives equal bytes."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
