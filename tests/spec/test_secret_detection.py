"""What looks like a secret, and what only sounds like one."""

from __future__ import annotations

import time

import pytest

from launcher.spec.secret_detection import LONG, known_secret, looks_secret, masked
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
        ("X", "xoxb-1234567890-" + "aB3" * 8),
        ("X", "npm_" + "a1" * 18),
        ("X", "pypi-AgEIcHlwaS5vcmc" + "a1" * 30),
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
        ("PGPASSWORD", "hunter2"),
        ("MYSQL_PWD", "hunter2"),
        ("DB_PASS", "hunter2"),
        ("DB_PASSWORD", "48151623"),
        ("DB_PASSWORD", "1234"),
        ("DB_PASSWORD", "pa$sword"),
        ("DB_PASSWORD", "correct$(horse)battery"),
        ("DATABASE_URL", "postgresql://app:hunter2@10.0.0.1/db"),
        ("PIP_INDEX_URL", "https://me:hunter2@pypi.example.com/simple"),
        ("REDIS", "redis://:hunter2@10.0.0.1:6379"),
        ("PIP_INDEX_URL", "https://ghp_" + "a1" * 18 + "@example.com/simple"),
        ("ARGUMENTS", "--token=hf_" + "aB3" * 10),
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
        ("LABEL", "task-scheduler-with-a-long-name-1"),
        ("LABEL", "sk-learn-model-version-2"),
        ("PASSWORD_FILE", "/run/x"),
        ("DB_PASSWORD_FILE", "secrets/db.txt"),
        ("PGPASSWORD", "$(DB_PASSWORD)"),
        ("PGPASSWORD", "$DB_PASSWORD"),
        ("AUTH_TOKEN", "Bearer $(HUB_TOKEN)"),
        ("DATABASE_URL", "postgresql://app:$(DB_PASSWORD)@10.0.0.1/db"),
        ("DATABASE_URL", "postgresql://app@10.0.0.1:5432/db"),
        ("REGISTRY", "http://host:8080/@scope/package"),
        ("PWD", "somewhere/else"),
        ("ASK_PASSWORD", "0"),
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
        "run: {args: [--token, %s]}",
        "run: {args: [--token=%s]}",
        "run: {command: [curl, 'https://%s@example.com']}",
        "run: {config: {data: %s}}",
        "run: {config: {steps: %s}}",
        "run: {config: {optimizer: {betas: [%s]}}}",
        "output: https://%s@b/x",
    ],
)
def test_a_known_secret_is_never_shown(text: str) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    assert secret[6:] not in " ".join(lines(SMALL.replace("name: a\n", "") + text % secret))


def test_values_of_env_and_secrets_are_never_shown() -> None:
    (line,) = lines(SMALL + "secrets: {DB: correct horse battery}")
    assert line.startswith("s.yaml:3: secrets.DB: 'corr…' is invalid | use a Secret Manager version, never the secret")


@pytest.mark.parametrize("secret", ["1234", "424242", "hunter2", "correct-horse", "a" * (LONG - 1)])
@pytest.mark.parametrize("text", ["env: {DB_PASSWORD: %s}", "secrets: {DB: %s}", "env: {DB_PASSWORD: '%s'}"])
def test_of_a_short_secret_no_character_is_shown(text: str, secret: str) -> None:
    """Four characters of four are the secret."""
    shown = "\n".join(lines(SMALL + text % secret))
    assert secret[:2] not in shown.replace("DB_PASSWORD", "")


def test_a_long_secret_is_shown_by_its_first_characters() -> None:
    for length in range(60):
        secret = "".join(chr(ord("A") + at % 26) for at in range(length))
        shown = masked(secret).strip("'…")
        assert shown == ("ABCD" if length >= LONG else "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {args: [--epochs, 3, --token=%s]}", "s.yaml:3: run.args[2]: '--to…' contains a secret"),
        ("run: {command: [python, x.py, %s]}", "s.yaml:3: run.command[2]: 'hf_a…' contains a secret"),
        ("run: {config: {data: %s}}", "s.yaml:3: run.config.data: 'hf_a…' contains a secret"),
        ("run: {args: ['https://me:hunter2@example.com/x']}", "s.yaml:3: run.args[0]: 'http…' contains a secret"),
    ],
)
def test_what_the_program_is_given_has_no_secret(text: str, message: str) -> None:
    (line,) = lines(SMALL + text.replace("%s", "hf_abcdefghijklmnopqrst"))
    assert line.startswith(message)
    assert "reference it under secrets" in line


def test_a_long_text_is_searched_in_no_time() -> None:
    began = time.process_time()
    for piece in ("a", "sk-", "sk-a", "eyJ", "eyJaaaa.", "://a:", "://:a", "$(a", "ghp_", "a-"):
        assert not known_secret(piece * (250_000 // len(piece)))
    assert time.process_time() - began < 5  # any of them alone would take minutes if the time were quadratic


@pytest.mark.parametrize(
    "text",
    [
        "notify: {webhook: 'ftp://hooks.example.com/s3cr3t'}",
        "notify: {webhook: ['https://hooks.example.com/s3cr3t']}",
        "notify: https://hooks.example.com/s3cr3t",
        "notify: {url: 'https://hooks.example.com/s3cr3t'}",
        "notify: {webhook: 'https://me:s3cr3t@hooks.example.com/x'}",
        "notify: {webhook: 'http://hooks.example.com/s3cr3t', on: [finish], format: xml}",
    ],
)
def test_a_webhook_is_never_shown(text: str) -> None:
    found = lines(f"{SMALL}{text}\n")
    assert any("notify" in line for line in found)
    assert not any("s3cr3t" in line for line in found)
