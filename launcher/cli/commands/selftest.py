"""`launch selftest`: run every feature once in a project, on small machines."""

from __future__ import annotations

import contextlib
import getpass
import io
import os
import platform
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from launch_train.common.scratch import temporary_folder
from launcher import __version__
from launcher.cli import run
from launcher.cli.flows.cloud import of_project
from launcher.cli.flows.confirm import confirmed
from launcher.cli.help_page import COMMON, COST, RUN, WHERE, option
from launcher.cli.ui.text import WIDTH, wrapped
from launcher.errors import UsageError
from launcher.inputs import gcloud_config
from launcher.inputs.gather import project as default_project
from launcher.inputs.git import commit
from launcher.selftest.cleanup import clean as remove_resources
from launcher.selftest.kit import PREFIX, Kit, Ran
from launcher.selftest.recording import Recorder, recorded, write_bundle
from launcher.selftest.steps import GROUPS, Item, Outcome, Step, check_cap, chosen, items, run_steps, total
from launcher.signals import signals_stop
from launcher.text import usd_text

MARKS = {True: "✓", False: "✗", None: "–"}
ROOT = Path(__file__).resolve().parents[3]
"""The checkout of launch, if it is one."""


def selftest(
    *,
    project: Annotated[
        str | None,
        option(WHERE, "--project", help="Project; default: gcloud's.", metavar="PROJECT"),
    ] = None,
    region: Annotated[
        str | None, option(WHERE, "--region", help="Region; default: gcloud's.", metavar="REGION")
    ] = None,
    usd: Annotated[float, option(COST, "--usd", help="Refuse to run if it could cost more.", metavar="USD")] = 5.0,
    only: Annotated[
        str,
        option(RUN, "--only", help="Some of cpu,vertex,vm,preempt,push; default: all.", metavar="WHAT"),
    ] = "",
    clean: Annotated[bool, option(RUN, "--clean", help="Delete what a killed selftest left, and exit.")] = False,
    yes: Annotated[bool, option(COMMON, "--yes", help="Skip the confirmation.")] = False,
    repository: Annotated[str, typer.Option("--repository", hidden=True)] = "",
) -> None:
    """Run every feature once in a project and report what works.

    Shows what it creates and the maximum cost, asks for confirmation, runs, deletes everything, and writes a redacted
    bundle for bug reports. docs/selftest.md describes the steps.
    """
    groups = [word for word in only.split(",") if word]
    if unknown := [group for group in groups if group not in GROUPS]:
        raise UsageError(f"unknown part {unknown[0]!r} in --only", f"Use some of {','.join(GROUPS)}.")
    with temporary_folder("selftest") as folder, signals_stop():
        kit = kit_of(project, region, Path(folder), repository, needs_region=not clean)
        if clean:
            if not remove(kit, f"{PREFIX}-", everywhere=region is None):
                raise typer.Exit(1)
            return
        steps = chosen(groups)
        resources = items(kit, steps)
        check_cap(kit, resources, usd)
        known = known_values(kit)
        try:
            tempfile.TemporaryFile(dir=Path.cwd()).close()
        except OSError as error:
            raise UsageError(f"cannot write the bundle here: {error}", "cd to a writable folder.") from error
        confirm(kit, resources, yes)
        outcomes, path, is_clean = carried_out(kit, steps, known)
    if any(outcome.ok is False for outcome in outcomes) or not (path and is_clean):
        raise typer.Exit(1)


def kit_of(project: str | None, region: str | None, folder: Path, repository: str, *, needs_region: bool) -> Kit:
    """Return the steps' kit, and set this process's project to the one named. Raises UsageError."""
    os.environ["CLOUDSDK_CORE_PROJECT"] = name = project or default_project("vertex", os.environ)
    where = region or next(iter(gcloud_config.default_regions(os.environ)), "")
    if needs_region and not where:
        raise UsageError("no region is set", "Set one that has L4 GPUs: --region us-central1")
    cloud = of_project(name)
    return Kit(
        id=secrets.token_hex(3),
        project=name,
        region=where,
        folder=folder,
        environ=os.environ,
        clock=cloud.clock,
        vertex=cloud.vertex,
        compute=cloud.compute,
        launch=launch,
        start=start,
        repository=repository,
    )


# --- launch's own commands --------------------------------------------------------------------------------------------


