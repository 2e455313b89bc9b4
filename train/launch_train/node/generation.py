"""Run one generation on one node: start the ordered processes, watch and end them, and report the outcome."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread

from launch_train import runfolder
from launch_train.common import contract, faults
from launch_train.common.config import DEFAULT
from launch_train.common.console import say
from launch_train.common.contract import Exit
from launch_train.common.errors import OutputError
from launch_train.common.scratch import temporary_folder
from launch_train.common.signal_registry import registered_processes
from launch_train.common.storage import create_variant, open_storage
from launch_train.node.cluster import Cluster
from launch_train.node.command import Task, command_line
from launch_train.node.control_store import GenerationSpec, Member, Timing
from launch_train.node.environment import child_env, framework_env
from launch_train.node.exit_status import Outcome
from launch_train.node.hang_detection import NEAR_S, HangDetector
from launch_train.node.own_checkpoints import Resume
from launch_train.node.process import Child, Helper
from launch_train.node.torchrun import Torchrun
from launch_train.telemetry.metric_sink import Sink

MONITOR_SECONDS, CLOSE_SECONDS = DEFAULT.monitor, 0.5

READ_SECONDS = 0.1
"""Time until the last output has been read from the pipes."""
COLLECT_SECONDS, PREEMPTED_COLLECT_SECONDS = 15.0, 2.0
"""Time for the collector to read and upload the rest; it may have started late on a busy machine."""

HUNG_SECONDS = 5.0
"""Time that hung processes get to exit by themselves."""

ARGUMENTS_SECONDS = 300.0
"""A script that exits with code 2 later doesn't mean its arguments. They are parsed after imports, which may take
minutes on a new machine."""

SOON_SECONDS = 600.0
"""A script that ran longer has worked, whatever it left."""

LATELY_SECONDS = 10.0
"""A process that failed longer ago is not the reason why its shell's command failed."""


@dataclass(frozen=True)
class LaunchPlan:
    """The processes that this node starts in every generation.

    `env`: its environment. `processes`: how many torchrun starts. `gpus`: how many GPUs they see. `code`: folder of the
    user's code. `spool`: folder of what waits to be uploaded. `secrets`: variables for the processes only.
    """

    task: Task
    cluster: Cluster
    env: Mapping[str, str]
    processes: int
    gpus: int
    code: Path
    run: str
    restarts: int | None = None
    spool: Path | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    hang_after: float | None = None
    """For a script or command: seconds of silence after which it counts as hung (contract.HANG_AFTER)."""
    heard: Callable[[], float] = lambda: -math.inf
    """time.monotonic() of the newest output of its processes."""
    listen: Callable[[Callable[[bytes], None] | None], None] = lambda _listener: None
    """Set what receives the output of the processes, or None."""
    torchrun: Torchrun | None = None
    """What starts a task whose launcher is torchrun."""
    printed: set[str] = field(default_factory=set)
    """Markers of the tracebacks that this node's generations have printed (train/launch_train/common/faults.py)."""


@dataclass
class StopRequest:
    """A request of the platform or the user to stop.

    `signum`: the first signal, 0 for none. `when`: the Unix time at which it came, `since`: the monotonic one. `until`:
    monotonic time at which the machine ends. `hurry`: Ctrl-C came twice. `exited`: monotonic time at which the
    processes of the last generation had exited.
    """

    signum: int = 0
    hurry: bool = False
    when: float = 0.0
    since: float = math.inf
    until: float = math.inf
    exited: float = -math.inf

    def note(self, signum: int, *, ctrl_c: bool, seconds: float = contract.NOTICE_SECONDS) -> None:
        """Record a signal, after which the machine runs for `seconds`. A second one changes nothing, unless both are
        Ctrl-C, or the machine now ends earlier."""
        self.hurry = self.hurry or (ctrl_c and bool(self.signum))
        self.until = min(self.until, time.monotonic() + seconds)
        if not self.signum:
            self.when, self.since = time.time(), time.monotonic()
            self.signum = signum  # last: other threads check it

    def left(self, until: float, timing: Timing) -> float:
        """Return the seconds for uploads until the monotonic time `until`.

        After a signal it is little, counted from the exit of the processes, so that the grace periods nest.
        """
        if self.hurry:
            return 0.0
        limit = min(max(self.exited, self.since), self.kill_at(timing)) + timing.last
        return max(0.0, min(until, limit if self.signum else until) - time.monotonic())

    def kill_at(self, timing: Timing) -> float:
        """Return the monotonic time at which processes that still run are killed."""
        return self.until - contract.NOTICE_SECONDS + timing.grace

    def leave_seconds(self, timing: Timing) -> float:
        """Return how long a node that must stop waits for the coordinator, in time for its own last lines."""
        latest = self.kill_at(timing) + timing.last - 2 * timing.text_least
        return max(0.1, min(timing.leave, latest - time.monotonic()))


