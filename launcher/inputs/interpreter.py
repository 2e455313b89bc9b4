"""Choose the Python that runs a job on this machine, and look at its packages without importing them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import invalidate_caches
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from launcher import catalog
from launcher.errors import UsageError
from launcher.plan.recipe import PINNED
from launcher.spec.models import JobSpec

OWN: Final = "launch's own"
EARLIER: Final = "as in an earlier attempt; --python chooses another"
VARIABLES: Final = ("VIRTUAL_ENV", "CONDA_PREFIX")
TRAINER: Final = "the built-in trainer"
OLDEST_PYTHON: Final = (3, 10)
"""For the node and the API for scripts; the built-in trainer needs OLDEST_FOR_TRAINER."""
OLDEST_FOR_TRAINER: Final = (3, 11)
PROBE_SECONDS: Final = 60.0
"""Time limit of the process that looks: on a network file system a first start takes seconds."""
PROBE: Final = """
import json, sys
sys.path = [folder for folder in sys.path if folder]
packages, modules = json.loads(sys.argv[1])
version, installed, lacks = list(sys.version_info[:3]), {}, []
if version >= [3, 10]:
    from importlib.metadata import PackageNotFoundError, distribution
    from importlib.util import find_spec
    for name in packages:
        try:
            installed[name] = distribution(name).version
        except PackageNotFoundError:
            pass
    lacks = [name for name in modules if find_spec(name) is None]
print(json.dumps([version, installed, lacks]))
"""
"""Any Python since 2.7 runs it. The last line of its output is the answer."""


Answers = tuple[list[int], dict[str, str], list[str]]


class Wanted(NamedTuple):
    """The packages and modules to look for in an interpreter."""

    needs: Sequence[tuple[str, str]] = ()
    """Packages without which launch can't start the job, each with what needs it."""
    packages: Sequence[str] = ()
    modules: Sequence[str] = ()
    is_dry: bool = False
    """Nothing starts, so launch's own Python is looked at for packages and modules alone: it costs 35 ms."""


class Interpreter(Struct, frozen=True, kw_only=True):
    """The Python that runs a job on this machine."""

    path: str
    """Absolute, but not resolved: the python of a virtual environment is a link, whose place names the environment."""
    origin: str
    """How it was chosen: --python, local.python, EARLIER, one of VARIABLES, or OWN."""
    version: tuple[int, ...] = ()
    installed: Mapping[str, str] = {}
    """Version of each wanted package that is installed."""
    lacks: tuple[str, ...] = ()
    """The wanted modules that can't be imported."""
    error: UsageError | None = None
    """Why it can't run the job."""
    note: str = ""
    """Why the Python of the active environment is not used."""

    @property
    def is_named(self) -> bool:
        """Return whether the user named it, so that nothing else may take its place."""
        return self.origin in ("--python", "local.python")

    @property
    def text(self) -> str:
        """Return `/a/.venv/bin/python (VIRTUAL_ENV), Python 3.12.1, torch 2.13.0`."""
        torch = f"torch {self.installed['torch']}" if "torch" in self.installed else "without torch"
        versions = f", Python {'.'.join(map(str, self.version))}, {torch}" if self.version else ""
        return f"{self.path} ({self.origin}){versions}"

    def install(self, *words: str) -> str:
        """Return the command that installs packages there."""
        pip = f"{self.path} -m pip install" if "pip" in self.installed else f"uv pip install --python {self.path}"
        return " ".join([pip, *words])


def find_interpreter(
    wanted: Wanted, environ: Mapping[str, str], *, option: str | None, setting: Path | None, earlier: str | None
) -> Interpreter:
    """Return the interpreter of a job: that of --python (`option`), else of local.python (`setting`), else that of the
    run's earlier attempts if it still exists, else the active environment's, else launch's own.

    The active environment's is used only if it can run the job.
    """
    if option is not None:
        return look_at(Path(option).expanduser(), "--python", wanted)
    if setting is not None:
        return look_at(setting.expanduser(), "local.python", wanted)
    if earlier and os.path.isfile(earlier):  # noqa: PTH113 -- Path.is_file raises on a name that is too long
        return look_at(Path(earlier), EARLIER, wanted)
    variable = next((name for name in VARIABLES if environ.get(name)), "")
    note = ""
    if variable and os.path.realpath(environ[variable]) != os.path.realpath(sys.prefix):
        active = look_at(Path(environ[variable], "bin", "python"), variable, wanted)
        if active.error is None:
            return active
        note = f"the environment of {variable} is not used: {active.error.problem}"
    if wanted.is_dry and not (wanted.packages or wanted.modules):
        return Interpreter(path=sys.executable, origin=OWN, note=note)
    return replace(look_at(Path(sys.executable), OWN, wanted), note=note)


