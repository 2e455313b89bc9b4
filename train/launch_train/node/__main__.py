"""Run one machine's part of a run: `python -m launch_train.node [--launcher …] [--module M | --script S | --command] --
ARGS`.

CLUSTER_SPEC lists the machines. Node 0 hosts the control store and the coordinator
(train/launch_train/node/coordinator.py). Every node follows its orders: it starts the processes of a generation,
reports how they ended, and then restarts them or exits with the run's exit code.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from types import FrameType
from typing import TypeVar

from launch_train import runfolder
from launch_train.common import contract, faults
from launch_train.common.errors import OutputError, TrainError, UnfitError, UsageError
from launch_train.common.secrets import UnavailableError, read_secrets, sent_secrets
from launch_train.common.storage import LocalFolder, MemoryFolder, UnreachableError, open_storage
from launch_train.node import gpu_benchmark, health_check, notify
from launch_train.node.cluster import Cluster, parse_cluster
from launch_train.node.command import Task, missing_target, parse_args
from launch_train.node.control_store import GenerationSpec, Member, State, Store, Timing, TorchStore
from launch_train.node.coordinator import Coordinator
from launch_train.node.environment import code_path, network_env, program_path, with_run_path
from launch_train.node.exit_status import End, Outcome, end_from_outcomes
from launch_train.node.gce_vm import watch_vm
from launch_train.node.generation import LaunchPlan, StopRequest, run_generation
from launch_train.node.notify import CLOSE_SECONDS, Notifier
from launch_train.node.own_checkpoints import Resume
from launch_train.node.process import adopt_orphans
from launch_train.node.report_writer import LAST_SECONDS, ReportWriter
from launch_train.node.run_record import DuplicateError, RunRecord, ended_jobs, retry_until
from launch_train.node.torchrun import Torchrun
from launch_train.telemetry.log_capture import TextCapture
from launch_train.telemetry.upload_queue import Leftovers, spool_folder

T = TypeVar("T")


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ, timing: Timing | None = None) -> int:
    """Run the node agent. Returns the exit code (contract.Exit, or 128 + the signal that ended it)."""
    stop, timing = _catch_signals(), timing or Timing()
    adopt_orphans()
    task, environ = parse_args(argv), dict(environ)
    uploader = watch_vm(environ, stop, say)
    text = TextCapture(wanted=bool(environ.get(contract.RUN_FOLDER)), every=timing.text, say=say, uploader=uploader)
    try:
        try:
            cluster = parse_cluster(environ.get(contract.CLUSTER_SPEC), environ)
            task, environ = with_run_path(task, environ)
            end = Node(task, cluster, environ, timing.of(cluster.size), stop, text).run()
        except TrainError as error:
            end = End(error.exit, str(error))
        say(f"{end.reason} (exit code {end.code})" if end.code else end.reason)
    finally:
        until, least = time.monotonic() + timing.text_last, time.monotonic() + timing.text_least
        text.close(lambda: max(stop.left(until, timing), least - time.monotonic()))
    return int(end.code)


def say(line: str) -> None:
    """Print one line to the job's log, in one write."""
    sys.stderr.write(f"launch: {line}\n")
    sys.stderr.flush()


class TerminalError(TrainError):
    """The run folder forbids this start. Every node finds that out by itself."""

    exit = contract.Exit.TERMINAL


class _InterruptedError(TrainError):
    """A signal came while waiting for the run folder."""


