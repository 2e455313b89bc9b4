"""The Python of a job on a host: one that is there, or a virtual environment with the packages of the spec.

What an image would contain is installed by the same steps (`launcher.plan.recipe`). A Python of the host whose PyTorch
the requirements allow is the base of the environment, so that PyTorch is neither downloaded nor stored again; without
one, the base is an environment with launch's own packages and PyTorch, which all specs with that PyTorch share.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec.structs import replace

from launcher import catalog
from launcher.errors import LaunchError, PlanRefused, UsageError
from launcher.inputs import requirements
from launcher.inputs.content import hashed
from launcher.inputs.interpreter import PROBE, Interpreter, check_fitness, needs_of
from launcher.plan.model import Packages, Torch
from launcher.plan.names import json_digest
from launcher.plan.placement import choose
from launcher.plan.recipe import INDEX, Recipe, admits_python, allowed, first, host_recipe, host_script, wanted_build
from launcher.text import plural

if TYPE_CHECKING:
    from launcher.catalog import Gpu
    from launcher.inputs.gather import Inputs
    from launcher.remote.agent import Agent

NODE_PACKAGES: Final = ("numpy", "tensorboard", "google-cloud-storage", "google-crc32c", "nvidia-ml-py", "psutil")
"""Launch's own packages of a job: those of containers/node.in."""
PROBE_ARGV: Final = ("-E", "-c", PROBE, json.dumps([["torch", "pip", *NODE_PACKAGES], []]))
"""What follows a Python of the host, to ask it for the versions of these packages."""
INSTALL_SECONDS: Final = 3600.0


def packages_of(inputs: Inputs) -> dict[str, Any]:
    """Return what a request says of the packages that a host must have: `torch` (as the requirements have it; absent:
    the job needs none), `requirements` (their text) and `files` (name -> SHA-256 of a uv.lock and its project)."""
    torch, source = first(inputs.context.packages, "torch"), inputs.source
    packages: dict[str, Any] = {"torch": torch.text if torch else "torch"} if torch or needs_of_python(inputs) else {}
    if source.requirements.strip():
        packages["requirements"] = source.requirements
    if source.project:
        packages["files"] = {file.name: hashed(file.path)[1] for file in source.project}
    return packages


def needs_of_python(inputs: Inputs) -> list[tuple[str, str]]:
    """Return the large packages that launch itself needs for a job, each with what needs it."""
    return [need for need in needs_of(inputs.spec) if need[0] in ("torch", "numpy")]


class HostFacts(NamedTuple):
    """What is known of a host on arrival."""

    pythons: tuple[Interpreter, ...]
    """By preference; with the versions of PyTorch and NODE_PACKAGES."""
    gpu: Gpu | None
    """None: the job runs on processors."""
    driver: int | None
    environments: frozenset[str]
    """The IDs of those that can be used."""
    processor: str
    """Hosts with others may share a home folder."""
    container: Mapping[str, Any] | None = None
    """The container that has these Pythons; None: the host itself has them."""


def facts_of(
    answer: Mapping[str, Any], inputs: Inputs, gpus: int, host: str, *, is_login_node: bool = False
) -> HostFacts:
    """Return the facts in launch_train.host's description of a machine, for a job with so many GPUs. Those of a login
    node are not the job's: it has the GPUs of the spec, and an unknown driver."""
    pythons = (
        Interpreter(path=python["path"], origin=host, version=tuple(version), installed=installed)
        for python in answer["pythons"]
        for version, installed, _ in [python["answer"]]
    )
    gpu, driver = None, ""
    if gpus and is_login_node:
        gpu = choose(inputs.spec, catalog.load(), "local")[0].gpu
    elif gpus:
        device = answer["gpus"][0]
        chosen, driver = choose(inputs.spec, catalog.load(), "local")[0], device["driver"].partition(".")[0]
        gpu = replace(chosen.gpu, title=device["name"], sm=device["capability"] or chosen.gpu.sm, max_driver=None)
    number = int(driver) if driver.isdecimal() else None
    return HostFacts(tuple(pythons), gpu, number, frozenset(answer["environments"]), answer["processor"])


