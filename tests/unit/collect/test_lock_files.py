"""What is seen of a lock file: its age, who has it open or locked, and whom it names."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.collect.blocked import LockLine, lock_of, read_lock_file, read_lock_files, read_locks
from ddpdoctor.collect.machine.file_system import is_shared
from ddpdoctor.collect.system import System
from ddpdoctor.model.causes import LockFile, LockKind

NOBODY: frozenset[int] = frozenset()
ENDED = 2**22 + 1
"""Above the greatest number that Linux gives to a process."""


def test_a_file_that_nobody_has_open_says_how_old_it_is(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(f"{ENDED}\n{os.uname().nodename}\n")
    os.utime(lock, (0, os.stat(lock).st_mtime - 3600))  # noqa: PTH116 - as the collector reads it
    found = read_lock_file(str(lock), LockKind.MARKER, (), NOBODY)
    assert (found.exists, found.holders, found.unseen) == (True, (), 0)
    assert (found.named_pid, found.named_lives) == (ENDED, False)
    assert found.age_s is not None
    assert 3600 <= found.age_s < 3700


def test_who_has_it_open_holds_it_unless_it_polls_itself(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w"):
        held = read_lock_file(str(lock), LockKind.MARKER, (), NOBODY)
        polled = read_lock_file(str(lock), LockKind.MARKER, (), frozenset({os.getpid()}))
    assert [owner.pid for owner in held.holders] == [os.getpid()]
    assert polled.holders == ()


def test_a_lock_on_another_device_is_on_another_file_of_the_same_inode(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    seen = lock.stat()

    def is_held(device: int) -> bool:
        line = LockLine(number=1, waits=False, kind="flock", pid=os.getpid(), file=(device, seen.st_ino))
        return bool(read_lock_file(str(lock), LockKind.KERNEL, (line,), NOBODY).holders)

    assert [is_held(device) for device in (seen.st_dev, os.makedev(0, 9999), os.makedev(250, 9))] == [True, True, False]


def test_a_file_names_who_lives(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(f"pid: {os.getpid()}\n")
    found = read_lock_file(str(lock), LockKind.MARKER, (), NOBODY)
    assert (found.named_pid, found.named_lives) == (os.getpid(), True)


@pytest.mark.parametrize("text", ["", "node0", "2024-01-01", "1732291200.25", "\x00\xff"])
def test_other_text_names_nobody_that_is_believed_to_live(text: str, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(text)
    assert read_lock_file(str(lock), LockKind.MARKER, (), NOBODY).named_pid is None


def test_a_process_of_another_host_may_live(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(f"{ENDED}\nsome-other-host\n")
    found = read_lock_file(str(lock), LockKind.MARKER, (), NOBODY)
    assert (found.named_pid, found.named_lives, found.named_host) == (ENDED, None, "some-other-host")


def test_a_lock_of_the_kernel_is_recognized_by_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    code = (
        "import fcntl,sys; f=open(sys.argv[1],'w'); fcntl.flock(f,fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        found = read_lock_files({1: {"lock": {"path": str(lock), "kind": "kernel"}}}, read_locks())
        other.communicate()
    assert [owner.pid for owner in found[1].holders] == [other.pid]
    with lock.open("w") as free:
        fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_is_gone_is_said_to_be_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    assert read_lock_file(path, LockKind.MARKER, (), NOBODY) == LockFile(path=path, kind=LockKind.MARKER, exists=False)


def test_a_device_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert read_lock_file(str(tmp_path / "lock"), LockKind.OWN_LOOP, (), NOBODY).named_pid is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({}, (None, LockKind.KERNEL)),
        ({"lock": {"path": "/x", "kind": "marker"}}, ("/x", LockKind.MARKER)),
        ({"lock": {"path": "/x", "kind": "new"}}, ("/x", LockKind.KERNEL)),
        ({"lock": {"path": 7}}, (None, LockKind.KERNEL)),
        ({"lock_path": "/x"}, ("/x", LockKind.KERNEL)),
    ],
)
def test_an_answer_says_what_is_polled_for(answer: dict[str, object], expected: tuple[str | None, LockKind]) -> None:
    assert lock_of(answer) == expected


MOUNTS = """\
disk / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
bucket /home/me/s3 fuse.s3fs rw 0 0
server:/a /my\\040data fuse.ceph rw 0 0
short
"""


def test_a_path_is_shared_if_its_deepest_mount_is(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "mounts").write_text(MOUNTS)
    paths = ("/tmp/x", "/home/me/x", "/home/me/s3/x", "/my data/x")
    assert [is_shared(Path(path), System(root=tmp_path)) for path in paths] == [False, True, False, True]
