"""One generation on one node: start what the order says, watch it, end it, and say how it ended."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from launch_train.common import faults
from launch_train.common.config import DEFAULT
from launch_train.common.contract import Exit
from launch_train.metrics import Null
from launch_train.node.cluster import Cluster
from launch_train.node.command import Paths, Task, child_env, command
from launch_train.node.control_store import Member, Order, Timing
from launch_train.node.exit_status import Outcome
from launch_train.node.hang_detection import NEAR_S, Hangs
from launch_train.node.process import Child

MONITOR_SECONDS, CLOSE_SECONDS = DEFAULT.monitor, 0.5

HUNG_SECONDS = 5.0
"""Time that hung processes get to exit by themselves."""

ARGUMENTS_SECONDS = 300.0
"""A script that exits with 2 later doesn't mean its arguments. They are parsed after imports, which may take minutes on
a new machine."""

LATELY_SECONDS = 10.0
"""A process that failed earlier is not why its shell's command failed."""


@dataclass(frozen=True)
class Plan:
    """What this node starts in every generation: `env` is its environment, `processes` how many torchrun starts, `gpus`
    how many GPUs they can see, `code` the folder of the user's code, `spool` that of what waits to be sent, and
    `secrets` what only its processes may know."""

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
    """Of a script or command: seconds of silence after which it counts as hung (contract.HANG_AFTER)."""
    heard: Callable[[], float] = lambda: -math.inf
    """time.monotonic() of the newest output of its processes."""
    printed: set[str] = field(default_factory=set)
    """Files that stand for the tracebacks which were printed in this node's generations
    (train/launch_train/common/faults.py)."""


@dataclass
class Stop:
    """What the platform or the user wants: `signum` is the first signal, 0 for none, `when` the Unix time at which it
    came and `since` the monotonic one; `hurry`: Ctrl-C came twice. `gone`: monotonic time at which the processes of the
    last generation had ended."""

    signum: int = 0
    hurry: bool = False
    when: float = 0.0
    since: float = math.inf
    gone: float = -math.inf

    def note(self, signum: int, *, ctrl_c: bool) -> None:
        """A signal came. A second one changes nothing, but for the impatience of who presses Ctrl-C again."""
        self.hurry = self.hurry or (ctrl_c and bool(self.signum))
        if not self.signum:
            self.when, self.since = time.time(), time.monotonic()
            self.signum = signum  # last: it is what everybody looks at

    def left(self, until: float, timing: Timing) -> float:
        """Seconds until the monotonic time `until` for what may still be sent. Once we are told to stop it is little,
        counted from when the processes have gone, so that the graces nest."""
        if self.hurry:
            return 0.0
        told = min(max(self.gone, self.since) + timing.last, self.since + timing.grace + timing.last)
        return max(0.0, min(until, told if self.signum else until) - time.monotonic())

    def patience(self, timing: Timing) -> float:
        """Seconds that a node told to stop waits for the others' word: in time for its own last words."""
        latest = self.since + timing.grace + timing.last - 2 * timing.text_least
        return max(0.1, min(timing.leave, latest - time.monotonic()))


def run_generation(
    plan: Plan,
    order: Order,
    member: Member,
    timing: Timing,
    stop: Stop,
    keep: Callable[[bytes], None] = lambda stacks: None,
) -> Outcome:
    """Start the order's processes and wait until they are all gone. `keep` takes their stacks, if they hung."""
    node = plan.cluster.node
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True))
            exit_file, notice, watch, failed = (Path(folder) / name for name in ("exit", "notice", "watch", "faults"))
            paths = Paths(plan.code, exit_file, notice, plan.spool, watch, failed)
            failed.mkdir()
            for name in plan.printed:
                (failed / name).touch()
            hangs = Hangs(paths.watch, plan.hang_after, plan.heard)
            child = _start(plan, order, paths, timing)
        except OSError as error:  # a full disk, too many processes: of this machine, and of this moment perhaps
            note = f"the command could not be started: {error.strerror or error}"
            return Outcome(node, code=1, signum=stop.signum, note=note)
        began = time.monotonic()
        with _monitored(plan, order, paths):
            code, note, stacks = _watch(child, order, member, timing, stop, paths.notice, hangs)
            stop.gone = time.monotonic()
        if stacks:
            keep(stacks)
        plan.printed.update(file.name for file in failed.glob(f"{faults.PRINTED}*"))
        marks = _marks(paths.exit_file)
        told = stop.signum or note or (failed / faults.STEPPED).exists()
        if not told and is_usage(plan.task, code, stop.gone - began, timing):
            marks += (Exit.USAGE,)
        return Outcome(node, code, marks, stop.signum, note, _faults(plan.task, child.pid, failed) if code else ())


