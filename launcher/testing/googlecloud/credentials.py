"""Check access tokens, and refuse requests as Google's APIs do."""

from __future__ import annotations

from collections.abc import Collection

from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.wire import Request

EXPECTED = (
    "Expected OAuth 2 access token, login cookie or other valid authentication credential. "
    "See https://developers.google.com/identity/sign-in/web/devconsole-project."
)
MISSING = f"Request is missing required authentication credential. {EXPECTED}"
INVALID = f"Request had invalid authentication credentials. {EXPECTED}"


def check(request: Request, operation: str, tokens: Collection[str]) -> None:
    """Refuse requests without one of the tokens.

    Cloud Storage's clients are anonymous if STORAGE_EMULATOR_HOST is set. So a missing token is accepted there, but a
    wrong one is refused.

    Raises ApiError 401.
    """
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind == "Bearer" and token in tokens:
        return
    service = operation.partition(".")[0]
    if service in ("storage", "compute"):
        if service == "compute" or kind:
            raise ApiError(401, "Invalid Credentials", reason="authError")
        return
    reason = "ACCESS_TOKEN_EXPIRED" if kind else "CREDENTIALS_MISSING"
    metadata = {"service": f"{service}.googleapis.com"}
    raise ApiError(401, INVALID if kind else MISSING, info=reason, metadata=metadata)
