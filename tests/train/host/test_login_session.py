"""A host whose logind kills the processes of a session at the logout; its answers are those of systemd 257."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch_train.host import login_session
from launch_train.host.errors import RefusedError
from launch_train.host.login_session import is_in_session, leave_login_session

SESSION = "0::/user.slice/user-1000.slice/session-c1.scope\n"
SCOPE = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/launch-x.scope\n"
KILLS = 'b true\nas 1 "root"\nas 0'
BUSCTL = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$1" in
  get-property) printf '%s\\n' '{properties}' ;;
  --user) {move} ;;
esac
"""


class LoggedIn:
    """This process, as one of the session of the account `me`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.cgroup = folder, folder / "cgroup"
        self.cgroup.write_text(SESSION)
        account = type("Account", (), {"pw_name": "me"})
        monkeypatch.setattr("pwd.getpwuid", lambda _: account)
        monkeypatch.setattr(login_session, "CGROUP", self.cgroup)
        monkeypatch.setattr(login_session, "LINGER", folder)
        monkeypatch.setattr(login_session, "MOVE_SECONDS", 0.2)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        self.answer(KILLS)

    def answer(self, properties: str, *, moves: bool = True) -> None:
        """Let the bus answer with logind's properties, and move a process or not."""
        move = f"printf '{SCOPE.strip()}\\n' > {self.cgroup}" if moves else "exit 1"
        text = BUSCTL.format(folder=self.folder, properties=properties, move=move)
        (self.folder / "busctl").write_text(text)
        (self.folder / "busctl").chmod(0o755)

    def calls(self) -> str:
        return (self.folder / "calls").read_text()


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoggedIn:
    return LoggedIn(tmp_path, monkeypatch)


def test_a_job_moves_to_a_scope_of_its_own(session: LoggedIn) -> None:
    (session.folder / "me").touch()
    leave_login_session("launch-x.scope")
    assert not is_in_session()
    assert f"ssa(sv)a(sa(sv)) launch-x.scope fail 1 PIDs au 1 {os.getpid()} 0" in session.calls()


def test_without_linger_or_if_it_cannot_be_moved_it_is_refused(session: LoggedIn) -> None:
    with pytest.raises(RefusedError, match="KillUserProcesses") as refused:
        leave_login_session("launch-x.scope")
    assert refused.value.fix.endswith("loginctl enable-linger")
    (session.folder / "me").touch()
    session.answer(KILLS, moves=False)
    with pytest.raises(RefusedError, match="can't leave its session"):
        leave_login_session("launch-x.scope")


@pytest.mark.parametrize(
    "properties",
    ["b false\nas 0\nas 0", 'b true\nas 2 "root" "me"\nas 0', 'b true\nas 0\nas 1 "other"', "Failed to get property"],
)
def test_where_nothing_kills_it_it_stays(session: LoggedIn, properties: str) -> None:
    session.answer(properties)
    leave_login_session("launch-x.scope")
    assert "--user" not in session.calls()


def test_a_process_of_no_session_asks_nothing(session: LoggedIn) -> None:
    session.cgroup.write_text("0::/system.slice/sshd.service\n")
    leave_login_session("launch-x.scope")
    assert not (session.folder / "calls").exists()
