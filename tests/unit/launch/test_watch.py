"""What the watcher makes of a launcher that has no rank, and what it keeps of children that have ended."""

import json
import mmap
import os
import time
from pathlib import Path

import pytest

from ddpdoctor.collect.run.agent_log import AgentLog, WorkerStart
from ddpdoctor.collect.run.watched import read_watch
from ddpdoctor.launch.replicas.comparing import LiveComparison
from ddpdoctor.launch.watching.progress import Followed
from ddpdoctor.launch.watching.suspicion import Suspicion, suspicion_of
from ddpdoctor.launch.watching.watch import JobWatch
from ddpdoctor.model.facts import Helper
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.ring_writing import Ring

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


def test_the_batches_of_a_worker_are_those_of_the_rank_whose_fork_server_ends_with_it(tmp_path: Path):
    (tmp_path / "rings").mkdir()
    watch = JobWatch(tmp_path, TIMEOUT_S, time.monotonic_ns(), LiveComparison(tmp_path, 50, ()))
    rank, server, worker = 2**22 + 1, 2**22 + 2, 2**22 + 3
    roles = {rank: ring_layout.ROLE_RANK, server: ring_layout.ROLE_CHILD, worker: ring_layout.ROLE_CHILD}
    for pid, role in roles.items():
        ring = Ring(str(tmp_path / "rings"), role, ring_layout.CHILD_SHAPE, pid=pid, start_ticks=1)
        ring.note({"k": "process", "ppid": pid - 1})
        ring.set("fetches", 30 if pid == worker else 0)
        watch.followed[pid] = Followed(pid=pid, ticks=1, role=role, ring=mmap.mmap(-1, 1), ended_ns=time.monotonic_ns())
    watch.follow(at_once=True)
    watch.save(ended=True, launcher_status=0)
    assert [path.name for path in (tmp_path / "rings").iterdir()] == [f"{rank}-1.ring"]
    (row,) = json.loads((tmp_path / "watch.json").read_text())["processes"].values()
    assert row["child_fetches"] == [30, 0, 0, 0]


def test_the_errors_of_a_ranks_ended_children_are_kept_the_first_and_the_last(tmp_path: Path):
    (tmp_path / "rings").mkdir()
    watch = JobWatch(tmp_path, TIMEOUT_S, time.monotonic_ns(), LiveComparison(tmp_path, 50, ()))
    rank = 2**22 + 1
    for pid in range(rank, rank + 12):
        role = ring_layout.ROLE_RANK if pid == rank else ring_layout.ROLE_CHILD
        ring = Ring(str(tmp_path / "rings"), role, ring_layout.CHILD_SHAPE, pid=pid, start_ticks=1)
        ring.note({"k": "process", "ppid": 1, "rank_pid": rank})  # a shell between them has ended
        for kind, uncaught in (("KeyError", 0), ("KeyboardInterrupt", 1), ("ValueError", pid != rank + 3)):
            ring.note({"k": "raised", "type": kind, "text": str(pid), "at": pid, "main": 1, "uncaught": uncaught})
        if pid > rank:
            ended = Followed(pid=pid, ticks=1, role=role, ring=mmap.mmap(-1, 1), ended_ns=time.monotonic_ns())
            watch.followed[pid] = ended
            watch.follow(at_once=True)
    watch.followed[rank] = Followed(pid=rank, ticks=1, role=ring_layout.ROLE_RANK, ring=mmap.mmap(-1, 1), ended_ns=1)
    watch.save(ended=True, launcher_status=0)
    errors = read_watch(tmp_path, None).of(rank).child_errors
    assert [(one.who, one.name, one.error.type) for one in errors] == [
        (Helper.CHILD, str(rank + n), "ValueError") for n in (1, 2, 4, 5, 6, 7, 8, 11)
    ]
