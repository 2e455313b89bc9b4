"""Check that a model exists on the Hugging Face hub, with a short timeout."""

from __future__ import annotations

from threading import Thread
from typing import Final

from launch_train.common.errors import UsageError
from launch_train.common.text import one_line

PATIENCE: Final = 10.0
"""Timeout in seconds, including DNS. The hub's own client retries many times."""


def only_cached(name: str) -> bool:
    """Return True if the hub can't be reached and the model `name` (org/name, or name) is in the local cache.

    Raises UsageError if the hub has no such model, the user may not access it, or the hub can't be reached and nothing
    is cached.
    """
    from huggingface_hub import constants, errors, try_to_load_from_cache

    failed = _request_error(name)
    if failed is None:
        return False
    if isinstance(failed, errors.GatedRepoError):
        raise UsageError(f"model: hf:{name} is gated: accept its terms at {constants.ENDPOINT}/{name}, and {_GIVE}")
    if isinstance(failed, errors.RepositoryNotFoundError):
        short = "" if "/" in name else "; most are hf:ORG/NAME, and a type such as hf:llama has no pretrained weights"
        raise UsageError(f"model: hf:{name}: model not found at {constants.ENDPOINT}, or it is private: {_GIVE}{short}")
    if isinstance(failed, errors.EntryNotFoundError):
        raise UsageError(f"model: hf:{name}: it has no config.json; transformers can't build it")
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return True
    if isinstance(failed, errors.OfflineModeIsEnabled):
        raise UsageError(
            f"model: hf:{name}: config.json is not in the local cache, and nothing is downloaded here; download it: "
            f"hf download {name} config.json; hf:TYPE (hf:llama) with settings needs no hub"
        )
    raise UsageError(
        f"model: hf:{name}: {constants.ENDPOINT} can't be reached ({one_line(failed, 200)}), and nothing is cached "
        "here; hf:TYPE (hf:llama) with settings needs no hub"
    )


_GIVE: Final = "give a token in HF_TOKEN (secrets)"


def _request_error(name: str) -> Exception | None:
    """Request the metadata of the model's config.json, and return the error, or None if it succeeds."""
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url

    failed: list[Exception | None] = [TimeoutError(f"no answer within {PATIENCE:g} s")]

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), token=get_token(), timeout=PATIENCE)
            failed.append(None)
        except Exception as error:  # noqa: BLE001 - errors of the client, its transport or the system
            if "Timeout" not in type(error).__name__:  # all timeouts are reported as the error above
                failed.append(error)

    asking = Thread(target=ask, name="hub", daemon=True)  # DNS resolution has no timeout
    asking.start()
    asking.join(PATIENCE)
    return failed[-1]
