"""Detect values that look like secrets. The cloud stores and shows a job's request, so it must not contain any.

The patterns are compiled on first use, as most specs need none. They are searched for in long texts, so no match may
start inside a run of its own characters: that keeps the time linear.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

SHAPES: Final = (
    r"(?<![A-Za-z0-9_-])("
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"  # GitHub
    r"|sk-([A-Za-z0-9_]+-)*(?=[A-Za-z_]*[0-9])[A-Za-z0-9_]{16,}"  # OpenAI, Anthropic
    r"|(AKIA|ASIA)[A-Z0-9]{12,}(?![A-Za-z0-9])"  # AWS
    r"|AIza[A-Za-z0-9_-]{16,}|ya29\.[A-Za-z0-9._-]{8,}|GOCSPX-[A-Za-z0-9_-]{16,}"  # Google
    r"|xox[a-z]-[A-Za-z0-9-]{8,}"  # Slack
    r"|glpat-[A-Za-z0-9_-]{16,}"  # GitLab
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"  # a signed JSON Web Token
    r")|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|://[^\s/@:]*:[^\s/@]+@"  # a password in a URL
)
WANDB: Final = r"[0-9a-f]{40}"
SURE: Final = (
    r".*(PASSWORD|PASSWD|PASSPHRASE)|(.+_)(PWD|PASS)"
    r"|(.*_)?(SECRET|API_?KEY|(ACCESS|PRIVATE|SECRET)_KEY|(ACCESS|AUTH|HF|API)_TOKEN)"
)
LIKELY: Final = r"(.*_)?(TOKEN|KEY|CREDENTIALS?)"
HARMLESS: Final = (
    r"true|false|yes|no|on|off|none|null|auto|bearer|basic"  # switches, and words before a reference
    r"|[./~].*|[a-z]+://[^:@/]*(/.*)?|projects/.*"  # paths, URLs without a password, resource names
    r"|[<\[].*[>\]]"  # <|endoftext|>, [PAD]
)
REFERENCE: Final = r"\$\(\w+\)|\$\{\w+\}|^\$[A-Z_][A-Z0-9_]*$"
"""The value of another variable: `$(NAME)`, as Vertex AI expands it, or a shell's `$NAME`."""
RANDOM: Final = r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_\-+/=.]{16,}"
LONG: Final = 20
"""Minimum characters of a secret whose first four may be shown."""
SHORTEST: Final = 4
"""Minimum characters of a password; anything shorter is a switch or a count."""


def known_secret(text: str) -> bool:
    """Return whether the text contains a well-known kind of secret, whatever its name."""
    return bool(re.search(SHAPES, re.sub(REFERENCE, "", text)))


def looks_secret(name: str, value: str) -> bool:
    """Return whether a variable holds a secret: by the form of its value, or by its name and a plausible value."""
    name = name.upper()
    if known_secret(value) or (name == "WANDB_API_KEY" and re.fullmatch(WANDB, value)):
        return True
    literal = re.sub(REFERENCE, "", value).strip()
    if len(literal) < SHORTEST or re.fullmatch(HARMLESS, literal, re.IGNORECASE | re.DOTALL):
        return False
    return bool(re.fullmatch(SURE, name) or (re.fullmatch(LIKELY, name) and re.fullmatch(RANDOM, literal)))


def secrets_in(value: Any, at: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield (path, text) of each text in plain data that contains a known secret."""
    if isinstance(value, str):
        if known_secret(value):
            yield at, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from secrets_in(item, (*at, key))


def masked(value: str) -> str:
    """Return the first four characters of a secret: enough to recognise it, too few to use it. Secrets with fewer than
    20 characters are masked completely."""
    return f"'{value[:4] if len(value) >= LONG else ''}…'"


PRIVATE_NAMES: Final = (
    r".*\.env|\.env\..*|\.envrc|\.netrc|\.pgpass|\.git-credentials|\.pypirc|\.npmrc|\.boto|\.?htpasswd"
    r"|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|application_default_credentials\.json|kaggle\.json"
    r"|credentials|(hf|github|gitlab|wandb|api|access|auth)?_?token(\.txt)?|.*\.(p12|pfx|jks|keystore|kdbx)"
)
EXAMPLES: Final = r".*\.(example|sample|template|dist)|(example|sample|template|dist)\.env"
"""Templates such as `.env.example`, which are meant to be shared."""
PRIVATE_FOLDERS: Final = r"(.*/)?(\.config/gcloud|\.huggingface|\.config/wandb)/.*"
READ: Final = frozenset({"json", "pem", "key", "txt", "cfg", "ini", "yaml", "yml", "toml"})
"""Suffixes of files whose content is searched."""
MOST_READ: Final = 1 << 16
KEY_FILE: Final = (
    r'-----BEGIN [A-Z ]*PRIVATE KEY|"type"\s*:\s*"(service_account|authorized_user|external_account)"'
    r"|(?i:aws_secret_access_key)\s*[=:]\s*\S"
)


def is_secret_file(name: str, path: str) -> bool:
    """Return whether a file holds a secret: by its name, or by a private key or Google credentials in it.

    With an empty `path` only the name counts. An unreadable file is not a secret here: the code that needs its content
    reports it.
    """
    base = name.rpartition("/")[2].lower()
    if re.fullmatch(PRIVATE_NAMES, base) and not re.fullmatch(EXAMPLES, base):
        return True
    if re.fullmatch(PRIVATE_FOLDERS, name):
        return True
    if not path or base.rpartition(".")[2] not in READ:
        return False
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 -- one of ten thousand
            return bool(re.search(KEY_FILE, file.read(MOST_READ)))
    except OSError:
        return False
