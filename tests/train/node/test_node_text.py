"""What a node and its processes print is in the run folder too, as real processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train.common.contract import Exit
from tests.train.nodes import Machines, machines, until


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


def python(script: str) -> tuple[str, ...]:
    return ("--launcher", "python", "--script", script)


def parts(one: Machines) -> list[Path]:
    return sorted((one.run_folder / "text").glob("*.log"))


def text(one: Machines) -> str:
    return b"".join(part.read_bytes() for part in parts(one)).decode()


def test_all_that_is_printed_is_kept_in_its_order(one: Machines) -> None:
    script = one.script(
        "import os, sys\n"
        "print('on stdout', os.environ['LAUNCH_GENERATION'])\n"
        "print('on stderr', file=sys.stderr)\n"
        "os.system('echo from a child')\n"
        "os.write(1, b'native, no newline at the end')\n"
        "raise SystemExit(3 * (os.environ['LAUNCH_GENERATION'] == '0'))\n"
    )
    node = one.start(*python(script))
    assert node.wait() == Exit.OK
    assert text(one) == node.text
    lines = ["on stdout 0", "on stderr", "from a child", "native, no newline at the end"]
    assert node.text.startswith("\n".join(lines) + "launch: node 0: exit code 3; restarting (1 of 3")
    assert "native, no newline at the endtrain: the script exited with 0 after" in node.text
    assert node.text.endswith("\nlaunch: done\n")


def test_a_process_that_is_killed_leaves_its_last_words(one: Machines) -> None:
    script = one.script("import os; os.write(2, b'last words\\n' * 9000); os.kill(os.getpid(), 9)")
    node = one.start(*python(script), env={"LAUNCH_RESTARTS": "0"})
    assert node.wait() == Exit.FAILED
    assert text(one).count("last words\n") == 9000
    assert text(one) == node.text


def test_it_is_there_while_the_run_goes_on_and_whole_after_a_preemption(one: Machines) -> None:
    script = one.script(
        "import os, signal, time\n"
        "def told(*_):\n"
        "    print('saving', flush=True)\n"
        "    open(os.environ['LAUNCH_EXIT_FILE'], 'a').write('75\\n')\n"
        "    os.write(1, b'saved, 100%\\r')\n"
        "    os._exit(75)\n"
        "signal.signal(15, told)\n"
        "print('waiting', flush=True)\n"
        "time.sleep(100)\n"
    )
    node = one.start(*python(script), timing={"text": 0.1})
    until(lambda: text(one) == "waiting\n", "the first part", limit=5)
    node.send(signal.SIGTERM)
    assert node.wait() == Exit.PREEMPTED
    assert text(one) == "waiting\nsaving\nsaved, 100%\rlaunch: interrupted; checkpoint saved (exit code 75)\n"


def test_what_a_generation_printed_is_written_as_soon_as_it_is_over(one: Machines) -> None:
    work = (
        "import os, time\nprint('begin', flush=True)\n1 / (os.environ['LAUNCH_GENERATION'] != '0')\ntime.sleep(100)\n"
    )
    one.start(*python(one.script(work)), timing={"text": 1000})
    until(lambda: "ZeroDivisionError" in text(one), "the text of the first generation", limit=10)


def test_parts_go_on_after_those_of_the_container_before(one: Machines) -> None:
    for number in (1, 2):
        node = one.start("--command", "--", "echo", f"container {number}")
        assert node.wait() == Exit.OK
    names = [part.name for part in parts(one)]
    assert names == [f"0001-0000-{number:06d}.log" for number in range(len(names))]
    printed = [line for line in text(one).splitlines() if "train: the script exited with 0" not in line]
    assert printed == ["container 1", "launch: done", "container 2", "launch: done"]


def test_why_a_machine_was_not_fit_is_kept_too(one: Machines) -> None:
    node = one.start(*python("nowhere.py"))
    assert node.wait() == Exit.USAGE
    assert "nowhere.py: no such file" in text(one)
    assert text(one) == node.text


def test_without_a_run_folder_nothing_stands_in_between(one: Machines) -> None:
    work = "import os; print(os.path.sameopenfile(1, 2), os.fstat(1).st_size > 0)"  # both are the log itself
    node = one.start(*python(one.script(f"print('log', flush=True); {work}")), env={"LAUNCH_RUN_FOLDER": ""})
    assert node.wait() == Exit.OK
    assert "log\nTrue True\n" in node.text


def test_a_text_that_can_not_be_kept_ends_nothing(one: Machines) -> None:
    (one.run_folder).mkdir()
    (one.run_folder / "text").write_text("a file in the way")
    node = one.start(*python(one.script("print('works')")), timing={"text": 0.1})
    start = time.monotonic()
    assert node.wait() == Exit.OK
    assert time.monotonic() - start < 10
    assert "works\n" in node.text
    assert node.text.count("log lines are not being stored, retrying: ") == 1
    assert node.text.endswith("launch: the last log lines could not be stored\n")
