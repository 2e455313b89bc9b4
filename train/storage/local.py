"""The run folder as one seam: a local folder or a folder of a Cloud Storage bucket, with the same few verbs.

Names are relative, with `/` between parts. A write is whole or absent: nobody ever reads half an object.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from urllib.parse import urlsplit

from train.errors import OutputError

__all__ = ["GcsFolder", "LocalFolder", "OutputError", "Storage", "open_storage"]

TIMEOUT = 60.0
"""Seconds for one request to Cloud Storage; the client itself retries 408, 429 and 5xx for 120 s in all."""


class Storage(Protocol):
    """A folder that holds named objects."""

    url: str

    def write(self, name: str, data: bytes, *, create: bool = False) -> None:
        """Store `data`. With `create`, raise FileExistsError if the name is taken; else replace it."""

    def write_file(self, name: str, path: Path) -> None:
        """Store the content of a local file, replacing what was there."""

    def read(self, name: str) -> bytes:
        """The content. Raises FileNotFoundError."""

    def list(self, prefix: str = "") -> list[str]:
        """The names that start with `prefix`, sorted."""

    def delete(self, name: str) -> None:
        """Remove an object; one that isn't there is fine."""


def open_storage(url: str) -> Storage:
    """The folder at `url`: gs://bucket/path or a local path (also file:///path)."""
    if url.startswith("gs://"):
        return GcsFolder(url)
    if "://" in url and not url.startswith("file://"):
        raise OutputError(f"{url} is neither gs://BUCKET/PATH nor a local folder")
    return LocalFolder(Path(url.removeprefix("file://")))


class LocalFolder:
    """A folder of this machine, made when the first object is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().absolute()
        self.url = str(self.folder)

    def write(self, name: str, data: bytes, *, create: bool = False) -> None:
        with self._temporary(name) as (temporary, target):
            temporary.write_bytes(data)
            _publish(temporary, target, create=create)

    def write_file(self, name: str, path: Path) -> None:
        with self._temporary(name) as (temporary, target), path.open("rb") as source:
            with temporary.open("wb") as sink:
                while block := source.read(1 << 20):
                    sink.write(block)
            _publish(temporary, target, create=False)

    def read(self, name: str) -> bytes:
        target = self.folder / checked(name)
        try:
            return target.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise OutputError(f"{target} can't be read: {error.strerror or error}") from error

    def list(self, prefix: str = "") -> list[str]:
        names = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        return sorted(name for name in names if name.startswith(prefix) and not _is_temporary(name))

    def delete(self, name: str) -> None:
        target = self.folder / checked(name)
        try:
            target.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(target, error) from error

    @contextmanager
    def _temporary(self, name: str) -> Iterator[tuple[Path, Path]]:
        """A file beside the target, on the same file system, that is gone afterwards whatever happens."""
        target = self.folder / checked(name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, text = tempfile.mkstemp(prefix=_TEMPORARY, dir=target.parent)
        except OSError as error:
            raise _unwritable(target, error) from error
        os.close(handle)
        temporary = Path(text)
        try:
            yield temporary, target
        except FileExistsError:
            raise
        except OSError as error:
            raise _unwritable(target, error) from error
        finally:
            temporary.unlink(missing_ok=True)


_TEMPORARY = ".tmp-"


def _unwritable(target: Path, error: OSError) -> OutputError:
    return OutputError(f"{target} can't be written: {error.strerror or error}")


def _is_temporary(name: str) -> bool:
    return PurePosixPath(name).name.startswith(_TEMPORARY)


def _publish(temporary: Path, target: Path, *, create: bool) -> None:
    """Make a complete file visible under its name. A hard link fails if the name is taken; a rename replaces it."""
    _sync(temporary)
    temporary.chmod(0o666 & ~_umask())
    if create:
        os.link(temporary, target)
    else:
        temporary.replace(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    """The process's umask, which mkstemp passes over. Linux tells it without changing it for a moment."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