def run_generation(
    plan: LaunchPlan,
    order: GenerationSpec,
    member: Member,
    timing: Timing,
    stop: StopRequest,
    keep: Callable[[bytes, Mapping[int, bytes]], None] = lambda stacks, dumps: None,
) -> Outcome:
    """Start the ordered processes and wait until all of them have exited. If they hung, `keep` gets their stacks and
    the dumps of NCCL's flight recorder by rank."""
    node, began, started = plan.cluster.node, time.monotonic(), time.time()
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(temporary_folder("node")))
            env = child_env(plan.env, order, node, gpus=plan.gpus, code=plan.code, folder=folder)
            env |= {contract.SPOOL: str(plan.spool)} if plan.spool else {}
            failed = Path(env[contract.FAULTS])
            failed.mkdir()
            for name in plan.printed:
                (failed / name).touch()
            hangs = HangDetector(Path(env[contract.WATCH]), plan.hang_after, plan.heard)
            child, prepare_next = _start(plan, order, env, timing)
        except OSError as error:  # a full disk, too many processes: perhaps temporary
            note = f"the command could not be started: {error.strerror or error}"
            return Outcome(node, code=1, signum=stop.signum, note=note)
        with _collected(plan, env, stop, started), _monitored(plan, env):
            code, note, stacks = _watch(
                child, order, member, timing, stop, Path(env[contract.NOTICE]), hangs, prepare_next
            )
            stop.exited = time.monotonic()
        dumps = hangs.collectives()
        if stacks or dumps:
            keep(stacks, dumps)
        plan.printed.update(file.name for file in failed.glob(f"{faults.PRINTED}*"))
        marks: tuple[int, ...] = ()
        with suppress(OSError, UnicodeDecodeError):
            marks = tuple(int(line) for line in Path(env[contract.EXIT_FILE]).read_text().split() if line.isdecimal())
        has_stepped = (failed / faults.STEPPED).exists()
        if code == 0 and not stop.signum and not note and not has_stepped and plan.env.get(contract.RUN_FOLDER):
            _warn_of_missing_metrics(plan, order, stop.exited - began, timing)
        # argparse, click and Python exit with 2 if they reject the arguments. Other programs (make) do so for other
        # reasons, so for a command it only counts at the start.
        soon = timing.quick if plan.task.kind == "command" else ARGUMENTS_SECONDS
        if code == Exit.USAGE and stop.exited - began < soon and not (stop.signum or note or has_stepped):
            marks += (Exit.USAGE,)
        return Outcome(node, code, marks, stop.signum, note, _faults(plan.task, child.pid, failed) if code else ())


