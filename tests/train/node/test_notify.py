"""The webhook: each event is sent once, and no failure delays the run."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.contract import Exit
from launch_train.common.errors import UsageError
from launch_train.common.storage import LocalFolder
from launch_train.node import notify
from launch_train.node.exit_status import End
from launch_train.node.generation import StopRequest
from launch_train.node.notify import CostMeter, Notifier, Settings, event_of, newest_row, post, slack
from launcher.testing.googlecloud import GoogleCloud
from launcher.testing.httpserver import Head, LoopbackServer, Response

RUN = "gpt-1a2b3c4d"
EVENTS = ("preempted", "failed", "finished", "stalled")
PLAN = {
    "machine": {"nodes": 2},
    "attempts": [{"region": "r", "machine_type": "m", "provisioning": "spot", "usd_per_hour": 36.0}],
}
ENTRY = {"region": "r", "machine": "m", "provisioning": "spot", "time": 1.0}


class Hook(LoopbackServer):
    """A webhook on loopback that answers with the codes in turn, then with 200. `hang`: it never answers."""

    def __init__(self, *codes: int, hang: bool = False) -> None:
        super().__init__(self.answer, "webhook")
        self.codes, self.hang = [*codes], hang
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"{super().url}/s3cr3t"

    def answer(self, head: Head) -> Response:
        self.bodies.append(json.loads(head.read(None)))
        if self.hang:
            return Response(head=False, then="hold")
        code = self.codes.pop(0) if self.codes else 200
        return Response(status=code, headers={"Location": "/elsewhere"} if 300 <= code < 400 else {})


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "TICK", 0.005)
    monkeypatch.setattr(notify, "AGAIN_SECONDS", 0.001)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path: Path) -> LocalFolder:
    (tmp_path / runfolder.PLAN).write_text(json.dumps(PLAN))
    storage = LocalFolder(tmp_path)
    storage.write(runfolder.attempt_lock(1), json.dumps(ENTRY).encode())
    rows = [{"step": 6, "loss": 2.5}, {"step": 7, "loss": 2.25}, {"event": "checkpoint", "step": 7}]
    storage.write(runfolder.metrics_part(1, 0, 0, 0), "".join(json.dumps(row) + "\n" for row in rows).encode())
    return storage


def notifier(
    storage: LocalFolder, url: str, said: list[str], *, stop: StopRequest | None = None, node: int = 0, **fields: Any
) -> Notifier:
    wanted = Settings(**{"webhook": url, "on": EVENTS, **fields})
    environ = {contract.RUN: RUN, "TOKEN": "s3cr3t-token"}
    return Notifier(wanted, storage, environ, node=node, attempt=1, stop=stop or StopRequest(), say=said.append)


def test_a_message_says_what_happened_and_what_to_do(run: LocalFolder, said: list[str]) -> None:
    with Hook() as hook:
        one = notifier(run, hook.url, said)
        one.close(End(Exit.FAILED, "node 0: exit code 1; token s3cr3t-token"), 5.0)
    (body,) = hook.bodies
    assert body["time"] == pytest.approx(time.time(), abs=60)
    assert {**body, "time": 0, "usd": 0} == {
        "run": RUN,
        "event": "failed",
        "cause": "node 0: exit code 1; token •••",
        "step": 7,
        "loss": 2.25,
        "usd": 0,
        "attempt": 1,
        "node": 0,
        "time": 0,
        "next": f"launch logs {RUN}",
    }
    assert 0 <= body["usd"] < 1
    assert said == []


def test_each_event_is_sent_once_whoever_sees_it(run: LocalFolder, said: list[str]) -> None:
    with Hook() as hook:
        for node in (0, 1, 0):  # two nodes, and one that starts again
            one = notifier(run, hook.url, said, node=node)
            one.note("stalled", f"node {node}: hung")
            one.note("finished", "done")
            one.close(None, 5.0)
    assert sorted(body["event"] for body in hook.bodies) == ["finished", "stalled"]


def test_only_the_events_of_the_spec_are_sent(run: LocalFolder, said: list[str]) -> None:
    with Hook() as hook:
        one = notifier(run, hook.url, said, on=("failed",))
        one.note("stalled", "hung")
        one.close(End(Exit.OK, "done"), 5.0)
    assert hook.bodies == []


def test_a_preemption_is_sent_while_the_processes_still_save(run: LocalFolder, said: list[str]) -> None:
    stop, sent = StopRequest(), threading.Event()
    with Hook() as hook:
        one = notifier(run, hook.url, said, stop=stop)
        stop.note(signal.SIGTERM, ctrl_c=False)
        until = time.monotonic() + 5
        while not hook.bodies and time.monotonic() < until:
            sent.wait(0.005)
        assert [body["event"] for body in hook.bodies] == ["preempted"]
        one.close(End(Exit.PREEMPTED, "interrupted; checkpoint saved"), 5.0)
    assert len(hook.bodies) == 1


@pytest.mark.parametrize(
    ("code", "signum", "event"),
    [
        (Exit.OK, 0, "finished"),
        (Exit.FAILED, 0, "failed"),
        (Exit.USAGE, 0, "failed"),
        (Exit.UNFIT, 0, "failed"),
        (Exit.PREEMPTED, 0, "preempted"),
        (128 + signal.SIGTERM, signal.SIGTERM, "preempted"),
        (128 + signal.SIGINT, signal.SIGINT, ""),
        (Exit.SUPERSEDED, 0, ""),
        (Exit.TERMINAL, 0, ""),
    ],
)
def test_the_event_of_an_end(code: int, signum: int, event: str) -> None:
    assert event_of(End(code, ""), StopRequest(signum=signum)) == event


def test_the_cost_counts_over_all_starts(run: LocalFolder) -> None:
    run.write(runfolder.COST, b'{"usd": 79.9}')
    now = [1000.0]
    meter = CostMeter(run, 1, lambda: now[0])
    assert meter.update() == 79.9
    now[0] += 10  # two machines at 36 USD an hour
    assert meter.update() == 80.1
    assert CostMeter(run, 1).read() == 80.1  # as another node says it
    assert CostMeter(run, 1, lambda: now[0]).update() == 80.1  # and the next start


def test_an_unreadable_cost_does_not_count_as_zero(run: LocalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write(runfolder.COST, b'{"usd": 79.9}')
    meter = CostMeter(run, 1, lambda: 1000.0)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "read", lambda self, name: (_ for _ in ()).throw(TimeoutError(name)))
        assert (meter.update(), meter.read()) == (None, None)
    assert meter.update() == 79.9


@pytest.mark.parametrize(("usd", "sent"), [(79.9, 0), (80.1, 1)])
def test_the_share_of_the_cost_limit(run: LocalFolder, said: list[str], usd: float, sent: int) -> None:
    run.write(runfolder.COST, json.dumps({"usd": usd}).encode())
    with Hook() as hook:
        for _ in range(2):
            notifier(run, hook.url, said, on=("cost>80%",), usd=100.0).close(None, 5.0)
    assert [body["next"] for body in hook.bodies] == [f"launch cancel {RUN}"] * sent


def test_a_price_that_is_unknown_is_not_guessed(run: LocalFolder, said: list[str]) -> None:
    run.write(runfolder.PLAN, b"{}")
    with Hook() as hook:
        one = notifier(run, hook.url, said, on=("cost>1%", "finished"), usd=0.01)
        one.close(End(Exit.OK, "done"), 5.0)
    (body,) = hook.bodies
    assert (body["event"], body["usd"]) == ("finished", None)


def test_an_answer_of_500_is_tried_again(run: LocalFolder, said: list[str]) -> None:
    with Hook(500, 503) as hook:
        notifier(run, hook.url, said).close(End(Exit.OK, "done"), 5.0)
    assert (len(hook.bodies), said) == (3, [])


@pytest.mark.parametrize(
    ("codes", "problem"), [((500,) * 9, "HTTP 500"), ((307,) * 9, "HTTP 307"), ((404,) * 9, "HTTP 404")]
)
def test_a_refusal_or_a_redirect_is_a_warning(
    run: LocalFolder, said: list[str], codes: tuple[int, ...], problem: str
) -> None:
    with Hook(*codes) as hook:
        notifier(run, hook.url, said).close(End(Exit.OK, "done"), 5.0)
        assert len(hook.bodies) == notify.TRIES  # a redirect is not followed
    (line,) = said
    assert problem in line
    assert "s3cr3t" not in line


def test_a_webhook_that_hangs_delays_the_end_up_to_its_time_limit(run: LocalFolder, said: list[str]) -> None:
    with Hook(hang=True) as hook:
        one, began = notifier(run, hook.url, said), time.monotonic()
        one.close(End(Exit.OK, "done"), 0.1)
        assert time.monotonic() - began < 5
    assert "did not answer in time" in said[0]


def test_an_unreachable_webhook_prints_no_url() -> None:
    assert post("http://127.0.0.1:9/s3cr3t", {}) == "ConnectionError"
    assert "s3cr3t" not in post("https://[s3cr3t", {})


def test_without_the_record_nothing_is_sent(run: LocalFolder, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: LocalFolder, name: str, *args: Any, **options: Any) -> str:
        raise OSError("the disk is full")

    with Hook() as hook:
        monkeypatch.setattr(LocalFolder, "write", full)
        notifier(run, hook.url, said).close(End(Exit.OK, "done"), 5.0)
    assert hook.bodies == []
    assert "not sent" in said[0]


def test_the_url_comes_from_secret_manager(run: LocalFolder, said: list[str], cloud: GoogleCloud) -> None:
    version = "projects/my-project/secrets/hook/versions/latest"
    with Hook() as hook:
        for secret in (b"", f"{hook.url}\n".encode()):  # it does not exist yet when the first node starts
            if secret:
                cloud.secrets.add("hook", secret)
            wanted = Settings(version, EVENTS)
            one = Notifier(wanted, run, cloud.environ(), node=0, attempt=1, stop=StopRequest(), say=said.append)
            one.close(End(Exit.OK, "done"), 5.0)
    assert len(hook.bodies) == 1  # the first node did not claim what it could not send
    assert {"notify.webhook" in line for line in said} == {True}
    assert not any("s3cr3t" in line for line in said)


def test_the_newest_row_is_that_of_a_step(run: LocalFolder) -> None:
    assert newest_row(run) == {"step": 7, "loss": 2.25}
    run.write(runfolder.metrics_part(2, 0, 0, 0), b'{"event": "start"}\n')
    assert newest_row(run)["step"] == 7
    for damaged in (b"{cut off", b"5\n"):
        run.write(runfolder.metrics_part(2, 0, 0, 1), damaged)
        assert newest_row(run)["step"] == 7  # a damaged part costs itself alone


def test_the_newest_row_of_a_run_with_many_parts_takes_one_request(
    run: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"step": 100_000, "loss": 1.5, "time": 1.75e9}
    run.write(runfolder.PROGRESS, json.dumps({"attempt": 1, "steps": 200_000, "row": row}).encode())
    monkeypatch.setattr(LocalFolder, "list", lambda *_: pytest.fail("a list of 100,000 parts takes 100 requests"))
    assert newest_row(run) == row


def test_slacks_format() -> None:
    body = {"run": RUN, "event": "cost>80%", "cause": "a < b & c", "step": 1200, "loss": math.pi, "usd": 3.5}
    text = slack({**body, "next": f"launch cancel {RUN}"})["text"]
    assert text.splitlines() == [
        f"*{RUN}* has used much of its limit: a &lt; b &amp; c",
        "step 1,200, loss 3.142, $3.50 so far",
        f"`launch cancel {RUN}`",
    ]
    bare = slack({**body, "event": "failed", "step": None, "loss": None, "usd": None, "next": "x"})["text"]
    assert len(bare.splitlines()) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"webhook": "https://a.b/s3cr3t"}', '{"on": 3, "webhook": "x"}'])
def test_settings_that_can_not_be_read_are_an_error_without_the_url(text: str) -> None:
    if text == "[]":
        assert notify.notify_settings({contract.NOTIFY: text}) is None
        return
    with pytest.raises(UsageError) as error:
        notify.notify_settings({contract.NOTIFY: text})
    assert "s3cr3t" not in str(error.value)
