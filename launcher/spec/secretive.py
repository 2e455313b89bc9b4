"""Which texts look like a secret. A request is stored and shown by the cloud; what is in it is no longer secret.

The patterns are compiled when they are first needed: most specs need none.
"""

from __future__ import annotations

import re
from typing import Final

SHAPES: Final = (
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"  # GitHub
    r"|sk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic
    r"|(AKIA|ASIA)[A-Z0-9]{12,}"  # AWS
    r"|AIza[A-Za-z0-9_-]{16,}|ya29\.[A-Za-z0-9._-]{8,}|GOCSPX-[A-Za-z0-9_-]{16,}"  # Google
    r"|xox[a-z]-[A-Za-z0-9-]{8,}"  # Slack
    r"|glpat-[A-Za-z0-9_-]{16,}"  # GitLab
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"  # a signed JSON Web Token
)
WANDB: Final = r"[0-9a-f]{40}"
SURE: Final = (
    r"(.*_)?(PASSWORD|PASSWD|PASSPHRASE|SECRET|API_?KEY|(ACCESS|PRIVATE|SECRET)_KEY|(ACCESS|AUTH|HF|API)_TOKEN)"
)
LIKELY: Final = r"(.*_)?(TOKEN|KEY|CREDENTIALS?)"
HARMLESS: Final = (
    r"(true|false|yes|no|on|off|none|null|auto|[-+.0-9e]+)"  # switches and numbers
    r"|[./~].*|[a-z]+://[^:@/]*(/.*)?|projects/.*"  # paths, addresses without a password, resource names
    r"|.*\$[({A-Za-z_].*|[<\[].*[>\]]"  # references to other variables; <|endoftext|>, [PAD]
)
RANDOM: Final = r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_\-+/=.]{16,}"


def known_secret(value: str) -> bool:
    """The value has the shape of a well-known kind of secret, whatever its name."""
    return bool(re.fullmatch(SHAPES, value.strip())) or ("-----BEGIN " in value and "PRIVATE KEY" in value)


def looks_secret(name: str, value: str) -> bool:
    """Whether a variable carries a secret: by its value's shape, or by its name and a value that can be one."""
    name = name.upper()
    if known_secret(value) or (name == "WANDB_API_KEY" and re.fullmatch(WANDB, value)):
        return True
    if len(value) < 6 or re.fullmatch(HARMLESS, value, re.IGNORECASE | re.DOTALL):
        return False
    return bool(re.fullmatch(SURE, name) or (re.fullmatch(LIKELY, name) and re.fullmatch(RANDOM, value)))


def masked(value: str) -> str:
    """The first four characters: enough to tell which secret it is, too little to use it."""
    return f"'{value[:4]}…'"