def provide_python(agent: Agent, facts: HostFacts, named: str, inputs: Inputs, say: Callable[[str], None]) -> str:
    """Return the path of the Python on the host that runs the job; make its environment, unless it exists.

    `named` is the only Python to use, as it is; empty: any.

    Raises:
        LaunchError: no Python there is suitable, no PyTorch that the requirements allow runs there, or packages can't
            be installed.
    """
    host, source, packages = agent.connection.host, inputs.source, inputs.context.packages
    if named:
        if not facts.pythons:
            raise LaunchError(f"{named} on {host.name} is no Python", f"Try: ssh {host.ssh_text} {named} -VV")
        try:
            check_fitness(facts.pythons[0], needs_of_python(inputs))
        except UsageError as error:
            raise LaunchError(f"{host.name}: {error.problem}", f"On {host.name}: {error.hint}") from error
        return facts.pythons[0].path
    problems = {python.path: problem_of(python, inputs) for python in facts.pythons}
    suitable = next((python for python in facts.pythons if not problems[python.path]), None)
    has_packages = bool(source.requirements.strip() or source.project)
    needs = needs_of(replace(inputs.spec, secrets={}))  # which are sent to a host, not read there
    missing = suitable and any(package not in suitable.installed for package, _ in needs)
    if suitable and not has_packages and not missing:
        return suitable.path
    check_installable(inputs)
    if suitable and not (packages.hashed and first(packages, "torch")):
        version, _, build = suitable.installed.get("torch", "").partition("+")
        torch = Torch(version=version, build=build, index=f"{INDEX}/{build}" if build else "") if version else None
        recipe = Recipe(packages=packages, torch=torch, full=False, python="", secrets=(), compiler=False, setup=())
        lacks = any(name not in suitable.installed for name in NODE_PACKAGES)
        return install(agent, facts, inputs, suitable, host_script(recipe, on_base=True, with_lock=lacks), say)
    if unused := next((python for python in facts.pythons if "torch" in python.installed), None):
        say(f"{host.name}: the PyTorch of {unused.path} is not used: {problems[unused.path]}")
    base, recipe = choose_base(facts, inputs, host.name)
    if packages.hashed and first(packages, "torch"):
        return install(agent, facts, inputs, base, host_script(recipe, on_base=False, with_lock=True), say)
    script = host_script(replace(recipe, packages=Packages()), on_base=False, with_lock=True)
    path = install(agent, facts, inputs, base, script, say, torch=recipe.torch)
    if not has_packages:
        return path
    script = host_script(replace(recipe, full=False), on_base=True, with_lock=False)
    return install(agent, facts, inputs, replace(base, path=path), script, say)


def python_of_pyxis(named: str, inputs: Inputs) -> str:
    """Return the Python of a Pyxis container, which can't be asked for its packages on a login node. Raises
    LaunchError: some would have to be installed."""
    if inputs.source.requirements.strip() or inputs.source.project:
        problem = f"image.requirements: {inputs.spec.image.requirements}: not installed into a Pyxis container"
        raise LaunchError(problem, "Name an image that has them, and that: --python python3. Or --container FILE.sif")
    return named or "python3"


def problem_of(python: Interpreter, inputs: Inputs) -> str:
    """Return why a Python of the host is no base for the job's packages; empty: it is."""
    packages = inputs.context.packages
    try:
        check_fitness(python, needs_of_python(inputs))
    except UsageError as error:
        return error.problem
    version = f"{python.version[0]}.{python.version[1]}"
    if not admits_python(packages.requires_python, version):
        return f"it is Python {version}, and the project's requires-python is {packages.requires_python}"
    if torch := first(packages, "torch"):
        release, _, build = python.installed.get("torch", "").partition("+")
        wanted = wanted_build(inputs.spec, packages)
        if not release or not allowed(torch, (release,), prereleases=True) or (wanted and build not in ("", wanted)):
            return f"{torch.where} needs {torch.text}; it has {python.installed.get('torch', 'none')}"
    return ""


