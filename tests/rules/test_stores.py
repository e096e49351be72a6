"""Ranks that connect to a store which nobody serves are to blame, at the line that gave its address."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.progress import judge_job as judge
from ddpdoctor.model.causes import Blocked, Connections, Owner, ProcessCauses, StoreSought
from ddpdoctor.model.findings import Confidence
from tests.rules.build import C10D, LONG_AGO, NOW, S, in_user, job, line, moving, phase, rank, sample, stack

ELSEWHERE = Connections(listening=("[::]:29500", "0.0.0.0:22"))
SLEEPS = Blocked(call="clock_nanosleep")
MOVED = StoreSought(
    host="localhost", port=29999, rank=0, method="env://", of_agent=True, given="127.0.0.1:29500",
    set_at=line(5, "setup"),
)  # fmt: skip
BY_URL = replace(MOVED, method="tcp://", set_at=None)
OWN = replace(MOVED, of_agent=False, given=None, set_at=None, port=29500)
REMOTE = replace(BY_URL, host="10.0.0.9")
AS_GIVEN = replace(MOVED, port=29500, set_at=None)


def connecting(number, store, connections=ELSEWHERE, blocked=SLEEPS, world=2, **more):
    causes = ProcessCauses(store=replace(store, rank=number), connections=connections, blocked=blocked, **more)
    return rank(
        number, world, initialized=False, open_calls=(phase("init_process_group", 6),), causes=causes,
        samples=(sample(stack(line(6), C10D)),),
    )  # fmt: skip


def in_init(number, world=2):
    return rank(number, world, initialized=False, open_calls=(phase("init_process_group", 6),))


FOUND = {
    "a script sets MASTER_PORT": (
        (connecting(0, MOVED), connecting(1, MOVED)), (0, 1), Confidence.HIGH, True,
        "the launcher set the store address to 127.0.0.1:29500, but train.py:5 sets localhost:29999 (env://)",
        "keep the MASTER_ADDR and MASTER_PORT that torchrun sets (remove train.py:5)",
    ),
    "a script names an address of its own": (
        (connecting(0, BY_URL), connecting(1, BY_URL)), (0, 1), Confidence.HIGH, True,
        "no process listens on port 29999 of node0", "without init_method",
    ),
    "one rank alone": (
        (in_init(0), connecting(1, MOVED)), (1,), Confidence.HIGH, True,
        "rank 0 is a client too", "(remove train.py:5)",
    ),
    "another host, which does not answer": (
        (connecting(0, REMOTE, Connections(unanswered=("10.0.0.9:29999",))), connecting(1, REMOTE)), (0, 1),
        Confidence.MEDIUM, False, "10.0.0.9:29999 does not respond", "without init_method",
    ),
    "somebody else serves that port": (
        tuple(
            connecting(
                n, MOVED, Connections(listening=("0.0.0.0:29999",)), Blocked(call="poll", remote="127.0.0.1:29999"),
                listener=Owner(pid=77, command="nc -l 29999"),
            )
            for n in (0, 1)
        ),
        (0, 1), Confidence.MEDIUM, False, "process 77 (nc -l 29999) accepted the connection on port 29999",
        "remove train.py:5",
    ),
    "the agent's store cannot be reached": (
        (connecting(0, AS_GIVEN, Connections()), connecting(1, AS_GIVEN, Connections())), (0, 1), Confidence.MEDIUM,
        False, "torchrun's agent serves the store", "ddpdoctor check-rendezvous",
    ),
    "rank 0 has its store at another port": (
        (connecting(0, OWN), connecting(1, replace(OWN, port=29501))), (1,), Confidence.MEDIUM, False,
        "rank 0 should serve the store, but it serves one at localhost:29500", "the address of rank 0's host",
    ),
    "each host looks for the store on itself": (
        (connecting(0, OWN), replace(connecting(1, OWN, Connections(listening=("0.0.0.0:22",))), host="node1")),
        (1,), Confidence.HIGH, True, "serves one at localhost:29500 on node0", "the address of rank 0's host",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_who_waits_for_a_store_that_nobody_serves_is_named(name):
    ranks, blamed, confidence, certain, said, fix = FOUND[name]
    judged = judge(job(*ranks))
    (finding,) = judged.findings
    assert (finding.code, finding.ranks, finding.confidence) == ("DD601", blamed, confidence), finding
    assert judged.certain is certain
    assert any(said in text for text in finding.evidence), finding.evidence
    assert fix in finding.fix
    store = ranks[blamed[0]].causes.store
    assert [place.line for place in finding.where if place.rank == blamed[0]] == ([5, 6] if store.set_at else [6])


SILENT = {
    "rank 0 serves, and the others are on their way": (connecting(0, OWN), connecting(1, OWN)),
    "they have only begun": tuple(
        replace(one, open_calls=(phase("init_process_group", 6, started_ns=NOW - S),))
        for one in (connecting(0, MOVED), connecting(1, MOVED))
    ),
    "they make progress": (moving(connecting(0, MOVED)), moving(connecting(1, MOVED))),
    "where they connect to is not known": (in_init(0), in_init(1)),
}


@pytest.mark.parametrize("name", SILENT)
def test_nobody_is_named_where_the_store_may_come(name):
    assert not [finding for finding in judge(job(*SILENT[name])).findings if finding.code == "DD601"]


def test_the_rank_that_is_to_serve_and_does_not_come_is_stuck():
    held = in_user(0, world=2, initialized=False, groups=(), last_progress_ns=LONG_AGO)
    (finding,) = judge(job(held, connecting(1, OWN))).findings
    assert (finding.code, finding.ranks) == ("DD601", (0,))
