"""Jobs in which a rank has ended: which end is the cause, and which follow from it?"""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import BeforeCall, GroupState, Life
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.rules.progress.states import MAX_TEXT
from tests.rules.build import (
    ABORT,
    AUTOGRAD,
    C10D,
    LONG_AGO,
    S,
    aborted_in_call,
    call,
    crashed,
    ended,
    error,
    failed_in,
    group,
    in_backward,
    in_call,
    in_user,
    job,
    killed,
    limited,
    line,
    phase,
    rank,
    waiting,
)


def test_abort_at_exit_is_no_failure():
    found = judge(job(ended(0), killed(1, main_ended_ns=LONG_AGO - S, **ABORT), ended(2), ended=True))
    assert [(f.kind, f.ranks, f.severity) for f in found.findings] == [("exit-abort", (1,), Severity.INFO)]


def test_a_fault_at_exit_is_told_with_its_signal_and_line():
    died = [killed(rank, "SIGSEGV", main_ended_ns=LONG_AGO - S) for rank in (0, 1)]
    at_a_line = killed(2, "SIGBUS", main_ended_ns=LONG_AGO - S, fatal_place=line(31))
    found = judge(job(*died, at_a_line, ended=True, launcher_status=1)).findings
    assert [(f.kind, f.ranks, f.severity) for f in found] == [("exit-abort", r, Severity.INFO) for r in ((0, 1), (2,))]
    assert "ranks 0 and 1 died of SIGSEGV at exit" in found[0].summary
    assert "pytorch#190489" in found[0].evidence[0]
    assert found[0].evidence[1].endswith("its exit status is 1")
    assert [place.line for place in found[1].where] == [31]
    assert "pytorch" not in found[1].evidence[0]


def test_a_spawner_that_ends_the_others_after_an_abort_at_exit_is_no_failure():
    aborted = killed(0, main_ended_ns=LONG_AGO - S, ended_ns=LONG_AGO, **ABORT)
    fetched = killed(1, "SIGTERM", main_ended_ns=LONG_AGO - S, ended_ns=LONG_AGO + S)
    assert [f.kind for f in judge(job(aborted, fetched, ended=True, world_size=2)).findings] == ["exit-abort"]


@pytest.mark.parametrize(
    "other", [ended(0), killed(0, main_ended_ns=LONG_AGO - S, ended_ns=LONG_AGO + 2 * S, **ABORT)], ids=["no", "later"]
)
def test_sigterm_without_an_abort_before_it_is_a_kill(other):
    dead = killed(1, "SIGTERM", main_ended_ns=LONG_AGO - S, ended_ns=LONG_AGO + S)
    assert "killed" in [f.kind for f in judge(job(other, dead, ended=True, world_size=2)).findings]


@pytest.mark.parametrize(
    ("asked", "kind"), [("3", "crash"), ("'no data'", "crash"), ("0", "early-exit"), ("None", "early-exit")]
)
def test_an_error_status_is_not_lost_in_an_abort_at_exit(asked, kind):
    left = killed(1, main_ended_ns=LONG_AGO - S, exit_call=line(14), exit_asked=asked, **ABORT)
    found = judge(job(failed_in(0, "backward"), left, in_backward(2), ended=True))
    assert [(f.kind, f.ranks) for f in found.findings if f.kind != "exit-abort"] == [(kind, (1,))]


def test_abort_at_exit_after_an_exception_is_a_crash():
    dead = killed(1, main_ended_ns=LONG_AGO, raised=(error(),), **ABORT)
    found = judge(job(in_backward(0), dead, in_backward(2), ended=True))
    assert [(f.kind, f.ranks) for f in found.findings] == [("crash", (1,))]


def test_the_oom_killer_is_reported():
    found = judge(job(in_call(0), killed(1, oom_killed=True), in_call(2), ended=True))
    assert "OOM killer" in found.findings[0].summary
    assert "memory" in found.findings[0].fix


def test_last_line_before_sigkill_is_marked_as_such():
    found = judge(job(in_call(0), killed(1), in_call(2), ended=True))
    assert "it was last seen" in found.findings[0].summary


def test_cascades_are_evidence():
    found = judge(job(crashed(0), failed_in(1, "backward"), failed_in(2, "backward"), ended=True))
    assert (
        "ranks 1 and 2 failed as well, in backward: RuntimeError: Connection closed by peer"
        in found.findings[0].evidence
    )


def test_long_messages_are_cut_to_one_line():
    found = judge(job(crashed(0, error(message="x" * 5000 + "\nmore"), world=1), ended=True))
    assert len(found.findings[0].summary) < MAX_TEXT + 100
    assert "more" not in found.findings[0].summary


def test_a_slow_exit_that_the_launcher_cut_short_is_still_a_failure():
    slow = rank(0, life=Life.SIGNALED, signal="SIGTERM", after_stop=True, raised=(error(at=LONG_AGO),))
    found = judge(job(slow, failed_in(1, "backward"), in_backward(2), ended=True, stopping_since_ns=LONG_AGO + 5 * S))
    assert [(f.kind, f.ranks) for f in found.findings] == [("crash", (0,))]