def _warn_of_missing_metrics(plan: LaunchPlan, order: GenerationSpec, seconds: float, timing: Timing) -> None:
    """Warn on node 0 of what `run.metrics` names and a successful script without one step has not given, and record it
    if the script exited soon and has left no result at all: many report "no GPU" and then exit with 0. That is no
    warning, as others only print their results."""
    if plan.cluster.node:
        return
    settings = json.loads(plan.env.get(contract.SCRIPT_METRICS) or "{}")
    if "regex" in settings:
        say(
            "warning: the script succeeded, but run.metrics.regex found no step in its output, so this start has no "
            "metrics from it. Compare the expression with the lines above."
        )
    folder = settings.get("tensorboard")
    if folder and not any(Path(folder).rglob(contract.EVENT_FILES)):
        say(f"warning: the script succeeded, but run.metrics.tensorboard: {folder} has no event files.")
    resume = Resume(**json.loads(plan.env.get(contract.RESUME) or '{"glob": "", "args": []}'))
    if plan.task.is_trainer or seconds > SOON_SECONDS or (resume.glob and resume.newest()):
        return
    with suppress(OutputError, OSError):
        storage = open_storage(plan.env[contract.RUN_FOLDER]).within(timing.ask)
        names = storage.list()
        rows = [name for name in names if name.startswith(f"{runfolder.METRICS}/")]
        others = {name.partition("/")[0] for name in names} - {runfolder.METRICS}
        # What an earlier start left counts too: there may be nothing left to do.
        if others & runfolder.WORK or others - runfolder.OWN_NAMES:
            return
        if any(runfolder.NO_STEP.encode() not in storage.read(name) for name in rows):
            return
        event = {"event": runfolder.NO_STEP, "time": time.time(), "seconds": round(seconds, 1)}
        name = runfolder.metrics_part(order.attempt, order.generation, 0, 0)
        create_variant(storage, name, json.dumps(event).encode() + b"\n")
        say(
            f"the script exited with 0 after {seconds:.0f} s and recorded no step: it left no metrics, no checkpoint "
            "and no other file in the run folder. If it should have trained, see its lines above."
        )


def _faults(task: Task, pid: int, folder: Path) -> tuple[faults.Fault, ...]:
    """Return the faults of the ranks, or of the one process.

    Of the other processes of a command, only the last fault counts, if it may be the reason why the command failed. It
    isn't permanent, as a shell may continue after a failure.
    """
    recorded = [*faults.read_faults(folder)]
    own = tuple(fault for _, fault in recorded if fault.rank is not None or fault.pid == pid)
    if own or task.kind != "command" or not recorded:
        return own
    when, last = max(recorded, key=lambda timed: timed[0])
    return (last._replace(permanent=False),) if time.time() - when < LATELY_SECONDS else ()


def _start(
    plan: LaunchPlan, order: GenerationSpec, env: Mapping[str, str], timing: Timing
) -> tuple[Child, Callable[[], None]]:
    """Start the command. Returns it, and what prepares the start of the next generation."""
    Path(env[contract.NOTICE]).with_suffix(".new").touch()  # `give_notice` only renames it, also on a full disk
    inner = timing.grace - timing.report
    argv = command_line(plan.task, plan.cluster, order, processes=plan.processes, run=plan.run, grace=inner)
    env = {**env, **framework_env(plan.task, plan.cluster, order, plan.env), **plan.secrets}
    torchrun = plan.torchrun
    if torchrun is None:
        registered = partial(registered_processes, Path(env[contract.WATCH]))
        return Child(argv, env, registered=registered, as_group=plan.task.kind == "command"), lambda: None

    def prepare_next() -> None:
        # Before the first step the processes need the processors, and a failure may recur.
        if plan.restarts != 0 and Path(env[contract.FAULTS], faults.STEPPED).exists():
            torchrun.prepare(argv, env)

    return torchrun.start(argv, env), prepare_next  # torchrun passes signals on to its ranks


