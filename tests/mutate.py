"""`make mutants`: break the product one line at a time, in a copy, and see that the named tests fail.

    python -m tests.mutate [--part N/4] [ID …]

The tests run in a virtual environment of the copy, which doesn't know the checkout: processes that tests start import
the copy too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Literal, NamedTuple
from xml.etree import ElementTree as ET

from tests.command import ROOT
from tests.conftest import part_of
from tests.mutants import Mutant, mutants

WORKERS: Final = 2
LIMIT_SECONDS: Final = 1200.0
"""For the tests of one mutant. A break that makes a test hang must be replaced by one that makes it fail."""
PACKAGES = {"launcher": "launcher", "launch_train": "train/launch_train", "tests": "tests"}

Outcome = Literal["caught", "SURVIVED", "broken"]


class Copy(NamedTuple):
    """A copy of the checkout, and the Python whose imports come from it."""

    root: Path
    python: Path


class Ran(NamedTuple):
    """One run of pytest: its exit code, the number of tests, and the ids of those that failed, or that had an error
    outside of the test (in a fixture, while it was collected)."""

    code: int
    tests: int
    failed: frozenset[str]
    errors: frozenset[str]
    output: str


class Result(NamedTuple):
    """What came of one mutant."""

    mutant: Mutant
    outcome: Outcome
    seconds: float
    why: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Try the mutants. Return 1 if one survives or is broken, or if a test fails without any."""
    asked = arguments(argv)
    try:
        chosen = selected(asked.ids, asked.part)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [copied(Path(folder) / f"copy{number}") for number in range(WORKERS)]
        began = time.monotonic()
        unbroken = pytest(copies[0], sorted({test for mutant in chosen for test in mutant.tests}))
        if unbroken.code != 0:
            print(unbroken.output, "The tests fail without any mutant.", sep="\n")
            return 1
        print(f"{unbroken.tests} tests pass without a mutant ({time.monotonic() - began:.0f} s)", flush=True)
        results = [shown(result) for result in tried(chosen, copies)]
    caught = sum(result.outcome == "caught" for result in results)
    print(f"{caught} of {len(results)} mutants caught ({time.monotonic() - began:.0f} s)")
    return int(caught < len(results))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="N/OF", help="every OF-th mutant from the N-th")
    parser.add_argument("ids", nargs="*", metavar="ID", help="default: all")
    return parser.parse_args(argv)


def selected(ids: Sequence[str], part: tuple[int, int]) -> list[Mutant]:
    """Return the mutants with these ids (none: all), of those the part. Raises ValueError: an id is unknown."""
    known = {mutant.id: mutant for mutant in mutants()}
    if unknown := [one for one in ids if one not in known]:
        raise ValueError(f"unknown mutants: {', '.join(unknown)}; tests/mutants.yaml lists them")
    number, of = part
    return [known[one] for one in ids or known][number - 1 :: of]


def copied(folder: Path) -> Copy:
    """Copy the checkout, with what isn't committed, and make it a virtual environment of its own.

    Its packages are this environment's, by path: the .pth files there, which lead to the checkout, aren't read again.
    """
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():  # else it was deleted, and that isn't committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    venv.create(folder / ".venv", symlinks=True)
    site = next((folder / ".venv" / "lib").glob("python3.*/site-packages"))
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "copy.pth").write_text("\n".join([str(folder), str(folder / "train"), *packages, ""]))
    made = Copy(folder, folder / ".venv" / "bin" / "python")
    check_imports(made)
    return made


def check_imports(copy: Copy) -> None:
    """Check that Python imports the packages from the copy, whatever the environment says. Raises RuntimeError."""
    source = "import sys; print(*(__import__(name).__file__ for name in sys.argv[1:]), *sys.path, sep='\\n')"
    command = [str(copy.python), "-I", "-c", source, *PACKAGES]
    lines = subprocess.run(command, cwd="/", capture_output=True, check=True, text=True).stdout.splitlines()
    expected = [str(copy.root / PACKAGES[name] / "__init__.py") for name in PACKAGES]
    if lines[: len(PACKAGES)] != expected or str(ROOT) in lines:
        raise RuntimeError(f"the tests would not import the copy: {lines}")


def tried(chosen: Sequence[Mutant], copies: Sequence[Copy]) -> Iterator[Result]:
    """Try mutants, one in each copy at once; yield the results in the order of the mutants."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(mutant: Mutant) -> Result:
        copy = free.get()
        try:
            return outcome(mutant, copy)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as threads:
        yield from threads.map(one, chosen)


def outcome(mutant: Mutant, copy: Copy) -> Result:
    """Break the copy, run the mutant's tests, and repair it."""
    began = time.monotonic()
    try:
        with broken(mutant, copy.root):
            ran = pytest(copy, mutant.tests)
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        return Result(mutant, "broken", time.monotonic() - began, str(error))
    seconds = time.monotonic() - began
    if ran.code == 0:
        return Result(mutant, "SURVIVED", seconds, f"{ran.tests} tests pass")
    if ran.code != 1 or ran.errors:
        why = f"pytest exited with {ran.code}; {len(ran.errors)} errors outside of the tests"
        return Result(mutant, "broken", seconds, f"{why}\n{ran.output}")
    failed = {one.partition("[")[0] for one in ran.failed} | ran.failed
    if passed := [test for test in mutant.tests if test not in failed]:
        return Result(mutant, "SURVIVED", seconds, f"no failure of {', '.join(passed)}")
    return Result(mutant, "caught", seconds)


@contextmanager
def broken(mutant: Mutant, root: Path) -> Iterator[None]:
    """Write the mutant's file with the break, then as it was. Raises ValueError: it doesn't apply."""
    file = root / mutant.file
    before, after = file.read_text(), mutant.applied(root)
    file.write_text(after)
    try:
        yield
    finally:
        file.write_text(before)


def pytest(copy: Copy, tests: Sequence[str]) -> Ran:
    """Run tests in a copy. Raises TimeoutExpired, after all of its processes were killed."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "PYTEST_ADDOPTS", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    # Neither mutant's code may be left behind for the next one; and a copy's own caches would only be in the way.
    environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PATH": f"{copy.python.parent}{os.pathsep}{environ.get('PATH', '')}"}
    with tempfile.TemporaryDirectory(prefix="mutants-run-") as folder:
        report = Path(folder) / "report.xml"
        command = [copy.python, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", f"--junitxml={report}"]
        output, code = finished([*map(str, command), f"--basetemp={folder}/tests", *tests], copy.root, environ)
        cases = [*ET.parse(report).getroot().iter("testcase")] if report.is_file() else []
    failed, errors = (frozenset(id_of(one) for one in cases if one.find(kind) is not None) for kind in KINDS)
    return Ran(code, len(cases), failed, errors, output)


KINDS: Final = ("failure", "error")


def id_of(case: ET.Element) -> str:
    """Return the id of a test in a JUnit report, as pytest takes it."""
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


def finished(command: Sequence[str], cwd: Path, environ: dict[str, str]) -> tuple[str, int]:
    """Return a process's output and exit code. Raises TimeoutExpired, after its group was killed."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=cwd, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=LIMIT_SECONDS)[0], process.returncode
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def shown(result: Result) -> Result:
    """Print a result."""
    why = f": {result.why}" if result.why else ""
    print(f"{result.outcome:8}  {result.mutant.id}  {result.seconds:.1f} s{why}", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
