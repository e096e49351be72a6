"""A run folder goes to the first node with all that is judged of it, and nothing that is no part of one gets in."""

import json
import os
import zlib

import pytest

from ddpdoctor.exchange.conversation import BadMessage
from ddpdoctor.launch.nodes.packing import MAX_FILE_BYTES, MAX_FILES, MAX_PLAIN_BYTES, pack_folder, unpack_folder
from tests.synthetic import Job, write_hosts

PIECE = 64 * 1024


def packed(index, rest=b""):
    """Return what somebody else packed."""
    text = json.dumps(index).encode() if not isinstance(index, bytes) else index
    return zlib.compress(len(text).to_bytes(4, "big") + text + rest)


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_folder_arrives_as_it_was(tmp_path):
    _, second = write_hosts(tmp_path / "hosts", Job(world=4, steps=30, situation="stuck"), 2)
    unpack_folder(pack_folder(second), tmp_path / "gathered")
    assert files_of(tmp_path / "gathered") == files_of(second)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        bytes(3 * PIECE),
        bytes(3 * PIECE + 7),
        bytes(PIECE) + b"x" + bytes(2 * PIECE),
        b"x" * PIECE + bytes(PIECE - 1) + b"y",
        bytes(2 * PIECE) + b"end",
    ],
)
def test_holes_arrive_as_zeros(tmp_path, content):
    (tmp_path / "own" / "rings").mkdir(parents=True)
    (tmp_path / "own" / "rings" / "1-2.ring").write_bytes(content)
    unpack_folder(pack_folder(tmp_path / "own"), tmp_path / "gathered")
    assert files_of(tmp_path / "gathered") == ({"rings/1-2.ring": content})


def test_zeros_take_no_room_on_either_side(tmp_path):
    (tmp_path / "own" / "rings").mkdir(parents=True)
    with (tmp_path / "own" / "rings" / "1-2.ring").open("wb") as ring:
        ring.truncate(32 * 2**20)
    one = pack_folder(tmp_path / "own")
    unpack_folder(one, tmp_path / "gathered")
    assert len(one) < 200
    assert (tmp_path / "gathered" / "rings" / "1-2.ring").stat().st_blocks == 0


def test_what_came_before_is_replaced(tmp_path):
    (tmp_path / "gathered").mkdir()
    (tmp_path / "gathered" / "run.json").write_text("former")
    unpack_folder(packed([["watch.json", 2, [0]]], b"{}"), tmp_path / "gathered")
    assert files_of(tmp_path / "gathered") == {"watch.json": b"{}"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "unpacks to more|damaged"),
        (b"garbage", "damaged"),
        (packed([["run.json", 2, [0]]], b"{}")[:-3], "damaged"),
        (packed([["run.json", 2, [0]]], b"{}") + b"x", "damaged"),
        (zlib.compress(b"\0"), "index"),
        (packed(b"no JSON"), "index"),
        (packed({"run.json": 2}), "index"),
        (packed([["run.json", 2]], b"{}"), "index"),
        (packed([["run.json", "two", [0]]], b"{}"), "index"),
        (packed(b'[["run.json", 1e999, [0]]]', b"{}"), "index"),
        (packed(b'[["run.json", 2, [Infinity]]]', b"{}"), "index"),
        (packed(b"[" * 100_000), "index"),
        (packed([["run.json", 2, [0]], ["run.json", 2, [0]]], b"{}{}"), "twice"),
        (packed([["../../.ssh/authorized_keys", 1, [0]]], b"x"), "no run folder"),
        (packed([["/etc/passwd", 1, [0]]], b"x"), "no run folder"),
        (packed([["rings/../../x.ring", 1, [0]]], b"x"), "no run folder"),
        (packed([["report.json", 1, [0]]], b"x"), "no run folder"),
        (packed([["run.json", -1, []]]), "no run folder"),
        (packed([["run.json", MAX_FILE_BYTES + 1, []]]), "no run folder"),
        (packed([["run.json", 2, [-1]]], b"{}"), "no run folder"),
        (packed([["run.json", 2, [1]]], b"{}"), "no run folder"),
        (packed([["run.json", 2, [0, 0]]], b"{}{}"), "no run folder"),
        (packed([["run.json", 2, [0]]], b"{"), "not as long"),
        (packed([["run.json", 2, [0]]], b"{}x"), "not as long"),
        (packed([[f"rings/1-{number}.ring", 0, []] for number in range(MAX_FILES + 1)]), "too many files"),
        (
            packed([[f"rings/1-{n}.ring", MAX_FILE_BYTES, []] for n in range(MAX_PLAIN_BYTES // MAX_FILE_BYTES + 1)]),
            "no run folder",
        ),
    ],
)
def test_what_is_no_packed_run_folder_is_refused_and_nothing_is_written(tmp_path, data, words):
    with pytest.raises(BadMessage, match=words):
        unpack_folder(data, tmp_path / "gathered")
    assert list(tmp_path.iterdir()) == []


def test_what_unpacks_to_more_than_the_limit_is_refused(tmp_path):
    packer = zlib.compressobj()
    first, again = (packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    bomb = first + again * (MAX_PLAIN_BYTES // 2**24)
    with pytest.raises(BadMessage, match="unpacks to more"):
        unpack_folder(bomb, tmp_path / "gathered")


def test_what_is_no_part_of_a_run_folder_is_not_sent(tmp_path):
    own = tmp_path / "own"
    (own / "rings").mkdir(parents=True)
    (own / "run.json").write_text("{}")
    (own / "secret.txt").write_text("secret")
    (own / "report.json").write_text("{}")
    (own / "watch.json").symlink_to("/etc/passwd")
    os.mkfifo(own / "rings" / "1-2.ring")
    unpack_folder(pack_folder(own), tmp_path / "gathered")
    assert files_of(tmp_path / "gathered") == {"run.json": b"{}"}
