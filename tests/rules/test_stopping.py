"""Which hangs are proven, so that a job is stopped without being asked to, and which may still resolve."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import BeforeCall, GroupState
from ddpdoctor.model.findings import Confidence
from tests.rules.build import (
    C10D,
    LONG_AGO,
    NOW,
    TIMEOUT_S,
    S,
    at_end,
    before_init,
    call,
    crashed,
    ended,
    error,
    group,
    in_call,
    in_init,
    in_user,
    job,
    killed,
    line,
    rank,
    stack,
)

UPLOADER = stack(line(31, "upload"), main=False, thread="uploader")
FROZEN_NS = NOW - int(TIMEOUT_S * S)


def limited(found, timeout_s):
    groups = tuple(replace(one, timeout_s=timeout_s) for one in found.groups)
    return replace(found, groups=groups)


def waiting(number, timeout_s=None, **more):
    return limited(in_call(number, **more), timeout_s)


def proven(*ranks, **more):
    found = judge(job(*ranks, **more))
    assert found.findings, "the job hangs"
    return found.proven


NEVER_GO_ON = {
    "another operation": (in_call(0, "reduce", 7, 6), in_call(1), in_call(2)),
    "another dtype": (in_call(0), in_call(1), in_call(2, dtype="torch.int64")),
    "a circle": (
        rank(0, 2, open_calls=(call("recv", None, 20, peer=1),)),
        rank(1, 2, open_calls=(call("recv", None, 21, peer=0),)),
    ),
    "a rank that has ended": (in_call(0), ended(1, exit_call=line(12)), in_call(2)),
    "a rank that has failed": (in_call(0), crashed(1), in_call(2)),
    "a rank that was killed": (in_call(0), killed(1), in_call(2)),
    "a rank that the launcher never started": (in_init(0, 4), in_init(1, 4), in_init(2, 4)),
    "a rank frozen for the whole hang timeout": (
        in_call(0), in_user(1, proc_state="T", frozen_since_ns=FROZEN_NS), in_call(2),
    ),
    "torch's own limit has passed": (waiting(0, 20.0), in_user(1), waiting(2, 20.0)),
    "torch's own limit has passed, as a peer reports": (waiting(0), in_user(1), waiting(2, 20.0)),
    "all inside one collective, beyond torch's own limit": (waiting(0, 20.0), waiting(1, 20.0), waiting(2, 20.0)),
}  # fmt: skip

MAY_RESUME = {
    "a rank that sleeps or computes": (in_call(0), in_user(1), in_call(2)),
    "a rank on its way to init": (in_init(0), before_init(1), in_init(2)),
    "nobody waits and nobody moves": (in_user(0), in_user(1), in_user(2)),
    "frozen a moment ago": (in_call(0), in_user(1, proc_state="T", frozen_since_ns=FROZEN_NS + 1), in_call(2)),
    "frozen, since when is not known": (in_call(0), in_user(1, proc_state="T"), in_call(2)),
    "held by a debugger": (
        in_call(0), in_user(1, proc_state="t", traced_by=99, frozen_since_ns=LONG_AGO), in_call(2),
    ),
    "stopped under a debugger": (
        in_call(0), in_user(1, proc_state="T", traced_by=99, frozen_since_ns=LONG_AGO), in_call(2),
    ),
    "asleep in the kernel": (
        in_call(0), in_user(1, proc_state="D", answered=False, frozen_since_ns=LONG_AGO), in_call(2),
    ),
    "all frozen, as by a batch system": tuple(
        in_user(n, proc_state="T", frozen_since_ns=LONG_AGO) for n in range(3)
    ),
    "a thread that uploads after the end": (at_end(0, UPLOADER), ended(1), ended(2)),
    "all inside one collective": (waiting(0, 1800.0), waiting(1, 1800.0), waiting(2, 1800.0)),
    "torch's own limit has just passed": (waiting(0, 50.0), in_user(1), waiting(2, 50.0)),
    "a barrier, which may have a limit of its own": (
        waiting(0, 20.0, op="barrier", shape=None, dtype=None),
        in_user(1),
        waiting(2, 20.0, op="barrier", shape=None, dtype=None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEVER_GO_ON)
def test_what_can_never_go_on_is_proven(name):
    assert proven(*NEVER_GO_ON[name])


@pytest.mark.parametrize("name", MAY_RESUME)
def test_what_may_resume_is_not(name):
    assert not proven(*MAY_RESUME[name])


@pytest.mark.parametrize(
    ("timeout_s", "words"),
    [
        (1800.0, "torch's own timeout for this all_reduce is 30 min; 29 min are left"),
        (61.0, "torch's own timeout for this all_reduce is 1 min 1 s; 1 s are left"),
        (50.0, "torch's own timeout for this all_reduce is 50 s; it has passed"),
    ],
)
def test_the_limit_is_reported_with_what_is_left_of_it(timeout_s, words):
    (finding,) = judge(job(waiting(0, timeout_s), in_user(1), in_call(2))).findings
    assert words in finding.evidence


def test_torch_does_not_end_a_job_whose_rank_has_waited_past_both_limits():
    """It has waited for a minute. See test_device for a job that torch did end."""
    (finding,) = judge(job(waiting(0, 50.0), in_user(1), in_call(2), hang_timeout_s=55.0)).findings
    assert not any("torch ends the job before" in sentence for sentence in finding.evidence), finding.evidence


def test_a_limit_that_nobody_gave_is_not_made_up():
    (finding,) = judge(job(in_call(0), in_user(1), in_call(2))).findings
    assert not any("time limit" in sentence for sentence in finding.evidence)
    assert GroupState(name="0", ranks=(), backend="", enqueued=0).timeout_s is None
    assert group(1, 2).timeout_s is None


# A rank that came to a call when the others had given up there is to blame, and its work before is the line.


TIMED_OUT = "Timed out waiting 8000ms for recv operation to complete"


def gave_up(number, after_s=8.0, raised_s=9.0, limit_s=8.0):
    failed = call("all_reduce", 7, failed=True, open_=False, ended_ns=LONG_AGO + int(after_s * S))
    raised = error("RuntimeError", TIMED_OUT, LONG_AGO + int(raised_s * S), (line(20), C10D), in_call="all_reduce")
    found = crashed(number, raised, recent_calls=(failed,), groups=in_call(number).groups)
    return limited(found, limit_s)


WORK = (line(12, "tokenize"),)


def came(number, after_s, lines=WORK, limit_s=8.0):
    began_ns = LONG_AGO + int(after_s * S)
    seen = BeforeCall(until_ns=began_ns + S // 100, lines=lines) if lines else None
    return limited(replace(in_call(number, started_ns=began_ns), before_call=seen), limit_s)


def found(*ranks):
    errors = judge(job(*ranks, ended=True, launcher_status=1)).findings
    return [(f.kind, f.ranks, [place.line for place in f.where]) for f in errors], errors


def test_the_rank_that_came_too_late_is_named_by_its_work():
    reported, (finding,) = found(came(0, 8.5), gave_up(1), gave_up(2))
    assert reported == [("stuck", (0,), [12])]
    assert finding.confidence is Confidence.HIGH
    assert finding.summary == (
        "rank 0 called all_reduce too late: ranks 1 and 2 had timed out there after 8 s; "
        "before that it was in tokenize (train.py:12)"
    )
    assert finding.evidence[0] == "rank 0 called all_reduce of float32[16] (train.py:20) 8.5 s after rank 1"


def test_an_error_that_the_script_handled_for_long_counts_from_when_the_call_failed():
    assert found(came(0, 8.5), gave_up(1, 8.0, 60.0), gave_up(2))[0] == [("stuck", (0,), [12])]


def test_without_its_lines_the_call_is_named():
    reported, (finding,) = found(came(0, 8.5, lines=()), gave_up(1), gave_up(2))
    assert reported == [("stuck", (0,), [20])]
    assert finding.confidence is Confidence.MEDIUM


def test_who_came_in_time_is_not_late():
    assert found(came(0, 7.5), gave_up(1), gave_up(2))[0] == [("transport", (0, 1, 2), [20] * 3)]


def test_who_was_thrown_out_before_the_limit_did_not_give_up():
    reported, _ = found(came(0, 8.5, limit_s=1800.0), gave_up(1, limit_s=1800.0), gave_up(2, limit_s=1800.0))
    assert ("stuck", (0,), [12]) not in reported