@contextmanager
def _monitored(plan: LaunchPlan, env: Mapping[str, str]) -> Iterator[None]:
    """Monitor this machine (launch_train.monitoring) during a script or command; the trainer monitors by itself.

    Closing takes little time: the end of the processes may be that of the machine, and the data of the last minute is
    small.
    """
    if plan.task.is_trainer:
        yield
        return
    from launch_train.monitoring.monitor import open_monitor

    # Sink(): on node 0 the parts of events have the names of the script's parts.
    monitor = open_monitor(MONITOR_SECONDS, env, Sink(), rank=plan.cluster.node)
    try:
        yield
    finally:
        closing = Thread(target=monitor.close, name="close monitor", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


@contextmanager
def _collected(plan: LaunchPlan, env: Mapping[str, str], stop: StopRequest, started: float) -> Iterator[None]:
    """Collect the metrics that a script prints or writes to event files, if the spec asks for it, or on node 0 if it
    may write them to a local run folder (node/collector.py). `started`: the processes' start, in Unix seconds.

    What the collector has not uploaded at the end is on the disk: the node uploads it next.
    """
    settings = json.loads(plan.env.get(contract.SCRIPT_METRICS) or "{}")
    url = plan.env.get(contract.RUN_FOLDER, "")
    is_script_in_folder = plan.cluster.node == 0 and not plan.task.is_trainer and not url.startswith("gs://")
    if not url or not (settings or is_script_in_folder):
        yield
        return
    ours = {"PYTHONSAFEPATH": "1", "PYTHONPATH": plan.env.get("PYTHONPATH", "")}  # the user's modules are not for it
    helper = Helper([sys.executable, "-m", "launch_train.node.collector", str(started)], {**env, **ours})
    if "regex" in settings:
        plan.listen(helper.write)
    try:
        yield
    finally:
        time.sleep(READ_SECONDS)
        plan.listen(None)
        helper.close(PREEMPTED_COLLECT_SECONDS if stop.signum else COLLECT_SECONDS)


def _watch(
    child: Child,
    order: GenerationSpec,
    member: Member,
    timing: Timing,
    stop: StopRequest,
    notice: Path,
    hangs: HangDetector,
    prepare_next: Callable[[], None],
) -> tuple[int, str, bytes]:
    """Return the command's exit code, why it was ended (empty: it ended by itself), and its stacks if it hung."""
    while (code := child.poll()) is None:
        if stop.signum:
            return _stop_preempted(child, order, member, timing, stop, notice), "", b""
        if not member.runs(order):
            stacks_so_far = b""
            if hangs.is_overdue(-NEAR_S):
                hangs.dump_collectives()
                stacks_so_far = hangs.stacks()
            return child.stop(timing.grace, hurry=lambda: stop.hurry), "stopped with the others", stacks_so_far
        if (stacks := hangs.found()) is not None:
            note = f"hung: no progress for {hangs.silent():.0f} s"
            if ranks_behind := hangs.dump_collectives():
                note += f"; {ranks_behind}"
            return child.stop(HUNG_SECONDS, hurry=lambda: stop.hurry), note, stacks
        prepare_next()
        time.sleep(timing.tick)
    child.kill()  # its subprocesses
    return code, "", b""


def _stop_preempted(
    child: Child, order: GenerationSpec, member: Member, timing: Timing, stop: StopRequest, notice: Path
) -> int:
    """Let the processes save and exit; return the exit code. Once another node has reported that its processes failed,
    nothing can be saved: the notice is removed, so that nobody waits for them.

    The signal follows the notice at once, or NOTICE_SECONDS before the machine's end: from then on torchrun has a fixed
    time. Processes that know the notice exit before."""

    def hurry() -> bool:
        if not member.runs(order):
            notice.unlink(missing_ok=True)
        return stop.hurry

    give_notice(notice, stop)  # before the signal, which means something else without it
    until = stop.until
    while child.poll() is None and stop.until - time.monotonic() > contract.NOTICE_SECONDS and not hurry():
        if not member.runs(order):
            break
        time.sleep(timing.tick)
    if stop.until < until and notice.exists():  # the machine ends earlier than announced
        give_notice(notice, stop)
    return child.stop(max(0.0, stop.kill_at(timing) - time.monotonic()), stop.signum, hurry)


def give_notice(path: Path, stop: StopRequest) -> None:
    """Tell the processes, atomically, that this machine must stop, and when it ends."""
    with suppress(OSError):
        path.with_suffix(".new").write_text(f"{stop.when} {stop.when + stop.until - stop.since}\n")
    with suppress(OSError):
        path.with_suffix(".new").replace(path)