def check_installable(inputs: Inputs) -> None:
    """Check that pip or uv can install what the image would contain. Raises LaunchError."""
    image, fix = inputs.spec.image, "Create the environment on the host yourself, and name its Python: --python PATH"
    if inputs.context.packages.tool == "conda":
        raise LaunchError(
            f"image.requirements: {image.requirements}: conda's packages are not installed on a host", fix
        )
    if image.torch and image.torch != "base":
        raise LaunchError("image.torch: a custom wheel is not installed on a host", fix)
    if unset := [name for name in image.build_secrets if not os.environ.get(name)]:
        problem = f"image.build_secrets: {unset[0]} is not set in this shell"
        raise UsageError(problem, f"Set it where you run launch: export {unset[0]}=VALUE", field="image.build_secrets")


def choose_base(facts: HostFacts, inputs: Inputs, host: str) -> tuple[Interpreter, Recipe]:
    """Return the Python of the host that makes an environment with PyTorch, and what this gets. Raises LaunchError."""
    refused = LaunchError(
        f"{host} has no Python that can run this job",
        "Install one there: apt-get install python3 python3-venv, or uv python install (https://docs.astral.sh/uv)",
    )
    chosen = choose(inputs.spec, catalog.load(), "local")[0]
    context = replace(inputs.context, driver=facts.driver)
    for python in facts.pythons:
        if python.version >= ((3, 11) if inputs.spec.run.is_builtin else (3, 10)):
            try:
                return python, host_recipe(inputs.spec, catalog.load(), context, chosen, python.version, facts.gpu)
            except PlanRefused as error:
                refused = LaunchError(f"{host}: {error.problem}", error.hint)
                if "image.python" in error.hint:  # which has no effect there
                    refused.hint = "Install such a Python there (uv python install VERSION), and name it: --python PATH"
    raise refused


def install(
    agent: Agent,
    facts: HostFacts,
    inputs: Inputs,
    base: Interpreter,
    script: str,
    say: Callable[[str], None],
    *,
    torch: Torch | None = None,
) -> str:
    """Return the Python of the environment that a script makes, by the Python `base`; run it unless that exists.

    `torch`: it gets this and launch's packages, and none of the job's.

    Raises LaunchError: packages can't be installed, with the installer's reason.
    """
    source, host = inputs.source, agent.connection.host.name
    texts = {"requirements.txt": "" if torch else source.requirements}
    texts |= {file.name: file.path.read_text(encoding="utf-8") for file in source.project if not torch}
    locks = {file.name: file for file in (*source.locks, *source.recipe) if file.name in script}
    texts |= {name: file.path.read_text(encoding="utf-8") for name, file in locks.items()}
    image = facts.container["image"] if facts.container else ""
    request = {
        "id": json_digest((script, texts, base.path, base.version, facts.processor, image), 16),
        "container": facts.container,
        "python": base.path,
        "script": script,
        "files": texts,
        "secrets": {name: os.environ[name] for name in inputs.spec.image.build_secrets if not torch},
    }
    if request["id"] not in facts.environments:
        count = len([*requirements.packages(texts["requirements.txt"])])
        packages = [f"torch {torch.version}+{torch.build}"] if torch else []
        packages += (
            [str(inputs.spec.image.requirements)] if count or (source.project and not torch) else ["launch's packages"]
        )
        packages += [plural(count, "package")] if count else []
        say(f"{host}: making the environment ({', '.join(packages)})…")
    return str(agent.call("environment", request, seconds=INSTALL_SECONDS)["python"])