def launch(*argv: str) -> Ran:
    """Run a command in this process. Raises KeyboardInterrupt: a signal stopped it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*argv])
    if code > 128:
        raise KeyboardInterrupt
    return Ran(argv, code, out.getvalue(), err.getvalue())


def start(*argv: str) -> subprocess.Popen[str]:
    """Start a command in a separate process."""
    pipe = subprocess.PIPE
    line = [sys.executable, "-m", "launcher", *argv]
    return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace")


# --- Before -----------------------------------------------------------------------------------------------------------


def confirm(kit: Kit, resources: Sequence[Item], yes: bool) -> None:
    """Show what will be created, and ask. Raises UsageError: no terminal; typer.Exit: the answer is no."""
    say(f"launch selftest creates in project {kit.project}, region {kit.region}:\n")
    for item in resources:
        say(f"  {item.kind:12}{item.name}")
        if item.usd is not None:
            say(f"  {'':12}at most {usd_text(item.usd)}")
    say(f"\nat most {usd_text(total(resources))} in all, including boot disks, excluding network traffic")
    say(f"Everything is removed at the end. If this process is killed:\n  {clean_command(kit)}")
    if not yes and not confirmed("Continue?", "launch selftest asks for confirmation", "Add --yes."):
        raise typer.Exit(2)


# --- The run ----------------------------------------------------------------------------------------------------------


def carried_out(kit: Kit, steps: Sequence[Step], known: Mapping[str, str]) -> tuple[list[Outcome], Path | None, bool]:
    """Run the steps, remove what they created, show the table and write the bundle, also after Ctrl-C.

    Returns the outcomes, the bundle (None: it could not be written), and whether nothing is left in the project.
    """
    outcomes: list[Outcome] = []
    recorder = Recorder()
    path, is_clean = None, False

    def begins(step: Step) -> None:
        recorder.step = step.name
        say(f"launch: {step.name} …")

    try:
        with recorded(recorder):
            try:
                run_steps(kit, steps, outcomes, begins)
            finally:
                recorder.step = "clean"
                is_clean = remove(kit, kit.prefix)
    finally:
        done = {outcome.name for outcome in outcomes}
        missing = [step for step in steps if step.name not in done]
        outcomes += [Outcome(step.name, None, step.target, 0.0, "interrupted") for step in missing]
        print("\n".join(table(outcomes)))
        try:
            path = write_bundle(Path.cwd(), f"{kit.prefix}.zip", results(kit, outcomes), recorder.calls, known)
            say(f"bundle    {path.name} (redacted; attach it to a bug report)")
        except Exception as error:  # noqa: BLE001 - must not hide how the steps went
            say(f"launch: the bundle could not be written: {type(error).__name__}: {error}")
    return outcomes, path, is_clean


def remove(kit: Kit, scope: str, *, everywhere: bool = False) -> bool:
    """Remove the resources of a scope, and print each. Return whether nothing is left."""
    say("launch: removing what was created …")
    try:
        removal = remove_resources(kit, scope, everywhere=everywhere)
    except KeyboardInterrupt:
        say(f"launch: interrupted; this removes the rest:\n  {clean_command(kit)}")
        raise
    for name in removal.removed:
        say(f"launch: removed {name}")
    for problem in removal.problems:
        say(f"launch: not removed: {problem}")
    if removal.problems:
        say(f"launch: something may still be billed; to retry:\n  {clean_command(kit)}")
    return not removal.problems


def clean_command(kit: Kit) -> str:
    """Return the command that removes the rest, in all regions."""
    return f"launch selftest --clean --project {kit.project}"


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of each step, of at most 80 columns."""
    wide = max(len(outcome.name) for outcome in outcomes) + 2
    for outcome in outcomes:
        seconds = f" ({outcome.seconds:.0f} s)" if outcome.seconds >= 1 else ""
        first, *more = wrapped(f"{outcome.found or outcome.why}{seconds}", WIDTH - wide - 2)
        yield f"{MARKS[outcome.ok]} {outcome.name:{wide}}{first}"
        yield from (f"{'':{wide + 2}}{line}" for line in more)


def results(kit: Kit, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the results as the bundle has them (benchmarks/results/selftest-DATE.json)."""
    packages = ("google-cloud-aiplatform", "google-cloud-compute", "google-cloud-storage", "grpcio", "requests")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": revision(ROOT),
        "version": __version__,
        "region": kit.region,
        "python": platform.python_version(),
        "system": platform.system(),
        "packages": {name: or_empty(partial(metadata.version, name)) for name in packages},
        "steps": [outcome.as_data() for outcome in outcomes],
    }


def revision(root: Path) -> str:
    """Return the commit of launch's checkout, or an empty text if launch is installed."""
    project = root / "pyproject.toml"
    if not (root / ".git").exists() or not project.is_file() or 'name = "gcp-launch"' not in project.read_text():
        return ""
    at = commit(root)
    return at.revision if at else ""


def known_values(kit: Kit) -> dict[str, str]:
    """Return values that must not be in the bundle, and their replacements."""
    account = gcloud_config.setting("core/account", os.environ) or ""
    file = Path(os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", "/nonexistent"))
    known = {
        str(ROOT): "CHECKOUT",
        sys.prefix: "PYTHON",
        or_empty(lambda: str(Path.cwd())): "FOLDER",
        or_empty(lambda: str(Path.home())): "HOME",
        or_empty(getpass.getuser): "USER",
        or_empty(socket.gethostname): "HOST",
        account: "ACCOUNT",
        account.partition("@")[0]: "USER",
        account.replace("@", "_").replace(".", "_"): "USER",
        os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN", ""): "TOKEN",
        or_empty(lambda: file.read_text(encoding="utf-8").strip()): "TOKEN",
        kit.repository: "REPOSITORY",
        str(kit.folder): "SPECS",
        kit.project: "PROJECT",
    }
    return {value: word for value, word in known.items() if value not in ("", "/")}


def or_empty(read: Callable[[], str]) -> str:
    """Return what `read` returns, or an empty text if this machine has no such name (as a uid in some containers) or
    package."""
    try:
        return read()
    except (KeyError, OSError, ImportError, RuntimeError, ValueError):
        return ""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
