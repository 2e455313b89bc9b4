"""What reports and loggers must not show, and that masking costs no time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from launch_train.common.masking import HIDDEN, mask, mask_message

CANARY = "c4naryValue"


@pytest.mark.parametrize(
    "value",
    [
        {"tokenizer": {"auth_token": CANARY}},
        {"tokenizer_password": CANARY},
        {"env": {"ANY": CANARY}},
        {"args": ["--password", CANARY]},
        {"args": [f"--api-key={CANARY}"]},
        {"command": f"sh -c 'train --password \"{CANARY}\"'"},
        {"command": f"train --passphrase {CANARY}"},
        {"command": f"train --webhook {CANARY} --lr 1"},
        {"command": f"curl https://host/?token={CANARY}&x=1"},
    ],
)
def test_a_secret_is_hidden(value: dict[str, Any]) -> None:
    masked = str(mask(value))
    assert CANARY not in masked
    assert HIDDEN in masked


@pytest.mark.parametrize(
    "value",
    [{"tokens_per_s": 5.0}, {"tokenizer": "tiktoken:gpt2"}, {"token_dtype": "uint16"}, {"args": ["--lr", "0.1"]}],
)
def test_what_is_no_secret_is_kept(value: dict[str, Any]) -> None:
    assert mask(value) == value


def test_a_long_word_takes_no_time() -> None:
    """It took minutes when each place in it was a beginning."""
    began = time.process_time()
    mask({"blob": "a" * 200_000})
    assert time.process_time() - began < 5


def test_a_message_has_no_value_of_a_secret() -> None:
    env = {"SECRET_KEY": f"{CANARY}\n", "PLAIN": "refused"}
    assert mask_message(f"login with {CANARY} refused", env) == f"login with {HIDDEN} refused"
