"""Any text of anybody's gives a verdict that can be shown, and every verdict an exit code."""

from __future__ import annotations

import re
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from launcher.diagnosis import (
    Diagnosis,
    Kind,
    Refusal,
    RequestContext,
    Scope,
    diagnose_end,
    diagnose_refusal,
    error_of,
)
from launcher.errors import LaunchError
from launcher.jobs.job import ENDED, GONE, Failure
from tests.diagnosis.test_api_error import REFUSALS
from tests.diagnosis.test_job_end import ENDS, job
from tests.diagnosis.test_vm_end import job as vm_job
from tests.diagnosis.test_vm_errors import REFUSALS as VM_REFUSALS
from tests.diagnosis.wordings import FLEX, PLAIN, SPOT, VM, told

CODES = {
    1: {"succeeded", "disabled", "image", "output", "busy", "unfit", "lost"},
    2: {"invalid", "machine"},
    3: {"user", "unknown", "expired", "cancelled"},
    4: {"permission", "credentials", "project"},
    5: {"quota", "stockout", "waited", "preempted"},
}


def test_exit_codes() -> None:
    found: dict[int, set[str]] = {code: set() for code in CODES}
    for kind in get_args(Kind):
        found[error_of(Diagnosis(scope="permanent", kind=kind, cause="")).exit_code].add(kind)
    assert found == CODES


PIECES = st.sampled_from([one[0].message for one in REFUSALS] + [one[0].error.message for one in ENDS if one[0].error])
SYNTAX = st.text("{}%$'\"\\.;:,\n\t", max_size=40)
TEXT = st.one_of(st.text(), SYNTAX, PIECES, st.tuples(PIECES, st.text(), PIECES).map("".join))
KEYS = (
    *("permission", "service", "consumer", "resource", "quota_metric", "quota_limit", "quota_limit_value"),
    *("gpu_family", "zonesAvailable"),
)
REASONS = sorted({one[0].reason for one in (*REFUSALS, *VM_REFUSALS)})
ANY_REFUSAL = st.builds(
    Refusal,
    code=st.integers(-1, 700),
    message=TEXT,
    reason=st.sampled_from(REASONS),
    metadata=st.dictionaries(st.sampled_from(KEYS), st.one_of(TEXT, st.from_regex(r"\A[\w.:/@,-]{1,20}\Z"))),
    service=st.sampled_from(["aiplatform", "compute"]),
)


def fit_for_a_person(diagnosis: Diagnosis) -> None:
    assert diagnosis.cause
    assert diagnosis.scope in get_args(Scope)
    assert diagnosis.kind in get_args(Kind)
    assert issubclass(error_of(diagnosis), LaunchError)
    assert not re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", diagnosis.cause + diagnosis.fix)


@given(ANY_REFUSAL, st.sampled_from([SPOT, PLAIN, VM, FLEX]))
def test_any_refusal_gets_a_diagnosis(refusal: Refusal, tried: RequestContext) -> None:
    fit_for_a_person(diagnose_refusal(refusal, tried))


@given(
    st.sampled_from([*sorted(ENDED), GONE, "?"]), st.integers(0, 40), TEXT, TEXT, st.sampled_from([SPOT, PLAIN, FLEX])
)
def test_any_end_gets_a_diagnosis(state: str, code: int, message: str, said: str, tried: RequestContext) -> None:
    fit_for_a_person(diagnose_end(job(state, code, message), tried, said))


@given(
    st.sampled_from([*sorted(ENDED), GONE, "?"]),
    st.builds(
        Failure,
        code=st.integers(0, 40),
        message=TEXT,
        reason=st.sampled_from([*REASONS, "startup", "preempted", "hostError", "maintenance", "stopped"]),
        metadata=st.dictionaries(st.sampled_from([*KEYS, "reason"]), TEXT),
    ),
    TEXT,
)
def test_any_end_of_a_vm_gets_a_diagnosis(state: str, failure: Failure, said: str) -> None:
    fit_for_a_person(diagnose_end(vm_job(state, failure), VM, said))


def test_a_message_of_a_megabyte_is_read_at_once() -> None:
    for piece in ("List of found errors: 1.Field: a; Message: ", "image x ", "the replica ", "quota '", " \t"):
        fit_for_a_person(diagnose_refusal(told(400, piece * (1_000_000 // len(piece))), SPOT))
