"""One machine of a run: `python -m launch_train.node [--launcher …] [--module M | --script S | --command] -- ARGS`.

CLUSTER_SPEC says which machines take part. Node 0 hosts the control store and its referee
(train/launch_train/node/coordinator.py); every node obeys it: starts what the order says, reports how it ended, and
starts again or leaves with the run's exit code.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from types import FrameType
from typing import TypeVar

from launch_train.common import contract, faults
from launch_train.common.errors import OutputError, TrainError, UnfitError, UsageError
from launch_train.common.secrets import AwayError, secrets_of
from launch_train.common.storage import LocalFolder, UnreachableError, open_storage
from launch_train.node import gpu_benchmark, health_check
from launch_train.node.cluster import Cluster, parse
from launch_train.node.command import Task, machine_env, missing, parse_args, rehearsal_env
from launch_train.node.control_store import Member, MemoryStore, Order, State, Store, Timing, TorchStore
from launch_train.node.coordinator import Referee
from launch_train.node.discovery import find_store
from launch_train.node.exit_status import End, Outcome, decided
from launch_train.node.gce_vm import attend
from launch_train.node.launch_round import Plan, Stop, run_generation
from launch_train.node.process import adopt_orphans
from launch_train.node.retry import patiently
from launch_train.node.run_record import DuplicateError, Record, ended_jobs
from launch_train.telemetry.log_capture import Text
from launch_train.telemetry.recovery import Leftovers, spool_folder

T = TypeVar("T")


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ, timing: Timing | None = None) -> int:
    """Do a node's work; the exit code (contract.Exit, or 128 + the signal that ended it)."""
    stop, timing = _catch_signals(), timing or Timing()
    adopt_orphans()
    environ = dict(environ)
    task = parse_args(argv)
    journal = attend(environ, stop, say)
    text = Text(wanted=bool(environ.get(contract.RUN_FOLDER)), every=timing.text, say=say, journal=journal)
    try:
        end = _end(task, environ, timing, stop, text)
        say(f"{end.reason} (exit code {end.code})" if end.code else end.reason)
    finally:
        until, least = time.monotonic() + timing.text_last, time.monotonic() + timing.text_least
        text.close(lambda: max(stop.left(until, timing), least - time.monotonic()))
    return int(end.code)


def _end(task: Task, environ: Mapping[str, str], timing: Timing, stop: Stop, text: Text) -> End:
    try:
        cluster = parse(environ.get(contract.CLUSTER_SPEC), environ)
        return Node(task, cluster, environ, timing.of(cluster.size), stop, text).run()
    except TrainError as error:
        return End(error.exit, str(error))


def say(line: str) -> None:
    """One line to the job's log, in one write."""
    sys.stderr.write(f"launch: {line}\n")
    sys.stderr.flush()


class TerminalError(TrainError):
    """The run folder forbids the start. Every node reads that for itself."""

    exit = contract.Exit.TERMINAL


class _StoppedError(TrainError):
    """A signal came while the run folder was waited for."""


