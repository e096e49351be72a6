"""Rings that are kept before a signal asks: as they were, and no larger than what was written to them."""

import mmap
from pathlib import Path

from ddpdoctor.launch.watching.evidence import EvidenceTaker
from ddpdoctor.launch.watching.progress import Followed
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring


def test_a_kept_ring_is_the_ring_without_what_was_never_written(tmp_path: Path) -> None:
    evidence = EvidenceTaker(tmp_path)
    ring = Ring(str(tmp_path / "rings"), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=42, start_ticks=7)
    ring.note({"k": "process"})
    for seq in range(100):
        ring.end(
            ring.begin(ring_layout.pack_kind(ring.intern("barrier"), 0, ring.intern("0"), 0, 0, 0, -1, 0, 4, ()), seq)
        )
    path = Path(ring.path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    evidence._keep_rings([Followed(pid=42, ticks=7, role=ring_layout.ROLE_RANK, ring=mapped)])
    kept = tmp_path / "evidence" / "42-7.held"
    assert kept.read_bytes() == path.read_bytes()
    assert list(ring_reading.read_ring_file(kept).slots) == list(ring_reading.read_ring_file(path).slots)
    assert kept.stat().st_blocks * 512 < path.stat().st_size / 4
