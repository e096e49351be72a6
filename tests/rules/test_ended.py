"""Jobs in which a rank has ended: which end is the cause, and which follow from it?"""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import BeforeCall, EndedByThread, GroupState, Helper, HelperError, Life, MeetingFile
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.stacks import Frame
from ddpdoctor.rules.progress.states import MAX_TEXT
from tests.rules.build import (
    AUTOGRAD,
    C10D,
    LONG_AGO,
    NOW,
    TIMEOUT_S,
    TORCH,
    S,
    at_end,
    backwards,
    before_init,
    call,
    crashed,
    ended,
    error,
    failed_in,
    group,
    in_backward,
    in_call,
    in_init,
    in_user,
    job,
    killed,
    line,
    phase,
    rank,
    stack,
)

FINGERPRINT = "Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint"
TIMED_OUT = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"
WORKER_ERROR = error(
    "KeyError", "Caught KeyError in DataLoader worker process 0.", frames=(line(88, "get"),), from_child=True
)
SIGCHLD = Frame(file=f"{TORCH}/utils/data/_utils/signal_handling.py", line=72, function="handler", user=False)
LAYER_ERROR = error(
    "RuntimeError", "mat1 and mat2 shapes cannot be multiplied", in_call="ddp_forward",
    frames=(line(30), line(12, "step")),
)  # fmt: skip
ABORT = {"signal": "SIGABRT", "last_place": line(20)}


def aborted_in_call(number, **more):
    return killed(number, open_calls=(call(seq=7, **more),), recent_calls=backwards(3), **ABORT)


REFUSED = "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused"
LEFT = MeetingFile(path="/tmp/meet", size_bytes=80)
CHILD_FAILED = error("CalledProcessError", "returned non-zero exit status 1", LONG_AGO + 2 * S, frames=(line(50),))
OF_CHILD = HelperError(who=Helper.CHILD, name="77", error=error("KeyError", at=LONG_AGO, frames=(line(61),)))
OF_CHILD_BEFORE = replace(OF_CHILD, error=error(at=LONG_AGO - 30 * S))
OF_VICTIM = replace(OF_CHILD, error=error("RuntimeError", at=LONG_AGO - S, frames=(line(62),), in_call="all_reduce"))


def own_error_then(number, op, message="Connection closed by peer"):
    """A rank that handled an error of its own, and whose call meanwhile failed."""
    data = {"shape": None, "dtype": None} if op == "barrier" else {}
    failed = call(op, 7, 14, failed=True, open_=False, **data)
    raised = error("RuntimeError", message, LONG_AGO + S, (line(14), C10D), in_call=op, first=error())
    return crashed(number, raised, recent_calls=(*backwards(3), failed), ended_ns=LONG_AGO + 2 * S)


def lost_in_step(number):
    """A rank whose backward failed, and then the barrier of its ``finally``."""
    then = own_error_then(number, "barrier")
    in_step = error(
        "RuntimeError", "Detected mismatch", frames=(line(30), AUTOGRAD), in_call="backward", uncaught=False
    )
    return replace(then, raised=(in_step, *(replace(one, first=None) for one in then.raised)))


def own_limit(number, **more):
    """A rank that another thread of its own ended."""
    return ended(number, exit_code=17, ended_by_thread=EndedByThread(place=line(80, "watch")), **more)


def thrown_out(number, at):
    """A rank whose backward raised after the stop of the job had begun, and which SIGTERM then ended on its way out."""
    gone = {"life": Life.SIGNALED, "exit_code": None, "signal": "SIGTERM", "after_stop": True, "main_ended_ns": at + S}
    return failed_in(number, "backward", at=at, **gone)


