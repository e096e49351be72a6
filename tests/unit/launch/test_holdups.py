"""Where a rank was before the last call that needed others."""

import os
from pathlib import Path
from typing import Any

from ddpdoctor.launch.watching.progress import Followed, open_rings
from ddpdoctor.launch.watching.seen import HoldUps
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring


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
