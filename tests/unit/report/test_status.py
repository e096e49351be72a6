"""What a job does, as text: ranks that do the same are one row, whatever is collected is escaped."""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Place
from ddpdoctor.model.nodes import NodeSeen, Presence
from ddpdoctor.model.status import JobNow, Liveness, RankNow, ReplicasNow, WaitNow
from ddpdoctor.report.verbs.live import fold, render_status
from tests.doc_pages import DOCS


def rank(number, **changes):
    one = RankNow(
        rank=number, host="n0", pid=100 + number, lives=True, trains=True, state="trains", since_s=None, where=None,
        step=1040, step_ms=41.2, waits_share=0.03, epoch=2, batch=88, memory_bytes=2**30,
    )  # fmt: skip
    return replace(one, **changes)


def still(number, state, line, **changes):
    place = Place(rank=number, file="/w/train.py", line=line, function="main")
    return rank(number, trains=False, state=state, since_s=12.0, where=place, **changes)


def status(*ranks, **changes):
    one = JobNow(
        run="run", state=Liveness.RUNNING, host="n0", started_at=None, running_s=723.0, exit_status=None, attempt=0,
        world_size=len(ranks) or None, ranks=ranks, waits=(), waited_for=(), replicas=None, unseen=(), reported="",
    )  # fmt: skip
    return replace(one, **changes)


def draw(one, width=80):
    return render_status(one, width=width, color=False)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"step": 1042, "step_ms": 43.0, "waits_share": 0.1, "batch": 90, "memory_bytes": 2**31}, 1),
        ({"step": 1043}, 2),
        ({"step_ms": 60.0}, 2),
        ({"waits_share": 0.4}, 2),
        ({"lives": False, "trains": False, "state": "exit status 1"}, 2),
    ],
)
def test_ranks_that_train_alike_are_one_row(changes, rows):
    assert len(fold([rank(0), rank(1, **changes)])) == rows


def test_ranks_that_stand_still_are_one_row_at_the_same_line_and_step_only():
    ranks = [still(0, "in all_reduce", 7), still(1, "in all_reduce", 7), still(2, "in all_reduce", 8)]
    assert [[one.rank for one in those] for those in fold([*ranks, still(3, "in all_reduce", 7, step=1)])] == [
        [0, 1], [2], [3],
    ]  # fmt: skip


def test_a_job_that_trains():
    shown = draw(status(*map(rank, range(8)), replicas=ReplicasNow(equal_up_to=1000, at="optimizer step", compared=12)))
    assert shown == (
        "ddpdoctor: the job runs for 12 min, 8 ranks; run folder run\n"
        "  ranks  step  step time  waits  epoch  batch   memory  does\n"
        "                      ms\n"
        "  0-7    1040       41.2     3%      2     88  1.0 GiB  trains\n"
        "\n"
        "replicas equal up to optimizer step 1000, in 12 checks\n"
    )


def test_who_waits_for_whom():
    waits = (WaitNow(ranks=(0, 2, 3), call="all_reduce of float32[1]", since_s=12.0),)
    ranks = (
        still(0, "in all_reduce", 7),
        still(1, "in the script", 9),
        *(still(n, "in all_reduce", 7) for n in (2, 3)),
    )
    shown = draw(status(*ranks, waits=waits, waited_for=(1,), reported="DD601 stuck, rank 1: rank 1 stands still"))
    assert "ranks 0, 2, 3 have waited for rank 1 for 12 s, in all_reduce of float32[1]\n" in shown
    assert "\nranks 0, 2, 3 are at /w/train.py:7 in main\nrank 1 is at /w/train.py:9 in main\n" in shown
    assert "`wrap` has reported DD601 stuck, rank 1: rank 1 stands still\n  report  ddpdoctor report run\n" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_page_shows_what_is_drawn():
    seen = {"trains": False, "since_s": 26.0, "step": 300, "step_ms": 38.7, "epoch": 0, "batch": 0}
    memory = {"memory_bytes": 311 * 2**20}
    at, stuck = (
        Place(rank=1, file="train.py", line=line, function=name) for line, name in ((12, "main"), (6, "fetch_settings"))
    )
    ranks = [rank(n, state="in backward", where=at, waits_share=0.4, **seen, **memory) for n in range(8)]
    ranks[1] = rank(1, state="in the script", where=stuck, waits_share=0.41, **seen, **memory)
    waits = (WaitNow(ranks=(0, 2, 3, 4, 5, 6, 7), call="backward", since_s=26.0),)
    compared = ReplicasNow(equal_up_to=300, at="optimizer step", compared=12)
    run = "ddpdoctor-report/20261124-131805-train"
    shown = draw(status(*ranks, run=run, running_s=95.0, waits=waits, waited_for=(1,), replicas=compared), width=100)
    assert f"```\n{shown}```" in (DOCS / "status.md").read_text()


def test_for_whom_they_wait_is_left_out_where_it_is_not_known():
    waits = (WaitNow(ranks=(0, 1), call="backward", since_s=3.0),)
    assert "ranks 0 and 1 have waited for 3.0 s, in backward\n" in draw(status(rank(0), rank(1), waits=waits))


def test_replicas_that_differ():
    found = ReplicasNow(equal_up_to=64, at="optimizer step", compared=9, differing=("parameter",))
    assert "replicas equal up to optimizer step 64 only: parameter differ\n" in draw(status(rank(0), replicas=found))


def test_nodes_that_cannot_be_seen_are_named_with_what_their_wrap_says():
    nodes = (
        NodeSeen(number=1, host="n1", presence=Presence.HERE, ranks=(1, 2), alive=2, waits_s=12.0),
        NodeSeen(number=2, host="", presence=Presence.ABSENT),
    )
    shown = draw(status(rank(0), unseen=nodes, world_size=4), width=None)
    assert (
        "ranks 1 and 2 on node 1 (n1) cannot be seen from here: run `ddpdoctor status` there; its `wrap` says: "
        "2 living ranks, one has waited for 12 s\n"
    ) in shown
    assert "the ranks on node 2 cannot be seen from here: its `wrap` has not come yet\n" in shown


def test_ranks_of_which_nobody_knows_are_named():
    assert "ranks 1-3 cannot be seen from here" in draw(status(rank(0), world_size=4))


def test_a_job_that_has_ended_names_the_report():
    ended = status(state=Liveness.ENDED, exit_status=1)
    assert draw(ended, None) == ("ddpdoctor: the job has ended with exit status 1\n  report  ddpdoctor report run\n")
    assert "left no word of how" in draw(replace(ended, exit_status=None), None)


def test_a_job_before_its_first_rank():
    assert "no rank has started yet" in draw(status(world_size=2))


def test_what_is_collected_cannot_control_the_terminal():
    place = Place(rank=0, file="/w/\x1b[2J.py", line=7, function="main")
    shown = draw(status(still(0, "in \x1b[31mx", 7, host="\x07"), rank(1, host="b")))
    assert "\x1b" not in shown + draw(status(replace(still(0, "in x", 7), where=place)))
    assert "\x07" not in shown
