"""Jobs of which no rank has failed: who holds the others up?"""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import Helper, HelperError, Life, MeetingFile
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.stacks import Frame
from tests.rules.build import (
    AUTOGRAD,
    C10D,
    LOCK,
    LONG_AGO,
    NOW,
    QUEUE,
    S,
    at_end,
    backwards,
    before_init,
    call,
    child,
    ended,
    error,
    group,
    in_backward,
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

SELECT = Frame(file="/usr/lib/python3.11/selectors.py", line=468, function="select", user=False)
QUEUES = Frame(file="/usr/lib/python3.11/asyncio/queues.py", line=158, function="get", user=False)
AWAITS = (line(3), SELECT, line(21, "train"), QUEUES)
POPEN = Frame(file="/usr/lib/python3.11/subprocess.py", line=1200, function="wait", user=False)
PASSED_BARRIER = (call("monitored_barrier", 7, 18, index=90, open_=False, shape=None, dtype=None),)


def helper_error(who=Helper.TASK):
    return HelperError(who=who, name="rollout", error=error("LookupError", frames=(line(9, "rollout"),)))


def held_in_loader(number):
    fetch = phase("next_batch", 50)
    children = (child(line(88, "read_csv"), QUEUE), child(line(2), QUEUE, idle=True))
    return in_user(number, line(50), QUEUE, open_calls=(fetch,), children=children)


def stopped_in_call(number, **more):
    return rank(number, proc_state="T", open_calls=(call("all_reduce", 7),), groups=(group(7, 3),), **more)


def tearing_down(number, ended_ns, **more):
    """A rank whose last look was taken while its script still ran."""
    early = replace(sample(stack(line(8))), time_ns=ended_ns - S)
    fields = {"main_ended_ns": ended_ns, "samples": (early,), "proc_state": "R", "last_progress_ns": ended_ns}
    return rank(number, **{**fields, **more})


UPLOADER = stack(line(31, "upload"), LOCK, main=False, thread="uploader")
PAIR = group(3, 2, "1")
HUNG = {
    "stuck: sleeps before a recorded call": ((in_call(0), in_user(1), in_call(2)), ("stuck", [1], [12], True)),
    "stuck: sleeps before DDP's reduction": ((in_backward(0), in_user(1), in_backward(2)), ("stuck", [1], [12], True)),
    "stuck: the rank never answered, its last place is known": (
        (in_call(0), in_user(1, samples=(), last_place=line(77)), in_call(2)),
        ("stuck", [1], [77], True),
    ),
    "stuck: its answer is older than its last call, so the last line seen": (
        (
            in_call(0),
            in_user(
                1,
                samples=(replace(sample(stack(line(40))), time_ns=LONG_AGO - S),),
                recent_calls=(call("all_reduce", 6, 20, open_=False),),
                last_place=line(77),
            ),
            in_call(2),
        ),
        ("stuck", [1], [77], True),
    ),
    "transport: an answer from before a backward says nothing of it": (
        (
            in_backward(0),
            in_backward(1, samples=(replace(sample(stack(line(44))), time_ns=LONG_AGO - S),)),
            in_backward(2),
        ),
        ("transport", [0, 1, 2], [30] * 3, False),
    ),
    "stuck: in an except, so the line of the error too": (
        (in_call(0), in_user(1, handled=error(frames=(line(40), line(7, "parse")))), in_call(2)),
        ("stuck", [1], [7, 12], True),
    ),
    "crash: in a finally, so the error is the cause, and the line of the call comes second": (
        (
            in_backward(0),
            in_call(1, "barrier", 7, 14, shape=None, dtype=None, recent=backwards(3), handled=error()),
            in_backward(2),
        ),
        ("crash", [1], [7, 14], True),
    ),
    "crash: in an except, and the others are further in the loop": (
        (
            in_call(0, "barrier", 7, 14, shape=None, dtype=None, handled=error("RuntimeError", first=error("OSError"))),
            in_call(1),
            in_call(2),
        ),
        ("crash", [0], [7, 14], True),
    ),
    "stuck: an error is handled in the call that all make, and one does not come": (
        (in_call(0), in_call(1, handled=error("KeyError")), in_user(2)),
        ("stuck", [2], [12], True),
    ),
    "transport: an error is handled in the call that all make": (
        (in_call(0), in_call(1, handled=error("KeyError")), in_call(2)),
        ("transport", [0, 1, 2], [20] * 3, True),
    ),
    "mismatch: another's error, which a call raised, is handled there": (
        (in_call(0, "reduce", 7, 6), in_call(1, handled=error("RuntimeError", in_call="all_reduce")), in_call(2)),
        ("mismatch", [0], [6], True),
    ),
    "stuck: the producer of its queue has ended": (
        (in_call(0), in_user(1, line(21), QUEUE, helper_errors=(helper_error(Helper.THREAD),)), in_call(2)),
        ("stuck", [1], [21, 9], True),
    ),
    "stuck: it awaits what an asyncio task should have put": (
        (
            in_call(0),
            in_user(1, line(3), SELECT, line(21, "train"), QUEUES, helper_errors=(helper_error(),)),
            in_call(2),
        ),
        ("stuck", [1], [21, 9], True),
    ),
    "stuck: the child of its evaluation that holds up the other one": (
        (in_call(0), in_user(1, line(21), POPEN, children=(child(line(61), C10D), child(line(62)))), in_call(2)),
        ("stuck", [1], [62, 21], True),
    ),
    "stuck: in a file that an earlier job has left": (
        tuple(in_init(n, meeting=MeetingFile(path="/tmp/meet", size_bytes=80), init_ns=n) for n in range(3)),
        ("stuck", [0, 1, 2], [5] * 3, True),
    ),
    "stuck: a loader worker holds its rank up": (
        (in_backward(0), held_in_loader(1), in_backward(2)),
        ("stuck", [1], [88, 50], True),
    ),
    "stuck: its child is idle, so the rank's own line": (
        (in_backward(0), in_user(1, line(21), QUEUE, children=(child(line(9), idle=True),)), in_backward(2)),
        ("stuck", [1], [21], True),
    ),
    "stuck: user code runs inside a backward": (
        (
            in_backward(0),
            in_backward(1, 6, samples=(sample(stack(line(30), AUTOGRAD, line(44, "hook"))),)),
            in_backward(2),
        ),
        ("stuck", [1], [44], True),
    ),
    "stuck: another thread holds the lock": (
        (
            in_call(0),
            in_user(1, samples=(sample(stack(line(60), LOCK), stack(line(70, "hold"), main=False, thread="t")),)),
            in_call(2),
        ),
        ("stuck", [1], [60, 70], True),
    ),
    "stuck: a chain across groups ends at the rank that waits for nobody": (
        (
            rank(0, open_calls=(call("all_reduce", 3, 20, group="1"),), groups=(group(3, 3, "1", (0, 1)),)),
            rank(
                1,
                open_calls=(call("all_reduce", 5, 21, group="2"),),
                groups=(group(2, 3, "1", (0, 1)), group(5, 3, "2", (1, 2))),
            ),
            in_user(2, groups=(group(4, 3, "2", (1, 2)),)),
        ),
        ("stuck", [2], [12], True),
    ),
    "stuck: held up on its way to init": ((in_init(0), before_init(1), in_init(2)), ("stuck", [1], [3], True)),
    "stuck: nobody waits and nobody moves": (
        (in_user(0), in_user(1), in_user(2)),
        ("stuck", [0, 1, 2], [12] * 3, True),
    ),
    "stuck: a receiver waits for a peer in its own code": (
        (rank(0, 2, open_calls=(call("recv", None, 20, peer=1),)), in_user(1, world=2)),
        ("stuck", [1], [12], True),
    ),
    "stuck: others wait in a monitored barrier, after one that all have passed": (
        (
            in_call(0, "monitored_barrier", 7, recent=PASSED_BARRIER),
            in_call(1, "monitored_barrier", 7, recent=PASSED_BARRIER),
            in_user(2, enqueued=6, recent_calls=PASSED_BARRIER),
        ),
        ("stuck", [2], [12], True),
    ),
    "mismatch: another shape, after a monitored barrier": (
        (
            in_call(0, recent=PASSED_BARRIER),
            in_call(1, recent=PASSED_BARRIER),
            in_call(2, recent=PASSED_BARRIER, shape=(8,)),
        ),
        ("mismatch", [2], [20], True),
    ),
    "stuck: others have not come back from beginning an asynchronous call": (
        (in_call(0, is_async=True), in_call(1, is_async=True), in_user(2)),
        ("stuck", [2], [12], True),
    ),
    "stuck: others wait for work that is asynchronous": (
        (
            rank(0, 2, open_calls=(call("all_reduce", 7, 20, index=5, is_async=True), phase("work_wait", 22, index=6))),
            in_user(1, world=2),
        ),
        ("stuck", [1], [12], True),
    ),
    "stuck: busy in several lines of one function": (
        (in_call(0), in_user(1, samples=tuple(sample(stack(line(n, "spin"))) for n in (5, 6, 6))), in_call(2)),
        ("stuck", [1], [6, 5], True),
    ),
    "stopped: in its own code": ((in_call(0), in_user(1, proc_state="T"), in_call(2)), ("stopped", [1], [12], True)),
    "stopped: inside the collective": ((in_call(0), stopped_in_call(1), in_call(2)), ("stopped", [1], [], True)),
    "stopped: a debugger holds it": (
        (in_call(0), in_user(1, proc_state="t", traced_by=99), in_call(2)),
        ("stopped", [1], [12], True),
    ),
    "missing: never started": (
        (in_init(0), in_init(1), rank(2, life=Life.NEVER_STARTED, recorded=False, initialized=False)),
        ("missing", [2], [], True),
    ),
    "missing: the script's world is larger": (
        (in_init(0, 4), in_init(1, 4), in_init(2, 4)),
        ("missing", [3], [], True),
    ),
    "early-exit: status 0 while others wait": (
        (in_backward(0), ended(1, exit_call=line(12)), in_backward(2)),
        ("early-exit", [1], [12], True),
    ),
    "early-exit: its script has ended, its process not yet": (
        (
            in_call(0),
            rank(1, main_ended_ns=NOW - S, recent_calls=(call("all_reduce", 6, 33, open_=False),)),
            in_call(2),
        ),
        ("early-exit", [1], [33], True),
    ),
    "exit-hang: a thread that is no daemon": (
        (at_end(0, UPLOADER), ended(1), ended(2)),
        ("exit-hang", [0], [31], True),
    ),
    "exit-hang: a function at exit": (
        (rank(0, main_ended_ns=LONG_AGO, samples=(sample(stack(line(90, "flush"))),)), ended(1), ended(2)),
        ("exit-hang", [0], [90], True),
    ),
    "exit-hang: a destructor waits": (
        (tearing_down(0, NOW - 15 * S, proc_state="S", cpu_share=0.0), ended(1), ended(2)),
        ("exit-hang", [0], [], True),
    ),
    "exit-hang: an interpreter takes itself down for ever": (
        (tearing_down(0, LONG_AGO, cpu_share=0.9), ended(1), ended(2)),
        ("exit-hang", [0], [], True),
    ),
    "stuck: alone for long, when the others are done": ((in_user(0), ended(1), ended(2)), ("stuck", [0], [12], True)),
    "mismatch: another operation": ((in_call(0, "reduce", 7, 6), in_call(1), in_call(2)), ("mismatch", [0], [6], True)),
    "mismatch: a recorded call against DDP's reduction": (
        (in_call(0, "reduce", 7, 6), in_backward(1), in_backward(2)),
        ("mismatch", [0], [6], True),
    ),
    "mismatch: another shape": ((in_call(0), in_call(1, shape=(8,)), in_call(2)), ("mismatch", [1], [20], True)),
    "mismatch: another dtype": (
        (in_call(0), in_call(1), in_call(2, dtype="torch.int64")),
        ("mismatch", [2], [20], True),
    ),
    "mismatch: one step fewer": (
        (in_backward(0), in_backward(1), in_call(2, "barrier", 7, 14, shape=None, dtype=None, recent=backwards(3))),
        ("mismatch", [2], [14], True),
    ),
    "mismatch: an earlier call already differed": (
        (
            in_backward(0, 8, recent_calls=(call("reduce", 7, 6, index=2, open_=False), *backwards(3, 3))),
            in_backward(1, recent_calls=(call("all_reduce", 6, 4, index=1, open_=False), *backwards(3, 3))),
            in_backward(2, recent_calls=(call("all_reduce", 6, 4, index=1, open_=False), *backwards(3, 3))),
        ),
        ("mismatch", [0], [6], True),
    ),
    "mismatch: of two, the one whose call is new": (
        (in_call(0, "reduce", 7, 6, world=2, recent=backwards(5)), in_backward(1, world=2, steps=5)),
        ("mismatch", [0], [6], True),
    ),
    "mismatch: of two without a history, both": (
        (in_call(0, "reduce", 7, 6, world=2), in_call(1, world=2)),
        ("mismatch", [0, 1], [6, 20], True),
    ),
    "deadlock: both receive": (
        (
            rank(0, 2, open_calls=(call("recv", None, 20, peer=1),)),
            rank(1, 2, open_calls=(call("recv", None, 21, peer=0),)),
        ),
        ("deadlock", [0, 1], [20, 21], True),
    ),
    "deadlock: two groups in opposite order": (
        (
            rank(0, 2, open_calls=(call("all_reduce", 3, 20, group="1"),), groups=(group(3, 2, "1"), group(2, 2, "2"))),
            rank(1, 2, open_calls=(call("all_reduce", 3, 21, group="2"),), groups=(group(2, 2, "1"), group(3, 2, "2"))),
        ),
        ("deadlock", [0, 1], [20, 21], True),
    ),
    "transport: two are in one of their own, for which the third waits": (
        (
            rank(0, open_calls=(call("all_reduce", 3, 20, group="1"),), groups=(PAIR, group(6, 3))),
            rank(1, open_calls=(call("all_reduce", 3, 20, group="1"),), groups=(PAIR, group(6, 3))),
            in_call(2),
        ),
        ("transport", [0, 1], [20] * 2, True),
    ),
    "transport: the root has gone on to the next call": (
        (in_call(0, "barrier", 8, 21, shape=None, dtype=None), in_call(1, "broadcast"), in_call(2, "broadcast")),
        ("transport", [0, 1, 2], [21, 20, 20], True),
    ),
    "transport: all in one collective": (
        (in_call(0), in_call(1), in_call(2)),
        ("transport", [0, 1, 2], [20] * 3, True),
    ),
}


MEETINGS = {
    "the first rank to come has made the file": [
        in_init(n, meeting=MeetingFile(path="/tmp/meet", size_bytes=80 * n), init_ns=n) for n in range(3)
    ],
    "one has not come to the file, and the clocks of two hosts differ": [
        in_init(n, host=f"node{n}", meeting=MeetingFile(path="/tmp/meet", size_bytes=80 * (n % 2)), init_ns=9 - n)
        for n in range(3)
    ],
}


@pytest.mark.parametrize("name", MEETINGS)
def test_a_file_of_this_job_is_not_blamed(name):
    assert judge(job(*MEETINGS[name])).findings == ()


@pytest.mark.parametrize("detail", ["OFF", "DETAIL"])
@pytest.mark.parametrize("name", HUNG)
def test_hang(name, detail):
    ranks, (kind, blamed, lines, certain) = HUNG[name]
    if detail == "DETAIL" and name.startswith("mismatch: an earlier"):
        pytest.skip("the counter tells it without DETAIL only")
    found = judge(job(*ranks, debug_level=detail))
    assert [c for c in found.checks if c.outcome == "crashed"] == []
    errors = [f for f in found.findings if f.severity is Severity.ERROR]
    assert [(f.kind, list(f.ranks), [p.line for p in f.where]) for f in errors] == [(kind, blamed, lines)]
    assert found.certain is certain
    assert errors[0].summary
    assert errors[0].evidence
    assert errors[0].fix


QUIET_JOBS = {
    "all compute": [moving(in_user(n)) for n in range(3)],
    "a moving rank holds the others up": [in_call(0), moving(in_user(1)), in_call(2)],
    "all finished": [ended(n) for n in range(3)],
    "one finishes a little later": [ended(0), moving(in_user(1)), ended(2)],
    "a rank ended at which nobody had to wait": [
        ended(0, recent_calls=(call("barrier", 7, open_=False),), groups=(group(7, 2),)),
        moving(in_call(1, "barrier", 7, world=2)),
    ],
    "init is slow, and nobody waits": [before_init(n) for n in range(3)],
    "rank 0 saves a checkpoint in a function that moves": [
        moving(in_user(0, line(60, "save"))), in_call(1, "barrier", 7), in_call(2, "barrier", 7),
    ],
    "broadcast from different lines": [
        *[moving(in_call(n, "broadcast", 7, 10 + n)) for n in range(3)],
    ],
    "splits of a gather differ": [
        moving(in_call(n, "all_to_all_single", 7, shape=(n,))) for n in range(3)
    ],
    "a mismatch in flight": [moving(in_call(0, "reduce", 7, 6)), in_backward(1), in_backward(2)],
    "the script ended a moment ago": [rank(0, 1, main_ended_ns=NOW - S)],
    "stopped, but it moved a moment ago": [in_call(0), moving(in_user(1, proc_state="T")), in_call(2)],
    "nothing is known yet": [],
    "an interpreter at work taking itself down": [tearing_down(0, NOW - 15 * S), ended(1), ended(2)],
    "an interpreter taken down on crowded cores": [tearing_down(0, LONG_AGO, cpu_share=0.1), ended(1), ended(2)],
    "a rank goes on for a while when the others are done": [in_user(0, last_progress_ns=NOW - 20 * S), ended(1)],
    "a bare process": [
        rank(0, 1, initialized=False, world_size=None, recorded=True, samples=(), last_progress_ns=None)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET_JOBS)
def test_silent(name):
    found = judge(job(*QUIET_JOBS[name]))
    assert [(f.kind, f.ranks) for f in found.findings] == []
    assert found.certain is False
    assert [c for c in found.checks if c.outcome == "crashed"] == []


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
