"""Rings that are kept before a signal asks, and answers of recorders that come late."""

import json
import math
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpdoctor.collect import proc
from ddpdoctor.launch.watching import evidence
from ddpdoctor.launch.watching.evidence import EvidenceTaker
from ddpdoctor.launch.watching.progress import Followed
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.files import write_whole
from ddpdoctor.recorder.storage.ring_writing import Ring


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
