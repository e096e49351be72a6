"""Jobs of several nodes: one that never came, one that was lost, and views of one node alone."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import HostSeen, Life, NodeSeen, NodesSeen, Presence, Rank
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.reaching import Connecting, Contact
from tests.rules.build import (
    C10D,
    LONG_AGO,
    NOW,
    TORCH,
    S,
    crashed,
    ended,
    error,
    failed_in,
    group,
    in_call,
    in_user,
    job,
    killed,
    line,
    moving,
    phase,
    rank,
    sample,
    stack,
)
from tests.rules.test_disagreement import Script

HERE, LEFT, SILENT, ABSENT = Presence.HERE, Presence.LEFT, Presence.SILENT, Presence.ABSENT


def node(number, presence=HERE, **more):
    fields = {"host": f"node{number}", "gathered": presence in (HERE, LEFT), "heard_ns": LONG_AGO}
    fields.update({"heard_ns": None} if presence is ABSENT else {}, **more)
    return NodeSeen(number=number, presence=presence, **fields)


def nodes_of(*nodes, own=0, **more):
    return NodesSeen(expected=len(nodes), own=own, nodes=nodes, **more)


def of_nodes(*ranks, nodes, world=4, own=0, alone=False, of_ranks=False, **more):
    """A job of two ranks a node, as the node ``own`` sees it."""
    fields = {
        "world_size": world, "nnodes": len(nodes), "local_ranks_expected": 1 if of_ranks else 2,
        "may_run_elsewhere": True, "host": f"node{own}", "node_rank": own,
        "members": nodes_of(*nodes, own=own, of_ranks=of_ranks, alone_since_ns=LONG_AGO if alone else None),
    }  # fmt: skip
    fields.update(more)
    return job(*ranks, **fields)


def tried(host, contact, error=""):
    return Connecting(host=host, address=None, port=29500, contact=contact, error=error)


def on(host, *ranks):
    return [replace(found, host=host) for found in ranks]


def waiting(*numbers, world=4, host="node0", **more):
    return on(host, *(in_call(n, world=world, **more) for n in numbers))


def errors(judgment):
    return [finding for finding in judgment.findings if finding.severity is Severity.ERROR]


def verdict(judgment):
    found = errors(judgment)
    assert found, [check.reason for check in judgment.checks]
    return found[0]


# A node that never came


@pytest.mark.parametrize("given", [0, None])
def test_a_node_that_never_came_is_missing_with_its_ranks(given):
    found = judge(of_nodes(nodes=(node(0), node(1, ABSENT, why="no answer")), node_rank=given))
    finding = verdict(found)
    assert (finding.code, finding.ranks, finding.hosts) == ("DD607", (2, 3), ("node1",))
    assert (finding.confidence, found.certain) == (Confidence.HIGH, True)
    assert "node 1 (node1) never joined" in finding.summary
    assert "1 of 2 nodes joined: node0" in finding.evidence
    assert "check-rendezvous" in finding.fix


def test_a_node_whose_name_nobody_said():
    finding = verdict(judge(of_nodes(nodes=(node(0), node(1, ABSENT, host="")))))
    assert (finding.hosts, finding.ranks) == ((), (2, 3))
    assert "node 1 never joined" in finding.summary


def test_two_of_four_nodes():
    nodes = (node(0), node(1, ABSENT), node(2), node(3, ABSENT))
    finding = verdict(judge(of_nodes(nodes=nodes, world=8)))
    assert (finding.hosts, finding.ranks) == (("node1", "node3"), (2, 3, 6, 7))


def test_nodes_may_still_come_before_the_hang_timeout():
    found = judge(of_nodes(nodes=(node(0), node(1, ABSENT)), launched_ns=NOW - 5 * S))
    assert (errors(found), found.certain) == ([], False)


def test_launchers_that_are_all_here_and_do_not_meet():
    seen = HostSeen(host="node1", reached=(tried("master", Contact.REFUSED, "Connection refused"),))
    found = judge(of_nodes(nodes=(node(0), node(1)), elsewhere=(seen,)))
    finding = verdict(found)
    assert (finding.kind, finding.ranks, finding.hosts) == ("missing", (), ())
    assert "all 2 nodes are up, but their launchers have not completed the rendezvous" in finding.summary
    assert any(sentence.startswith("on node1, connecting from here to master:29500") for sentence in finding.evidence)
    assert "--rdzv-id" in finding.fix
    assert found.certain


def test_a_name_that_does_not_resolve_here_is_this_hosts_fault():
    reached = (tried("master", Contact.UNRESOLVED, "Name or service not known"),)
    finding = verdict(judge(of_nodes(nodes=(node(0), node(1)), own=1, reached=reached)))
    assert finding.hosts == ("node1",)
    assert "node1 cannot reach master:29500 (the name does not resolve here)" in finding.summary
    assert "/etc/hosts" in finding.fix


@pytest.mark.parametrize(
    ("contact", "hosts", "fix"),
    [
        (Contact.NO_ANSWER, ("node0",), "allow node1 to reach node0:29500 and ports 32768-60999"),
        (Contact.REFUSED, ("node0",), "ss -ltnp 'sport = :29500'"),
        (Contact.NO_STORE, ("node0",), "another program uses node0:29500"),
        (Contact.UNRESOLVED, ("node1",), "run `getent hosts node0` on node1"),
    ],
)
def test_a_node_that_hears_nothing_of_the_first_says_what_it_sees_of_it(contact, hosts, fix):
    nodes = (node(0, ABSENT), node(1), node(2, ABSENT))
    found = judge(of_nodes(nodes=nodes, own=1, alone=True, world=6, reached=(tried("node0", contact),)))
    finding = verdict(found)
    assert (finding.kind, finding.ranks, finding.hosts) == ("missing", (0, 1), hosts)
    assert (finding.confidence, found.certain) == (Confidence.MEDIUM, True)
    assert finding.summary.startswith("node1 cannot reach node0:29500")
    assert fix in finding.fix


def test_a_task_that_never_came_is_a_missing_rank_on_its_host():
    inside = [rank(n, 3, initialized=False, open_calls=(phase("init_process_group"),)) for n in (0, 1)]
    found = judge(of_nodes(*inside, nodes=(node(0), node(1), node(2, ABSENT)), world=3, of_ranks=True))
    finding = verdict(found)
    assert (finding.code, finding.ranks, finding.hosts) == ("DD607", (2,), ("node2",))
    assert (finding.confidence, found.certain) == (Confidence.HIGH, True)


def test_nodes_that_a_launcher_has_brought_together_have_come_whatever_was_heard():
    """Its ranks run; only its ``wrap`` is not heard. A rank there may be held up on its way to init."""
    inside = [rank(n, 4, initialized=False, open_calls=(phase("init_process_group"),)) for n in (0, 1)]
    found = judge(of_nodes(*inside, nodes=(node(0), node(1, ABSENT)), alone=True))
    finding = verdict(found)
    assert (finding.kind, finding.hosts, finding.confidence) == ("missing", (), Confidence.LOW)
    assert not found.certain


# A node that was lost


def test_a_node_that_went_silent_while_others_wait_for_it_was_killed():
    found = judge(of_nodes(*waiting(0, 1), nodes=(node(0), node(1, SILENT, ranks=(2, 3), why="it does not answer"))))
    finding = verdict(found)
    assert (finding.code, finding.ranks, finding.hosts) == ("DD605", (2, 3), ("node1",))
    assert finding.summary == (
        "node 1 (node1) died or was cut off: no message from it for 60 s; "
        "ranks 0 and 1 are waiting for it in all_reduce"
    )
    assert "node 1 (node1): it does not answer" in finding.evidence
    assert (finding.confidence, found.certain, len(errors(found))) == (Confidence.HIGH, True, 1)


def test_what_was_seen_of_a_lost_node_before_is_out_of_date():
    before = waiting(2, 3, host="node1", seq=5)
    found = judge(of_nodes(*waiting(0, 1), *before, nodes=(node(0), node(1, SILENT, ranks=(2, 3)))))
    assert (verdict(found).kind, verdict(found).ranks) == ("killed", (2, 3))


def test_ranks_that_lost_their_connections_to_a_lost_node_did_not_crash():
    here = [failed_in(n, "backward", world=4) for n in (0, 1)]
    found = judge(of_nodes(*here, nodes=(node(0), node(1, SILENT)), ended=True, launcher_status=1))
    finding = verdict(found)
    assert (finding.kind, finding.ranks, finding.hosts) == ("killed", (2, 3), ("node1",))
    assert any("Connection closed by peer" in sentence for sentence in finding.evidence)


def test_a_rank_that_failed_by_itself_is_the_cause_whoever_is_silent_since():
    here = [killed(0, world=4), failed_in(1, "backward", world=4)]
    found = judge(of_nodes(*here, nodes=(node(0), node(1, SILENT)), ended=True, launcher_status=1))
    assert (verdict(found).ranks, verdict(found).hosts) == ((0,), ("node0",))


def test_a_rank_here_that_holds_the_others_up_is_the_cause():
    found = judge(of_nodes(*waiting(0), *on("node0", in_user(1, world=4)), nodes=(node(0), node(1, SILENT))))
    assert (verdict(found).kind, verdict(found).ranks) == ("stuck", (1,))


def test_a_silent_node_is_nothing_as_long_as_the_ranks_get_on():
    moved = [moving(found) for found in waiting(0, 1, started_ns=NOW - S)]
    found = judge(of_nodes(*moved, nodes=(node(0), node(1, SILENT, heard_ns=NOW - 12 * S))))
    assert (errors(found), found.certain) == ([], False)


def test_a_lost_node_is_why_a_launcher_began_anew_at_once():
    moved = [moving(found) for found in waiting(0, 1, started_ns=NOW - S)]
    finding = verdict(judge(of_nodes(*moved, nodes=(node(0), node(1, SILENT)), ended=True)))
    assert (finding.code, finding.hosts) == ("DD605", ("node1",))


def test_a_node_lost_before_this_attempt_has_no_part_in_it():
    here = [failed_in(n, "backward", world=2) for n in (0, 1)]
    gone = node(1, SILENT, heard_ns=LONG_AGO - 150 * S, ranks=(2, 3))
    found = judge(of_nodes(*here, nodes=(node(0), gone), world=2, ended=True, launcher_status=1))
    assert verdict(found).kind == "crash"


@pytest.mark.parametrize("ranks", [(2, 3), ()], ids=["its ranks are known", "its ranks are not known"])
def test_a_node_lost_before_this_attempt_is_why_its_ranks_are_missing(ranks):
    gone = node(1, SILENT, heard_ns=LONG_AGO - 150 * S, ranks=ranks)
    finding = verdict(judge(of_nodes(*waiting(0, 1), nodes=(node(0), gone))))
    assert (finding.code, finding.hosts) == ("DD605", ("node1",))


@pytest.mark.parametrize(("silent_s", "kinds"), [(9, ["killed"]), (2, [])])
def test_a_node_that_answers_nothing_and_starts_no_ranks_is_lost_before_it_is_given_up(silent_s, kinds):
    overdue = node(1, HERE, heard_ns=NOW - silent_s * S, gathered=False, ranks=(2, 3))
    found = errors(judge(of_nodes(*waiting(0, 1), nodes=(node(0), overdue))))
    assert [finding.kind for finding in found] == kinds


def test_a_silent_node_is_nothing_after_a_job_that_ended_well():
    done = [ended(n, world=4) for n in (0, 1)]
    assert errors(judge(of_nodes(*done, nodes=(node(0), node(1, SILENT)), ended=True, launcher_status=0))) == []


def test_a_node_lost_since_the_job_was_stopped_is_no_cause():
    stopped = NOW - 20 * S
    here = [replace(found, last_progress_ns=stopped - S) for found in waiting(0, 1, started_ns=stopped - S)]
    found = judge(
        of_nodes(
            *here, nodes=(node(0), node(1, SILENT, heard_ns=NOW - 15 * S)), ended=True, interrupted_by="SIGTERM",
            stopping_since_ns=stopped,
        )
    )  # fmt: skip
    assert errors(found) == []


def test_a_node_that_left_badly_and_reported_nothing():
    here = [failed_in(n, "backward", world=4) for n in (0, 1)]
    found = judge(of_nodes(*here, nodes=(node(0), node(1, LEFT, gathered=False, status=1)), ended=True))
    assert "node 1 (node1) exited with status 1" in verdict(found).summary
    assert verdict(found).hosts == ("node1",)


def test_a_host_that_answers_has_lost_its_job_only():
    reached = (tried("node1", Contact.REFUSED),)
    found = judge(of_nodes(*waiting(0, 1), nodes=(node(0), node(1, SILENT)), reached=reached))
    assert verdict(found).summary.startswith("the job on node 1 (node1) is gone, but the host responds")
    assert "SIGKILL" in verdict(found).fix


def test_of_two_nodes_either_may_be_the_one_that_is_cut_off():
    reached = (tried("node0", Contact.NO_ANSWER),)
    found = judge(
        of_nodes(*waiting(2, 3, host="node1"), nodes=(node(0, SILENT), node(1)), own=1, alone=True, reached=reached)
    )
    assert (verdict(found).kind, verdict(found).hosts) == ("killed", ("node0",))
    assert (verdict(found).confidence, found.certain) == (Confidence.MEDIUM, True)


THREE = (node(0, SILENT), node(1, SILENT), node(2))


def test_a_node_that_reaches_none_of_several_others_is_itself_cut_off():
    reached = (tried("node0", Contact.NO_ANSWER), tried("node1", Contact.NO_ANSWER))
    here = waiting(4, 5, host="node2", world=6)
    found = judge(of_nodes(*here, nodes=THREE, own=2, alone=True, world=6, reached=reached))
    assert (verdict(found).hosts, verdict(found).confidence) == (("node2",), Confidence.HIGH)
    assert "this node (node2) is cut off: node0 and node1 do not respond" in verdict(found).summary


def test_a_node_that_hears_nothing_since_the_first_died_blames_the_first():
    reached = (tried("node0", Contact.NO_ANSWER), tried("node1", Contact.REFUSED))
    here = waiting(4, 5, host="node2", world=6)
    found = judge(of_nodes(*here, nodes=THREE, own=2, alone=True, world=6, reached=reached))
    assert (verdict(found).hosts, verdict(found).ranks) == (("node0",), (0, 1))


def test_a_lost_task_is_a_rank_and_the_others_of_its_host_live():
    nodes = (node(0), node(1, host="node0"), node(2, SILENT, host="node1"), node(3, host="node1"))
    here = [*waiting(0, 1), *waiting(3, host="node1")]
    found = judge(of_nodes(*here, nodes=nodes, of_ranks=True))
    assert (verdict(found).ranks, verdict(found).hosts) == ((2,), ("node1",))
    assert verdict(found).summary.startswith("rank 2 on node1 died or was cut off")


# Facts of all nodes together


def test_a_stuck_rank_on_another_node_is_named_with_its_host():
    ranks = [*waiting(0, 1), *waiting(2, host="node1"), *on("node1", in_user(3, world=4))]
    found = judge(of_nodes(*ranks, nodes=(node(0), node(1))))
    finding = verdict(found)
    assert (finding.kind, finding.ranks, finding.hosts) == ("stuck", (3,), ("node1",))
    assert finding.summary.startswith("rank 3 on node1 is stuck")
    assert found.certain


def test_where_every_node_has_reported_a_collective_that_all_are_in_does_not_complete():
    ranks = [*waiting(0, 1), *waiting(2, 3, host="node1")]
    found = judge(of_nodes(*ranks, nodes=(node(0), node(1))))
    assert (verdict(found).kind, verdict(found).hosts) == ("transport", ("node0", "node1"))


def test_a_healthy_job_of_two_nodes():
    ranks = [moving(found) for found in (*waiting(0, 1, started_ns=NOW - S), *waiting(2, 3, host="node1"))]
    assert errors(judge(of_nodes(*ranks, nodes=(node(0), node(1))))) == []


def test_ranks_of_a_node_that_reported_nothing_are_not_held_for_missing():
    found = judge(of_nodes(*waiting(0, 1), nodes=(node(0), node(1, gathered=False))))
    assert (errors(found), found.certain) == ([], False)


def test_equal_process_numbers_on_two_hosts_are_two_processes():
    first, second = (rank(1, 3, initialized=False, open_calls=(phase("init_process_group"),)) for _ in range(2))
    both = [replace(first, host="node0"), replace(second, host="node1")]
    found = judge(of_nodes(*both, nodes=(node(0), node(1)), world=3, launcher_status=None))
    assert "2 processes use rank 1: 1001 on node0, 1001 on node1" in verdict(found).evidence


def test_a_rank_killed_on_another_node():
    ranks = [failed_in(0, "backward", world=2), *on("node1", killed(1, world=2, life=Life.SIGNALED))]
    found = judge(of_nodes(*ranks, nodes=(node(0), node(1)), world=2, local_ranks_expected=1, ended=True))
    assert (verdict(found).ranks, verdict(found).hosts) == ((1,), ("node1",))
    assert verdict(found).summary.startswith("rank 1 on node1 was killed by SIGKILL")


@pytest.mark.parametrize(("there", "advised"), [(LEFT, False), (SILENT, False), (ABSENT, True)])
def test_nobody_is_asked_to_start_wrap_where_it_was_heard_of(there, advised):
    ranks = (failed_in(0, "all_reduce", 5), failed_in(1, "all_reduce", 5))
    found = judge(of_nodes(*ranks, nodes=(node(0), node(1, there, gathered=False)), own=0))
    assert any("start `ddpdoctor wrap` there" in finding.summary for finding in found.findings) is advised


@pytest.mark.parametrize("other", [node(1, SILENT, ranks=(2, 3)), node(1, gathered=False)])
def test_nobody_is_asked_to_watch_a_node_that_was_heard_of(other):
    found = judge(of_nodes(*waiting(0, 1), nodes=(node(0), other)))
    assert [finding for finding in found.findings if finding.kind == "not-recorded"] == []


@pytest.mark.parametrize(("left_s", "is_stopped"), [(2, False), (60, True)])
def test_ranks_on_their_way_out_after_a_crash_elsewhere_are_no_hang(left_s, is_stopped):
    at = NOW - left_s * S
    leaving = {"life": Life.RUNNING, "exit_code": None, "at": at, "main_ended_ns": at}
    ranks = [crashed(0, world=2), *on("node1", failed_in(1, "backward", world=2, **leaving))]
    found = judge(of_nodes(*ranks, nodes=(node(0), node(1)), world=2, local_ranks_expected=1))
    assert (verdict(found).kind, found.certain) == ("crash", is_stopped)


# A call that one rank makes alone, after the others have passed it and left; and ranks that left too early.


DDP = line(1880, "forward", f"{TORCH}/nn/parallel/distributed.py")
DESTROYED = "destroy_process_group"


def trained(number: int, world: int) -> Script:
    """Return the records of a rank that has trained its twelve steps, at lines 13 and 14."""
    return Script(number, world).build().steps(12)


def left(script: Script, *, destroyed_at: int | None = 41, function: str = "main", **more: object) -> Rank:
    """Return a rank whose script has ended, with or without ``destroy_process_group`` at a line of a function."""
    calls = list(script.calls)
    if destroyed_at is not None:
        site = line(destroyed_at, function)
        calls.append(phase(DESTROYED, site, index=len(calls) + 1, open_=False, begun=script.begun))
    fields = {"recent_calls": tuple(calls), "groups": (group(script.begun, script.world),), "main_ended_ns": LONG_AGO}
    return ended(script.number, script.world, **{**fields, **more})


def thrown_out(script: Script, *frames: object) -> Rank:
    """Return a rank whose last call raised, because its peers had closed their connections."""
    last = script.calls[-1]
    raised = error("RuntimeError", "Connection closed by peer", LONG_AGO + S, frames, in_call=last.op)
    return ended(
        script.number, script.world, exit_code=1, raised=(raised,),
        recent_calls=(*script.calls[:-1], replace(last, failed=True)),
        groups=(group(script.begun, script.world),), ended_ns=LONG_AGO + 2 * S,
    )  # fmt: skip


def hooked(script: Script) -> Rank:
    """Return a rank that waits in a callback, called at line 40 of main."""
    frames = (line(40), line(80, "fit"), line(9, "on_train_end"), C10D)
    return script.collective(line(9, "on_train_end"), "all_gather").waits(samples=(sample(stack(*frames)),))


def forwarded(script: Script) -> Rank:
    """Return a rank thrown out of a forward of DDP without gradients, whose error names the forward alone."""
    failed = thrown_out(script.phase("ddp_forward_no_grad", 30, 1), line(30), DDP)
    return replace(failed, raised=(replace(failed.raised[0], in_call="ddp_forward"),))


ALONE = {
    "a barrier, and the others passed its line": (lambda s: s.collective(30, "barrier").waits(), 30, Confidence.HIGH),
    "thrown out of it, as the others closed their connections": (
        lambda s: thrown_out(s.collective(30), line(30), C10D),
        30,
        Confidence.HIGH,
    ),
    "in a hook, from a line that the others passed": (hooked, 9, Confidence.HIGH),
    "in a function of another file: they only destroyed the group": (
        lambda s: s.collective(line(7, "save", "/home/me/save.py"), "barrier").waits(),
        7,
        Confidence.MEDIUM,
    ),
    "a broadcast whose root does not wait, then a barrier": (
        lambda s: s.collective(30, "broadcast", peer=0).collective(31, "barrier").waits(),
        30,
        Confidence.HIGH,
    ),
    "an evaluation through DDP": (forwarded, 30, Confidence.HIGH),
    "a backward at a line of its own": (
        lambda s: s.phase("ddp_forward", 29, 0).phase("backward", 30, 1).waits(),
        30,
        Confidence.HIGH,
    ),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ALONE)
def test_the_rank_that_calls_alone_is_blamed(name: str, world: int) -> None:
    make, where, confidence = ALONE[name]
    others = [left(trained(n, world)) for n in range(1, world)]
    found = errors_lone_calls(make(trained(0, world)), *others)
    assert [(f.kind, f.ranks, [p.line for p in f.where], f.confidence) for f in found] == [
        ("mismatch", (0,), [where], confidence)
    ]
    assert f"but {'rank 1' if world == 2 else 'ranks 1 and 2'} did not call it" in found[0].summary
    assert "is_global_zero" in found[0].fix


def next_step(script: Script) -> Rank:
    return script.step().waits()


LEFT_EARLY = {
    "in the middle of a pattern that the other goes on with": (next_step, {}),
    "before a call that the other had not made yet, group and all left as they were": (
        lambda s: s.collective(30, "barrier").waits(),
        {"destroyed_at": None},
    ),
    "by sys.exit above the call": (
        lambda s: s.collective(30, "barrier").waits(),
        {"destroyed_at": None, "exit_call": line(28)},
    ),
}


@pytest.mark.parametrize("name", LEFT_EARLY)
def test_a_rank_that_left_early_is_an_early_exit(name: str) -> None:
    make, how = LEFT_EARLY[name]
    found = errors_lone_calls(make(trained(0, 2)), left(trained(1, 2), **how))
    assert [(f.kind, f.ranks) for f in found] == [("early-exit", (1,))]


def test_where_most_ranks_make_the_call_the_one_that_left_is_to_blame() -> None:
    callers = [trained(n, 3).collective(30, "barrier").waits() for n in (0, 1)]
    assert [(f.kind, f.ranks) for f in errors_lone_calls(*callers, left(trained(2, 3)))] == [("early-exit", (2,))]


def test_a_call_that_the_other_made_at_the_same_line_is_none_of_one_rank_alone() -> None:
    caller = trained(0, 2).collective(30).collective(30).waits()
    assert [(f.kind, f.ranks) for f in errors_lone_calls(caller, left(trained(1, 2).collective(30)))] == [
        ("early-exit", (1,))
    ]


def errors_lone_calls(*ranks: Rank):
    return [f for f in judge(job(*ranks)).findings if f.severity is Severity.ERROR]


# Ranks that run where nobody sees them: said plainly, and never taken for a hang of those that are seen.


def of_kind(judgment, kind):
    return [finding for finding in judgment.findings if finding.kind == kind]


def in_init(number, world):
    return rank(number, world, initialized=False, open_calls=(phase("init_process_group"),))


def test_ranks_of_a_world_that_is_larger_than_what_is_seen_are_named():
    found = judge(job(in_call(0, world=8), in_call(1, world=8), world_size=None, may_run_elsewhere=True))
    (finding,) = found.findings
    assert (finding.code, finding.ranks, finding.hosts) == ("DD901", (2, 3, 4, 5, 6, 7), ())
    assert "ranks 2-7 of 8 run on another host or in another container" in finding.summary
    assert not found.certain


def test_whoever_waits_in_init_for_unseen_ranks_is_not_stopped():
    found = judge(job(in_init(0, 3), in_init(1, 3), world_size=None, may_run_elsewhere=True))
    (missing,) = of_kind(found, "missing")
    assert (missing.ranks, missing.confidence) == ((2,), Confidence.LOW)
    assert "not seen here" in of_kind(found, "not-recorded")[0].summary
    assert not found.certain


def test_where_the_launcher_says_that_all_are_here_they_are_missing():
    found = judge(job(in_init(0, 3), in_init(1, 3), world_size=None))
    assert of_kind(found, "missing")[0].confidence is Confidence.HIGH
    assert of_kind(found, "not-recorded") == []
    assert found.certain


def test_a_silent_rank_may_wait_for_one_that_nobody_sees():
    seen, whole = (judge(job(in_user(0, world=2), world_size=None, may_run_elsewhere=more)) for more in (True, False))
    assert (of_kind(seen, "stuck")[0].confidence, seen.certain) == (Confidence.LOW, False)
    assert of_kind(whole, "not-recorded") == []


def test_a_rank_that_others_here_wait_for_is_stuck_whoever_is_elsewhere():
    found = judge(job(in_call(0, world=3), in_user(1, world=3), world_size=None, may_run_elsewhere=True))
    assert (of_kind(found, "stuck")[0].ranks, found.certain) == ((1,), True)


@pytest.mark.parametrize("waiting", [True, False])
def test_nodes_that_the_user_named_are_named_only_where_something_is_wrong(waiting):
    here = [in_call(n, world=4) if waiting else rank(n, 4, life=Life.EXITED, exit_code=0) for n in (0, 1)]
    found = judge(job(*here, world_size=4, nnodes=2, may_run_elsewhere=True))
    assert bool(of_kind(found, "not-recorded")) is waiting


def test_a_rank_that_keeps_the_recorder_out_says_why():
    kept_out = replace(rank(1, 2), recorded=False, lost="Python was started with -I, which turns off start-up hooks")
    found = judge(job(in_call(0, world=2), kept_out))
    (finding,) = of_kind(found, "not-recorded")
    assert finding.ranks == (1,)
    assert "-I" in finding.summary
    assert not found.certain


def test_what_a_torch_lacks_is_said_once_with_what_is_lost():
    ranks = [replace(in_call(n), lacks=("Work.wait",)) for n in range(3)]
    (finding,) = of_kind(judge(job(*ranks)), "not-recorded")
    assert finding.ranks == (0, 1, 2)
    assert finding.summary == (
        "ranks 0-2 could not be recorded completely: "
        "this torch has no Work.wait, so waits for asynchronous collectives are not recorded"
    )


def test_several_missing_hooks_are_one_finding_with_a_line_each():
    ranks = [replace(in_call(n), lacks=("Work.wait", "a hook of later") if n else ()) for n in range(3)]
    (finding,) = of_kind(judge(job(*ranks)), "not-recorded")
    assert finding.ranks == (1, 2)
    assert finding.evidence == (
        "Work.wait: waits for asynchronous collectives are not recorded",
        "a hook of later: its purpose is unknown",
    )


def test_a_torch_that_has_every_hook_is_not_spoken_of():
    assert of_kind(judge(job(*(in_call(n) for n in range(3)))), "not-recorded") == []


@pytest.mark.parametrize(
    ("lost", "evidence"),
    [
        ("gradients: KeyError: x", ("gradients failed, so NaN and inf in gradients are not detected",)),
        (
            "mesh step ends: KeyError: x; mesh step ends: y",
            ("mesh step ends failed, so ranks of a device mesh are not compared",),
        ),
        ("no ring could be made: No space left on device", ()),
    ],
)  # fmt: skip
def test_what_a_failing_part_costs_is_said(lost, evidence):
    (finding,) = of_kind(judge(job(in_call(0), replace(in_call(1), lost=lost), in_call(2))), "not-recorded")
    assert (finding.ranks, finding.evidence) == ((1,), evidence)
    assert ("update ddpdoctor" if evidence else "free disk space") in finding.fix
