"""Files from anywhere: links in circles, pipes, devices, giants and damage cost themselves, and the rest is read."""

import bz2
import gzip
import lzma
import os
import random
import threading
from pathlib import Path

import pytest

from ddpdoctor.logs import files
from ddpdoctor.logs.files import LogFile, open_file
from ddpdoctor.logs.reading import read_logs
from ddpdoctor.model.log_facts import Failed, Logs, Who

FAILED = "[rank{0}]: Traceback (most recent call last):\n[rank{0}]: ValueError: shard {0} is bad\n"


def failed(*paths) -> list[int | None]:
    """Return the ranks of which a failure was read."""
    return failed_of(read_logs([str(path) for path in paths]))


def failed_of(found: Logs) -> list[int | None]:
    return sorted(fact.who.rank for run in found.runs for fact in run.facts if isinstance(fact, Failed))


def problems(*paths) -> dict[str, str]:
    return problems_of(read_logs([str(path) for path in paths]))


def problems_of(found: Logs) -> dict[str, str]:
    return {one.source.rpartition("/")[2]: one.problem for one in found.read}


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder with the log of rank 1, to which a test adds."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.log").write_text(FAILED.format(1))
    return tmp_path / "logs"


NOWHERE, OUT = "a broken link", "a link to outside the folder"
ODD = [
    (lambda odd: odd.symlink_to("odd"), NOWHERE), (lambda odd: odd.symlink_to("/etc/passwd"), OUT),
    (lambda odd: odd.symlink_to("other") or odd.with_name("other").symlink_to("odd"), NOWHERE),
    (lambda odd: odd.symlink_to("/dev/zero"), OUT), (lambda odd: odd.symlink_to("x" * 300), "File name too long"),
    (os.mkfifo, "not a regular file"), (lambda odd: odd.write_bytes(b"\x1f\x8b\x08\x00 and no more of it"), "damaged: "),
]  # fmt: skip


@pytest.mark.parametrize(("make", "reason"), ODD)
def test_what_cannot_be_read_in_a_folder_is_noted_and_the_rest_is_read(logs, make, reason) -> None:
    """Links within the folder are followed."""
    make(logs / "odd")
    (logs / "within").symlink_to(logs / "train.log")
    assert problems(logs)["odd"].startswith(reason)
    assert problems(logs)["train.log"] == ""
    assert failed(logs) == [1, 1]


def test_names_that_are_not_utf_8_are_read_and_can_be_written(logs) -> None:
    Path(os.fsdecode(os.fsencode(logs) + b"/gr\xfc\xdfe.log")).write_text(FAILED.format(2))
    assert failed(logs) == [1, 2]
    assert list(problems(logs)) == ["gr\\xfc\\xdfe.log", "train.log"]


def test_folders_may_be_nested_deeper_than_python_calls_itself(logs) -> None:
    before, depth = Path.cwd(), 1200
    os.chdir(logs)
    try:
        for _ in range(depth):
            Path("d").mkdir()
            os.chdir("d")
        Path("deep.log").write_text(FAILED.format(2))
        found = failed(logs)
        Path("deep.log").unlink()
        for _ in range(depth):  # neither pytest nor shutil could remove them
            os.chdir("..")
            Path("d").rmdir()
    finally:
        os.chdir(before)
    assert found == [1, 2]


def test_devices_and_files_of_the_kernel_are_not_opened(logs) -> None:
    kernel = "a kernel file"
    for path, reason in {"/dev/zero": "not a regular file", "/proc/kmsg": kernel, "/proc/self/mem": kernel}.items():
        assert failed(path, logs) == [1]
        assert problems(path, logs)[path.rpartition("/")[2]].startswith(reason)


def test_a_pipe_of_the_shell_is_read_and_a_named_one_is_not_waited_for(logs) -> None:
    os.mkfifo(logs.parent / "named")
    assert problems(logs.parent / "named", logs)["named"].startswith("a named pipe")
    reading, writing = os.pipe()
    writer = threading.Thread(target=lambda: os.write(writing, FAILED.format(2).encode()) and os.close(writing))
    writer.start()
    try:
        assert failed(f"/dev/fd/{reading}", logs) == [1, 2]
    finally:
        writer.join()
        os.close(reading)


def test_the_holes_of_a_giant_are_passed_over(logs) -> None:
    with (logs / "giant.log").open("wb") as giant:
        giant.write(FAILED.format(2).encode())
        giant.seek(2**40)
        giant.write(b"\n" + FAILED.format(3).encode())
    assert failed(logs) == [1, 2, 3]
    assert sum(one.bytes for one in read_logs([str(logs)]).read) < 2**20


