"""Check every feature on a GPU machine (part 1), measure the speed (2), and look for speed-ups (3).

It runs directly from a checkout.

    python3 -m benchmarks.gpu_acceptance --part 1 --minutes 8 --out DIR
    python3 -m benchmarks.gpu_acceptance --adopt DIR [DIR …]

Each row is written as soon as it ends, so an interrupted command keeps its finished rows; a second one with the same
--out continues with the missing rows. --tiny runs everything on a CPU, with tiny models.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_acceptance import log, machine, report, running
from benchmarks.gpu_acceptance.log import Log, Row
from benchmarks.gpu_acceptance.running import Running
from benchmarks.gpu_acceptance.tasks import Place, Task, Verdict

FIRST = ("1 facts", "2 gpt micro-batch 32", "2 gpt beside a plain loop", "1 killed and resumed")
"""The most valuable rows of all parts."""

SPARE = 8.0
"""Seconds of the budget that are reserved for the report."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code; 0: no row failed."""
    options = parsed(arguments)
    if options.row:
        return _row(*options.row)
    if options.adopt:
        from benchmarks.gpu_acceptance.adopt import adopt

        return adopt([Path(one) for one in options.adopt])
    return measure(options)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu_acceptance", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--part", type=int, choices=(1, 2, 3), action="append", help="run this part (default: all)")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="start no row that can't finish in time (default: 8)"
    )
    parser.add_argument("--out", type=Path, help="write results here; rows in it are not repeated")
    parser.add_argument("--carry", type=Path, metavar="FILE", help="continue the rows.jsonl of an earlier command")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only rows with TEXT in their names")
    parser.add_argument(
        "--share", type=_share, default=(1, 1), metavar="N/OF", help="run every OF-th row from the N-th, and its needs"
    )
    parser.add_argument("--jobs", type=int, help="run so many untimed rows at once (default: 3; tiny: 2)")
    parser.add_argument("--retry", action="store_true", help="repeat failed rows, each once")
    parser.add_argument("--tiny", action="store_true", help="use tiny models, on a CPU")
    parser.add_argument("--list", action="store_true", help="print the rows and their estimates, and exit")
    parser.add_argument("--adopt", nargs="+", metavar="DIR", help="copy results into benchmarks/results/ and the docs")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if not (found.out or found.adopt or found.row or found.list):
        parser.error("--out DIR is required: the folder for the results")
    return found


def _share(text: str) -> tuple[int, int]:
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise ValueError(text)
    return number, of


def shared(wanted: Sequence[Task], share: tuple[int, int]) -> list[Task]:
    """Return every OF-th row from the N-th, and the rows whose measurements these use, in their order."""
    number, of = share
    mine = wanted[number - 1 :: of]
    needed = {key for task in mine for key in task.needs}
    return [task for task in wanted if task in mine or task.key in needed]


def tasks(parts: Iterable[int]) -> list[Task]:
    """Return the rows of these parts, the most valuable first."""
    from benchmarks.gpu_acceptance import ablation, checks, speed

    rows = [task for part in parts for task in {1: checks.TASKS, 2: speed.TASKS, 3: ablation.TASKS}[part]]
    return sorted(rows, key=lambda task: FIRST.index(task.key) if task.key in FIRST else len(FIRST))


def _row(key: str, file: str) -> int:
    """Do one row's work in this process; called for fresh processes of `running.start`."""
    wanted = next(task for task in tasks((1, 2, 3)) if task.key == key)
    running.work(wanted, Place(Path(file).parent, **json.loads(Path(file).read_text(encoding="utf-8"))))
    return 0


