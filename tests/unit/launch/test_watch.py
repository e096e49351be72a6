"""What the watcher makes of a launcher that has no rank."""

import mmap
import os
import time
from pathlib import Path

import pytest

from ddpdoctor.collect.run.agent_log import AgentLog, WorkerStart
from ddpdoctor.launch.replicas.comparing import LiveComparison
from ddpdoctor.launch.watching.progress import Followed
from ddpdoctor.launch.watching.suspicion import Suspicion, suspicion_of
from ddpdoctor.launch.watching.watch import JobWatch
from ddpdoctor.recorder.storage import ring_layout

TIMEOUT_S = 10.0
LONG_NS = 1000 * 10**9
"""The launcher loaded torch so long ago, and has only waited for its rank since."""


@pytest.mark.parametrize(
    ("gone_s", "patience_s", "expected"),
    [
        (TIMEOUT_S / 2, 0.0, Suspicion.NONE),
        (TIMEOUT_S * 2, 0.0, Suspicion.STRONG),
        (TIMEOUT_S * 2, TIMEOUT_S * 3, Suspicion.NONE),
        (TIMEOUT_S * 5, TIMEOUT_S * 3, Suspicion.STRONG),
    ],
    ids=["its rank has just ended", "long ago", "it may go on with fewer nodes", "and has not for long"],
)
def test_a_launcher_idles_from_the_end_of_its_last_rank_on(tmp_path: Path, gone_s, patience_s, expected):
    now_ns = time.monotonic_ns()
    watch = JobWatch(tmp_path, TIMEOUT_S, now_ns - LONG_NS, LiveComparison(tmp_path, 50, ()))
    watch.restart_patience_s = patience_s
    pid = os.getpid()
    watch.agent = AgentLog(started={pid: WorkerStart(pid=pid, rank=0, local_rank=0, world_size=1, at=now_ns - LONG_NS)})
    watch.followed[pid] = Followed(
        pid=pid, ticks=1, role=ring_layout.ROLE_RANK, ring=mmap.mmap(-1, 1), ended_ns=now_ns - int(gone_s * 1e9)
    )
    assert suspicion_of([watch.own_progress()], TIMEOUT_S) is expected
