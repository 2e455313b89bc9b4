"""What looks like a secret, and what only sounds like one."""

from __future__ import annotations

import pytest

from launcher.spec.secretive import looks_secret
from tests.spec.helpers import SMALL, lines


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X", "hf_" + "aB3" * 10),
        ("X", "ghp_" + "a1" * 18),
        ("X", "github_pat_" + "a1" * 20),
        ("X", "sk-proj-" + "a1" * 20),
        ("X", "AKIAIOSFODNN7EXAMPLE"),
        ("X", "AIza" + "a" * 35),
        ("X", "ya29.a0AfH6SMBx"),
        ("X", "xoxb-1234567890-abc"),
        ("X", "-----BEGIN PRIVATE KEY-----\nMIIE\n"),
        ("X", "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n"),
        ("X", " hf_" + "aB3" * 10 + "\n"),
        ("WANDB_API_KEY", "0123456789" * 4),
        ("DB_PASSWORD", "hunter2"),
        ("PASSWORD", "correct horse battery"),
        ("MY_SECRET", "abc123!?"),
        ("OPENAI_API_KEY", "abcdefgh"),
        ("api_key", "abcdefgh"),
        ("COMET_TOKEN", "a1b2c3d4e5f6a7b8"),
        ("DEPLOY_KEY", "dGhpcyBpcyBhIGtleQ1=="),
    ],
)
def test_a_secret(name: str, value: str) -> None:
    assert looks_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "4096"),
        ("KEY_DIM", "64"),
        ("PAD_TOKEN", "[PAD]"),
        ("EOS_TOKEN", "<|endoftext|>"),
        ("SORT_KEY", "created_at"),
        ("PRIMARY_KEY", "user_identifier_column"),
        ("SSH_PRIVATE_KEY", "/root/.ssh/id_rsa"),
        ("HF_TOKEN", "$(HUB_TOKEN)"),
        ("HF_TOKEN", "${HUB_TOKEN}"),
        ("MY_SECRET", "projects/p/secrets/s/versions/latest"),
        ("API_KEY", "none"),
        ("USE_API_KEY", "true"),
        ("PASSWORD", ""),
        ("BOS_TOKEN", "128000"),
        ("HF_TOKEN", "gs://bucket/token.txt"),
        ("GIT_COMMIT", "0123456789" * 4),
        ("NCCL_DEBUG", "WARN"),
        ("LABEL", "sk-learn"),
    ],
)
def test_no_secret(name: str, value: str) -> None:
    assert not looks_secret(name, value)


@pytest.mark.parametrize(
    "text",
    [
        "env: {HF_TOKEN: %s}",
        "env: {X: {y: %s}}",
        "secrets: {HF_TOKEN: %s}",
        "name: %s",
        "output: [%s]",
        "limits: {usd: %s}",
        "vm: {on_stop: %s}",
        "env: {HF_TOKEN: &a %s}",
    ],
)
def test_a_known_secret_is_never_shown(text: str) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    assert secret[6:] not in " ".join(lines(SMALL.replace("name: a\n", "") + text % secret))


def test_what_stands_where_secrets_belong_is_never_shown() -> None:
    (line,) = lines(SMALL + "secrets: {DB: correct horse battery}")
    assert line.startswith("s.yaml:3: secrets.DB: 'corr…' can't be taken | a secret in Secret Manager, never its value")