def needs_of(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the packages that launch itself needs to run a spec's job on this machine, each with what needs it."""
    run = spec.run
    if run.is_builtin:
        yield from (("torch", TRAINER), ("numpy", TRAINER))
    elif run.launcher != "python" and not run.command and run.node != "none":
        yield "torch", "torchrun (run.launcher: python starts one process without it)"
    elif spec.machine.nodes > 1:
        yield "torch", "a job of several nodes"
    if spec.secrets or (spec.output or "").startswith("gs://"):
        yield "google-cloud-storage", "secrets" if spec.secrets else f"output: {spec.output}"


def look_at(path: Path, origin: str, wanted: Wanted) -> Interpreter:
    """Return an interpreter with its version and packages. Starts one process, and none for launch's own."""
    interpreter = Interpreter(path=os.path.abspath(path), origin=origin)  # noqa: PTH100 -- Path.resolve follows links
    packages = list(dict.fromkeys(["torch", "pip", *(package for package, _ in wanted.needs), *wanted.packages]))
    try:
        ask = answers_here if is_launchs_python(interpreter.path) else answers
        version, installed, lacks = ask(interpreter.path, tuple(packages), tuple(wanted.modules))
        interpreter = replace(interpreter, version=tuple(version), installed=installed, lacks=tuple(lacks))
        check_fitness(interpreter, wanted.needs)
    except UsageError as error:
        if interpreter.is_named:
            error.problem, error.field = f"{origin}: {error.problem}", "" if origin == "--python" else origin
        return replace(interpreter, error=error)
    return interpreter


def is_launchs_python(path: str) -> bool:
    """Return whether a path is the Python that runs launch; python and python3 of its environment are the same."""
    folders = (os.path.realpath(os.path.dirname(each)) for each in (path, sys.executable))  # noqa: PTH120 -- text
    return len({*folders}) == 1 and os.path.realpath(path) == os.path.realpath(sys.executable)


def answers_here(_: str, packages: tuple[str, ...], modules: tuple[str, ...]) -> Answers:
    """As `answers`, of the Python that runs launch, without a process."""
    from importlib.metadata import PackageNotFoundError, distribution
    from importlib.util import find_spec

    invalidate_caches()  # image.setup may have installed packages since launch began
    installed = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            installed[name] = distribution(name).version
    return [*sys.version_info[:3]], installed, [name for name in modules if find_spec(name) is None]


@cache  # the points of a sweep ask the same
def answers(path: str, packages: tuple[str, ...], modules: tuple[str, ...]) -> Answers:
    """Return an interpreter's version, the versions of the installed packages, and the modules that it lacks.

    Raises UsageError: it is not a Python that runs.
    """
    if Path(path).is_dir():
        inside = next((file for name in ("bin/python", "python") if (file := Path(path, name)).exists()), None)
        raise UsageError(f"{path} is a folder", f"Name its Python: {inside or 'DIR/bin/python'}")
    if not os.path.exists(path):  # noqa: PTH110 -- Path.exists raises on a name that is too long
        environment = Path(path).parent.parent if Path(path).parent.name == "bin" else Path(".venv")
        raise UsageError(f"{path} does not exist", f"Create the environment: python3 -m venv {environment}")
    try:
        done = subprocess.run(
            [path, "-c", PROBE, json.dumps([packages, modules])],
            cwd="/",
            env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
            check=False,
        )
        version, installed, lacks = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except OSError as error:
        raise UsageError(f"{path} can't be started: {error.strerror}", "Name a Python: .venv/bin/python") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{path} did not answer in {PROBE_SECONDS:g} s", f"Try it: {path} -VV") from error
    except (ValueError, TypeError) as error:
        said = (done.stderr or done.stdout).strip().rpartition("\n")[2][:200] or f"it exited with {done.returncode}"
        raise UsageError(f"{path} is not a working Python: {said}", f"Try it: {path} -VV") from error
    return version, installed, lacks


def check_fitness(interpreter: Interpreter, needs: Sequence[tuple[str, str]]) -> None:
    """Check that an interpreter can run the job. Raises UsageError, with the command that mends it."""
    version, is_trainer = ".".join(map(str, interpreter.version)), TRAINER in dict(needs).values()
    if interpreter.version < (floor := OLDEST_FOR_TRAINER if is_trainer else OLDEST_PYTHON):
        what = TRAINER if is_trainer else "launch"
        raise UsageError(
            f"{interpreter.path} is Python {version}; {what} needs {'.'.join(map(str, floor))} or newer",
            "Create a newer environment: python3.12 -m venv .venv",
        )
    releases = catalog.load().torch_releases
    fitting = [release.version for release in releases if ".".join(map(str, interpreter.version[:2])) in release.python]
    newest = PINNED if PINNED in fitting or not fitting else fitting[-1]
    for package, what in needs:
        fix = interpreter.install(f"torch=={newest}" if package == "torch" else package)
        if (installed := interpreter.installed.get(package)) is None:
            raise UsageError(f"{interpreter.path} has no {package}, which {what} needs", fix)
        oldest = PINNED.rpartition(".")[0] if what == TRAINER else releases[0].version
        if package == "torch" and minor_version(installed) < minor_version(oldest):
            raise UsageError(f"{interpreter.path} has torch {installed}; {what} needs {oldest} or newer", fix)


def minor_version(version: str) -> tuple[int, ...]:
    """Return (2, 9) of 2.9.1+cu126."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
