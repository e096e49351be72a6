"""A ring written by one side is read back by the other, whatever state it is in."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring


def make(tmp_path: Path, shape: ring_layout.RingShape = ring_layout.CHILD_SHAPE) -> Ring:
    return Ring(str(tmp_path), ring_layout.ROLE_RANK, shape, pid=42, start_ticks=7)


def read(ring: Ring) -> ring_reading.RingContent:
    return ring_reading.read_ring_file(ring.path)


def record(ring: Ring, op: str = "all_reduce", seq: int = 1, dims: tuple[int, ...] = (4, 8)) -> int:
    site = ring.intern_site(("f.py", 3), {"f": "f.py", "l": 3, "n": "main", "u": 1})
    names = (ring.intern(op), 0, ring.intern("0"), site, 0, ring.intern("torch.float32"))
    return ring.begin(ring_layout.pack_kind(*names, peer=-1, tensors=1, flags=4, dims=dims), seq)


def test_a_call_is_there_before_it_ends_and_complete_after(tmp_path: Path) -> None:
    ring = make(tmp_path)
    index = record(ring)
    (slot,) = read(ring).slots
    assert (slot.op, slot.group, slot.seq, slot.dtype, slot.shape) == ("all_reduce", "0", 1, "torch.float32", (4, 8))
    assert slot.site is not None
    assert slot.site["l"] == 3
    assert slot.ended_ns == 0
    ring.end(index, ring_layout.FLAG_FAILED)
    (slot,) = read(ring).slots
    assert slot.ended_ns >= slot.started_ns > 0
    assert slot.flags & ring_layout.FLAG_FAILED


def test_the_oldest_calls_are_overwritten_and_the_file_keeps_its_size(tmp_path: Path) -> None:
    ring = make(tmp_path)
    size = Path(ring.path).stat().st_size
    for seq in range(1, 101):
        ring.end(record(ring, seq=seq))
    content = read(ring)
    assert [slot.seq for slot in content.slots] == list(range(69, 101))
    assert content.cells["calls_done"] == 100
    assert Path(ring.path).stat().st_size == size == ring_layout.CHILD_SHAPE.total_bytes


def test_ending_a_call_that_was_overwritten_changes_nothing(tmp_path: Path) -> None:
    ring = make(tmp_path)
    first = record(ring)
    for seq in range(2, 40):
        record(ring, seq=seq)
    before = list(read(ring).slots)
    ring.end(first)
    assert list(read(ring).slots) == before


def test_a_full_journal_drops_and_counts_and_calls_go_on(tmp_path: Path) -> None:
    ring = make(tmp_path)
    while ring.note({"k": "filler", "text": "x" * 500}):
        pass
    assert ring.intern("n" * 600) == 0
    ring.end(record(ring))
    content = read(ring)
    assert content.cells["dropped"] >= 2
    assert len(content.slots) == 1


def test_all_blocks_are_allocated_at_the_start(tmp_path: Path) -> None:
    ring = make(tmp_path, ring_layout.RANK_SHAPE)
    assert Path(ring.path).stat().st_blocks * 512 >= ring_layout.RANK_SHAPE.total_bytes


def test_no_room_is_an_error_at_the_start_and_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import resource, sys; sys.path.insert(0, sys.argv[2]);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from ddpdoctor.recorder.storage import ring_layout, ring_writing\n"
        "try: ring_writing.Ring(sys.argv[1], 1, ring_layout.CHILD_SHAPE, 1, 1)\n"
        "except OSError as e: print('refused')"
    )
    root = str(Path(ring_layout.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(tmp_path), root], capture_output=True, text=True, check=False
    )
    assert done.stdout == "refused\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_many_threads_lose_no_call(tmp_path: Path) -> None:
    ring = make(tmp_path, ring_layout.RANK_SHAPE)

    def work() -> None:
        for _ in range(200):
            ring.end(record(ring))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = read(ring)
    assert [slot.number for slot in content.slots] == list(range(1, 801))
    assert all(slot.ended_ns for slot in content.slots)


def test_more_dimensions_than_a_record_holds(tmp_path: Path) -> None:
    ring = make(tmp_path)
    record(ring, dims=(1, 2, 3, 4, 5, 6, 7))
    assert read(ring).slots[0].shape is None


def test_the_last_place(tmp_path: Path) -> None:
    ring = make(tmp_path)
    assert read(ring).place is None
    ring.place("/home/u/train.py", 12, "load")
    ring.place("/home/u/träin.py", 13, "main")
    assert read(ring).place == ("/home/u/träin.py", 13, "main")


@pytest.mark.parametrize("data", [b"", b"x" * 5000, ring_layout.MAGIC + b"\0" * 5000, bytes(9000)])
def test_what_is_no_ring_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "no.ring"
    path.write_bytes(data)
    with pytest.raises(ring_reading.DamagedRingError):
        ring_reading.read_ring_file(path)


def test_a_truncated_ring_is_refused_and_a_damaged_line_is_passed_over(tmp_path: Path) -> None:
    ring = make(tmp_path)
    ring.note({"k": "first"})
    ring.note({"k": "second"})
    data = bytearray(Path(ring.path).read_bytes())
    copy = tmp_path / "copy.ring"
    copy.write_bytes(data[:-1])
    with pytest.raises(ring_reading.DamagedRingError, match="truncated"):
        ring_reading.read_ring_file(copy)
    data[ring_layout.HEADER_SIZE + 2] = 0xFF
    copy.write_bytes(data)
    assert [note["k"] for note in ring_reading.read_ring_file(copy).notes] == ["second"]
