"""Call REST APIs that have no client library here, with one set of credentials for all of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from launcher.errors import LaunchError
from launcher.gcp.api import SCOPE, Service, credentials, explain, http_date, no_credentials

SECONDS: Final = 30.0
INSTALL: Final = 'pip install "gcp-launch[gcp]"'


class Rest:
    """Requests to Google's APIs for one project, without retries. Thread-safe.

    Endpoints and credentials follow gcloud's variables (launcher.gcp.api). `server_time`: Google's clock at the last
    answer in Unix seconds; None before the first.
    """

    def __init__(self, project: str, environ: Mapping[str, str] = os.environ) -> None:
        self.project = project
        self.server_time: float | None = None
        self._environ = environ
        self._default: Any = None
        self._sessions: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __call__(
        self,
        service: Service,
        path: str,
        *,
        verb: str = "GET",
        params: Any = None,
        body: Any = None,
        seconds: float = SECONDS,
    ) -> dict[str, Any]:
        """Return the JSON answer to one request. `path` begins with a slash, `params` are the query's.

        Raises:
            UnreachableError: no answer, or a transient error.
            NotAuthorised: no credentials, or a permission is missing.
            LaunchError: another refusal; `status_of` returns its HTTP status.
        """
        origin = endpoint(service, self._environ)
        try:
            session = self._session(service, origin)
            answer = session.request(verb, origin + path, params=params, json=body, timeout=seconds)
            if answer.status_code >= 400:
                from google.api_core.exceptions import from_http_response

                raise from_http_response(answer)
            self.server_time = http_date(answer.headers.get("Date", "")) or self.server_time
            decoded = answer.json()
            if not isinstance(decoded, dict):
                raise ValueError("not a JSON object")
        except ImportError as error:
            raise LaunchError(f"{service.title}: Google's client libraries are not installed", INSTALL) from error
        except ValueError as error:
            raise LaunchError(f"{service.title}'s answer can't be read: {error}") from error
        except LaunchError:
            raise
        except Exception as error:
            if (known := explain(error, service, self.project)) is None:
                raise
            raise known from error
        return decoded

    def _session(self, service: Service, origin: str) -> Any:
        """Return the API's session; all of them share the default credentials. Raises NotAuthorised."""
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError
        from google.auth.transport.requests import AuthorizedSession

        with self._lock:
            if origin not in self._sessions:
                try:
                    own = credentials(self._environ, origin)
                    if own is None:
                        self._default = self._default or google.auth.default(scopes=[SCOPE])[0]
                except (DefaultCredentialsError, OSError) as error:
                    raise no_credentials(service, error) from error
                self._sessions[origin] = AuthorizedSession(own or self._default)
            return self._sessions[origin]


def endpoint(service: Service, environ: Mapping[str, str]) -> str:
    """Return scheme and host of an API: gcloud's override without its path, else Google's own."""
    override = environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service.name.upper()}", "")
    if not override and service.name == "storage":
        override = environ.get("STORAGE_EMULATOR_HOST", "")
    if not override:
        return f"https://{service.name}.googleapis.com"
    parts = urlsplit(override)
    return f"{parts.scheme}://{parts.netloc}"
