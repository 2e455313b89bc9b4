"""Call REST APIs that have no client library here, with one set of credentials for all of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, Final

from launcher.errors import LaunchError
from launcher.gcp.api import REQUEST_SECONDS, SCOPE, Api, RestClient, Service, credentials, endpoint, no_credentials

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
        self._clients: dict[str, RestClient] = {}
        self._lock = threading.Lock()

    def __call__(
        self,
        service: Service,
        path: str,
        *,
        verb: str = "GET",
        params: Any = None,
        body: Any = None,
        seconds: float = REQUEST_SECONDS,
    ) -> dict[str, Any]:
        """Return the JSON answer to one request. `path` begins with a slash, `params` are the query's.

        Raises:
            UnreachableError: no answer, or a transient error.
            NotAuthorised: no credentials, or a permission is missing.
            LaunchError: another refusal; `status_of` returns its HTTP status.
        """
        try:
            client = self._client(service)
            answer: dict[str, Any] = Api(service, self.project, client).once(
                "send", seconds, path=path, verb=verb, params=params, json=body
            )
        except ImportError as error:
            raise LaunchError(f"{service.title}: Google's client libraries are not installed", INSTALL) from error
        self.server_time = client.server_time or self.server_time
        return answer

    def _client(self, service: Service) -> RestClient:
        """Return the API's client; all of them share the default credentials. Raises NotAuthorised."""
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError
        from google.auth.transport.requests import AuthorizedSession

        with self._lock:
            if service.name not in self._clients:
                try:
                    url = endpoint(service, self._environ)
                    own = credentials(self._environ, url)
                    if own is None:
                        self._default = self._default or google.auth.default(scopes=[SCOPE])[0]
                except (DefaultCredentialsError, OSError) as error:
                    raise no_credentials(service, error) from error
                self._clients[service.name] = RestClient(service, AuthorizedSession(own or self._default), url)
            return self._clients[service.name]
