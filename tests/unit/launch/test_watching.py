"""What the watcher takes for progress, and when evidence is taken."""

import json
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from ddpdoctor.collect import proc
from ddpdoctor.collect.proc import Process, read_io
from ddpdoctor.collect.run_files import AgentLog, WorkerStart, read_watch
from ddpdoctor.launch import evidence
from ddpdoctor.launch.evidence import EvidenceTaker
from ddpdoctor.launch.hang import Examining
from ddpdoctor.launch.own_ranks import choose_status, describe_lost
from ddpdoctor.launch.progress import (
    EARLY_EXIT_WAIT_S,
    FAMILIAR_PATIENCE,
    IO_BYTES_PER_S,
    Followed,
    NodeProgress,
    Suspicion,
    discount_starving,
    follow,
    open_rings,
    read_progress,
    suspicion_of,
)
from ddpdoctor.launch.replica_exchange import LiveComparison
from ddpdoctor.launch.seen import HoldUps, Receptions, WorkSeen
from ddpdoctor.launch.watch import JobWatch
from ddpdoctor.model.facts import Helper
from ddpdoctor.model.findings import Confidence, Finding, Judgment, Severity
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.files import write_whole
from ddpdoctor.recorder.storage.ring_writing import Ring

# Rings that are kept before a signal asks, and answers of recorders that come late.


