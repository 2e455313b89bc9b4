"""Recognise files with secrets among the code: by their name, or by a key or a token in them.

What a token looks like is in `launcher.spec.secret_detection`. No entropy and no variable names count, so the code of
large packages raises no alarm. No scanner from PyPI fits: detect-secrets has no release since 2024, guesses by entropy
and takes 0.3 s to import; Kingfisher's binding (36 MB) compiles its rules for 8 s; the others need a service or dozens
of packages.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

from launcher.spec.secret_detection import TOKENS

PRIVATE_NAMES: Final = (
    r".*\.env|\.env\..*|\.envrc|[._]netrc|\.pgpass|\.my\.cnf|\.git-credentials|\.pypirc|\.npmrc|\.boto|\.s3cfg"
    r"|\.?htpasswd|\.databrickscfg|\.modal\.toml|\.dockercfg|\.vault-token|kubeconfig|rclone\.conf"
    r"|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|(.*[._-])?deploy[._-]?key|google_compute_engine"
    r"|application_default_credentials\.json|kaggle\.json"
    r"|credentials|(hf|github|gitlab|wandb|api|access|auth)?_?token(\.txt)?|.*\.(p12|pfx|jks|keystore|kdbx|ppk)"
)
BACKUP: Final = r"([._-](bak|backup|old|orig|save|copy|swp|[0-9]+)|~)+$"
EXAMPLES: Final = r".*\.(example|sample|template|dist)|(example|sample|template|dist)\.env"
"""Templates such as `.env.example`, which are meant to be shared."""
PRIVATE_FOLDERS: Final = r"(.*/)?(\.config/gcloud|\.huggingface|\.config/wandb)/.*|(.*/)?\.streamlit/secrets\.toml"

PEM: Final = "-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
KEY_FILE: Final = rf"\s*(?:{PEM}|-----BEGIN [A-Z ]+-----(?s:.*){PEM}|PuTTY-User-Key-File-|AGE-SECRET-KEY-1)"
"""The beginning of a private key's file, which may have certificates before the key."""
GOOGLE: Final = (
    rb'"type"\s*:\s*"(?:service_account|authorized_user|external_account)"',
    rb'"(?:private_key|refresh_token|credential_source)"\s*:',
)
"""Google credentials have both."""
EMBEDDED_KEY: Final = rf"{PEM[1:]}(?:\\+[nr]|[\s\"'\\,+#*(b])*(?:[A-Z][A-Za-z-]+: |[A-Za-z0-9+/=]{{20}})"
"""A private key within a file, after its first `-`. A header alone is no key: programs compare with it."""
GUARDS: Final = {"_": r"(?=[A-Za-z0-9]{16})", "-": r"(?!--)(?=[\w-]{16})", "A": "(?=[KSI])"}
"""What every token has after its rare character. It ends most attempts before the first look-behind."""
AWS_SECRET: Final = re.compile(rb"(?<![\w/+=])(?=[a-z0-9/+]*[A-Z])(?=[A-Z0-9/+]*[a-z])[A-Za-z0-9/+]{40}(?![\w/+=])")
NEAR: Final = 500
"""Bytes around the ID of an AWS access key in which its secret is. The ID alone is not secret."""
NO_SECRET: Final = re.compile(rb"(?i)example|x{6}|\*{4}")
"""Placeholders: AKIAIOSFODNN7EXAMPLE, hf_xxxxxxxx…"""
ALLOWED: Final = re.compile(rb"gitleaks:allow|pragma: ?allowlist secret")
"""Comments that allow a line, as the scanners gitleaks and detect-secrets read them."""
OVERLAP: Final = 4096
"""Bytes at the end of a chunk that are searched again with the next one."""


class Secret(NamedTuple):
    """A secret in a file: its kind, and its line; 0 if the whole file is one."""

    kind: str
    line: int = 0


def has_secret_name(name: str) -> bool:
    """Return whether a file of this name holds secrets, whatever its content."""
    base = re.sub(BACKUP, "", name.rpartition("/")[2].lower())
    if re.fullmatch(EXAMPLES, base):
        return False
    return bool(re.fullmatch(PRIVATE_NAMES, base) or re.fullmatch(PRIVATE_FOLDERS, name))


@cache
def patterns() -> tuple[tuple[re.Pattern[bytes], list[str]], ...]:
    """Return a regular expression for each rare character of TOKENS, with the kinds of its groups.

    It begins with that one character, which `re` finds as fast as memchr, and then looks behind: alternatives of whole
    prefixes take six times as long.
    """
    compiled = []
    for rare, guard in GUARDS.items():
        rows = []
        for token in (token for token in TOKENS if token.rare == rare):
            prefix, random = token.before + rare, f"[{token.characters}]{{{token.length},}}"
            rows.append(rf"((?<={prefix})(?<![\w-]{prefix}){token.after}{random})")
        key = f"|({EMBEDDED_KEY})" if rare == "-" else ""
        text = f"{rare}(?:{guard}(?:{'|'.join(rows)}){key})"
        compiled.append(
            (re.compile(text.encode()), [*(token.kind for token in TOKENS if token.rare == rare), "private key"])
        )
    return tuple(compiled)


class SecretSearch:
    """Searches a file for its first secret, chunk by chunk. Binary files are not searched."""

    def __init__(self) -> None:
        self.secret: Secret | None = None
        self._decoder: codecs.IncrementalDecoder | None = None
        self._is_binary = False
        self._text = b""
        self._lines = 0
        """Lines before the text."""

    def feed(self, chunk: bytes) -> None:
        is_first = not self._text
        if is_first and chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
        elif is_first:
            self._is_binary = b"\0" in chunk
        if self._is_binary or self.secret:
            return
        text = self._decoder.decode(chunk).encode(errors="replace") if self._decoder else chunk
        if is_first and is_credentials(text := text.removeprefix(codecs.BOM_UTF8)):
            self.secret = Secret("private key or credentials")
            return
        if not is_first:
            cut = max(len(self._text) - OVERLAP, 0)
            self._lines += self._text.count(b"\n", 0, cut)
            text = self._text[cut:] + text
        self._text = text
        hits = [hit for pattern, kinds in patterns() for hit in find_tokens(text, pattern, kinds)]
        if hits:
            at, kind = min(hits)
            self.secret = Secret(kind, self._lines + text.count(b"\n", 0, at) + 1)


def is_credentials(text: bytes) -> bool:
    """Return whether a whole file is a private key or Google credentials, judged by its beginning."""
    if text[:64].lstrip().startswith(b"{"):
        return all(re.search(pattern, text) for pattern in GOOGLE)
    return bool(re.match(KEY_FILE.encode(), text))


def find_tokens(text: bytes, pattern: re.Pattern[bytes], kinds: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the position and the kind of each secret in a text, without placeholders and allowed lines."""
    for match in pattern.finditer(text):
        begin, end = match.span()
        kind = kinds[(match.lastindex or 1) - 1]
        line_end = text.find(b"\n", end)
        line = text[text.rfind(b"\n", 0, begin) + 1 : line_end if line_end >= 0 else None]
        if NO_SECRET.search(match[0]) or ALLOWED.search(line):
            continue
        if kind == "AWS access key":
            secret = AWS_SECRET.search(text[max(begin - NEAR, 0) : end + NEAR])
            if not secret or NO_SECRET.search(secret[0]):
                continue
        yield begin, kind
