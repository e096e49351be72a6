"""Dumps of torch's flight recorder are read without running anything."""

import datetime as dt
import json
import os
import pickle
import time
from pathlib import Path

import pytest

from ddpdoctor.collect.rank.flight import read_dump
from ddpdoctor.recorder.state import start_ticks
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.plain_pickle import parse_cut_pickle, parse_plain_pickle
from ddpdoctor.recorder.storage.ring_reading import RingContent, read_ring_file
from ddpdoctor.recorder.storage.ring_writing import Ring

DATA = Path(__file__).parents[2] / "data" / "flight-recorder"
DUMP = (DATA / "nccl2-2.15.pickle").read_bytes()
PLAIN = {"a": [1, -2, 2**40, 1.5, True, None, ()], "b": {"c": (1, 2, 3, 4)}, "d": [], "e": ("x",)}


def test_a_dump_of_torch_holds_what_its_json_does() -> None:
    reported = parse_plain_pickle(DUMP)
    expected = json.loads((DATA / "nccl2-2.15.json").read_text())
    names = [entry["profiling_name"] for entry in expected["entries"]]
    assert [entry["profiling_name"] for entry in reported["entries"]] == names
    assert reported["version"] == expected["version"]


def test_plain_values_come_back_as_they_were() -> None:
    assert parse_plain_pickle(pickle.dumps(PLAIN, protocol=2)) == PLAIN
    assert parse_plain_pickle(pickle.dumps(PLAIN, protocol=4)) == PLAIN


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02.",
        b"\x80\x02a.",
        b"\x80\x02}]]s.",
        b"\x80\x02h\x07.",
        b"\x80\x02(K\x01u.",
        b"\x80\x02K\x01K\x02a.",
        b"cos\nsystem\n(S'true'\ntR.",
        pickle.dumps(dt.date(2026, 1, 1), protocol=2),
        DUMP[:-100],
    ],
)
def test_what_is_damaged_or_more_than_plain_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - pickletools has its own words
        parse_plain_pickle(data)


def test_a_pickle_that_is_cut_off_keeps_what_came_before() -> None:
    whole = parse_plain_pickle(DUMP)
    cut = parse_cut_pickle(DUMP[: len(DUMP) // 2])
    assert cut["version"] == whole["version"]
    assert 0 < len(cut["entries"]) < len(whole["entries"])
    assert cut["entries"][0] == whole["entries"][0]


@pytest.mark.parametrize("data", [b"", b"\x80\x02(", b"\x80\x02}(cos\nsystem\n(S'true'\ntR"])
def test_of_what_holds_nothing_or_more_than_plain_values_nothing_is_kept(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"left|plain"):
        parse_cut_pickle(data)


def ring_of(folder: Path) -> RingContent:
    """Return what is in the ring of this process, as its reader has it."""
    (folder / "rings").mkdir()
    (folder / "evidence").mkdir()
    ring = Ring(str(folder / "rings"), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, os.getpid(), start_ticks())
    return read_ring_file(ring.path)


def test_the_dump_of_a_process_is_read_by_its_clock(tmp_path: Path) -> None:
    content = ring_of(tmp_path)
    path = tmp_path / "evidence" / f"{content.pid}-{content.start_ticks}.flight1"
    assert read_dump(tmp_path, content) is None
    path.write_bytes(DUMP[:500])
    assert read_dump(tmp_path, content) is None
    path.write_bytes(DUMP)
    found = read_dump(tmp_path, content)
    assert found is not None
    assert [entry["collective_seq_id"] for entry in found.entries if not entry["is_p2p"]] == [1, 6]
    assert found.wall_ahead_ns == pytest.approx(time.time_ns() - time.monotonic_ns(), abs=1e9)