def is_usage(task: Task, code: int, seconds: float, timing: Timing) -> bool:
    """Whether an exit code means that the arguments were refused: argparse, click and Python itself exit with 2. So do
    other programs for other reasons (make), hence of a command only what it exits with at once."""
    return code == Exit.USAGE and seconds < (timing.quick if task.kind == "command" else ARGUMENTS_SECONDS)


def _faults(task: Task, pid: int, folder: Path) -> tuple[faults.Fault, ...]:
    """Those of the ranks, or of the one process. Of the others that a command started, the last one if it may be why
    the command failed: a shell may go on after a failure, so that it is not permanent."""
    found = [*faults.read(folder)]
    own = tuple(fault for _, fault in found if fault.rank is not None or fault.pid == pid)
    if own or task.kind != "command" or not found:
        return own
    when, last = max(found, key=lambda timed: timed[0])
    return (last._replace(permanent=False),) if time.time() - when < LATELY_SECONDS else ()


def _start(plan: Plan, order: Order, paths: Paths, timing: Timing) -> Child:
    prepare_notice(paths.notice)
    inner = timing.grace - timing.report
    argv = command(plan.task, plan.cluster, order, processes=plan.processes, run=plan.run, grace=inner)
    env = {**plan.env, **plan.secrets}
    return Child(argv, child_env(env, order, plan.cluster.node, gpus=plan.gpus, paths=paths))


@contextmanager
def _monitored(plan: Plan, order: Order, paths: Paths) -> Iterator[None]:
    """Look at this machine (launch_train.monitoring) beside processes that don't do it themselves: all but the
    trainer's.

    It isn't waited for long: the end of the processes may be that of the machine, and what it has seen since the last
    minute is little.
    """
    if plan.task.kind == "module" and plan.task.target.partition(".")[0] == "train":
        yield
        return
    from launch_train.monitoring.monitor import open_monitor

    env = child_env(plan.env, order, plan.cluster.node, gpus=plan.gpus, paths=paths)
    # On node 0 the names of events' parts are those of the script's rows.
    watch = open_monitor(MONITOR_SECONDS, _Looker(plan.cluster.node), env, Null())
    try:
        yield
    finally:
        closing = Thread(target=watch.close, name="monitor's end", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class _Looker(NamedTuple):
    rank: int
    local_rank: int = 0


def _watch(
    child: Child, order: Order, member: Member, timing: Timing, stop: Stop, notice: Path, hangs: Hangs
) -> tuple[int, str, bytes]:
    """Return the command's exit code, why it was ended (empty: it ended by itself), and its stacks if it hung."""
    while (code := child.poll()) is None:
        if stop.signum:
            return _preempted(child, order, member, timing, stop, notice), "", b""
        if not member.runs(order):
            taken = hangs.stacks() if hangs.is_overdue(-NEAR_S) else b""
            return child.stop(timing.grace, hurry=lambda: stop.hurry), "stopped with the others", taken
        if (stacks := hangs.found()) is not None:
            note = f"hung: no progress for {hangs.silent():.0f} s"
            return child.stop(HUNG_SECONDS, hurry=lambda: stop.hurry), note, stacks
        time.sleep(timing.tick)
    child.kill()  # what it left behind
    return code, "", b""


def _preempted(child: Child, order: Order, member: Member, timing: Timing, stop: Stop, notice: Path) -> int:
    """Let the processes save and exit; return the exit code. Once another node has reported that its processes failed,
    nothing can be saved: the notice is removed, so that nobody waits for them."""

    def hurry() -> bool:
        if not member.runs(order):
            notice.unlink(missing_ok=True)
        return stop.hurry

    give_notice(notice, stop.when)  # before the signal, which means something else without it
    return child.stop(timing.grace, stop.signum, hurry)


def prepare_notice(path: Path) -> None:
    """Make the file that `give_notice` will only rename: that works on a full disk too."""
    path.with_suffix(".new").touch()


def give_notice(path: Path, when: float) -> None:
    """Tell the processes that this machine was told to stop at the Unix time `when`; all of it is there at once."""
    with suppress(OSError):
        path.with_suffix(".new").write_text(f"{when}\n")
    with suppress(OSError):
        path.with_suffix(".new").replace(path)


def _marks(exit_file: Path) -> tuple[int, ...]:
    """The exit codes that the processes wrote; a line that isn't a number is none."""
    try:
        lines = exit_file.read_text().split()
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(int(line) for line in lines if line.isdecimal())
