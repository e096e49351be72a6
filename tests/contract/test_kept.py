"""Kept runs are of the layout and the jobs of this tree, belong to a test, are small, and tell of no machine."""

import lzma
import re
import socket
import struct
from collections import Counter
from pathlib import Path

import pytest

from ddpdoctor.recorder.storage import ring_layout
from tests import kept, record

PACKED = sorted(kept.KEPT.glob("*.tar.xz"))
OF_A_MACHINE = re.compile(rb"/(?:home|root|Users|work|builds?)/\w+")


def test_each_was_recorded_from_the_layout_and_the_job_of_this_tree() -> None:
    stale = sorted(set(record.stale().values()))
    assert not stale, f"`{kept.RECORD} --stale` records again: {', '.join(stale)}"
    assert len(PACKED) > 100


@pytest.mark.parametrize(("name", "value"), [("VERSION", 99), ("KIND", struct.Struct("<I"))])
def test_a_change_of_the_layout_asks_for_all_again(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept.sources_of("stuck_lock")
    monkeypatch.setattr(ring_layout, name, value)
    after = kept.sources_of("stuck_lock")
    assert {key: before[key] == after[key] for key in before} == {"layout": False, "job": True}


def test_a_change_of_a_job_asks_for_its_own_runs_and_a_job_below_it_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (kept.JOBS / "stuck.py").read_text()
    assert text.index("def stuck_lock(") < text.index("def stuck_spin(")
    (tmp_path / "training.py").write_text((kept.JOBS / "training.py").read_text())
    (tmp_path / "stuck.py").write_text(text.replace("def stuck_spin(", "def stuck_spin(again=1, "))
    before = {job: kept.sources_of(job) for job in ("stuck_lock", "stuck_spin")}
    monkeypatch.setattr(kept, "JOBS", tmp_path)
    assert [kept.sources_of(job) == before[job] for job in before] == [True, False]


def test_a_job_of_which_no_run_is_kept_says_how_to_keep_one(tmp_path: Path) -> None:
    job = kept.Job("stuck_lock", ("--speed",), 2, (), {})
    with (
        kept.turn_of(kept.Turn("a test", "kept", tmp_path)),
        pytest.raises(AssertionError, match=r"tests\.record stuck"),
    ):
        kept.take(job, tmp_path)


def test_a_test_that_fails_keeps_nothing(tmp_path: Path) -> None:
    turn = kept.Turn("a test", "record", tmp_path, {tmp_path / "kept": b"a run"})
    with pytest.raises(ValueError, match="wrong"), kept.turn_of(turn):
        raise ValueError("wrong")
    assert list(tmp_path.iterdir()) == []
    with kept.turn_of(turn):
        pass
    assert (tmp_path / "kept").read_bytes() == b"a run"


@pytest.mark.full
def test_no_packed_run_is_large_or_tells_of_the_machine_that_it_was_recorded_on() -> None:
    assert {path.name: path.stat().st_size for path in PACKED if path.stat().st_size > kept.MAX_BYTES} == {}
    host = rf'"{re.escape(socket.gethostname())}"'.encode()
    said: Counter[bytes] = Counter()
    for path in PACKED:
        data = re.sub(rb"\0+", b"\0", lzma.decompress(path.read_bytes()))
        said.update([*OF_A_MACHINE.findall(data), *re.findall(host, data)])
    assert said == {}
