"""gcloud's settings as files: odd ones never end in a traceback."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.inputs import gcloud_config

PROJECT = "core/project"


def configured(folder: Path, text: bytes, active: bytes = b"work\n", name: str = "work") -> Mapping[str, str]:
    """The environment that points to a gcloud folder with one configuration."""
    (folder / "configurations").mkdir()
    (folder / "active_config").write_bytes(active)
    (folder / "configurations" / f"config_{name}").write_bytes(text)
    return {"CLOUDSDK_CONFIG": str(folder)}


P1 = b"[core]\nproject = p1\n"


@pytest.mark.parametrize(
    ("text", "active", "name"),
    [
        (P1, b"work\n", "work"),
        (b"\xef\xbb\xbf[core]\r\nproject = p1\r\n", b"work\n", "work"),
        (b"# caf\xe9\n[core]\nproject = p1\naccount = \xff\n", b"work\n", "work"),
        (P1, b"\xef\xbb\xbfwork", "work"),
        (P1, b"work\r\n", "work"),
        (P1, b"\n", "default"),
    ],
)
def test_a_configuration_that_can_be_read(tmp_path: Path, text: bytes, active: bytes, name: str) -> None:
    assert gcloud_config.setting(PROJECT, configured(tmp_path, text, active, name)) == "p1"


@pytest.mark.parametrize(
    ("text", "active"),
    [
        (b"[core]\nproject = p\0q\n", b"work"),
        (b"project = p1\n", b"work"),
        (b"\0\xff", b"work"),
        (b"[core]\nproject = p1\n", b"wo\0rk"),
        (b"[core]\nproject = p1\n", b"\xff\xfe"),
        (b"[core]\nproject = p1\n", b"x" * 5000),
    ],
)
def test_an_unreadable_configuration_is_empty(tmp_path: Path, text: bytes, active: bytes) -> None:
    assert gcloud_config.setting(PROJECT, configured(tmp_path, text, active)) is None


def test_a_variable_that_is_no_text_is_nothing() -> None:
    assert gcloud_config.setting(PROJECT, {"CLOUDSDK_CORE_PROJECT": "\udcff", "CLOUDSDK_CONFIG": "/none"}) is None


def test_a_missing_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME, and a uid that no name belongs to, as in some containers."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert gcloud_config.setting(PROJECT, {}) is None
    assert gcloud_config.default_regions({}) == ()
