"""A rank that came to a call when the others had given up there is to blame, and its work before is the line."""

from dataclasses import replace

from ddpdoctor.diagnose.progress import judge_job as judge
from ddpdoctor.model.facts import BeforeCall
from ddpdoctor.model.findings import Confidence

from .build import C10D, LONG_AGO, S, call, crashed, error, in_call, job, line
from .test_stopping import limited

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