def test_other_ranks_errors_follow_from_it_only_if_there_are_any():
    alone, followed = (crashed(n) for n in range(3)), (crashed(0), failed_in(1, "all_reduce", 7), in_backward(2))
    fixes = [judge(job(*ranks, ended=True)).findings[0].fix for ranks in (alone, followed)]
    assert [fix.endswith("it caused the errors of the other ranks") for fix in fixes] == [False, True]
    assert fixes[0].startswith("fix the error in parse")


def test_a_rank_that_failed_in_a_call_that_needs_nobody_is_no_victim():
    fetch = phase("next_batch", 50, open_=False, failed=True)
    raised = error("RuntimeError", "worker exited", in_call="next_batch", frames=(line(50), AUTOGRAD))
    found = judge(job(crashed(0, raised, recent_calls=(fetch,)), in_user(1), in_backward(2), ended=True))
    assert [(f.kind, f.ranks, f.where[0].line) for f in found.findings] == [("crash", (0,), 50)]


def test_a_killed_rank_of_which_no_line_is_known_is_said_to_stand_at_none():
    found = judge(job(in_call(0), killed(1, last_place=None), in_call(2)))
    assert [(f.kind, f.ranks, f.where) for f in found.findings] == [("killed", (1,), ())]
    assert found.findings[0].summary == "rank 1 was killed by SIGKILL"


@pytest.mark.parametrize(("signal", "said"), [("SIGTERM", True), ("", False)])
def test_an_exit_in_a_handler_of_a_signal_is_named_with_what_to_do(signal, said):
    left = ended(1, exit_call=line(7, "bye"), exit_signal=signal)
    (found,) = judge(job(in_backward(0), left, in_backward(2))).findings
    assert (found.kind, found.ranks, [place.line for place in found.where]) == ("early-exit", (1,), [7])
    assert ("do not exit in the handler of SIGTERM: set a flag there, all_reduce it" in found.fix) is said
    assert ("rank 1 has left by an exit call in the script's handler of SIGTERM" in found.evidence) is said
    assert found.fix.startswith("do not exit in bye (train.py:7) on some ranks only") is not said
    (at_its_end,) = judge(job(in_backward(0), ended(1), in_backward(2))).findings
    assert "do not exit" not in at_its_end.fix


@pytest.mark.parametrize(("op", "said"), [("all_to_all_single", True), ("all_reduce", False)])
def test_an_abort_in_all_to_all_may_be_of_split_sizes(op, said):
    found = judge(job(aborted_in_call(0, op=op), *[in_call(n, op) for n in (1, 2)]))
    fixes = [finding.fix for finding in found.findings]
    assert any("output_split_sizes[i] on rank r must be input_split_sizes[r] on rank i" in fix for fix in fixes) is said


def nccl(rank: int, other: int) -> str:
    return (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:92, invalid usage (run with NCCL_DEBUG=WARN "
        "for details), NCCL version 2.30.7\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
        f"Last error:\nDuplicate GPU detected : rank {rank} and rank {other} both on CUDA device 1b000"
    )


SHARED = {
    "both raise it": ({0: nccl(0, 1), 1: nccl(1, 0)}, (0, 1), "ranks 0 and 1 raised"),
    "one was stopped before it could": ({0: nccl(0, 1)}, (0, 1), "rank 0 raised"),
    "three share it": ({0: nccl(0, 1), 1: nccl(1, 0), 2: nccl(2, 0)}, (0, 1, 2), "ranks 0-2 raised"),
    "one is told of a pair that it is not in": ({0: nccl(0, 1), 2: nccl(1, 0)}, (0, 1), "rank 0 raised"),
    "another error of NCCL names no ranks": (
        {
            0: nccl(0, 1).replace(
                "Duplicate GPU detected : rank 0 and rank 1", "Cuda failure 'out of memory' at 0 and 1"
            )
        },
        (0,),
        "rank 0 raised",
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_all_ranks_that_share_a_gpu_are_named_and_the_headline_says_it(name: str) -> None:
    texts, blamed, begins = SHARED[name]
    ranks = [
        failed_in(n, "all_reduce", 1, message=texts[n], world=4) if n in texts else in_user(n, world=4)
        for n in range(4)
    ]
    (found,) = [one for one in judge(job(*ranks)).findings if one.severity is Severity.ERROR]
    said = texts[0].rpartition("\n")[2]
    assert (found.kind, found.ranks) == ("crash", blamed)
    assert found.summary.startswith(begins)
    assert found.summary.endswith(said)


# Which hangs are proven, so that a job is stopped without being asked to, and which may still resolve.


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


TIMED_OUT_STOPPING = "Timed out waiting 8000ms for recv operation to complete"


def gave_up(number, after_s=8.0, raised_s=9.0, limit_s=8.0):
    failed = call("all_reduce", 7, failed=True, open_=False, ended_ns=LONG_AGO + int(after_s * S))
    raised = error(
        "RuntimeError", TIMED_OUT_STOPPING, LONG_AGO + int(raised_s * S), (line(20), C10D), in_call="all_reduce"
    )
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
