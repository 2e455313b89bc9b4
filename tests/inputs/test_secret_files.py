"""Secrets among the code: what is left out by its name, what stops the launch, and what raises no alarm."""

from __future__ import annotations

import codecs
import re
import time
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.inputs import content
from launcher.inputs.code_files import Code, collect_code, hashed_and_searched, without_secrets
from launcher.inputs.content import CHUNK
from launcher.inputs.secret_files import SecretSearch
from tests.command import ROOT
from tests.inputs.test_content import written

RANDOM = "Qx7Lr2Vb9KpT4mWz8NcY3hGd6JsF5aEuR1tXoQ7vBn2MkZ4pLw9"
BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIB"
BEGIN = "-----BEGIN PRIVATE" + " KEY-----"  # in two parts, like all secrets here: this repository is searched too
PEM = f"{BEGIN}\n{BODY}\n-----END PRIVATE" + " KEY-----\n"
ACCOUNT = '{"type": "service_account", "private_key": "x"}'


def judged(folder: Path, *allowed: str) -> Code:
    return without_secrets(collect_code(folder), allowed)


def kinds(text: str | bytes) -> str:
    search = SecretSearch()
    search.feed(text.encode() if isinstance(text, str) else text)
    return search.secret.kind if search.secret else ""


def test_files_with_the_name_of_a_secret_are_left_out_and_named(tmp_path: Path) -> None:
    secrets = [
        ".env",
        ".env.local",
        "prod.env",
        ".env.bak",
        "_netrc",
        ".netrc",
        "id_rsa",
        "id_ed25519.old",
        "deploy_key",
    ]
    secrets += ["github-deploy-key", "google_compute_engine", "aws/credentials", "hf_token.txt", "putty.ppk"]
    secrets += [".streamlit/secrets.toml"]
    code = [".env.example", "example.env", "environment", "token.py", "tokens.txt", "google_compute_engine.pub"]
    for name in (*secrets, *code):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    written(tmp_path / ".ssh", config="x")
    found = judged(tmp_path)
    assert sorted(found.secrets) == sorted(secrets)
    assert sorted(file.name for file in found.files) == sorted(code)
    assert found.content == content.content(found.files)


def test_files_that_are_a_key_are_left_out_whatever_their_name_and_encoding(tmp_path: Path) -> None:
    written(
        tmp_path, server__key__bak=PEM, notes=BEGIN + "\n", key__json=ACCOUNT, ca__pem="-----BEGIN CERTIFICATE-----\n"
    )
    written(tmp_path, both__pem=f"-----BEGIN CERTIFICATE-----\n{BODY}\n-----END CERTIFICATE-----\n{PEM}")
    written(tmp_path, data__json='{"type": "service_account"}', mine__txt="PuTTY-User-Key-File-3: ssh-ed25519\n")
    written(tmp_path, age__txt="AGE-SECRET-KEY-" + "1QQQ\n")
    (tmp_path / "utf-16-be.json").write_bytes(codecs.BOM_UTF16_BE + ACCOUNT.encode("utf-16-be"))
    for encoding in ("utf-16", "utf-8-sig"):
        (tmp_path / f"{encoding}.json").write_text(ACCOUNT, encoding=encoding)
    found = judged(tmp_path)
    keys = ["age.txt", "both.pem", "key.json", "mine.txt", "notes", "server.key.bak"]
    assert sorted(found.secrets) == [*keys, "utf-16-be.json", "utf-16.json", "utf-8-sig.json"]
    assert sorted(file.name for file in found.files) == ["ca.pem", "data.json"]


def test_a_secret_in_a_file_that_the_job_may_need_stops_the_launch(tmp_path: Path) -> None:
    token = "hf_" + RANDOM[:34]
    written(
        tmp_path, secret__py=f'"""Mine."""\n\nKEY = """{PEM}"""\n', secrets__yaml=f"a: 1\ntoken: {token}\n", a__py=""
    )
    with pytest.raises(UsageError) as refused:
        judged(tmp_path)
    assert "secret.py:3: private key" in refused.value.problem
    assert "secrets.yaml:2: Hugging Face token" in refused.value.problem
    assert "a.py" not in refused.value.problem
    assert "image.allow_secrets" in refused.value.hint
    assert ".dockerignore" in refused.value.hint
    assert not re.search(f"{token[4:]}|{BODY}", str(refused.value))
    (tmp_path / ".dockerignore").write_text("secret.py\n")
    assert "secret.py" not in [file.name for file in judged(tmp_path, "*.yaml").files]
    assert sorted(file.name for file in judged(tmp_path, "secrets.yaml").files) == [
        ".dockerignore",
        "a.py",
        "secrets.yaml",
    ]


