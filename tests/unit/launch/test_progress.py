"""What counts as progress of a process, seen from outside."""

import mmap
import os
from pathlib import Path

import pytest

from ddpdoctor.collect.proc import read_io
from ddpdoctor.launch.watching.progress import (
    FAMILIAR_PATIENCE,
    IO_BYTES_PER_S,
    Followed,
    discount_starving,
    follow,
    open_rings,
)
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.ring_writing import Ring

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
    assert process.last_progress_ns == 3 * SECOND


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
