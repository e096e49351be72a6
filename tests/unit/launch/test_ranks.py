"""Which status a bench ends with whose ranks ended as they did."""

import signal

import pytest

from ddpdoctor.launch.processes.ranks import choose_status, describe_lost


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ((0, 0), 0),
        ((1, 1), 1),
        ((0, 3), 0),
        ((130, 130), 130),
        ((1, -signal.SIGKILL), 1),
        ((-signal.SIGKILL, 1), 1),
        ((-signal.SIGKILL, 0, 1), 1),
        ((-signal.SIGTERM, -signal.SIGTERM), 143),
        ((-signal.SIGSEGV, 0), 139),
    ],
)
def test_rank_0_decides_while_it_can(statuses, status):
    assert choose_status(statuses) == status


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ((None, 5), "rank 1 ended with status 5"),
        ((None, 0, -signal.SIGSEGV, 7), "rank 2 was killed by SIGSEGV and rank 3 ended with status 7"),
        # A rank that reported, of a rank 0 that is stopped.
        ((None, 1), ""),
        ((None, -signal.SIGTERM, 1), ""),
        ((None, 0), ""),
        ((1, 5), ""),
        ((-signal.SIGKILL, 1), ""),
    ],
)
def test_ranks_that_fail_in_silence_are_reported_where_rank_0_waits_for_them(statuses, words):
    assert describe_lost(statuses) == words