@pytest.mark.full
@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_what_is_packed_is_unpacked_to_a_limit_and_read_so_far(logs, monkeypatch, pack) -> None:
    monkeypatch.setattr(files, "LEAST_UNPACKED", 2**20)
    (logs / "bomb.gz").write_bytes(pack(FAILED.format(2).encode() + (b"a" * 99 + b"\n") * 30_000))
    found = read_logs([str(logs)])
    assert problems_of(found)["bomb.gz"].startswith("unpacks to more than 200 times its size")
    assert failed_of(found) == [1, 2]
    assert sum(one.bytes for one in found.read) < 5 * 2**20


def test_a_dictionary_that_takes_all_memory_is_refused(logs, monkeypatch) -> None:
    monkeypatch.setattr(files, "MOST_DICTIONARY", 2**16)
    (logs / "odd.xz").write_bytes(lzma.compress(FAILED.format(2).encode()))
    assert problems(logs)["odd.xz"] == "damaged: Memory usage limit exceeded"
    assert failed(logs) == [1]


NOISE = random.Random(1).randbytes(60_000).hex().encode()


def flipped(packed: bytes) -> bytes:
    at = len(packed) // 2
    return packed[:at] + bytes(byte ^ 0xFF for byte in packed[at : at + 64]) + packed[at + 64 :]


@pytest.mark.full
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda packed: packed[: len(packed) // 2], "cut off"),
        (flipped, "damaged: "),
        (lambda packed: packed[:-8] + b"\0\0\0\0" + packed[-4:], "damaged: "),  # the checksum
        (lambda packed: packed[:-1], "cut off"),
    ],
)
@pytest.mark.parametrize(
    "pack", [gzip.compress, bz2.compress, lambda text: lzma.compress(text, check=lzma.CHECK_CRC32)]
)
def test_of_a_damaged_archive_all_is_read_that_comes_before_the_damage(logs, pack, damage, problem) -> None:
    text = FAILED.format(2).encode() + NOISE + b"\n" + NOISE + b"\n"
    (logs / "odd").write_bytes(damage(pack(text)))
    found = read_logs([str(logs)])
    assert problems_of(found)["odd"].startswith((problem, "cut off", "damaged: "))
    assert 1 in failed_of(found)
    if pack is gzip.compress:
        assert problems_of(found)["odd"].startswith(problem)
        assert failed_of(found) == [1, 2]


def test_damage_that_makes_a_text_look_like_no_text_is_told(logs) -> None:
    first = bytearray(bz2.compress(b"\x01\x00\x02" * 60_000))
    first[10] ^= 0xFF  # of the checksum of the block
    (logs / "odd.bz2").write_bytes(first)
    assert problems(logs)["odd.bz2"].startswith("damaged: ")


def test_a_checksum_that_is_wrong_loses_no_line(logs) -> None:
    packed = gzip.compress(NOISE + b"\n" + FAILED.format(2).encode())
    (logs / "odd.gz").write_bytes(packed[:-8] + bytes(4) + packed[-4:])
    assert failed(logs) == [1, 2]


def test_archives_that_were_joined_or_padded_are_whole(logs) -> None:
    parts = [pack(FAILED.format(rank).encode()) for rank, pack in ((2, gzip.compress), (3, gzip.compress))]
    (logs / "odd.gz").write_bytes(b"".join(parts) + bytes(512))
    assert (failed(logs), problems(logs)["odd.gz"]) == ([1, 2, 3], "")


def test_a_file_that_grows_is_read_to_its_size_at_the_beginning(logs) -> None:
    log = logs / "train.log"
    size = log.stat().st_size
    content, head, _ = open_file(LogFile(name="log", path=log, who=Who()))
    with content, log.open("a") as more:
        more.write("x" * 2**20)
        more.flush()
        assert (len(head), content.read(2**20)) == (size, b"")


def test_a_file_that_a_reader_fails_at_costs_itself_only(logs, monkeypatch) -> None:
    (logs / "again.log").write_text(FAILED.format(2))
    real = files.open_file

    def fails(file: LogFile):
        if file.name.endswith("again.log"):
            raise ValueError("of ours")
        return real(file)

    monkeypatch.setattr("ddpdoctor.logs.reading.open_file", fails)
    assert failed(logs) == [1]
    assert problems(logs)["again.log"] == "ddpdoctor cannot read it: ValueError: of ours"