class GcsFolder:
    """A folder of a bucket, wherever the environment says that Cloud Storage is (`_client`)."""

    def __init__(self, url: str, client: Any = None) -> None:
        bucket, _, folder = url.removeprefix("gs://").partition("/")
        self.url = url.rstrip("/")
        self._prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        self._bucket = (client or _client()).bucket(bucket)

    def write(self, name: str, data: bytes, *, create: bool = False) -> None:
        with _as_ours(f"{self.url}/{name}"):
            self._blob(name).upload_from_string(
                data,
                content_type="application/octet-stream",
                if_generation_match=0 if create else None,
                checksum="crc32c",
                timeout=TIMEOUT,
            )

    def write_file(self, name: str, path: Path) -> None:
        with _as_ours(f"{self.url}/{name}"):
            self._blob(name).upload_from_filename(str(path), checksum="crc32c", timeout=TIMEOUT)

    def read(self, name: str) -> bytes:
        with _as_ours(f"{self.url}/{name}"):
            return bytes(self._blob(name).download_as_bytes(checksum="crc32c", timeout=TIMEOUT))

    def list(self, prefix: str = "") -> list[str]:
        with _as_ours(self.url):
            blobs = self._bucket.list_blobs(prefix=self._prefix + prefix, timeout=TIMEOUT)
            return sorted(blob.name[len(self._prefix) :] for blob in blobs)

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError), _as_ours(f"{self.url}/{name}"):
            self._blob(name).delete(timeout=TIMEOUT)

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + checked(name))


def _client() -> Any:
    """A client for where the environment says that Cloud Storage is, and as whom it says that we ask."""
    try:
        from google.cloud import storage
    except ImportError as error:
        raise OutputError("gs:// needs google-cloud-storage: install the extra gcp") from error
    from google.auth.exceptions import DefaultCredentialsError

    endpoint = _endpoint(os.environ)
    options = {"api_endpoint": endpoint} if endpoint else None
    try:
        return storage.Client(project=None, credentials=_credentials(os.environ, endpoint), client_options=options)
    except DefaultCredentialsError as error:
        raise OutputError("gs:// needs credentials: gcloud auth application-default login") from error


def _endpoint(environ: Mapping[str, str]) -> str | None:
    """Scheme, host and port of Cloud Storage, from gcloud's variable (which ends with the API's path) or the
    emulator's (which may do without a scheme); None is Google's own."""
    override = environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", "").rstrip("/").removesuffix("/storage/v1")
    emulator = environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    if not override and emulator and "://" not in emulator:
        return f"http://{emulator}"
    return override or emulator or None


def _credentials(environ: Mapping[str, str], endpoint: str | None) -> Any:
    """As whom to ask: nobody where gcloud has its credentials disabled, who holds gcloud's token, nobody at an
    emulator, and otherwise (None) whom Google's libraries find."""
    from google.auth.credentials import AnonymousCredentials
    from google.oauth2.credentials import Credentials

    if environ.get("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "").lower() in _TRUE:
        return AnonymousCredentials()
    if token := _token(environ):
        return Credentials(token)
    if environ.get("STORAGE_EMULATOR_HOST") or (endpoint and _is_loopback(endpoint)):
        return AnonymousCredentials()
    return None


_TRUE = ("true", "1", "yes", "on", "y")
"""What gcloud takes for true (googlecloudsdk.core.properties)."""


def _token(environ: Mapping[str, str]) -> str | None:
    """gcloud's access token, from the environment or the file that it names; None when there is none."""
    token, file = environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN"), environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE")
    if token or not file:
        return token or None
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise OutputError(f"the access token can't be read from {file}: {error}") from error


def _is_loopback(endpoint: str) -> bool:
    """A server of this machine without TLS: a test's."""
    url = urlsplit(endpoint)
    host = url.hostname or ""
    return url.scheme == "http" and (host in ("localhost", "::1") or host.startswith("127."))


@contextmanager
def _as_ours(url: str) -> Iterator[None]:
    """Cloud Storage's errors as the ones that Storage promises."""
    from google.api_core.exceptions import GoogleAPIError, NotFound, PreconditionFailed
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    try:
        yield
    except PreconditionFailed as error:
        raise FileExistsError(f"{url} exists") from error
    except NotFound as error:
        raise FileNotFoundError(f"{url} does not exist") from error
    except (GoogleAPIError, GoogleAuthError, RequestException) as error:
        raise OutputError(f"{url} can't be reached: {error}") from error


def checked(name: str) -> str:
    """`name`, if it stays in the folder. Raises ValueError: names are ours, so a bad one is a fault in the code."""
    parts = name.split("/")
    if not name or "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is no name in a run folder")
    return name
