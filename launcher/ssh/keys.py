"""SSH keys: the user's key (gcloud's) and the VMs' known host keys."""

from __future__ import annotations

import base64
import binascii
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from launcher.errors import LaunchError, UsageError

KEY: Final = "google_compute_engine"
"""In ~/.ssh: gcloud's key, so that gcloud and launch can be used with the same VM."""
HOST_KEYS: Final = "hostkeys"
"""The namespace of guest attributes to which a VM's guest agent writes its host keys at boot."""
KINDS: Final = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa")
"""Kinds of host keys that are used, as in gcloud (googlecloudsdk/command_lib/compute/ssh_utils.py)."""


def settings_folder(environ: Mapping[str, str]) -> Path:
    """Return launch's settings folder (XDG)."""
    own = Path(environ.get("XDG_CONFIG_HOME", ""))
    return (own if own.is_absolute() else home(environ) / ".config") / "launch"


def home(environ: Mapping[str, str]) -> Path:
    """Return the user's home folder. Raises UsageError: none."""
    try:
        return Path(environ.get("HOME") or Path.home())
    except RuntimeError as error:
        raise UsageError("no home folder for SSH keys", "Set HOME.") from error


def ensure_key(folder: Path, report: Callable[[str], None]) -> Path:
    """Return the private key in ~/.ssh. If it does not exist, create it and report that. The public key is in KEY.pub.

    Raises LaunchError: it can't be created.
    """
    key = folder / KEY
    public = key.with_name(f"{KEY}.pub")
    make_ssh_folder(folder)
    with locked(folder):  # ssh-keygen would ask before it overwrites a key that another launch has just created
        if not key.is_file():
            report(f"creating an SSH key without passphrase, where gcloud expects it: {key}")
            keygen("-q", "-t", "rsa", "-b", "3072", "-N", "", "-C", "launch", "-f", str(key))
        elif not public.is_file():
            replace_file(public, keygen("-y", "-f", str(key)))
    return key


def keygen(*argv: str) -> str:
    """Run ssh-keygen and return its output. It may ask for a passphrase on the terminal. Raises LaunchError."""
    try:
        ran = subprocess.run(["ssh-keygen", *argv], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise missing_program("ssh-keygen") from None
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"could not create an SSH key: {error.stderr.strip()}") from error
    return ran.stdout


def missing_program(program: str) -> LaunchError:
    return LaunchError(
        f"{program} is not installed", "Install OpenSSH's client (Debian, Ubuntu: apt install openssh-client)."
    )


def public_key(key: Path) -> str:
    """Return the public key in one line. Raises LaunchError."""
    file = key.with_name(f"{key.name}.pub")
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise LaunchError(f"can't read {file}: {error}", f"ssh-keygen -y -f {key} > {file}") from error


def host_keys(attributes: Mapping[str, str]) -> tuple[str, ...]:
    """Return a VM's host keys ("ssh-ed25519 AAAA…") from its guest attributes.

    The VM itself wrote them, so values that are not base64 are ignored.
    """
    words = {kind: attributes.get(kind, "").split() for kind in KINDS}
    return tuple(f"{kind} {values[0]}" for kind, values in words.items() if values and is_base64(values[0]))


def is_base64(text: str) -> bool:
    """Return whether a text is base64 and nothing else."""
    try:
        return bool(text) and base64.b64encode(base64.b64decode(text, validate=True)).decode() == text
    except (ValueError, binascii.Error):
        return False


def known_hosts(settings: Path, alias: str) -> Path:
    """Return the file with one VM's host keys.

    Each VM has its own file, so that concurrent launches and ssh, which appends to it, can't overwrite each other's
    keys.
    """
    return settings / "known_hosts.d" / alias


def store_host_keys(settings: Path, alias: str, keys: tuple[str, ...]) -> bool:
    """Replace the stored host keys of a VM by those that Google has, and return whether it has any.

    If it has none, keys that ssh learned at the first contact are kept. Raises LaunchError: the file can't be written.
    """
    file = known_hosts(settings, alias)
    make_ssh_folder(file.parent)
    text = "".join(f"{alias} {key}\n" for key in keys)
    if text and text_of(file) != text:
        replace_file(file, text)
    return bool(keys)


def forget(settings: Path, alias: str) -> None:
    """Remove a VM's host keys. Raises LaunchError."""
    file = known_hosts(settings, alias)
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise LaunchError(f"can't remove {file}: {error.strerror}") from error


def make_ssh_folder(folder: Path) -> None:
    """Create a folder that only its owner can access. Raises LaunchError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"can't create {folder}: {error.strerror}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other launches on this machine while its files are read and rewritten.

    Without effect on file systems without locks (some NFS).
    """
    import fcntl  # Windows, which lacks it, shows the help of each command

    descriptor = -1
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def text_of(file: Path) -> str:
    """Return a file's text; empty if it does not exist. Raises LaunchError."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise LaunchError(f"can't read {file}: {error.strerror}") from error


def replace_file(file: Path, text: str) -> None:
    """Replace a file atomically. A new file is readable by its owner only.

    Links are followed, because dotfiles may be kept elsewhere. Raises LaunchError.
    """
    target = Path(os.path.realpath(file))
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
        descriptor, new = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as stream:  # noqa: PTH123 -- a descriptor
            stream.write(text)
        Path(new).chmod(mode)
        Path(new).replace(target)
    except OSError as error:
        raise LaunchError(f"can't write {file}: {error.strerror}") from error
