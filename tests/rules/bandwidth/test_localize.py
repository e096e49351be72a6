"""DD402, DD403 and DD404: who is named where a rank, a link or a node is slow, and where nobody can be."""

from dataclasses import replace

from ddpdoctor.model import bandwidth
from ddpdoctor.model.bandwidth import Collective, Wrong
from ddpdoctor.model.findings import Outcome
from ddpdoctor.rules.answers import Answer
from ddpdoctor.rules.bandwidth.curves import Measured
from ddpdoctor.rules.bandwidth.localize import check_slow_link, check_slow_node, check_slow_rank
from ddpdoctor.rules.bandwidth.verdicts import check_wrong_data
from tests.golden import table
from tests.rules.bandwidth import build
from tests.rules.bandwidth.build import MIB, bench, sweep

RULES = {"rank": check_slow_rank, "link": check_slow_link, "node": check_slow_node}
ONE = ("a",) * 3
EIGHT = ("a",) * 8
THREE = ("a", "b", "c")
TWO_EACH = ("a", "a", "b", "b", "c", "c")
FOUR_EACH = ("a",) * 4 + ("b",) * 4


def slow(asked):
    """Ask all three; the answer has the problems of each, by its name."""
    answers = {name: rule(asked) for name, rule in RULES.items()}
    named = tuple(replace(one, kind=name) for name, answer in answers.items() for one in answer.problems)
    said = "; ".join(f"{name} {answer.outcome.value}: {answer.seen}" for name, answer in answers.items())
    worst = Outcome.FAILED if named else answers["rank"].outcome
    return Answer(outcome=worst, seen=said, problems=named)


# DD401: wrong data, and whom it blames.


GATHER, BROADCAST, REDUCE = Collective.ALL_GATHER, Collective.BROADCAST, Collective.REDUCE
TO_ALL, SEND_RECV = Collective.ALL_TO_ALL, Collective.SEND_RECV


def wrong(rank, *, collective=Collective.ALL_REDUCE, index=17, found=3.0, size=MIB, count=1, **changes):
    redop = "sum" if collective.reduces else None
    given = {"dtype": "float32", "in_place": False, "expected": 6.0, **changes}
    return Wrong(
        rank=rank, host=f"node{rank // 2}", collective=collective, redop=redop, size_bytes=size, index=index,
        found=found, count=count, **given,
    )  # fmt: skip


def ask(*wrongs, rows=None, ranks=4, hosts=2):
    rows = sweep({MIB: 1.0}, ranks=ranks) if rows is None else rows
    return check_wrong_data(Measured(bench=bench(rows, ranks=ranks, hosts=hosts, wrong=tuple(wrongs))))


test_rows = table("localize", vars(bandwidth), vars(build), globals())
