"""What the watcher keeps, and when evidence is taken; ``jobs.txt`` has what it takes for progress."""

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.collect.proc import Process
from ddpdoctor.collect.run_files import read_watch
from ddpdoctor.launch.evidence import Followed
from ddpdoctor.launch.node_messages import NodeProgress
from ddpdoctor.launch.own_ranks import choose_status, describe_lost
from ddpdoctor.launch.replica_exchange import LiveComparison
from ddpdoctor.launch.seen import Receptions, WorkSeen
from ddpdoctor.launch.watch import EARLY_EXIT_WAIT_S, LAUNCHER_WINDOW_S, JobWatch, open_rings, suspicion_of
from ddpdoctor.model.facts import Helper
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring
from tests.golden import words
from tests.synthetic import new_taker

# Rings that are kept before a signal asks.


def test_a_kept_ring_is_the_ring_without_what_was_never_written(tmp_path: Path) -> None:
    taker = new_taker(tmp_path)
    ring = Ring(str(tmp_path / "rings"), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=42, start_ticks=7)
    ring.note({"k": "process"})
    for seq in range(100):
        ring.end(
            ring.begin(ring_layout.pack_kind(ring.intern("barrier"), 0, ring.intern("0"), 0, 0, 0, -1, 0, 4, ()), seq)
        )
    path = Path(ring.path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    followed = Followed(pid=42, ticks=7, role=ring_layout.ROLE_RANK, ring=mapped)
    taker.take({42: followed}, lambda: None, keep_rings=True, limit_s=0.0)
    kept = tmp_path / "evidence" / "42-7.held"
    assert kept.read_bytes() == path.read_bytes()
    assert list(ring_reading.read_ring_file(kept).slots) == list(ring_reading.read_ring_file(path).slots)
    assert kept.stat().st_blocks * 512 < path.stat().st_size / 4


def test_a_ring_that_replaces_another_is_followed_from_its_start(tmp_path: Path) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.CHILD_SHAPE, pid=os.getpid(), start_ticks=5)
    known: dict[int, Followed] = {}
    open_rings(tmp_path, known, 0)
    first = known[os.getpid()]
    open_rings(tmp_path, known, 1)
    assert known[os.getpid()] is first
    ring.remove()
    Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=os.getpid(), start_ticks=5)
    open_rings(tmp_path, known, 2)
    assert len(known[os.getpid()].ring) == ring_layout.RANK_SHAPE.total_bytes
    assert isinstance(first.ring, mmap.mmap)


def test_what_is_no_ring_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "1-2.ring").write_bytes(b"nonsense" * 1000)
    (tmp_path / "3-4.ring").write_bytes(b"")
    known: dict[int, Followed] = {}
    open_rings(tmp_path, known, 0)
    assert known == {}


# When evidence is taken: by how far the ranks of all nodes have come together.


LIMIT_S = 10.0
LONG, SHORT = LIMIT_S + 1, LIMIT_S - 1
TRAINS = NodeProgress(alive=2, begun=True)
WAITS = NodeProgress(alive=2, begun=True, waits_s=LONG, stuck_s=LONG, still=2)
STUCK = NodeProgress(alive=1, begun=True, still=1, idle=True)
GONE = NodeProgress(alive=1, begun=True, ended_s=EARLY_EXIT_WAIT_S + 1)
UNSTARTED = NodeProgress(never=True)
LOADING = NodeProgress(starting=True)


WAITS_OR_WORKS = """
import sys, time
for line in sys.stdin:
    until = time.process_time() + float(line)
    while time.process_time() < until:
        pass
    print("done", flush=True)
"""


