"""When evidence is taken: by how far the ranks of all nodes have come together."""

from dataclasses import replace

import pytest

from ddpdoctor.launch.watching.suspicion import EARLY_EXIT_WAIT_S, NodeProgress, Suspicion, suspicion_of

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
