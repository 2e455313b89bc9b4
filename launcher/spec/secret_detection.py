"""Detect values that look like secrets. The cloud stores and shows a job's request, so it must not contain any.

The patterns are compiled on first use, as most specs need none. They are searched for in long texts, so no match may
start inside a run of its own characters: that keeps the time linear.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct


class Token(Struct, frozen=True):
    """A kind of token by its fixed prefix, `before` + `rare` + `after`, and its random part: at least `length` of
    `characters`. `rare` is a single character of the prefix by which a search skips through long files."""

    kind: str
    before: str
    rare: str
    after: str
    characters: str
    length: int


ALNUM, WORD, DASHED = "A-Za-z0-9", "A-Za-z0-9_", "A-Za-z0-9_-"
TOKENS: Final = (
    Token("Hugging Face token", "hf", "_", "", ALNUM, 30),
    Token("Hugging Face token", "api_org", "_", "", ALNUM, 34),
    Token("GitHub token", "gh[pousr]", "_", "", ALNUM, 36),
    Token("GitHub token", "github_pat", "_", "", WORD, 60),
    Token("npm token", "npm", "_", "", ALNUM, 36),
    Token("Weights & Biases key", "wandb_v1", "_", "", WORD, 60),
    Token("Replicate token", "r8", "_", "", ALNUM, 37),
    Token("Groq key", "gsk", "_", "", ALNUM, 48),
    Token("Stripe key", "[sr]k_live", "_", "", ALNUM, 24),
    Token("GitLab token", "glpat", "-", "", DASHED, 20),
    Token("GitLab token", "gl[dfr]t", "-", "", DASHED, 20),
    Token("PyPI token", "pypi", "-", "AgEIcHlwaS5vcmc", DASHED, 50),
    Token("OpenAI or Anthropic key", "sk", "-", rf"(?:[{WORD}]+-)*(?=[A-Za-z_]*[0-9])", WORD, 20),
    Token("Google OAuth secret", "GOCSPX", "-", "", DASHED, 28),
    Token("NVIDIA key", "nvapi", "-", "", DASHED, 60),
    Token("xAI key", "xai", "-", "", ALNUM, 60),
    Token("Slack token", "xox[a-z]", "-", "[0-9]+-", f"{ALNUM}-", 16),
    Token("Slack token", "xapp", "-", "[0-9]+-", f"{ALNUM}-", 16),
    Token("Google API key", "", "A", "Iza", DASHED, 35),
    Token("AWS access key", "", "A", "[KS]IA", "A-Z2-7", 16),
)
"""As the issuers document them, and as gitleaks' and Kingfisher's rules have them. JSON Web Tokens and passwords in
URLs are not among them: examples of those are in every documentation."""
SHAPES: Final = (
    rf"(?<![{DASHED}])("
    + "|".join(
        f"{token.before}{token.rare}{token.after}[{token.characters}]{{{min(token.length, 16)},}}" for token in TOKENS
    )
    + rf"|ya29\.[.{DASHED}]{{8,}}"  # Google's access tokens
    rf"|eyJ[{DASHED}]{{8,}}\.eyJ[{DASHED}]{{8,}}\.[{DASHED}]+"  # a signed JSON Web Token
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
SHORTEST_TOKEN: Final = 19
"""Characters of the shortest secret in SHAPES (hf_ and 16 more), except for GOOGLE and a password in a URL."""
GOOGLE: Final = "ya29."
"""Begins Google's access tokens."""
SHORTEST: Final = 4
"""Minimum characters of a password; anything shorter is a switch or a count."""


def known_secret(text: str) -> bool:
    """Return whether the text contains a well-known kind of secret, whatever its name."""
    if (
        len(text) < SHORTEST_TOKEN and "://" not in text and GOOGLE not in text
    ):  # most values; the patterns need not be compiled for them
        return False
    return bool(re.search(SHAPES, re.sub(REFERENCE, "", text)))


def looks_secret(name: str, value: str) -> bool:
    """Return whether a variable holds a secret: by the form of its value, or by its name and a plausible value."""
    name = name.upper()
    if known_secret(value) or (name == "WANDB_API_KEY" and re.fullmatch(WANDB, value)):
        return True
    literal = re.sub(REFERENCE, "", value).strip()
    by_name = re.fullmatch(SURE, name) or (re.fullmatch(LIKELY, name) and re.fullmatch(RANDOM, literal))
    is_harmless = by_name and re.fullmatch(HARMLESS, literal, re.IGNORECASE | re.DOTALL)
    return bool(by_name and len(literal) >= SHORTEST and not is_harmless)


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