def test_an_allowed_file_is_sent_though_it_is_a_key(tmp_path: Path) -> None:
    written(tmp_path / "tests", server__pem=PEM, __env="A=1")
    assert judged(tmp_path, "tests/*.pem").secrets == ["tests/.env"]
    assert judged(tmp_path, "tests/server.pem", "tests/.env").secrets == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("hf_" + RANDOM[:34], "Hugging Face token"),
        ("ghp_" + RANDOM[:36], "GitHub token"),
        (f"github_pat_{RANDOM[:22]}_{RANDOM}{RANDOM[:8]}", "GitHub token"),
        ("npm_" + RANDOM[:36], "npm token"),
        ("glpat-" + "a-b_" + RANDOM[:16], "GitLab token"),
        ("pypi-AgEIcHlwaS5vcmc" + RANDOM, "PyPI token"),
        ("sk-" + RANDOM[:48], "OpenAI or Anthropic key"),
        ("sk-proj-" + RANDOM + "-" + RANDOM, "OpenAI or Anthropic key"),
        ("sk-ant-api03-" + RANDOM + "_" + RANDOM, "OpenAI or Anthropic key"),
        ("GOCSPX-" + RANDOM[:28], "Google OAuth secret"),
        ("AIzaSy" + RANDOM[:33], "Google API key"),
        ("xoxb-2210535565-2217624551-" + RANDOM[:24], "Slack token"),
        ("AKIA" + "Q7XW2LMB5RTN3VKZ" + f"\nsecret: {RANDOM[:40]}", "AWS access key"),
        (f"secret: {RANDOM[:40]}\n" + "AKIA" + "Q7XW2LMB5RTN3VKZ", "AWS access key"),
        ("wandb_v1_" + RANDOM + RANDOM[:25], "Weights & Biases key"),
        (f"b'{BEGIN}' \\\n  b'{BODY}'", "private key"),
        (f'"{BEGIN}\\n{BODY}"', "private key"),
    ],
)
@pytest.mark.parametrize("around", ["{}", "import os\nx = '{}'\n", "a=1&t={}&b=2", '"--token={}",'])
def test_known_shapes_of_secrets_are_found(text: str, kind: str, around: str) -> None:
    filled = around.format(text)
    if around == "{}" and kind == "private key":
        filled = f"#{filled}"
    assert kinds(filled) == kind
    assert kinds(filled.encode("utf-16")) == kind


@pytest.mark.parametrize(
    "text",
    [
        "AKIA" + "IOSFODNN7EXAMPLE wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "AKIA" + "Q7XW2LMB5RTN3VKZ alone",
        "AKIA" + "Q7XW2LMB5RTN3VKZ wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "hf_" + "x" * 34,
        "hf_model_for_sequence_classification_with_a_long_name",
        "from_hf_" + RANDOM[:34],
        "risk-" + RANDOM[:34],
        "sk-learn-contrib-with-a-long-kebab-name",
        "xoxb-your-bot-token-goes-here",
        f"if '{BEGIN}' in text: pass",
        f"{BEGIN}\n..."[1:],
        "https://user:password@example.com/",
        "sha256:" + "0a1b2c3d" * 8,
        "glpat-" + RANDOM[:20] + "  # gitleaks:allow",
    ],
)
def test_examples_placeholders_and_names_raise_no_alarm(text: str) -> None:
    assert not kinds(f"a\n{text}\n")


def test_binary_files_are_not_searched() -> None:
    assert not kinds(b"\0\1" + b"hf_" + RANDOM[:34].encode())


def test_a_secret_across_two_chunks_is_found_on_its_line(tmp_path: Path) -> None:
    lines = "x" * 63 + "\n"
    for begin in (-36, -34, -10, -1, 0):  # of a token with 37 characters, from the end of a chunk
        head = lines * (CHUNK // 64) * 2
        text = head[: begin - 1 or None] + "\n" + "hf_" + RANDOM[:34] + "\n" + lines + "ghp_" + RANDOM[:36]
        (tmp_path / "a.py").write_text(text)
        (file,) = collect_code(tmp_path)
        _, secret = hashed_and_searched(file.path)
        assert secret == ("Hugging Face token", text.partition("hf_")[0].count("\n") + 1)


def test_this_repository_has_no_secrets() -> None:
    found = without_secrets(collect_code(ROOT))
    assert found.secrets == []
    assert len(found.files) > 1000


def test_a_link_to_a_secret_is_left_out_too(tmp_path: Path) -> None:
    written(tmp_path, __env="A=1")
    (tmp_path / "settings.json").symlink_to(".env")
    (tmp_path / "mine").symlink_to(".env")
    found = judged(tmp_path)
    assert {file.name: file.link for file in found.files} == {"settings.json": ".env", "mine": ".env"}
    assert found.secrets == [".env"]  # what the links lead to isn't there


def test_a_long_file_is_searched_in_linear_time() -> None:
    began = time.process_time()
    for piece in (
        "a",
        "sk-",
        "sk-a",
        "sk-a1-",
        "_",
        "-",
        "A",
        "AKIA",
        "ghp_",
        "-----BEGIN ",
        '"type"',
        "-----BEGIN A-----",
    ):
        assert not kinds(piece * (CHUNK // len(piece)))
    assert time.process_time() - began < 5  # any of them alone would take minutes if the time were quadratic
