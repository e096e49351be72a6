"""Which status a bench ends with whose ranks ended as they did."""

from __future__ import annotations

import signal

import pytest

from ddpdoctor.launch.ranks import choose_status


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
