"""What the end of a generation means."""

from __future__ import annotations

import pytest

from launch_train.common.contract import Exit
from launch_train.node.exit_status import End, Outcome, end_after_failure, end_from_outcomes, own_failure


def judged(*outcomes: Outcome, failures: int = 1, restarts: int = 3) -> End | None:
    return end_from_outcomes(outcomes) or end_after_failure(outcomes, failures=failures, restarts=restarts)


def test_all_good_is_the_end() -> None:
    assert judged(Outcome(0, 0), Outcome(1, 0)) == End(0, "done")


def test_a_failure_is_repaired_until_it_has_failed_too_often() -> None:
    failed = Outcome(1, -9)
    assert judged(Outcome(0, 0), failed, failures=3) is None
    end = judged(Outcome(0, 1, note="stopped with the others"), failed, failures=4)
    assert end == End(1, "node 1: killed by SIGKILL; failed 4 times without a new checkpoint", terminal=True)
    assert judged(failed, failures=1, restarts=0) is not None


@pytest.mark.parametrize(
    ("mark", "terminal"),
    [
        (Exit.USAGE, True),
        (Exit.DISAGREED, True),
        (Exit.TERMINAL, False),
        (Exit.UNFIT, False),
        (Exit.SUPERSEDED, False),
    ],
)
def test_what_another_start_can_not_change_ends_at_once(mark: Exit, terminal: bool) -> None:
    # The first to fall over is not the one who says why.
    end = judged(Outcome(0, 1), Outcome(1, 1, (int(mark), 75), note="stopped with the others"))
    assert end
    assert (end.code, end.terminal) == (mark, terminal)
    assert end.reason.startswith("node 1: ")


def test_preempted_is_never_success_and_never_for_good() -> None:
    end = judged(Outcome(0, 1, (75,), signum=15), Outcome(1, 1, (75,), note="stopped with the others"))
    assert end == End(75, "interrupted; checkpoint saved")
    assert judged(Outcome(0, 0, (75,), signum=15)) == end
    assert judged(Outcome(0, 0, signum=15)) == End(143, "node 0 received SIGTERM")
    assert judged(Outcome(0, -2, signum=2)) == End(130, "node 0 received SIGINT")


def test_who_has_saved_ends_the_run_on_all_nodes_whoever_got_the_signal() -> None:
    end = End(75, "interrupted; checkpoint saved")
    # Another node was preempted; this one's ranks agreed, saved and left by themselves.
    assert judged(Outcome(0, 1, (75,)), Outcome(1, 1, (75,), signum=15)) == end
    # It was stopped with the others a moment after its own processes had saved; the others broke on their way out.
    assert judged(Outcome(0, 1, (75,), note="stopped with the others"), Outcome(1, -9)) == end
    # The machine that was preempted went down before it could report.
    assert judged(Outcome(0, 1, (75,)), Outcome(1, 1, note="no heartbeat for 30 s")) == end


def test_who_left_with_work_left_is_not_done_whatever_it_exits_with() -> None:
    assert judged(Outcome(0, 0, (75,))) == End(75, "interrupted; checkpoint saved")
    assert not Outcome(0, 0, (2,)).ok


def test_who_has_taken_over_has_the_last_word() -> None:
    end = judged(Outcome(0, 1, (75,), signum=15), Outcome(1, 1, (2,)), Outcome(2, 1, (77,)))
    assert end == End(77, "node 2: another start of this run has taken over")


def test_after_a_signal_success_needs_the_processes_word() -> None:
    assert Outcome(0, 1, (0, 0), signum=15).ok
    assert not Outcome(0, 0, (), signum=15).ok
    assert not Outcome(0, 0, (0, 75), signum=15).ok
    assert Outcome(0, 1, (0,), note="stopped with the others").ok


def test_what_fails_twice_before_its_first_step_is_not_tried_again() -> None:
    failed = Outcome(1, 5)
    assert own_failure([Outcome(0, 1, note="was replaced"), failed, Outcome(2, 6)]) == 5
    assert own_failure([Outcome(0, 0), Outcome(1, 1, note="stopped with the others")]) is None
    words = "node 1: exit code 5; failed twice before its first step; not retrying"
    assert end_after_failure([failed], failures=2, restarts=3, failed_twice_early=True) == End(1, words, terminal=True)
    assert end_after_failure([failed], failures=2, restarts=3, failed_twice_early=False) is None


def test_an_unknown_signal_has_a_number() -> None:
    assert str(Outcome(2, -40)) == "node 2: killed by signal 40"


@pytest.mark.parametrize("code", [-9, 137, 128 + 64])
def test_a_death_by_signal_is_nobodys_own_failure(code: int) -> None:
    assert own_failure([Outcome(0, code)]) is None
    assert own_failure([Outcome(0, 1), Outcome(1, code)]) is None  # node 0's may have failed because of it
    assert own_failure([Outcome(0, 255)]) == 255
