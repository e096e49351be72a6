"""Jobs of which no rank has failed: who holds the others up?"""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.stacks import Frame
from tests.rules.build import (
    LOCK,
    LONG_AGO,
    NOW,
    S,
    at_end,
    before_init,
    ended,
    in_call,
    in_init,
    in_user,
    job,
    line,
    moving,
    phase,
    rank,
    sample,
    stack,
)

UPLOADER = stack(line(31, "upload"), LOCK, main=False, thread="uploader")


def test_a_rank_that_arrives_late_at_init_is_given_the_whole_timeout():
    waits = phase("init_process_group", 5, started_ns=NOW - 3 * S)
    early = rank(0, 2, initialized=False, open_calls=(waits,))
    found = judge(job(early, before_init(1, 2)))
    assert found.findings == ()
    assert {c.code for c in found.checks if c.outcome == "inconclusive"} == {"DD601"}


def test_missing_nodes_are_named_and_never_certain():
    found = judge(job(world_size=4, nnodes=2, local_ranks_expected=2, node_rank=0))
    assert [(f.kind, f.ranks, f.confidence) for f in found.findings] == [("missing", (2, 3), Confidence.LOW)]
    assert found.certain is False


def test_ranks_of_other_nodes_are_not_missing_from_a_collective():
    found = judge(job(in_call(0, world=4), in_call(1, world=4), world_size=4, nnodes=2, local_ranks_expected=2))
    assert [f.kind for f in found.findings if f.severity is Severity.ERROR] == []


def test_duplicate_numbers_are_evidence():
    ranks = [in_init(0, 3), in_init(1, 3), in_init(1, 3, pid=4711)]
    found = judge(job(*ranks, world_size=3))
    assert [(f.kind, f.ranks) for f in found.findings] == [("missing", (2,))]
    assert any("4711" in sentence for sentence in found.findings[0].evidence)
    assert "2 processes use rank 1" in found.findings[0].summary
    assert "RANK" in found.findings[0].fix


def test_an_exit_function_of_the_users_is_not_pythons_own():
    found = judge(
        job(at_end(0, UPLOADER), rank(1, main_ended_ns=LONG_AGO, samples=(sample(stack(line(90, "flush"))),)))
    )
    own = [sentence for sentence in found.findings[0].evidence if sentence.startswith("Python itself")]
    assert own == ["Python itself is in wait (threading.py:324) on rank 0"]


def test_a_queue_that_nobody_reads_is_reported():
    queues = "/usr/lib/python3.11/multiprocessing/queues.py"
    joins = Frame(file=queues, line=201, function="_finalize_join", user=False)
    stays = rank(0, main_ended_ns=LONG_AGO, samples=(sample(stack(joins, LOCK)),))
    found = judge(job(stays, ended(1), ended(2))).findings
    assert [(f.kind, f.ranks) for f in found] == [("exit-hang", (0,))]
    assert "cancel_join_thread" in found[0].fix
    assert "Python itself is in wait (threading.py:324) on rank 0" in found[0].evidence


def test_one_blamed_and_one_moving_rank_is_not_certain():
    found = judge(job(in_call(0), in_user(1), moving(in_user(2))))
    assert [(f.kind, f.ranks) for f in found.findings] == [("stuck", (1,))]
    assert found.certain is False


def test_a_rank_that_was_not_recorded_is_blamed_with_reserve():
    found = judge(job(in_call(0), in_user(1, recorded=False, samples=(), groups=()), in_call(2)))
    assert next((f.kind, f.ranks, f.confidence) for f in found.findings) == ("stuck", (1,), Confidence.LOW)
    assert found.certain is False
    assert "rank 1 could not be inspected" in found.findings[0].evidence


def test_interrupted_job_without_a_proven_hang_has_no_verdict():
    fresh = LONG_AGO + 55 * S
    ranks = [in_call(0), in_user(1, last_progress_ns=fresh), in_call(2)]
    found = judge(job(*ranks, ended=True, interrupted_by="SIGINT", stopping_since_ns=NOW - S))
    assert found.findings == ()


def test_a_rank_that_could_not_be_recorded_is_reported():
    found = judge(job(*[moving(in_user(n)) for n in range(2)], moving(in_user(2, recorded=False, lost="no space"))))
    assert [(f.kind, f.ranks, f.severity) for f in found.findings] == [("not-recorded", (2,), Severity.INFO)]


ENDED_BY_OTHERS = {
    "it waits for one that computes": (
        lambda at: (in_call(0, world=2, started_ns=at), replace(in_user(1, world=2), last_progress_ns=at)), "stuck"
    ),
    "all are inside": (lambda at: tuple(in_call(n, world=2, started_ns=at) for n in (0, 1)), "transport"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDED_BY_OTHERS)
def test_a_launcher_that_is_killed_leaves_ranks_that_had_got_on_without_blame(name):
    make, kind = ENDED_BY_OTHERS[name]

    def kinds(stood_s):
        at = NOW - stood_s * S
        ranks = [replace(found, last_progress_ns=at) for found in make(at)]
        fields = {"ended": True, "launcher_status": 143, "hang_timeout_s": 300.0, "stopping_since_ns": NOW}
        return [found.kind for found in judge(job(*ranks, **fields)).findings]

    assert kinds(20) == []
    assert kinds(31) == [kind]