class Node:
    """This machine's part of the run."""

    def __init__(
        self, task: Task, cluster: Cluster, environ: Mapping[str, str], timing: Timing, stop: Stop, text: Text
    ) -> None:
        self._task = task
        self._cluster = cluster
        self._environ = environ
        self._timing = timing
        self._stop = stop
        self._text = text
        self._record = Record(None)
        self._attempt = 1
        self._leftovers: Leftovers | None = None
        self._plan: Plan | None = None
        self._outcome: Outcome | None = None

    def run(self) -> End:
        """From the checks to the last node's leave."""
        alarm = self._prepare()
        if not alarm:
            self._sweep(self._timing.early)
        end = self._follow(alarm) if self._cluster.node else self._lead(alarm)
        if self._leftovers:
            until = time.monotonic() + self._timing.final
            self._leftovers.close(lambda: self._stop.left(until, self._timing))
        return end

    def _prepare(self) -> End | None:
        """Fill in the plan; the end when this machine, or what it shall run, isn't fit."""
        node = self._cluster.node
        try:
            self._open_record()
            self._plan = self._checked()
        except (TerminalError, DuplicateError):  # this node's alone: it must not say it to the others
            raise
        except _StoppedError:
            return self._own_end()
        except TrainError as error:
            if isinstance(error, OutputError):
                self._text.drop()
            return End(error.exit, f"node {node}: {error}", terminal=error.exit == contract.Exit.USAGE)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other nodes must not wait for this one
            what = " ".join(f"{type(error).__name__}: {error}".split())
            return End(contract.Exit.FAILED, f"node {node}: {what}")
        return None

    def _open_record(self) -> None:
        """Read the run folder, and take this job's attempt before anything else is written."""
        if not (url := self._environ.get(contract.RUN_FOLDER)):
            return
        storage, node = open_storage(url), self._cluster.node
        record = Record(storage).within(self._timing.ask)
        if reason := self._patiently(record.terminal):
            raise TerminalError(f"this run must not be started again: {reason}")
        job, ended = self._environ.get(contract.JOB_ID), ended_jobs(self._environ)
        self._attempt = self._patiently(lambda: record.take(job, ended))
        self._record = Record(storage)
        spool = None
        if not isinstance(storage, LocalFolder):  # what is written to this machine's disk needs no spool on it
            spool = spool_folder(self._environ, storage.url, node)
            self._leftovers = Leftovers(spool, storage, say)
        self._text.keep(storage, self._attempt, node, spool)

    def _patiently(self, ask: Callable[[], T]) -> T:
        """A node that comes while its bucket is away must not end the run for all. Raises _StoppedError."""
        return patiently(ask, (UnreachableError, AwayError), self._timing, say, self._pause)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stop.signum and time.monotonic() < until:
            time.sleep(self._timing.tick)
        if self._stop.signum:
            raise _StoppedError

    def _checked(self) -> Plan:
        processes = health_check.whole_number(self._environ, contract.PROCESSES, least=1)
        restarts = health_check.whole_number(self._environ, contract.RESTARTS, least=0)
        code = Path.cwd()
        if fault := missing(self._task, code):
            raise UsageError(fault)
        facts = health_check.gather(self._environ)
        findings = health_check.judge(
            facts, processes=processes, wanted=health_check.wanted_gpu(self._environ), cloud=self._cluster.cloud
        )
        for line in findings.warnings:
            say(line)
        if findings.unfit:
            raise UnfitError(findings.unfit)
        mine, record = {"host": socket.gethostname(), **facts.to_dict()}, self._record.within(self._timing.ask)
        node = self._cluster.node
        self._patiently(lambda: record.write_node(node, mine))
        env, line = (rehearsal_env if self._cluster.rehearsal else machine_env)(self._environ)
        if line:
            say(line)
        processes = processes or facts.gpus or 1
        if self._task.launcher == "torchrun" and processes > 1:
            env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would, in four lines; no result depends on cores
        gpu_benchmark.check(
            *(env, node, processes, facts.gpus, say, lambda: bool(self._stop.signum)),
            keep=lambda report: self._patiently(lambda: record.write_bench(node, report)),
        )
        self._pause(0.0)  # raises if it was told to stop meanwhile
        run = self._environ.get(contract.RUN) or "run"
        spool = self._leftovers.folder if self._leftovers else None
        secrets = secrets_of(self._environ, self._timing.ask, self._patiently, say)
        return Plan(
            *(self._task, self._cluster, env, processes, facts.gpus, code, run, restarts, spool, secrets),
            hang_after=float(env[contract.HANG_AFTER]) if env.get(contract.HANG_AFTER) else None,
            heard=lambda: self._text.heard,
        )

    def _lead(self, alarm: End | None) -> End:
        """Node 0: host the store and the referee, and take part like any other."""
        store = self._host()
        asked = self._plan.restarts if self._plan else None
        restarts = contract.DEFAULT_RESTARTS if asked is None else asked
        size, timing = self._cluster.size, self._timing
        referee = Referee(
            store, self._record, attempt=self._attempt, size=size, restarts=restarts, timing=timing, say=say
        )
        referee.start()
        end, heard = self._session(store, alarm)
        while heard and referee.join(0.1) and self._stop.left(inf, timing) > timing.text_least:
            pass
        return end

    def _host(self) -> Store:
        if self._cluster.size == 1:
            return MemoryStore()
        try:
            return TorchStore("localhost", self._cluster.port, serve=True)
        except ConnectionError as error:
            raise UnfitError(f"the control store can't listen on port {self._cluster.port}: {error}") from error

    def _follow(self, alarm: End | None) -> End:
        """Any other node: find node 0, take part, and find it again when it was replaced."""
        while True:
            # With bad news, it only tells the others if they are there: they may have found out for themselves.
            limit = self._timing.lost if alarm else self._timing.gather
            store = find_store(self._cluster, limit, self._timing, self._stop, say)
            if store is None:
                return alarm or self._own_end()
            end, heard = self._session(store, alarm)
            if heard or self._stop.signum or end.code == contract.Exit.PREEMPTED:  # saved: nothing to come back for
                return end
            say("node 0 does not answer any more; waiting for it to come back")

    def _session(self, store: Store, alarm: End | None) -> tuple[End, bool]:
        """Obey the referee until the end, and whether it was the referee who said it."""
        member = Member(store, self._cluster.node, self._timing)
        try:
            end = self._obey(member, alarm)
            return end or self._own_end(), end is not None
        finally:
            member.close(self._timing.text_least if self._stop.signum else 2.0)

    def _obey(self, member: Member, alarm: End | None) -> End | None:
        """The end that the referee published; None when it is out of reach, or too slow for a node told to stop."""
        done, deadline = -1, inf
        if alarm:
            member.alarm(alarm)
        while time.monotonic() < deadline:
            state = member.state()
            if state.end or state.phase == "lost":
                return state.end
            if self._stop.signum:
                deadline = min(deadline, time.monotonic() + self._stop.patience(self._timing))
                if not alarm and not (done == state.generation and self._is_settled(state)):
                    member.alarm(alarm := self._own_end())
            elif self._plan and state.order and state.generation != done and member.belongs(state.order):
                done = state.generation
                member.report(done, self._generation(self._plan, state.order, member))
            time.sleep(self._timing.tick)
        return None

    def _is_settled(self, state: State) -> bool:
        """Whether the outcome that was reported says all: with it the run ends, or it is good and the others work."""
        if self._outcome is None or decided([self._outcome]) is None:
            return False
        return state.phase == "run" or not self._outcome.ok

    def _generation(self, plan: Plan, order: Order, member: Member) -> Outcome:
        """Run one, and send what its processes left before it is reported: the referee reads the run folder then."""
        self._outcome = run_generation(plan, order, member, self._timing, self._stop, partial(self._keep_stacks, order))
        for line in faults.lines(self._outcome.faults):
            say(line)
        self._text.flush()
        self._sweep(self._timing.sweep)
        return self._outcome

    def _keep_stacks(self, order: Order, stacks: bytes) -> None:
        name = contract.stacks(order.attempt, order.generation, self._cluster.node)
        try:
            self._record.within(self._timing.ask).write_stacks(name, stacks)
        except (OutputError, OSError) as error:
            say(f"the stacks of the hung processes could not be stored: {error}")
        else:
            say(f"the processes hung; their stacks are in {name} in the run folder")

    def _sweep(self, seconds: float) -> None:
        """Send what dead processes left, those of a start before this one too."""
        if self._leftovers:
            until = time.monotonic() + seconds
            self._leftovers.send(lambda: self._stop.left(until, self._timing) - self._timing.text_least)

    def _own_end(self) -> End:
        """The end of a node that nobody else tells."""
        if self._outcome and self._outcome.preempted:
            return decided([self._outcome]) or End(contract.Exit.FAILED, str(self._outcome))
        if self._stop.signum:
            return End(128 + self._stop.signum, f"stopped by {signal.Signals(self._stop.signum).name}")
        return End(contract.Exit.FAILED, "no word from node 0")


def _catch_signals() -> Stop:
    stop = Stop()

    def note(signum: int, _frame: FrameType | None) -> None:
        stop.note(signum, ctrl_c=signum == signal.SIGINT)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, note)
    return stop


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # A thread may still be inside torch's store, which doesn't like to be torn down under it.
    os._exit(code)
