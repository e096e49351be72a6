"""When evidence is taken: by how far the ranks of all nodes have come together."""

import mmap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from ddpdoctor.launch.watching.examining import Examining
from ddpdoctor.launch.watching.progress import Followed, discount_starving
from ddpdoctor.launch.watching.suspicion import (
    EARLY_EXIT_WAIT_S,
    NodeProgress,
    Suspicion,
    read_progress,
    suspicion_of,
)
from ddpdoctor.model.findings import Judgment
from ddpdoctor.recorder.storage import ring_layout

if TYPE_CHECKING:
    from ddpdoctor.launch.watching.watch import JobWatch

LIMIT_S = 10.0
LONG, SHORT = LIMIT_S + 1, LIMIT_S - 1
TRAINS = NodeProgress(alive=2, begun=True)
WAITS = NodeProgress(alive=2, begun=True, waits_s=LONG, stuck_s=LONG, still=2)
STUCK = NodeProgress(alive=1, begun=True, still=1, idle=True)
GONE = NodeProgress(alive=1, begun=True, ended_s=EARLY_EXIT_WAIT_S + 1)
UNSTARTED = NodeProgress(never=True)
LOADING = NodeProgress(starting=True)

CASES = {
    "nobody is there": ([], Suspicion.NONE),
    "all train": ([TRAINS, TRAINS], Suspicion.NONE),
    "one node waits and the other moves": ([WAITS, TRAINS], Suspicion.WEAK),
    "all wait": ([WAITS, WAITS], Suspicion.STRONG),
    "the other node stands still": ([WAITS, STUCK], Suspicion.STRONG),
    "the other node stands still, and others have hardly waited": (
        [replace(WAITS, waits_s=SHORT, still=0), replace(STUCK, alive=2)],
        Suspicion.NONE,
    ),
    "all stand still before their group is made": ([NodeProgress(alive=1, still=1, idle=True)], Suspicion.WEAK),
    "one of them is at work": ([NodeProgress(alive=2, still=1, idle=True)], Suspicion.NONE),
    "a rank of another node has ended": ([replace(WAITS, waits_s=2, stuck_s=2, still=0), GONE], Suspicion.STRONG),
    "it has ended, and a rank over NCCL stands still": ([replace(TRAINS, nccl_still_s=2), GONE], Suspicion.WEAK),
    "it has ended, and a rank over NCCL goes on": ([replace(TRAINS, nccl_still_s=0.2), GONE], Suspicion.NONE),
    "a rank over NCCL stands still beside others": ([replace(TRAINS, nccl_still_s=5), TRAINS], Suspicion.NONE),
    "it has ended this moment": (
        [replace(WAITS, waits_s=2, stuck_s=2, still=0), replace(GONE, ended_s=0.1)],
        Suspicion.NONE,
    ),
    "a script has ended and its process has not": ([TRAINS, replace(TRAINS, lives_on=True)], Suspicion.STRONG),
    "no launcher gets on": ([UNSTARTED, UNSTARTED], Suspicion.STRONG),
    "one launcher waits for one that loads torch": ([UNSTARTED, LOADING], Suspicion.NONE),
    "one launcher waits for one that has left": ([UNSTARTED, NodeProgress()], Suspicion.STRONG),
}


@pytest.mark.parametrize("case", CASES)
def test_suspicion(case):
    progress, expected = CASES[case]
    assert suspicion_of(progress, LIMIT_S) is expected


class Watched:
    """Two ranks, of which one sleeps. The kernel books how long a thread waited for a core when it gets one."""

    def __init__(self, tmp_path: Path) -> None:
        self.proc = tmp_path
        self.ranks = [
            Followed(pid=pid, ticks=1, role=ring_layout.ROLE_RANK, ring=mmap.mmap(-1, 1), cells={"initialized": 1})
            for pid in (900_001, 900_002)
        ]
        self.ranks[0].cells["wait_since_ns"] = 1
        self.now_s = self.starved_s = 0

    def readable(self) -> Path:
        return self.proc

    def pass_second(self, *, booked_s: int = 0) -> None:
        self.now_s += 1
        self.starved_s += booked_s
        for rank in self.ranks:
            folder = self.proc / str(rank.pid) / "task" / str(rank.pid)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "schedstat").write_text(f"5 {self.starved_s * 10**9} 7\n")
            discount_starving(rank, self.now_s * 10**9, frozenset(), self.proc)

    def own_progress(self) -> NodeProgress:
        return read_progress(self.ranks, self.now_s * 10**9, LIMIT_S, None, is_stopping=False)


@pytest.mark.parametrize("how", ["it gets a core", "it moves"])
def test_a_report_is_withdrawn_when_a_rank_moves_and_not_when_it_gets_a_core(tmp_path: Path, how: str) -> None:
    moves = how == "it moves"
    watch = Watched(tmp_path)
    nothing = Judgment(findings=(), checks=(), certain=False)
    examining = Examining(cast("JobWatch", watch), lambda *_: nothing, LIMIT_S, "report", "")
    for _ in range(20):
        watch.pass_second()
    assert suspicion_of([watch.own_progress()], LIMIT_S) is Suspicion.STRONG
    examining.stand_by()
    watch.pass_second(booked_s=15)
    if moves:
        for rank in watch.ranks:
            rank.last_progress_ns = rank.advanced_ns = watch.now_s * 10**9
    assert suspicion_of([watch.own_progress()], LIMIT_S) is Suspicion.NONE
    assert (examining.examine() is not None) is moves
    assert examining.have_moved() is moves
