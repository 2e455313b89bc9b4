"""Whether Hugging Face's hub has a model, asked once and not for long."""

from __future__ import annotations

from threading import Thread
from typing import Final

from launch_train.common.errors import UsageError

PATIENCE: Final = 10.0
"""Seconds for the first answer, names' resolution included. The hub's own client asks again and again."""


def only_cached(name: str) -> bool:
    """Whether the model `name` (org/name, or name) has to come from this machine's cache: the hub can't be reached.

    Raises UsageError: the hub has no such model, or not for this user; or it can't be reached, and nothing is cached.
    """
    from huggingface_hub import constants, errors, try_to_load_from_cache

    failed = _asked(name)
    if failed is None:
        return False
    if isinstance(failed, errors.GatedRepoError):
        raise UsageError(f"model: hf:{name} is gated: accept its terms at {constants.ENDPOINT}/{name}, and {_GIVE}")
    if isinstance(failed, errors.RepositoryNotFoundError):
        short = "" if "/" in name else "; most are hf:ORG/NAME, and a type such as hf:llama has no pretrained weights"
        raise UsageError(f"model: hf:{name}: {constants.ENDPOINT} has no such model, or it is private: {_GIVE}{short}")
    if isinstance(failed, errors.EntryNotFoundError):
        raise UsageError(f"model: hf:{name}: it has no config.json; transformers can't build it")
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return True
    raise UsageError(
        f"model: hf:{name}: {constants.ENDPOINT} can't be reached ({_said(failed)}), and nothing is cached here; "
        "hf:TYPE (hf:llama) with settings needs no hub"
    )


_GIVE: Final = "give a token in HF_TOKEN (secrets)"


def _asked(name: str) -> Exception | None:
    """What kept the hub from telling about the model's config.json; None: it told."""
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url

    failed: list[Exception | None] = [TimeoutError(f"no answer within {PATIENCE:g} s")]

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), token=get_token(), timeout=PATIENCE)
            failed.append(None)
        except Exception as error:  # noqa: BLE001 - the client's own kinds, its transport's, the system's
            if "Timeout" not in type(error).__name__:  # of any of them: it is the same whoever noticed first
                failed.append(error)

    asking = Thread(target=ask, name="hub", daemon=True)  # a name server that is silent outlasts every timeout
    asking.start()
    asking.join(PATIENCE)
    return failed[-1]


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__
