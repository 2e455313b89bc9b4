"""Open the storage of a run folder, and convert its errors to launch's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from launch_train.common.storage import OutputError, Storage, open_storage
from launch_train.common.storage import UnreachableError as FolderUnreachable
from launcher.errors import LaunchError, NotAuthorised, UnreachableError, UsageError
from launcher.gcp.api import LOG_IN, status_of


def open_folder(folder: str) -> Storage:
    """Open a run folder: gs://…, ssh://HOST/…, or one on this machine. Raises UsageError: it is in a bucket, but there
    is neither an endpoint nor credentials."""
    with use_errors():
        if folder.startswith("ssh://"):
            from launcher.remote.folder import open_host_folder

            return open_host_folder(folder)
        return open_storage(folder)


@contextmanager
def use_errors() -> Iterator[None]:
    """Raise UsageError, or NotAuthorised without credentials, if a run folder can't be used."""
    try:
        yield
    except OutputError as error:
        if type(error.__cause__).__module__.startswith("google.auth"):
            problem = f"the run folder can't be used: {without_command(error)}"
            raise NotAuthorised(problem, LOG_IN) from error
        raise UsageError(f"the run folder can't be used: {error}", "Use another folder: --output DIR") from error


@contextmanager
def read_errors() -> Iterator[None]:
    """Raise UnreachableError if a run folder is unreachable, LaunchError if it can't be read."""
    try:
        yield
    except FolderUnreachable as error:
        raise UnreachableError(f"the run folder is unreachable: {error}", "Try again in a moment.") from error
    except OutputError as error:
        raise LaunchError(f"the run folder can't be read: {error}") from error


def explain_error(error: OutputError, make: Mapping[str, str]) -> LaunchError:
    """Convert the error of a run folder in a bucket, and add the command that creates the bucket.

    Args:
        error: the storage's error; its text may end in a gcloud command with placeholders.
        make: values for the placeholders PROJECT and REGION.
    """
    from google.auth.exceptions import GoogleAuthError

    if isinstance(error, FolderUnreachable):
        return UnreachableError(str(error), "Nothing was created. Try again in a moment.")
    if status_of(error) == 401 or isinstance(error.__cause__, GoogleAuthError):
        return NotAuthorised(without_command(error), LOG_IN)
    problem, command = without_command(error), str(error).partition(": gcloud ")[2]
    fix = f"gcloud {command} --project=PROJECT" if command else ""
    for name, value in make.items():
        fix = fix.replace(name, value)
    return UsageError(f"the run folder can't be used: {problem}", fix)


def without_command(error: OutputError) -> str:
    """Return an error's text without the gcloud command at its end, which belongs in the hint."""
    return str(error).partition(": gcloud ")[0]
