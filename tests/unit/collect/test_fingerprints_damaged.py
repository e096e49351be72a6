"""Files of fingerprints that are damaged, cut short, of another version, or made up: left out, with a reason."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ddpdoctor.collect.fingerprints.within_host import Comparer
from ddpdoctor.model.codec import encode
from ddpdoctor.model.consistency import Consistency
from ddpdoctor.recorder.storage import fingerprint_layout
from tests.fingerprints import TICKS, FakeRank, row


def write_three(folder: Path) -> list[FakeRank]:
    ranks = [FakeRank(folder, rank, range(3)).open(["w", row("w", "g")]) for rank in range(3)]
    for number in (1, 2):
        for rank in ranks:
            rank.write(number, "w", "g", random="r", settings=[["lr", "1"]])
    return ranks


def compare(folder: Path, ranks: list[FakeRank]) -> Consistency:
    comparer = Comparer(folder, check_every=50)
    comparer.compare([rank.process() for rank in ranks])
    return comparer.close()


def cut(data: bytes) -> bytes:
    return data[:-100]


def cut_to_nothing(_data: bytes) -> bytes:
    return b""


def cut_in_table(data: bytes) -> bytes:
    return data[: fingerprint_layout.HEADER_SIZE + 5]


def other_version(data: bytes) -> bytes:
    return data[:8] + struct.pack("<I", 99) + data[12:]


def identity(**changes: int) -> Callable[[bytes], bytes]:
    names = ("magic", "version", "rows", "table", "slots_at", "size", "slots", "pid", "ticks")

    def change(data: bytes) -> bytes:
        values = dict(zip(names, fingerprint_layout.IDENTITY.unpack_from(data), strict=True)) | changes
        return fingerprint_layout.IDENTITY.pack(*values.values()) + data[fingerprint_layout.IDENTITY.size :]

    return change


def table(**changes: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        magic, version, rows, size, slots_at, *rest = fingerprint_layout.IDENTITY.unpack_from(data)
        start = fingerprint_layout.HEADER_SIZE
        made = zlib.compress(json.dumps(json.loads(zlib.decompress(data[start : start + size])) | changes).encode())
        moved = start + len(made)
        head = fingerprint_layout.IDENTITY.pack(magic, version, rows, len(made), moved, *rest)
        return head + data[len(head) : start] + made + data[slots_at:]

    return change


BROKEN = {
    "cut": cut,
    "empty": cut_to_nothing,
    "cut in its table": cut_in_table,
    "of another version": other_version,
    "endless slots": identity(slots=2**63),
    "no slots": identity(slots=0),
    "endless table": identity(table=2**64 - 1),
    "rows that are not there": identity(rows=2**31),
    "unknown clock": table(clock="sundial"),
    "clock that cannot be looked up": table(clock=["step"]),
    "rank as text": table(rank="1"),
    "rank out of its group": table(rank=7),
    "no ranks": table(ranks=None),
    "rows of another form": table(rows=[["p"], ["g"]]),
    "rows of unknown kind": table(rows=[["z", "w", "", [1], "f"], ["p", "w", "", [1], "f"]]),
    "shapes that are none": table(rows=[["p", "w", "", ["x"], "f"], ["g", "w", "", 3, "f"]]),
    "rows that are no list": table(rows={"p": 1}),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_left_out_with_a_reason_and_the_others_are_compared(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    ranks = write_three(tmp_path)
    path = tmp_path / f"101-{TICKS}-0.prints"
    path.write_bytes(change(path.read_bytes()))
    found = compare(tmp_path, ranks)
    (stream,) = found.streams
    assert (stream.ranks, stream.compared, stream.differences) == ((0, 2), 2, ())
    (reason,) = found.unread
    assert reason.startswith(path.name)


def test_a_file_that_its_rank_is_making_is_read_once_it_is_there(tmp_path: Path) -> None:
    ranks = write_three(tmp_path)
    path = tmp_path / f"101-{TICKS}-0.prints"
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    comparer = Comparer(tmp_path, check_every=50)
    comparer.compare([rank.process() for rank in ranks])
    path.write_bytes(whole)
    comparer.compare([rank.process() for rank in ranks])
    found = comparer.close()
    assert (found.streams[0].ranks, found.unread) == ((0, 1, 2), ())


def test_a_file_that_is_gone_while_it_is_read_is_reported(tmp_path: Path) -> None:
    ranks = write_three(tmp_path)
    comparer = Comparer(tmp_path, check_every=50)
    comparer.compare([rank.process() for rank in ranks])
    (tmp_path / f"101-{TICKS}-0.prints").unlink()
    ranks[0].write(4, "w", "g")
    ranks[2].write(4, "w", "g")
    found = comparer.close()
    assert found.streams[0].compared == 3
    assert len(found.unread) == 1


@pytest.mark.parametrize(
    "text",
    [
        {"random": ["a"], "settings": 3, "site": [], "unreduced": "x", "steps": "many", "scale": 10**400},
        {"settings": [1, ["lr"], ["a", ["b"]]], "scale": "big", "dropout": 7, "site": {"f": 1, "l": "x"}},
        {"settings": {"lr": 1}, "scale": float("inf"), "hook": 1, "join": [], "optimizer": {}},
    ],
)
def test_texts_of_another_form_take_their_defaults(tmp_path: Path, text: dict[str, Any]) -> None:
    ranks = write_three(tmp_path)
    for rank in ranks:
        rank.write(4, "w", "g", **text)
    found = compare(tmp_path, ranks)
    assert found.streams[0].compared == 3
    assert json.dumps(encode(found))


def test_a_text_that_is_nested_without_end_is_left_out(tmp_path: Path) -> None:
    ranks = write_three(tmp_path)
    path = tmp_path / f"101-{TICKS}-0.prints"
    data = path.read_bytes()
    at = data.index(b'{"steps"')
    path.write_bytes(data[:at] + b"[" * fingerprint_layout.TEXT_SIZE + data[at + fingerprint_layout.TEXT_SIZE :])
    assert compare(tmp_path, ranks).streams[0].compared == 2


def test_no_flipped_byte_raises(tmp_path: Path) -> None:
    random = Random(0)
    ranks = write_three(tmp_path)
    path = tmp_path / f"101-{TICKS}-0.prints"
    whole = path.read_bytes()
    used = whole.rindex(b"g") + 1
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(random.choice((1, 4, 64))):
            data[random.randrange(used)] = random.randrange(256)
        path.write_bytes(data)
        json.dumps(encode(compare(tmp_path, ranks)))