def test_a_kept_ring_is_the_ring_without_what_was_never_written(tmp_path: Path) -> None:
    taker = EvidenceTaker(tmp_path)
    ring = Ring(str(tmp_path / "rings"), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=42, start_ticks=7)
    ring.note({"k": "process"})
    for seq in range(100):
        ring.end(
            ring.begin(ring_layout.pack_kind(ring.intern("barrier"), 0, ring.intern("0"), 0, 0, 0, -1, 0, 4, ()), seq)
        )
    path = Path(ring.path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    taker._keep_rings([Followed(pid=42, ticks=7, role=ring_layout.ROLE_RANK, ring=mapped)])
    kept = tmp_path / "evidence" / "42-7.held"
    assert kept.read_bytes() == path.read_bytes()
    assert list(ring_reading.read_ring_file(kept).slots) == list(ring_reading.read_ring_file(path).slots)
    assert kept.stat().st_blocks * 512 < path.stat().st_size / 4


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that takes evidence of a recorder that is late, and returns which of its answers were there."""
    monkeypatch.setattr(evidence, "ANSWER_LIMIT_S", -1.0)
    taker = EvidenceTaker(tmp_path)
    own = proc.read_process(os.getpid())
    assert own is not None
    path = tmp_path / "evidence" / f"{own.pid}-{own.start_ticks}-1.json"

    def take(*answers: dict[str, object], launcher_waits: bool = False, limit_s: float) -> list[str]:
        written: list[str] = []

        def write(left: tuple[dict[str, object], ...]) -> None:
            written.append(json.dumps(left[0]))
            write_whole(path, written[-1])
            if left[1:]:
                threading.Timer(0.05, write, (left[1:],)).start()

        process = Followed(pid=own.pid, ticks=own.start_ticks, role=ring_layout.ROLE_RANK, ring=mmap.mmap(-1, 4096))
        process.heartbeat_changed_ns = time.monotonic_ns()
        if launcher_waits:
            ring_layout.CELL.pack_into(taker.control, ring_layout.CONTROL_CLOSING, time.monotonic_ns())
        if answers:
            threading.Timer(0.05, write, (answers,)).start()
        seen: list[str] = []
        taker.take({own.pid: process}, lambda: seen.extend(written), limit_s=limit_s)
        return seen

    return take


def test_a_late_recorder_is_waited_for_until_its_answer_is_complete(late: Callable[..., list[str]]) -> None:
    answers = {"looks": [1]}, {"looks": [1, 2]}, {"looks": [1, 2], "complete": 1}
    assert late(*answers, limit_s=math.inf) == [json.dumps(answer) for answer in answers]


@pytest.mark.parametrize("hurry", [{"limit_s": -1.0}, {"limit_s": math.inf, "launcher_waits": True}])
def test_nobody_who_waits_for_the_evidence_waits_for_a_late_recorder(
    late: Callable[..., list[str]], hurry: dict[str, object]
) -> None:
    assert late(**hurry) == []


# Where a rank was before the last call that needed others.


class Rank:
    """A rank whose place and waits a test sets."""

    def __init__(self, folder: Path) -> None:
        self.ring = Ring(str(folder), ring_layout.ROLE_RANK, ring_layout.CHILD_SHAPE, pid=os.getpid(), start_ticks=5)
        known: dict[int, Followed] = {}
        open_rings(folder, known, 0)
        self.followed = known[os.getpid()]
        self.seen = HoldUps()

    def look(self, line: int, times: int = 1, **cells: int) -> None:
        for name, value in cells.items():
            self.ring.set(name, value)
        self.ring.place("train.py", line, "main")
        self.followed.cells = ring_reading.read_cells(self.followed.ring)
        for _ in range(times):
            self.seen.follow([self.followed])

    @property
    def row(self) -> dict[str, Any]:
        row = self.seen.row(self.followed.pid, self.followed.ticks)
        assert row is not None
        return {"until_ns": row["until_ns"], "lines": [line for _, line, _ in row["lines"]]}


def test_the_lines_before_a_call_are_kept_while_it_lasts(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.look(3, 9)
    rank.look(3, 1, initialized=1)
    rank.look(7, 4)
    rank.look(8, 2)
    rank.look(20, 5, wait_since_ns=1000)
    assert rank.row == {"until_ns": 1000, "lines": [7, 8]}


def test_a_call_that_failed_at_once_leaves_the_lines_before_it(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.look(3, 1, wait_since_ns=1000)
    rank.look(7, 4, wait_since_ns=0)
    rank.look(30)
    assert rank.row == {"until_ns": 0, "lines": [7, 30]}


def test_of_a_process_never_seen_nothing_is_known() -> None:
    assert HoldUps().row(1, 1) is None


# What counts as progress of a process, seen from outside.


SECOND = 10**9
TIMEOUT_S = 4.0


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.CHILD_SHAPE, pid=os.getpid(), start_ticks=5)


@pytest.fixture
def process(ring: Ring, tmp_path: Path) -> Followed:  # noqa: ARG001 - the ring must be there
    known: dict[int, Followed] = {}
    open_rings(tmp_path, known, 0)
    found = known[os.getpid()]
    look(found, 0)
    return found


def look(process: Followed, second: float, below: frozenset[int] = frozenset(), interval_s: float = 1000.0) -> None:
    follow(process, int(second * SECOND), interval_s, TIMEOUT_S, below)


@pytest.mark.parametrize("cell", ["calls_done", "slots_claimed", "steps", "batches", "epochs", "main_ended_ns"])
def test_a_cell_that_moves_is_progress(cell: str, ring: Ring, process: Followed) -> None:
    look(process, 1)
    assert process.last_progress_ns == 0
    ring.set(cell, 1)
    look(process, 2)
    assert process.last_progress_ns == 2 * SECOND
    look(process, 3)
    assert process.last_progress_ns == 2 * SECOND


def test_a_heartbeat_is_none_but_is_noted(ring: Ring, process: Followed) -> None:
    ring.set("heartbeat_ns", 5)
    look(process, 7)
    assert (process.last_progress_ns, process.heartbeat_changed_ns) == (0, 7 * SECOND)


def test_familiar_functions_are_progress_for_some_hang_timeouts_only(ring: Ring, process: Followed) -> None:
    limit = FAMILIAR_PATIENCE * TIMEOUT_S
    for second in range(1, int(limit) + 10):
        ring.set("function_changes", second)
        look(process, second)
    assert process.last_progress_ns == (limit - 1) * SECOND
    ring.set("new_functions", 1)
    look(process, 100)
    assert process.last_progress_ns == 100 * SECOND


def test_a_new_child_is_progress_and_one_that_stays_is_none(process: Followed) -> None:
    look(process, 1, frozenset({9}))
    assert process.last_progress_ns == SECOND
    look(process, 2, frozenset({9}))
    look(process, 3, frozenset())
    assert process.last_progress_ns == SECOND


def test_one_child_after_another_is_progress_for_some_hang_timeouts_only(process: Followed) -> None:
    limit = FAMILIAR_PATIENCE * TIMEOUT_S
    for second in range(1, int(limit) + 10):
        look(process, second, frozenset({100 + second}))
    assert process.last_progress_ns == (limit - 1) * SECOND


def test_much_io_is_progress_and_a_line_a_second_is_none(process: Followed, tmp_path: Path) -> None:
    look(process, 1, interval_s=1.0)
    begun = process.last_progress_ns
    (tmp_path / "line").write_bytes(b"x" * 100)
    look(process, 2, interval_s=1.0)
    assert process.last_progress_ns == begun
    (tmp_path / "checkpoint").write_bytes(b"x" * (IO_BYTES_PER_S + 65536))
    look(process, 3, interval_s=1.0)
    assert (process.last_progress_ns, process.advanced_ns) == (3 * SECOND, 3 * SECOND)


def test_what_another_thread_writes_does_not_take_a_report_back(process: Followed, tmp_path: Path) -> None:
    """At a group's limit, torch's threads write what is pending while the main thread sleeps on."""
    look(process, 1, interval_s=1.0)
    with ThreadPoolExecutor(1) as other:
        other.submit((tmp_path / "dump").write_bytes, b"x" * (IO_BYTES_PER_S + 65536)).result()
    look(process, 2, interval_s=1.0)
    assert (process.last_progress_ns, process.advanced_ns) == (2 * SECOND, 0)


def test_a_file_that_is_read_by_page_faults_is_progress(process: Followed, tmp_path: Path) -> None:
    """As a library is, from a cold disk: nothing goes through read(2)."""
    path = tmp_path / "library"
    path.write_bytes(os.urandom(1 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as library:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = fetched()
        look(process, 1, interval_s=1.0)
        assert sum(library[:: mmap.PAGESIZE]) > 0
        if fetched() - before < 2 * IO_BYTES_PER_S:
            pytest.skip("this file system keeps its files in memory")
        look(process, 2, interval_s=1.0)
    assert process.last_progress_ns == 2 * SECOND


def fetched() -> int:
    io = read_io(os.getpid())
    assert io is not None
    return io.fetched


def test_a_ring_that_replaces_another_is_followed_from_its_start(ring: Ring, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("waits", "last_progress_s"),
    [
        ({"rank": 0.9}, 9.0),  # it got a tenth of a core
        ({"thread": 0.9}, 9.0),  # a backend's thread holds it up
        ({"child": 0.9}, 9.0),  # a loader's worker gets none
        ({"rank": 0.9, "child": 0.8}, 9.0),  # they wait at the same time
        ({"rank": 0.02}, 0.2),
        ({}, 0.0),  # it sleeps, and stands still by itself
        ({"stranger": 0.9}, 0.0),
    ],
)
def test_time_without_a_core_does_not_count(
    waits: dict[str, float], last_progress_s: float, process: Followed, tmp_path: Path
) -> None:
    tasks = {"rank": (process.pid, process.pid), "thread": (process.pid, 900_001), "child": (900_002, 900_002)}
    tasks["stranger"] = (900_003, 900_003)
    for second in range(1, 12):  # the first look at second 1 is the base of the others
        for name, (pid, thread) in tasks.items():
            folder = tmp_path / "proc" / str(pid) / "task" / str(thread)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "schedstat").write_text(f"5 {int(waits.get(name, 0) * second * SECOND)} 7\n")
        discount_starving(process, second * SECOND, frozenset({900_002}), tmp_path / "proc")

    assert process.last_progress_ns == pytest.approx(last_progress_s * SECOND)
    assert process.starved_ns == process.last_progress_ns


def test_a_kernel_that_does_not_count_waits_changes_nothing(process: Followed, tmp_path: Path) -> None:
    for second in range(2, 5):
        discount_starving(process, second * SECOND, frozenset(), tmp_path)
    assert (process.last_progress_ns, process.starved_ns) == (0, 0)


# When evidence is taken: by how far the ranks of all nodes have come together.


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

    def all_stand(self, numbers: Sequence[int]) -> bool:
        return bool(numbers) and all(self.ranks[number].stands(self.now_s * 10**9, LIMIT_S) for number in numbers)


BLAMED = Finding(
    code="DD601", kind="stuck", severity=Severity.ERROR, confidence=Confidence.HIGH, summary="rank 1 is", ranks=(1,)
)
STUCK = Judgment(findings=(BLAMED,), checks=(), certain=False)


@pytest.mark.parametrize("how", ["it moves", "it gets a core", "the one that waited for it gives up", "they end"])
def test_a_report_is_withdrawn_when_the_rank_at_fault_moves_and_then_only(tmp_path: Path, how: str) -> None:
    moves = how == "it moves"
    watch = Watched(tmp_path)
    examining = Examining(cast("JobWatch", watch), lambda *_: STUCK, LIMIT_S, "report", "")
    for _ in range(20):
        watch.pass_second()
    assert suspicion_of([watch.own_progress()], LIMIT_S) is Suspicion.STRONG
    examining.stand_by(STUCK)
    watch.pass_second(booked_s=15 * (how == "it gets a core"))
    waiting = watch.ranks[0]
    for rank in () if how == "it gets a core" else (waiting,) if how.endswith("gives up") else watch.ranks:
        if how == "they end":
            rank.ended_ns = watch.now_s * 10**9
        else:
            rank.last_progress_ns = rank.advanced_ns = watch.now_s * 10**9
    if not moves:
        waiting.cells.pop("wait_since_ns")  # in a line of the script now
    assert suspicion_of([watch.own_progress()], LIMIT_S) is Suspicion.NONE
    assert (examining.examine() is not None) is moves
    assert examining.have_moved() is moves


@pytest.mark.parametrize(("booked_s", "expected"), [(0, Suspicion.STRONG), (1, Suspicion.NONE)])
def test_a_rank_whose_script_has_ended_may_wait_for_a_core(tmp_path: Path, booked_s: int, expected: Suspicion) -> None:
    watch = Watched(tmp_path)
    for rank in watch.ranks:
        rank.cells["main_ended_ns"] = 1
    for _ in range(20):
        watch.pass_second(booked_s=booked_s)
    assert suspicion_of([watch.own_progress()], LIMIT_S) is expected


# What the watcher makes of a launcher that has no rank, and what it keeps of children that have ended.


WATCH_TIMEOUT_S = 10.0
LONG_NS = 1000 * 10**9
"""The launcher loaded torch so long ago, and has only waited for its rank since."""


@pytest.mark.parametrize(
    ("gone_s", "patience_s", "expected"),
    [
        (WATCH_TIMEOUT_S / 2, 0.0, Suspicion.NONE),
        (WATCH_TIMEOUT_S * 2, 0.0, Suspicion.STRONG),
        (WATCH_TIMEOUT_S * 2, WATCH_TIMEOUT_S * 3, Suspicion.NONE),
        (WATCH_TIMEOUT_S * 5, WATCH_TIMEOUT_S * 3, Suspicion.STRONG),
    ],
    ids=["its rank has just ended", "long ago", "it may go on with fewer nodes", "and has not for long"],
)
def test_a_launcher_idles_from_the_end_of_its_last_rank_on(tmp_path: Path, gone_s, patience_s, expected):
    now_ns = time.monotonic_ns()
    watch = JobWatch(tmp_path, WATCH_TIMEOUT_S, now_ns - LONG_NS, LiveComparison(tmp_path, 50, ()))
    watch.restart_patience_s = patience_s
    pid = os.getpid()
    watch.agent = AgentLog(started={pid: WorkerStart(pid=pid, rank=0, local_rank=0, world_size=1, at=now_ns - LONG_NS)})
    watch.followed[pid] = Followed(
        pid=pid, ticks=1, role=ring_layout.ROLE_RANK, ring=mmap.mmap(-1, 1), ended_ns=now_ns - int(gone_s * 1e9)
    )
    assert suspicion_of([watch.own_progress()], WATCH_TIMEOUT_S) is expected


def test_the_batches_of_a_worker_are_those_of_the_rank_whose_fork_server_ends_with_it(tmp_path: Path):
    (tmp_path / "rings").mkdir()
    watch = JobWatch(tmp_path, WATCH_TIMEOUT_S, time.monotonic_ns(), LiveComparison(tmp_path, 50, ()))
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
    watch = JobWatch(tmp_path, WATCH_TIMEOUT_S, time.monotonic_ns(), LiveComparison(tmp_path, 50, ()))
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
    assert seen.of_rank(RANK.pid) is None
    assert seen.busy_cores(RANK.pid) is None
    seen.follow(busier(RANK, 100), (busier(CHILD, 400),), 5 * S)
    work = seen.of_rank(RANK.pid)
    assert work is not None
    assert (work.over_s, work.cores) == (4.0, pytest.approx(0.25))
    assert seen.busy_cores(RANK.pid) == pytest.approx(1.25)
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


# Which status a bench ends with whose ranks ended as they did.


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
