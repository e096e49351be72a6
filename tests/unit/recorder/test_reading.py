"""Rings in any state: turned over, torn, of another version, cut short while they are read."""

import struct
from pathlib import Path

import pytest

from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring

SHAPE = ring_layout.CHILD_SHAPE


def filled(folder: Path, calls: int, shape: ring_layout.RingShape = SHAPE) -> Path:
    ring = Ring(str(folder), ring_layout.ROLE_RANK, shape, pid=42, start_ticks=7)
    for seq in range(1, calls + 1):
        key = ("f.py", seq % 3)
        site = ring.known_site(key) or ring.intern_site(key, {"f": "f.py", "l": seq % 3, "n": "main", "u": 1})
        op, group, dtype = map(ring.intern, ("all_reduce", "0", "f"))
        kind = ring_layout.pack_kind(op, 0, group, site, 0, dtype, peer=-1, tensors=1, flags=4, dims=(seq,))
        ring.end(ring.begin(kind, seq))
    return Path(ring.path)


def change(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("calls", [0, 1, 31, 32, 33, 64, 100, 5000])
def test_all_calls_that_are_still_there_are_read_in_order(tmp_path: Path, calls: int) -> None:
    slots = ring_reading.read_ring_file(filled(tmp_path, calls)).slots
    assert [slot.seq for slot in slots] == list(range(max(1, calls - SHAPE.slots + 1), calls + 1))
    assert all(slot.shape == (slot.seq,) and slot.site is not None for slot in slots)
    assert all(slot.site["l"] == slot.seq % 3 for slot in slots if slot.site)


def test_a_record_that_was_claimed_and_not_written_is_left_out(tmp_path: Path) -> None:
    path = filled(tmp_path, 10)
    change(path, SHAPE.slots_at + 3 * ring_layout.SLOT_SIZE, bytes(ring_layout.SLOT_SIZE))
    assert [slot.seq for slot in ring_reading.read_ring_file(path).slots] == [1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_a_record_beyond_the_last_claimed_one_is_read(tmp_path: Path) -> None:
    """Threads claim out of order, and a process may be killed between a record and the claim."""
    path = filled(tmp_path, 10)
    change(path, ring_layout.CELL_OFFSETS["slots_claimed"], ring_layout.CELL.pack(8))
    assert [slot.seq for slot in ring_reading.read_ring_file(path).slots] == list(range(1, 11))


@pytest.mark.parametrize("number", [2**64 - 1, 0, 12345])
def test_a_damaged_number_costs_its_own_record_only(tmp_path: Path, number: int) -> None:
    path = filled(tmp_path, 40)
    change(path, SHAPE.slots_at + 20 * ring_layout.SLOT_SIZE, ring_layout.CELL.pack(number))
    assert [slot.seq for slot in ring_reading.read_ring_file(path).slots] == [n for n in range(9, 41) if n != 21]


@pytest.mark.parametrize("cell", ["slots_claimed", "journal_used", "steps_recorded"])
@pytest.mark.parametrize("value", [0, 7, 2**63, 2**64 - 1])
def test_a_damaged_cell_raises_nothing(tmp_path: Path, cell: str, value: int) -> None:
    path = filled(tmp_path, 40)
    change(path, ring_layout.CELL_OFFSETS[cell], ring_layout.CELL.pack(value))
    content = ring_reading.read_ring_file(path)
    assert len(list(content.slots)) <= SHAPE.slots
    assert list(content.steps) == []


def test_a_ring_of_another_version_says_which(tmp_path: Path) -> None:
    path = filled(tmp_path, 3)
    change(path, len(ring_layout.MAGIC), struct.pack("<I", 1))
    with pytest.raises(ring_reading.DamagedRingError, match="ring version 1, this program reads"):
        ring_reading.read_ring_file(path)


def test_cells_of_version_2_are_read_where_they_stood(tmp_path: Path) -> None:
    path = filled(tmp_path, 3)
    order = [ring_layout.CELL_NAMES.index(name) for name in ring_layout.CELL_NAMES_OF_VERSION_2]
    cells = struct.unpack_from(f"<{len(order)}Q", path.read_bytes(), ring_layout.CELLS_OFFSET)
    before = ring_reading.read_ring_file(path)
    change(path, ring_layout.CELLS_OFFSET, struct.pack(f"<{len(order)}Q", *(cells[i] for i in order)))
    change(path, len(ring_layout.MAGIC), struct.pack("<I", 2))
    after = ring_reading.read_ring_file(path)
    assert order != sorted(order)
    assert (after.cells, list(after.slots)) == (before.cells, list(before.slots))


@pytest.mark.parametrize("kept", [0, 100, ring_layout.HEADER_SIZE, SHAPE.slots_at + 5, SHAPE.total_bytes - 1])
def test_a_file_that_was_cut_short_says_so(tmp_path: Path, kept: int) -> None:
    path = filled(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ring_reading.DamagedRingError, match=r"truncated|too short"):
        ring_reading.read_ring_file(path)


def test_a_header_that_promises_gigabytes_is_not_believed(tmp_path: Path) -> None:
    path = filled(tmp_path, 3)
    identity = list(ring_layout.IDENTITY.unpack_from(path.read_bytes()))
    identity[4], identity[5] = 2**33, 2**33 + ring_layout.HEADER_SIZE
    change(path, 0, ring_layout.IDENTITY.pack(*identity))
    with path.open("r+b") as file:
        file.truncate(2**34)
    with pytest.raises(ring_reading.DamagedRingError, match="promises"):
        ring_reading.read_ring_file(path)


def test_one_damaged_line_of_the_journal_costs_that_line_only(tmp_path: Path) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, SHAPE, pid=42, start_ticks=7)
    for word in ("first", "second", "third"):
        ring.note({"k": word})
    data = Path(ring.path).read_bytes().replace(b'"second"', b'"sec\nnd"')
    Path(ring.path).write_bytes(data)
    assert [note["k"] for note in ring_reading.read_ring_file(ring.path).notes] == ["first", "third"]


@pytest.mark.parametrize("note", [{"k": 3}, {"pid": 1}, {"k": "child_end", "pid": "x"}, {"k": "raised", "at": []}])
def test_a_note_that_no_recorder_writes_is_left_out(tmp_path: Path, note: dict[str, object]) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, SHAPE, pid=42, start_ticks=7)
    ring.note(note)
    ring.note({"k": "init", "rank": None, "at": 5})
    assert [found["k"] for found in ring_reading.read_ring_file(ring.path).notes] == ["init"]


@pytest.mark.parametrize(
    ("backends", "expected"),
    [([], False), (["cpu:gloo"], False), (["cpu:gloo,cuda:nccl"], True), (["cuda:nccl", "cpu:gloo,cuda:gloo"], False)],
)
def test_whether_the_group_goes_over_nccl_is_read_of_a_ring_in_use(
    tmp_path: Path, backends: list[str], *, expected: bool
) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, SHAPE, pid=42, start_ticks=7)
    for backend in backends:
        ring.note({"k": "initialized", "backend": backend, "at": 1})
    assert ring_reading.uses_nccl(Path(ring.path).read_bytes()) is expected