def test_a_launcher_that_answers_still_waits_and_one_that_computes_is_at_work(tmp_path: Path) -> None:
    hour_ns = 3600 * 10**9
    command = [sys.executable, "-c", WAITS_OR_WORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        watch = JobWatch(
            new_taker(tmp_path), LIMIT_S, time.monotonic_ns() - hour_ns, LiveComparison(tmp_path, 50, ()),
            launcher.pid,
        )  # fmt: skip
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        for compute_s, waits in ((0.03, True), (2 * LAUNCHER_WINDOW_S, False)):
            watch.follow(at_once=True)
            launcher.stdin.write(f"{compute_s}\n")
            launcher.stdin.flush()
            assert launcher.stdout.readline() == "done\n"
            watch.follow(at_once=True)
            assert watch.own_progress().never is waits
        launcher.stdin.close()


# What the watcher keeps of children that have ended.


WATCH_TIMEOUT_S = 10.0


def test_the_batches_of_a_worker_are_those_of_the_rank_whose_fork_server_ends_with_it(tmp_path: Path):
    (tmp_path / "rings").mkdir()
    watch = JobWatch(new_taker(tmp_path), WATCH_TIMEOUT_S, time.monotonic_ns(), LiveComparison(tmp_path, 50, ()))
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
    watch = JobWatch(new_taker(tmp_path), WATCH_TIMEOUT_S, time.monotonic_ns(), LiveComparison(tmp_path, 50, ()))
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
    errors = read_watch(tmp_path, None).processes[rank].child_errors
    assert [(one.who, one.name, one.error.type) for one in errors] == [
        (Helper.CHILD, str(rank + n), "ValueError") for n in (1, 2, 4, 5, 6, 7, 8, 11)
    ]


# What ranks and the processes below them were seen to do, and over which connections they receive.


S = 1_000_000_000
RANK = Process(pid=os.getpid(), ppid=1, state="R", start_ticks=1, cpu_ticks=100, name="python")
CHILD = replace(RANK, pid=os.getppid(), ppid=RANK.pid, cpu_ticks=0, name="gcc")


def busier(process: Process, ticks: int) -> Process:
    return replace(process, cpu_ticks=process.cpu_ticks + ticks)


def test_rates_are_those_between_two_samples_that_are_far_enough_apart() -> None:
    seen = WorkSeen()
    seen.follow(RANK, (CHILD,), S)
    seen.follow(busier(RANK, 90), (CHILD,), 2 * S)
    assert seen.work == {}
    seen.follow(busier(RANK, 100), (busier(CHILD, 400),), 5 * S)
    work = seen.work[RANK.pid][RANK.pid]
    assert (work.over_s, work.cores) == (4.0, pytest.approx(0.25))
    assert sum(done.cores for done in seen.work[RANK.pid].values()) == pytest.approx(1.25)
    (child,) = seen.of_children(RANK.pid, (CHILD,))
    assert (child.pid, child.work.cores) == (CHILD.pid, pytest.approx(1.0))
    assert child.name


def test_a_child_that_is_new_or_idle_is_not_named() -> None:
    seen = WorkSeen()
    seen.follow(RANK, (CHILD,), S)
    seen.follow(RANK, (CHILD, replace(CHILD, pid=1, cpu_ticks=1000)), 1001 * S)
    assert seen.of_children(RANK.pid, (CHILD, replace(CHILD, pid=1))) == ()


SENDS = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sender, _ = server.accept()
    sys.stdin.readline()
    sender.sendall(bytes(100_000))
    sys.stdin.readline()
"""


def test_what_comes_over_a_connection_is_seen_unless_another_rank_sends_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        port = int(sender.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as client:
            since = Receptions()
            sender.stdin.write("send\n")
            sender.stdin.flush()
            assert client.recv(1)
            alone = since.of({1: (os.getpid(),)})
            together = since.of({1: (os.getpid(),), 2: (sender.pid,)})
            sender.stdin.write("end\n")
    assert alone[1].remote == f"127.0.0.1:{port}"
    assert alone[1].bytes_s > 0
    assert together == {}


def killed_for_memory(request, given):
    """A rank's end, the pids in the kernel's log, and how many such kills the kernel has counted since the start."""
    ended_ns, pids, kills = given
    patch, folder, counts = request.getfixturevalue("monkeypatch"), request.getfixturevalue("tmp_path"), [0, kills]
    patch.setattr("ddpdoctor.launch.watch.read_kernel_oom_pids", lambda: pids and frozenset(pids))
    patch.setattr("ddpdoctor.launch.watch.read_oom_kills", lambda: counts.pop(0))
    watch = JobWatch(new_taker(folder), WATCH_TIMEOUT_S, time.monotonic_ns(), LiveComparison(folder, 50, ()))
    ring = mmap.mmap(-1, 1)
    watch.followed[7] = Followed(pid=7, ticks=1, role=ring_layout.ROLE_RANK, ring=ring, ended_ns=ended_ns)
    watch.save(ended=True, launcher_status=0)
    return read_watch(folder, None).processes[7].oom


# Which status a bench ends with whose ranks ended as they did.


test_words = words(
    __name__,
    suspicion=lambda nodes: suspicion_of(eval(nodes), LIMIT_S).name,
    killed_for_memory=killed_for_memory, choose_status=choose_status, describe_lost=describe_lost,
)  # fmt: skip