class Node:
    """This machine's part of the run."""

    def __init__(
        self,
        task: Task,
        cluster: Cluster,
        environ: Mapping[str, str],
        timing: Timing,
        stop: StopRequest,
        text: TextCapture,
    ) -> None:
        self._task = task
        self._cluster = cluster
        self._notify = notify.notify_settings(environ)
        self._notifier: Notifier | None = None
        sent_secrets()  # before a process starts, which would inherit the file
        hidden = (contract.NOTIFY, contract.SECRETS_FILE)
        self._environ = {name: value for name, value in environ.items() if name not in hidden}
        self._timing = timing
        self._stop = stop
        self._text = text
        self._record = RunRecord(MemoryFolder())
        self._attempt = 1
        self._leftovers: Leftovers | None = None
        self._plan: LaunchPlan | None = None
        self._outcome: Outcome | None = None

    def run(self) -> End:
        """Run the checks, then all generations, and upload what the processes left."""
        failure = self._prepare()
        if not failure:
            self._sweep(self._timing.early)
        # A local run's report is written by `launch local`.
        has_report = self._leftovers and not self._cluster.node and not failure
        report = ReportWriter(self._environ[contract.RUN_FOLDER]) if has_report else None
        self._notifier = self._open_notifier()
        end = self._follow(failure) if self._cluster.node else self._lead(failure)
        if self._plan and self._plan.torchrun:
            self._plan.torchrun.close()
        if self._leftovers:
            until = time.monotonic() + self._timing.final
            self._leftovers.close(lambda: self._stop.left(until, self._timing))
        if self._notifier:
            left = self._stop.left(inf, self._timing) - self._timing.text_least
            self._notifier.close(None if self._cluster.node else end, min(left, CLOSE_SECONDS))
        if report:
            report.close(0.0 if self._stop.signum else LAST_SECONDS)  # after a signal the last lines need each second
        return end

    def _open_notifier(self) -> Notifier | None:
        """Return what calls the spec's webhook; None without one, or without a run folder."""
        if not self._notify or isinstance(self._record.storage, MemoryFolder):
            return None
        where = {"node": self._cluster.node, "attempt": self._attempt}
        secrets = {f"SECRET_{name}": value for name, value in (self._plan.secrets if self._plan else {}).items()}
        known = {**self._environ, **secrets}  # no message shows a secret's value
        return Notifier(self._notify, self._record.storage, known, **where, stop=self._stop, say=say)

    def _prepare(self) -> End | None:
        """Check the machine and set the plan. Returns the run's end if the machine or the task is unusable."""
        node = self._cluster.node
        try:
            self._open_record()
            self._plan = self._check()
        except (TerminalError, DuplicateError):  # applies to this node only: must not end the others
            raise
        except _InterruptedError:
            return self._local_end()
        except TrainError as error:
            if isinstance(error, OutputError):
                self._text.drop()
            return End(error.exit, f"node {node}: {error}", terminal=error.exit == contract.Exit.USAGE)
        except Exception as error:  # noqa: BLE001 - the other nodes must not wait for this one
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            return End(contract.Exit.FAILED, f"node {node}: {problem}")
        return None

    def _open_record(self) -> None:
        """Read the run folder, and claim this job's attempt before anything else is written."""
        if not (url := self._environ.get(contract.RUN_FOLDER)):
            return
        storage, node = open_storage(url), self._cluster.node
        record = RunRecord(storage).within(self._timing.ask)
        if reason := self._retry(record.terminal):
            raise TerminalError(f"an earlier attempt failed permanently: {reason}")
        job, ended = self._environ.get(contract.JOB_ID), ended_jobs(self._environ)
        self._attempt = self._retry(lambda: record.take(job, ended))
        self._record = RunRecord(storage)
        spool = None
        if not isinstance(storage, LocalFolder):  # a local run folder needs no spool
            spool = spool_folder(self._environ, storage.url, node)
            self._leftovers = Leftovers(spool, storage, say)
        self._text.keep(storage, self._attempt, node, spool)

    def _retry(self, ask: Callable[[], T]) -> T:
        """Retry while the run folder is unreachable, so that an outage doesn't end the run. Raises
        _InterruptedError."""
        return retry_until(ask, (UnreachableError, UnavailableError), self._timing, say, self._pause)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stop.signum and time.monotonic() < until:
            time.sleep(self._timing.tick)
        if self._stop.signum:
            raise _InterruptedError

    def _check(self) -> LaunchPlan:
        processes = health_check.whole_number(self._environ, contract.PROCESSES, least=1)
        restarts = health_check.whole_number(self._environ, contract.RESTARTS, least=0)
        code = Path.cwd()
        if problem := missing_target(self._task, code, code_path(self._environ, code), program_path(self._environ)):
            raise UsageError(problem)
        facts = health_check.inspect_machine(self._environ)
        findings = health_check.assess(
            facts, processes=processes, wanted=health_check.wanted_gpu(self._environ), cloud=self._cluster.cloud
        )
        for line in findings.warnings:
            say(line)
        if findings.unfit:
            raise UnfitError(findings.unfit)
        description, record = {"host": socket.gethostname(), **facts.to_dict()}, self._record.within(self._timing.ask)
        node = self._cluster.node
        # It also proves that the folder is writable.
        self._retry(lambda: record.write(runfolder.node_record(node), json.dumps(description) + "\n"))
        env, line = network_env(self._environ, rehearsal=self._cluster.rehearsal)
        if line:
            say(line)
        processes = processes or facts.gpus or 1
        if self._task.launcher == "torchrun" and processes > 1:
            env.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, without its four lines of warning
        gpu_benchmark.check_gpu_speed(
            *(env, node, processes, facts.gpus, say, lambda: bool(self._stop.signum)),
            keep=lambda report: self._retry(lambda: record.write(runfolder.node_bench(node), report)),
        )
        self._pause(0.0)  # raises if a signal came meanwhile
        run = self._environ.get(contract.RUN) or "run"
        spool = self._leftovers.folder if self._leftovers else None
        secrets = read_secrets(self._environ, self._timing.ask, self._retry, say)
        return LaunchPlan(
            *(self._task, self._cluster, env, processes, facts.gpus, code, run, restarts, spool, secrets),
            hang_after=float(env[contract.HANG_AFTER]) if env.get(contract.HANG_AFTER) else None,
            heard=lambda: self._text.heard,
            listen=partial(setattr, self._text, "listener"),
            torchrun=Torchrun(self._task) if self._task.launcher == "torchrun" else None,
        )

    def _lead(self, failure: End | None) -> End:
        """Run node 0: host the store and the coordinator, and take part like any other node."""
        size, port, timing = self._cluster.size, self._cluster.port, self._timing
        try:
            store = Store() if size == 1 else TorchStore("localhost", port, serve=True)
        except ConnectionError as error:
            raise UnfitError(f"the control store can't listen on port {port}: {error}") from error
        requested = self._plan.restarts if self._plan else None
        restarts = contract.DEFAULT_RESTARTS if requested is None else requested
        coordinator = Coordinator(
            store,
            self._record,
            attempt=self._attempt,
            size=size,
            restarts=restarts,
            timing=timing,
            say=say,
            resume=Resume(**json.loads(text)) if (text := self._environ.get(contract.RESUME)) else None,
        )
        coordinator.start()
        end, was_published = self._session(store, failure)
        while was_published and coordinator.join(0.1) and self._stop.left(inf, timing) > timing.text_least:
            pass
        return end

    def _follow(self, failure: End | None) -> End:
        """Run any other node: find node 0, take part, and find it again if it is replaced."""
        while True:
            # A failure is only reported to nodes that are up: others find it out by themselves.
            limit = self._timing.lost if failure else self._timing.gather
            store = self._find_store(limit)
            if store is None:
                return failure or self._local_end()
            end, was_published = self._session(store, failure)
            if was_published or self._stop.signum or end.code == contract.Exit.PREEMPTED:  # the state is saved
                return end
            say("node 0 no longer responds; waiting for it to return")

    def _find_store(self, limit: float) -> Store | None:
        """Connect to the store of node 0, which may start later than this node, or be replaced. Returns None if it
        doesn't respond within `limit` seconds. A node that must stop tries once, to report that to the others."""
        host, port = self._cluster.host, self._cluster.port
        start = reported = time.monotonic()
        while True:
            is_stopping = bool(self._stop.signum)
            with suppress(OSError):  # StoreLostError is one too
                socket.create_connection((host, port), timeout=2).close()
                longest = self._stop.leave_seconds(self._timing) if is_stopping else 20.0
                return TorchStore(host, port, serve=False, timeout=min(longest, self._timing.lost))
            if is_stopping:
                return None
            now = time.monotonic()
            if now - start > limit:
                say(f"node 0 ({host}:{port}) did not answer within {limit:.0f} s")
                return None
            if now - reported >= self._timing.line:
                reported = now
                say(f"waiting for node 0 ({host}:{port}, {now - start:.0f} s)")
            time.sleep(0.2)

    def _session(self, store: Store, failure: End | None) -> tuple[End, bool]:
        """Follow the coordinator's orders until the end. Returns the end, and whether the coordinator published it."""
        member = Member(store, self._cluster.node, self._timing)
        try:
            end = self._follow_orders(member, failure)
            return end or self._local_end(), end is not None
        finally:
            member.close(self._timing.text_least if self._stop.signum else 2.0)

    def _follow_orders(self, member: Member, failure: End | None) -> End | None:
        """Return the end that the coordinator published; None if it is unreachable, or too slow for a node that must
        stop."""
        done, deadline = -1, inf
        if failure:
            member.alarm(failure)
        while time.monotonic() < deadline:
            state = member.state()
            if state.end or state.phase == "lost":
                return state.end
            if self._stop.signum:
                deadline = min(deadline, time.monotonic() + self._stop.leave_seconds(self._timing))
                if not failure and not (done == state.generation and self._is_settled(state)):
                    member.alarm(failure := self._local_end())
            elif self._plan and state.order and state.generation != done and member.belongs(state.order):
                done = state.generation
                member.report(done, self._run_generation(self._plan, state.order, member))
            time.sleep(self._timing.tick)
        return None

    def _is_settled(self, state: State) -> bool:
        """Return whether the reported outcome settles the run: it ends the run, or it is good and the other nodes still
        work."""
        if self._outcome is None or end_from_outcomes([self._outcome]) is None:
            return False
        return state.phase == "run" or not self._outcome.ok

    def _run_generation(self, plan: LaunchPlan, order: GenerationSpec, member: Member) -> Outcome:
        """Run one generation and upload what its processes left, before reporting it: the coordinator then reads the
        run folder."""
        self._outcome = run_generation(plan, order, member, self._timing, self._stop, partial(self._keep_stacks, order))
        for line in faults.fault_lines(self._outcome.faults):
            say(line)
        if self._notifier and self._outcome.note.startswith("hung"):
            self._notifier.note("stalled", f"{self._outcome}; restarted if limits.restarts allows")
        self._text.flush()
        self._sweep(self._timing.sweep)
        return self._outcome

    def _keep_stacks(self, order: GenerationSpec, stacks: bytes, dumps: Mapping[int, bytes]) -> None:
        where = runfolder.stacks(order.attempt, order.generation, self._cluster.node)
        files = {where: stacks} if stacks else {}
        files |= {runfolder.collectives(order.attempt, order.generation, rank): dump for rank, dump in dumps.items()}
        try:
            for name, content in files.items():
                self._record.within(self._timing.ask).write(name, content)
        except (OutputError, OSError) as error:
            say(f"the stacks of the hung processes could not be stored: {error}")
        else:
            first = f"{next(iter(files))} in the run folder"
            more = f", beside {len(dumps)} dumps of NCCL's flight recorder" if dumps else ""
            hung = f"the processes hung; their stacks are in {first}{more}"
            say(hung if stacks else f"PyTorch dumped NCCL's flight recorder: {first}")

    def _sweep(self, seconds: float) -> None:
        """Upload what exited processes left, including those of earlier starts."""
        if self._leftovers:
            until = time.monotonic() + seconds
            self._leftovers.send(lambda: self._stop.left(until, self._timing) - self._timing.text_least)

    def _local_end(self) -> End:
        """Return the end of the run as far as this node knows."""
        if self._outcome and self._outcome.preempted:
            return end_from_outcomes([self._outcome]) or End(contract.Exit.FAILED, str(self._outcome))
        if self._stop.signum:
            return End(128 + self._stop.signum, f"stopped by {signal.Signals(self._stop.signum).name}")
        return End(contract.Exit.FAILED, "lost contact with node 0")


def _catch_signals() -> StopRequest:
    stop = StopRequest()

    def on_signal(signum: int, _frame: FrameType | None) -> None:
        stop.note(signal.SIGTERM if signum == signal.SIGURG else signum, ctrl_c=signum == signal.SIGINT)

    # SIGURG: Slurm sends a signal to every process of a job, and all others ignore this one (launch_train.host.slurm).
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGURG):
        signal.signal(signum, on_signal)
    return stop


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # A thread may still use torch's store, so the interpreter must not tear it down.
    os._exit(code)