# --- Measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Session:
    """State of one command: its limits, its rows and their log."""

    log: Log
    device: machine.Device
    commit: str
    tiny: bool
    until: float
    scratch: Path
    jobs: int
    fresh: bool = False
    rows: dict[str, Row] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def mine(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row of the log belongs to this commit and device."""
        mine = {"commit": self.commit, "device": self.device.key, "tiny": self.tiny, "torch": machine.torch_version()}
        same = all(row.get(name) == value for name, value in mine.items())
        return same and "key" in row


def measure(options: argparse.Namespace) -> int:
    """Run the missing rows while time is left; return the exit code."""
    wanted = shared([task for task in tasks(options.part or (1, 2, 3)) if options.only in task.name], options.share)
    if options.list:
        print("\n".join(f"{task.part}  {task.seconds:4.0f} s  {task.name}" for task in wanted))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    session = opened(options)
    try:
        run(session, wanted, retry=options.retry)
    finally:
        shutil.rmtree(session.scratch, ignore_errors=True)
    failed = [task.name for task in wanted if session.rows.get(task.key, {}).get("status") == "failed"]
    print(f"{len(failed)} rows failed{': ' if failed else ''}{', '.join(failed)}", flush=True)
    return 1 if failed else 0


def opened(options: argparse.Namespace) -> Session:
    """Inspect the machine, and load torch for the rows."""
    began = time.monotonic()
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = machine.Device("CPU", 0, "") if options.tiny else machine.device()
    if not (device.gpus or options.tiny):
        sys.exit(f"torch finds no GPU here (built for CUDA {device.cuda or 'none'}); use --tiny to run it on a CPU")
    scratch = machine.scratch()
    os.environ |= {"TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
    os.environ |= {"TRITON_CACHE_DIR": str(scratch / "triton"), "XDG_CACHE_HOME": str(scratch / "cache")}
    session = Session(
        log=Log(options.out.resolve()),
        device=device,
        commit=machine.commit(),
        tiny=options.tiny,
        until=began + 60 * options.minutes - SPARE,
        scratch=scratch,
        jobs=options.jobs or (2 if options.tiny else 3),
    )
    if options.carry and not session.log.rows():
        for row in Log(options.carry.resolve().parent).rows():
            session.log.add(row)
    session.rows = log.newest(row for row in session.log.rows() if session.mine(row))
    session.log.add({"machine": {**machine.described(device), "command": _command(options), "commit": session.commit}})
    _load(tiny=options.tiny)
    session.fresh = device.gpus > 0 and not _sees_the_gpu()
    print(f"{device.key}, commit {session.commit}, {len(session.rows)} rows already measured", flush=True)
    return session


def _command(options: argparse.Namespace) -> str:
    parts = " ".join(f"--part {part}" for part in options.part or ())
    more = " --tiny" if options.tiny else ""
    return f"python3 -m benchmarks.gpu_acceptance {parts} --minutes {options.minutes:g}{more}".replace("  ", " ")


def _load(*, tiny: bool = True) -> None:
    """Load the modules that all rows need, once. If one can't be loaded, the rows that need it fail."""
    try:
        import torch

        from launch_train.trainer import train  # noqa: F401 - the rows' processes are forked from this one

        if tiny:  # on a GPU machine it might initialise CUDA
            import torch._dynamo  # noqa: F401 - as above
    except Exception as error:  # noqa: BLE001 - the rows that need it report it
        print(f"preloading failed: {type(error).__name__}: {error}", flush=True)


def _sees_the_gpu() -> bool:
    """Return whether a forked process can use CUDA. This process must not have used it before."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    try:
        import torch

        os._exit(0 if float(torch.ones(2, device="cuda").sum()) == 2 else 1)
    except BaseException:  # noqa: BLE001 - a forked process must not run on
        os._exit(1)


def run(session: Session, wanted: Sequence[Task], *, retry: bool = False) -> None:
    """Run the rows in order: rows that measure time run alone, several of the others at once."""
    waiting = [task for task in wanted if _is_due(session, task, retry=retry)]
    under_way: list[Running] = []
    _announce(session, waiting)
    try:
        while waiting or under_way:
            for one in [one for one in under_way if one.poll()]:
                under_way.remove(one)
                conclude(session, one)
            while following := _next(session, waiting, under_way):
                waiting.remove(following)
                _begin(session, following, under_way)
            if under_way:
                time.sleep(0.02)
    finally:
        for one in under_way:
            one.kill()
    for part in sorted({task.part for task in wanted}):
        report.write(session.log, part, session.mine, [name for name in session.left if name.startswith(f"{part} ")])


def _announce(session: Session, waiting: Sequence[Task]) -> None:
    """Print how many rows of each part fit into the remaining time, by their estimates."""
    left = session.until - time.monotonic()
    estimated = [replace(one, seconds=_seconds(session, one), alone=_is_alone(session, one)) for one in waiting]
    fit = fitting(estimated, left, session.jobs)
    for part in sorted({task.part for task in waiting}):
        count, of = (sum(task.part == part for task in those) for those in (fit, waiting))
        print(f"part {part}: {count} of {of} rows fit into {max(0, left):.0f} s by the estimates", flush=True)


def fitting(waiting: Sequence[Task], left: float, jobs: int) -> list[Task]:
    """Return the rows that would start within `left` seconds if each took its estimate (see `_next`)."""
    now, ends, alone, found = 0.0, list[float](), False, list[Task]()
    for task in waiting:
        if alone or task.alone or task.needs:
            now, ends = max([now, *ends]), []
        elif len(ends) >= jobs:
            now = min(ends)
            ends.remove(now)
        if now + task.seconds <= left:
            ends.append(now + task.seconds)
            found.append(task)
            alone = task.alone
    return found


def _is_due(session: Session, task: Task, *, retry: bool) -> bool:
    """Return whether a row is missing, or failed and must be repeated."""
    row = session.rows.get(task.key)
    return row is None or (retry and row["status"] == "failed" and row["try"] == 1)


def _next(session: Session, waiting: list[Task], under_way: Sequence[Running]) -> Task | None:
    """Return the next row that may start now, or None. Rows that would not finish in time are skipped."""
    left = session.until - time.monotonic()
    for task in [task for task in waiting if _seconds(session, task) > left]:
        waiting.remove(task)
        session.left.append(task.key)
        print(f"left out: {task.name} needs {_seconds(session, task):.0f} s, {max(0, left):.0f} s left", flush=True)
    if len(under_way) >= session.jobs or any(_is_alone(session, one.task) for one in under_way):
        return None
    first = waiting[0] if waiting else None
    if first and under_way and (_is_alone(session, first) or first.needs):
        return None
    return first


def _seconds(session: Session, task: Task) -> float:
    return 5.0 if session.tiny or not session.device.gpus else task.seconds


def _is_alone(session: Session, task: Task) -> bool:
    return task.alone and not session.tiny


def _begin(session: Session, task: Task, under_way: list[Running]) -> None:
    if not session.device.gpus and task.on_cpu is None:
        _write(session, task, {"status": "needs a GPU", "why": ""}, 0.0)
        return
    known = {key.partition(" ")[2]: row["measured"] for key, row in session.rows.items() if row["status"] == "ok"}
    name = "".join(letter if letter.isalnum() else "-" for letter in task.key)
    folder = session.scratch / f"{name}-{time.monotonic_ns()}"
    place = Place(folder, session.tiny, session.device.gpus, known)
    limit = min(place.within(task.limit), session.until + SPARE / 2 - time.monotonic())
    try:
        under_way.append(running.start(task, place, limit, fresh=session.fresh))
    except OSError as error:
        _write(session, task, {"status": "failed", "why": f"its process can't be started: {error}"}, 0.0)


def conclude(session: Session, done: Running) -> None:
    """Judge a row and write it, unless the end of the session cut it off: the next command runs it again."""
    task, found = done.task, done.result()
    row: Row = {}
    if "cut off" in found:
        row = {"status": "cut off"}
    elif "measured" in found:
        verdict = judged(task, found["measured"])
        row = {"status": "ok" if verdict.ok else "failed", "why": verdict.why, "measured": found["measured"]}
    elif "skip" in found:
        row = {"status": found["skip"], "why": ""}
    else:
        row = {"status": "failed", "why": found["error"]}
    if row["status"] == "failed":
        row["output"] = running.last(done.printed()).splitlines()
    session.log.print(f"{task.key}: {row['status']}", done.printed())
    _note_ran_on(session.log, done.place.folder / log.RAN_ON)
    if row["status"] == "cut off":
        session.left.append(task.key)
        print(f"cut off {done.seconds:5.1f} s  {task.name}: the session ended; the next command runs it", flush=True)
    else:
        _write(session, task, row, done.seconds)
    shutil.rmtree(done.place.folder, ignore_errors=True)


def judged(task: Task, measured: Mapping[str, Any]) -> Verdict:
    """Judge a row; an exception in its judgement counts as failed."""
    try:
        return task.judge(measured)
    except Exception as error:  # noqa: BLE001 - what was measured is not what was expected
        return Verdict(False, f"can't be judged: {type(error).__name__}: {error}")


def _note_ran_on(out: Log, found: Path) -> None:
    """Record which GPU tests passed, also those of an interrupted file."""
    try:
        new = json.loads(found.read_text())
    except (OSError, ValueError):
        return
    path = out.folder / log.RAN_ON
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**known, **new}, indent=2) + "\n")


def _write(session: Session, task: Task, row: Row, seconds: float) -> None:
    """Write a row to the log, the part's page and the terminal."""
    before = session.rows.get(task.key)
    head = {"key": task.key, "part": task.part, "name": task.name, "about": task.about}
    tail = {"seconds": round(seconds, 1), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    which = {"commit": session.commit, "device": session.device.key, "tiny": session.tiny}
    which |= {"torch": machine.torch_version()}
    cpu = {"cpu": task.on_cpu} if task.on_cpu and not session.device.gpus else {}
    whole = log.clean({**head, **row, **tail, **which, **cpu, "try": before["try"] + 1 if before else 1})
    session.rows[task.key] = whole
    session.log.add(whole)
    report.write(session.log, task.part, session.mine, [])
    print(f"{whole['status']:<7} {seconds:5.1f} s  {task.name}: {whole['why']}"[:240], flush=True)


if __name__ == "__main__":
    sys.exit(main())