FAILED = {
    "crash: in its own code, the others follow": (
        (crashed(0), failed_in(1, "backward"), failed_in(2, "backward")),
        ("crash", [0], [7]),
    ),
    "crash: victims were seen to fail first": (
        (crashed(0, error(at=LONG_AGO + S)), failed_in(1, "backward", at=LONG_AGO), in_backward(2)),
        ("crash", [0], [7]),
    ),
    "crash: the others are still alive": ((crashed(0), in_backward(1), in_backward(2)), ("crash", [0], [7])),
    "crash: the process has not ended yet": (
        (rank(0, raised=(error(),), main_ended_ns=LONG_AGO), in_backward(1), in_backward(2)),
        ("crash", [0], [7]),
    ),
    "crash: the same on all ranks": (
        tuple(crashed(n, error(at=LONG_AGO + n * S // 5)) for n in range(3)),
        ("crash", [0, 1, 2], [7, 7, 7]),
    ),
    "crash: two different errors, the earlier one": (
        (crashed(0, error(at=LONG_AGO + S)), crashed(1, error("KeyError", frames=(line(50),))), in_backward(2)),
        ("crash", [1], [50]),
    ),
    "crash: a loader worker's error is the worker's line": (
        (crashed(0, WORKER_ERROR), failed_in(1, "backward"), in_backward(2)),
        ("crash", [0], [88]),
    ),
    "crash: a layer inside DDP's forward": (
        (crashed(0, LAYER_ERROR), in_backward(1), in_backward(2)),
        ("crash", [0], [12]),
    ),
    "crash: an exit status without an exception": (
        (ended(0, exit_code=3, exit_call=line(33)), failed_in(1, "backward"), in_backward(2)),
        ("crash", [0], [33]),
    ),
    "crash: backward itself fails on one rank": (
        (failed_in(0, "backward", message="CUDA out of memory", at=LONG_AGO), failed_in(1, "backward"), in_backward(2)),
        ("crash", [0], [20]),
    ),
    "crash: a wrong argument of a collective is the rank's own": (
        (
            crashed(
                0,
                error("TypeError", "Invalid function argument", in_call="all_reduce", frames=(line(20),)),
                recent_calls=(call(seq=7, shape=None, dtype=None, failed=True, open_=False),),
            ),
            in_call(1),
            in_call(2),
        ),
        ("crash", [0], [20]),
    ),
    "crash: the script logs its error, and leaves with a status": (
        (crashed(0, exit_call=line(99)), failed_in(1, "backward", exit_call=line(99)), in_backward(2)),
        ("crash", [0], [7, 99]),
    ),
    "crash: a loader worker's end is reported in the middle of a collective": (
        (
            crashed(
                0,
                error("RuntimeError", "DataLoader worker is killed", in_call="all_reduce", frames=(line(20), SIGCHLD)),
                recent_calls=(call(seq=7, failed=True, open_=False),),
            ),
            failed_in(1, "all_reduce", 7),
            in_call(2),
        ),
        ("crash", [0], [20]),
    ),
    "crash: a loader worker died, and the loop over its loader is known": (
        (
            crashed(
                0,
                error("RuntimeError", "DataLoader worker is killed", in_call="all_reduce", frames=(line(20), SIGCHLD)),
                recent_calls=(phase("next_batch", site=15, open_=False), call(seq=7, failed=True, open_=False)),
            ),
            failed_in(1, "all_reduce", 7),
            in_call(2),
        ),
        ("crash", [0], [15]),
    ),
    "killed: from outside": (
        (failed_in(0, "all_reduce", 7), in_call(1), killed(2)),
        ("killed", [2], [9]),
    ),
    "killed: inside a collective, which no peer can do": (
        (in_call(0), killed(1, open_calls=(call(seq=7),)), in_call(2)),
        ("killed", [1], [9]),
    ),
    "killed: a fatal signal has its own line": (
        (in_call(0), killed(1, "SIGSEGV", fatal_place=line(44)), in_call(2)),
        ("killed", [1], [44]),
    ),
    "crash: left with a status, and its peers were gone before its process was": (
        (
            failed_in(0, "backward", after_stop=False),
            ended(
                1, exit_code=3, exit_call=line(14), main_ended_ns=LONG_AGO, ended_ns=LONG_AGO + 9 * S, after_stop=True
            ),
            failed_in(2, "backward"),
        ),
        ("crash", [1], [14]),
    ),
    "killed: nobody saw how": (
        (in_call(0), ended(1, life=Life.GONE, exit_code=None, last_place=line(8)), in_call(2)),
        ("killed", [1], [8]),
    ),
    "early-exit: the others lost their connection": (
        (failed_in(0, "backward"), ended(1, recent_calls=backwards(3), exit_call=line(12)), failed_in(2, "backward")),
        ("early-exit", [1], [12]),
    ),
    "early-exit: another lost its connection in the wait of an asynchronous receive": (
        (
            crashed(
                0,
                error("RuntimeError", "Connection closed by peer", LONG_AGO + S, (line(22), C10D), in_call="work_wait"),
                recent_calls=(
                    call("irecv", None, 20, index=98, peer=1, is_async=True, open_=False),
                    phase("work_wait", 22, index=99, awaits=98, failed=True, open_=False),
                ),
                ended_ns=LONG_AGO + 2 * S,
            ),
            ended(1, exit_call=line(12)),
            ended(2),
        ),
        ("early-exit", [1], [12]),
    ),
    "early-exit: a peer was thrown out while the launcher was about to stop it": (
        (
            failed_in(0, "backward"),
            ended(1, recent_calls=backwards(3), exit_call=line(12)),
            thrown_out(2, at=LONG_AGO + 2 * S),
        ),
        ("early-exit", [1], [12]),
    ),
    "early-exit: no exit call, so its last call": (
        (failed_in(0, "barrier", 7), ended(1, recent_calls=backwards(3)), failed_in(2, "barrier", 7)),
        ("early-exit", [1], [30]),
    ),
    "early-exit: not of a rank that gave up after another's crash": (
        (crashed(0), ended(1, ended_ns=LONG_AGO + 2 * S), failed_in(2, "backward")),
        ("crash", [0], [7]),
    ),
    "mismatch: fingerprints differ, and all raise": (
        (
            failed_in(0, "reduce", 7, 6, FINGERPRINT, LONG_AGO + 2 * S),
            failed_in(1, "backward", None, 30, FINGERPRINT, LONG_AGO),
            failed_in(2, "backward", None, 30, FINGERPRINT, LONG_AGO + S),
        ),
        ("mismatch", [0], [6]),
    ),
    "mismatch: one has raised, the others are inside": (
        (in_call(0, "reduce", 7, 6), failed_in(1, "backward", None, 30, FINGERPRINT), in_backward(2)),
        ("mismatch", [0], [6]),
    ),
    "mismatch: the receiver was aborted": (
        (aborted_in_call(0), in_call(1, shape=(32,)), in_call(2)),
        ("mismatch", [1], [20]),
    ),
    "mismatch: an abort shows what a list had in it": (
        (aborted_in_call(0, op="all_gather"), in_call(1, "all_gather", shape=(32,)), in_call(2, "all_gather")),
        ("mismatch", [1], [20]),
    ),
    "crash: an error of its own, and a call in its finally, which failed": (
        (own_error_then(0, "barrier"), failed_in(1, "backward"), failed_in(2, "backward")),
        ("crash", [0], [7, 14]),
    ),
    "mismatch: it handled an error when a call failed that another rank alone makes": (
        (
            failed_in(0, "reduce", 7, 6, FINGERPRINT),
            own_error_then(1, "all_reduce", FINGERPRINT),
            failed_in(2, "all_reduce", 7, 20, FINGERPRINT),
        ),
        ("mismatch", [0], [6]),
    ),
    "crash: all call the barrier of their finally, the others since the call of their step failed": (
        (lost_in_step(0), own_error_then(1, "barrier"), lost_in_step(2)),
        ("crash", [1], [7, 14]),
    ),
    "crash: it handled an error in a call when another rank failed": (
        (crashed(2), own_error_then(1, "all_reduce"), failed_in(0, "all_reduce", 7)),
        ("crash", [2], [7]),
    ),
    "crash: an error that the script raised from another one": (
        (crashed(0, error("RuntimeError", frames=(line(50),), first=error())), in_backward(1), in_backward(2)),
        ("crash", [0], [7, 50]),
    ),
    "crash: a child's error, which its parent reports": (
        (crashed(0, CHILD_FAILED, helper_errors=(OF_CHILD, OF_VICTIM)), in_backward(1), in_backward(2)),
        ("crash", [0], [61, 50]),
    ),
    "crash: a wrapper exits with the status of its child": (
        (ended(0, exit_code=1, exit_call=line(99), helper_errors=(OF_CHILD,)), in_backward(1), in_backward(2)),
        ("crash", [0], [61, 99]),
    ),
    "crash: it exits with a status, and a child had failed half a minute before": (
        (
            ended(0, exit_code=1, exit_call=line(99), helper_errors=(OF_CHILD_BEFORE,)),
            in_backward(1),
            in_backward(2),
        ),
        ("crash", [0], [99]),
    ),
    "crash: a thread failed, and its hook for errors ended the rank": (
        (
            ended(0, exit_code=1, exit_call=line(99), helper_errors=(replace(OF_CHILD, who=Helper.THREAD),)),
            in_backward(1),
            in_backward(2),
        ),
        ("crash", [0], [61, 99]),
    ),
    "crash: its own error, and a child had failed long before": (
        (
            crashed(0, helper_errors=(OF_CHILD, replace(OF_CHILD, error=error(at=LONG_AGO - 500 * S)))),
            in_backward(1),
            in_backward(2),
        ),
        ("crash", [0], [7]),
    ),
    "stuck: NCCL's watchdog had given up the call before, and the next one raised": (
        (failed_in(0, "all_reduce", 7, message="NCCL communicator was aborted on rank 0."), in_user(1), in_call(2)),
        ("stuck", [1], [12]),
    ),
    "crash: NCCL's watchdog gave up the call because a rank had failed": (
        (failed_in(0, "all_reduce", 7, message="NCCL communicator was aborted on rank 0."), crashed(1), in_call(2)),
        ("crash", [1], [7]),
    ),
    "stuck: a watchdog of the script ended who waited": (
        (own_limit(0, open_calls=(call(seq=7),)), in_user(1), in_call(2)),
        ("stuck", [1], [12]),
    ),
    "stuck: a watchdog ended first who waited and then who was stuck": (
        (own_limit(0, open_calls=(call(seq=7),)), own_limit(1, samples=in_user(1).samples), in_call(2)),
        ("stuck", [1], [12]),
    ),
    "stuck: a watchdog ended who waited, which another rank was the first to see": (
        (own_limit(0, open_calls=(call(seq=7),)), in_user(1), failed_in(2, "all_reduce", 7, at=LONG_AGO - S)),
        ("stuck", [1], [12]),
    ),
    "mismatch: a watchdog ended who waited": (
        (own_limit(0, open_calls=(call(seq=7),)), in_call(1, "reduce", 7, 6), in_call(2)),
        ("mismatch", [1], [6]),
    ),
    "crash: a watchdog ended who waited for a rank that failed": (
        (own_limit(0, open_calls=(call(seq=7),)), crashed(1, error(at=LONG_AGO + S)), in_call(2)),
        ("crash", [1], [7]),
    ),
    "crash: the file in which ranks meet was left by an earlier job": (
        (
            failed_in(0, "init_process_group", site=5, message=REFUSED, meeting=LEFT, init_ns=1, initialized=False),
            in_init(1, meeting=LEFT, init_ns=2),
            in_init(2, meeting=LEFT, init_ns=3),
        ),
        ("crash", [0, 1, 2], [5] * 3),
    ),
    "crash: such a file, and a rank has not come yet": (
        (
            failed_in(0, "init_process_group", site=5, message=REFUSED, meeting=LEFT, init_ns=1, initialized=False),
            before_init(1),
            in_init(2, meeting=LEFT, init_ns=3),
        ),
        ("crash", [0, 2], [5] * 2),
    ),
    "killed: by addresses from a file that an earlier job has left": (
        (
            killed(0, "SIGSEGV", meeting=LEFT, init_ns=1, initialized=False),
            in_init(1, meeting=LEFT, init_ns=2),
            in_init(2, meeting=LEFT, init_ns=3),
        ),
        ("killed", [0, 1, 2], [9, 5, 5]),
    ),
    "stuck: a time limit has run out": (
        (failed_in(0, "all_reduce", 7, message=TIMED_OUT), in_user(1), in_call(2)),
        ("stuck", [1], [12]),
    ),
    "stuck: a time limit has run out, and the launcher has stopped the rank": (
        (
            failed_in(0, "all_reduce", 7, message=TIMED_OUT),
            in_user(1, life=Life.SIGNALED, signal="SIGTERM", after_stop=True),
            in_call(2),
        ),
        ("stuck", [1], [12]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("detail", ["OFF", "DETAIL"])
@pytest.mark.parametrize("name", FAILED)
def test_failure(name, detail):
    ranks, (kind, blamed, lines) = FAILED[name]
    since = LONG_AGO + (S if "about to stop" in name else 5 * S)
    stopped = {"stopping_since_ns": since} if any(r.after_stop for r in ranks) else {}
    found = judge(job(*ranks, debug_level=detail, ended=True, **stopped))
    assert [c for c in found.checks if c.outcome == "crashed"] == []
    errors = [f for f in found.findings if f.severity is Severity.ERROR]
    assert [(f.kind, list(f.ranks), [p.line for p in f.where]) for f in errors] == [(kind, blamed, lines)]
    assert errors[0].summary
    assert errors[0].fix


GOOD_ENDS = {
    "all with status 0": [ended(n, main_ended_ns=LONG_AGO) for n in range(3)],
    "sys.exit(0) was raised": [crashed(0, error("SystemExit", "0"), exit_code=0, world=1)],
    "the user pressed Ctrl-C": [
        killed(n, "SIGINT", after_stop=True, raised=(error("KeyboardInterrupt", "", LONG_AGO + 9 * S),))
        for n in range(2)
    ],
}


@pytest.mark.parametrize("name", GOOD_ENDS)
def test_good_end(name):
    stop = {"interrupted_by": "SIGINT", "stopping_since_ns": LONG_AGO + 8 * S} if "Ctrl-C" in name else {}
    found = judge(job(*GOOD_ENDS[name], ended=True, **stop))
    assert [(f.kind, f.ranks) for f in found.findings] == []


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
