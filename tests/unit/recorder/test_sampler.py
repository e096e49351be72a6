"""Evidence is written without a byte that would count as the script's own I/O."""

from __future__ import annotations

import os
from pathlib import Path

from ddpdoctor.collect.proc import read_io_bytes
from ddpdoctor.recorder.sampler import write_quietly


def test_what_is_written_quietly_is_there_and_counts_as_no_progress(tmp_path: Path) -> None:
    data = b"evidence " * 100_000
    before = read_io_bytes(os.getpid())
    write_quietly(str(tmp_path / "file"), data)
    after = read_io_bytes(os.getpid())
    assert before is not None
    assert after is not None
    assert after - before < 10_000
    assert (tmp_path / "file").read_bytes() == data
