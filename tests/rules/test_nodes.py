"""Jobs of several nodes: one that never came, one that was lost, and views of one node alone."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import HostSeen, Life, NodeSeen, NodesSeen, Presence
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.reaching import Connecting, Contact
from tests.rules.build import (
    LONG_AGO,
    NOW,
    S,
    crashed,
    ended,
    failed_in,
    in_call,
    in_user,
    job,
    killed,
    moving,
    phase,
    rank,
)

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
